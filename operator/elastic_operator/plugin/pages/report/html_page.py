"""The page of a job as one HTML file without scripts and without other files, for light and dark screens. Pure.

The page forbids scripts and requests by its own Content-Security-Policy, in case an escape was forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic_operator.plugin.pages.report import html_parts, sections
from elastic_operator.plugin.pages.report.charts import loss_chart
from elastic_operator.plugin.pages.report.html_parts import table, text, text_with_code
from elastic_operator.plugin.pages.report.story import Story, losses_of

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_html(story: Story, version: str) -> str:
    """Write the page in ASCII, so that it is read the same in any encoding.

    Args:
        story: the story of a job, with printable texts.
        version: version of this program.
    """
    job = story.job
    name = text(f"{job.namespace}/{job.name}")
    page = "\n".join([
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{name}</title>\n<style>\n{html_parts.STYLE}\n</style>\n</head>\n<body>\n<main>",
        f"<h1>{name}: {text(job.phase)}</h1>",
        html_parts.facts(sections.facts(story)),
        *_losses(story),
        *html_parts.attempts(story),
        *html_parts.recoveries(story),
        *html_parts.goodput(story),
        *html_parts.decisions(story),
        "<h2>Events</h2>",
        table(sections.events(story)) or "<p>None are left.</p>",
        "</main>",
        f"<footer>{text(sections.origin(story, version))}</footer>\n</body>\n</html>",
    ])  # fmt: skip
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _losses(story: Story) -> Iterator[str]:
    yield "<h2>Training loss</h2>"
    if chart := loss_chart(story.samples, story.commits):
        note = "One line per attempt, its range shaded and numbered; ticks below the axis are commits that are kept."
        yield f"<figure>{chart}<figcaption>{note}</figcaption></figure>"
    yield table(sections.losses(story))
    if len(losses_of(story)) < 2:
        yield f"<p>{text_with_code(sections.NO_LOSSES)}</p>"
