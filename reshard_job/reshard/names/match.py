"""Which rule speaks of which name: every name has exactly one, and no two give the same name."""

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
    """The job of every name that has one; what is wrong is added to `problems`."""
    parts: dict[tuple[int, frozenset[tuple[str, int | str]]], dict[int, str]] = {}
    for name in names:
        found = _find(name, name_map.rules)
        if len(found) != 1:
            several = "; ".join(str(name_map.rules[one.rule]) for one in found)
            problems.append(f"{name}: {f'several rules match: {several}' if found else 'no rule matches'}")
            continue
        key = found[0].rule, frozenset(found[0].bindings.items())
        parts.setdefault(key, {})[found[0].part] = name
    jobs: dict[str, Job] = {}
    for (number, bindings), held in parts.items():
        job = _job(name_map.rules[number], dict(bindings), held, problems)
        if job is not None:
            jobs |= dict.fromkeys(job.sources, job)
    return jobs


def check_targets(jobs: Iterable[Job], problems: list[str]) -> dict[str, Job]:
    """The job that each name after comes from."""
    found: dict[str, Job] = {}
    for job in {id(job): job for job in jobs}.values():
        for target in job.targets:
            other = found.setdefault(target, job)
            if other is not job or job.targets.count(target) > 1:
                problems.append(f"{target}: made of {_names(other.sources)} and of {_names(job.sources)}")
    return found


def _find(name: str, rules: Sequence[Rule]) -> list[_Match]:
    return [
        _Match(number, part, bindings)
        for number, rule in enumerate(rules)
        for part, template in enumerate(rule.sources)
        if (bindings := template.match(name)) is not None
    ]


def _job(rule: Rule, bindings: Bindings, held: Mapping[int, str], problems: list[str]) -> Job | None:
    try:
        sources = tuple(template.render(bindings) for template in rule.sources)
        targets = tuple(template.render(bindings) for template in rule.targets)
    except ValueError as error:
        problems.append(f"{_names(tuple(held.values()))}: {error}")
        return None
    if missing := [name for at, name in enumerate(sources) if at not in held]:
        problems.append(f"{_names(tuple(held.values()))}: {rule} wants {_names(missing)} besides, which is not there")
        return None
    return Job(rule, sources, targets)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
