"""Match names with rules: exactly one rule matches a name, and no two tensors get the same name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from reshard.names.rules import NameMap, Rule
from reshard.names.template import Bindings


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A rule applied to the names that belong together.

    Attributes:
        rule: the rule.
        sources: names before, one for each of the rule's sources.
        targets: names after, one for each of the rule's targets.
    """

    rule: Rule
    sources: tuple[str, ...]
    targets: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Match:
    rule: int
    part: int
    bindings: Bindings


def match(names: Iterable[str], name_map: NameMap, problems: list[str]) -> dict[str, Job]:
    """Find the rule of each name, and return the job of each name that has one.

    Args:
        names: of parameters.
        name_map: its rules.
        problems: what is wrong is added here: names without a rule or with several, and parts that are missing.
    """
    parts: dict[tuple[int, frozenset[tuple[str, int | str]]], dict[int, str]] = {}
    for name in names:
        matches = _find(name, name_map.rules)
        if len(matches) != 1:
            several = "; ".join(str(name_map.rules[one.rule]) for one in matches)
            problems.append(f"{name}: {f'several rules match: {several}' if matches else 'no rule matches'}")
            continue
        key = matches[0].rule, frozenset(matches[0].bindings.items())
        parts.setdefault(key, {})[matches[0].part] = name
    jobs: dict[str, Job] = {}
    for (number, bindings), names_by_part in parts.items():
        job = _job(name_map.rules[number], dict(bindings), names_by_part, problems)
        if job is not None:
            jobs |= dict.fromkeys(job.sources, job)
    return jobs


def check_targets(jobs: Iterable[Job], problems: list[str]) -> dict[str, Job]:
    """Return the job that makes each new name; add names that are made twice to `problems`."""
    job_of: dict[str, Job] = {}
    for job in {id(job): job for job in jobs}.values():
        for target in job.targets:
            other = job_of.setdefault(target, job)
            if other is not job or job.targets.count(target) > 1:
                problems.append(f"{target}: made of {_names(other.sources)} and of {_names(job.sources)}")
    return job_of


def _find(name: str, rules: Sequence[Rule]) -> list[_Match]:
    return [
        _Match(number, part, bindings)
        for number, rule in enumerate(rules)
        for part, template in enumerate(rule.sources)
        if (bindings := template.match(name)) is not None
    ]


def _job(rule: Rule, bindings: Bindings, names_by_part: Mapping[int, str], problems: list[str]) -> Job | None:
    try:
        sources = tuple(template.render(bindings) for template in rule.sources)
        targets = tuple(template.render(bindings) for template in rule.targets)
    except ValueError as error:
        problems.append(f"{_names(tuple(names_by_part.values()))}: {error}")
        return None
    if missing := [name for at, name in enumerate(sources) if at not in names_by_part]:
        problems.append(
            f"{_names(tuple(names_by_part.values()))}: {rule} wants {_names(missing)} besides, which is not there"
        )
        return None
    return Job(rule, sources, targets)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
