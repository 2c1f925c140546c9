"""Tables and picture of the results, and the place in docs/goodput.md where they go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simulation.assumptions import Assumptions, describe
from simulation.run import TRAINED, Result

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/goodput.md"
PICTURE = ROOT / "docs/simulation.svg"

COLOURS = {
    TRAINED: "#74c476",
    "fewer GPUs": "#c7e9c0",
    "repeated steps": "#fc9272",
    "saves": "#bcbddc",
    "recovery": "#fdae6b",
    "waiting for nodes": "#d9d9d9",
    "spares": "#9ecae1",
}


def results_table(results: Sequence[Result], assumptions: Assumptions) -> str:
    """Return a row for each result."""
    price = assumptions.dollars_per_gpu_hour
    rows = [
        f"| {item.num_gpus:,} | {item.policy.name} | {sum(item.account.hits.values())} | {item.account.attempts - 1} "
        f"| {item.ettr:.1%} | {item.progress:.1%} | {item.lost_gpu_hours:,.0f} "
        f"| {item.lost_gpu_hours * price / 1e6:.2f} | {item.decisions:,} |\n"
        for item in results
    ]
    head = (
        "| GPUs | policy | failures and drains that hit the job | restarts | ETTR | progress | lost GPU-hours "
        "| their price, million $ | decisions |\n|---|---|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(rows)


def assumptions_table(assumptions: Assumptions) -> str:
    """Return a row for each assumption."""
    rows = [
        f"| `{name}` | {value} | {meaning} | {source} |\n" for name, value, meaning, source in describe(assumptions)
    ]
    return "| name | value | meaning | source |\n|---|---|---|---|\n" + "".join(rows)


def publish(results: Sequence[Result], assumptions: Assumptions, *, page: Path = PAGE, picture: Path = PICTURE) -> None:
    """Write the tables into the page, and the picture beside it."""
    text = page.read_text(encoding="utf-8")
    text = replace_section(text, "simulation", results_table(results, assumptions))
    text = replace_section(text, "assumptions", assumptions_table(assumptions))
    page.write_text(text, encoding="utf-8")
    draw(results, picture)


def replace_section(text: str, name: str, table: str) -> str:
    """Replace what is between the marks of a section."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    head, rest = text.split(begin)
    return head + begin + table + end + rest.split(end)[1]


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw where the GPU-hours of each job went; the same results give the same file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    sizes = list(dict.fromkeys(item.num_gpus for item in results))
    with mpl.rc_context({"svg.hashsalt": "simulation", "svg.fonttype": "none", "font.size": 9}):
        figure, panels = plt.subplots(
            len(sizes), 1, figsize=(9, 2.1 * len(sizes) + 0.8), layout="constrained", sharex=True
        )
        for size, axes in zip(sizes, panels if len(sizes) > 1 else [panels], strict=True):
            group = [item for item in results if item.num_gpus == size]
            names = [item.policy.name for item in group]
            lefts = [0.0] * len(group)
            for use, colour in COLOURS.items():
                widths = [100 * item.gpu_hours()[use] / sum(item.gpu_hours().values()) for item in group]
                axes.barh(names, widths, left=lefts, color=colour, label=use, height=0.7)
                lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
            axes.invert_yaxis()
            axes.set_title(f"{size:,} GPUs", loc="left", fontsize=10)
            axes.set_xlim(0, 100)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        axes.set_xlabel("share of the GPU-hours that were paid for, in percent (simulated)")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, ncols=len(COLOURS), loc="outside lower center", frameon=False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
