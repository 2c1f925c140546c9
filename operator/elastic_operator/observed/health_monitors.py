"""Node conditions and labels by which health monitors call a node unhealthy. The administrator names them.

Device plugins report a sick accelerator to the kubelet, and `signals` reads that without any configuration. Monitors
of whole nodes (node-problem-detector, NVSentinel, the AMD GPU operator) set conditions and labels of their own;
`Rules` lists those that mean that jobs should leave the node.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

_MESSAGE_LIMIT = 200
"""Maximum number of characters that are quoted from a condition's message, to keep events readable."""


_SHUTTING_DOWN = "node is shutting down"
"""Text that a kubelet writes into the message of the condition Ready, among other problems."""


class RuleError(ValueError):
    """A rule that cannot be parsed, or that matches healthy nodes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A name and a value, each with shell wildcards (`*`, `?`, `[abc]`)."""

    name: str
    value: str

    def matches(self, name: str, value: str) -> bool:
        """Return whether both patterns match."""
        return fnmatch.fnmatchcase(name, self.name) and fnmatch.fnmatchcase(value, self.value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Conditions (type and status) and labels of nodes that jobs should leave."""

    conditions: tuple[Rule, ...] = ()
    labels: tuple[Rule, ...] = ()


NO_RULES = Rules()


def parse_rules(conditions: Iterable[str], labels: Iterable[str]) -> Rules:
    """Parse rules from `TYPE[=STATUS]` (STATUS defaults to True) and `KEY=VALUE`.

    Raises:
        RuleError: naming the rule, what was expected and what to do.
    """
    return Rules(
        conditions=tuple(_condition_rule(text.strip()) for text in conditions if text.strip()),
        labels=tuple(_label_rule(text.strip()) for text in labels if text.strip()),
    )


def find_health_problems(node: Mapping[str, Any], rules: Rules) -> tuple[str, ...]:
    """Return one phrase for each condition and label of a core/v1 Node that a rule matches."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    labels = node["metadata"].get("labels") or {}
    problems = [
        f"condition {item['type']} is {item['status']}{_because(item)}"
        for item in conditions
        if any(rule.matches(item["type"], item["status"]) for rule in rules.conditions)
    ]
    problems += [
        f"label {key} is {value}"
        for key, value in sorted(labels.items())
        if any(rule.matches(key, value) for rule in rules.labels)
    ]
    return tuple(problems)


def _because(condition: Mapping[str, Any]) -> str:
    text = " ".join((condition.get("message") or condition.get("reason") or "").split())
    return f" ({text[:_MESSAGE_LIMIT]})" if text else ""


def _condition_rule(text: str) -> Rule:
    name, _, status = text.partition("=")
    rule = Rule(name=name, value=status or "True")
    if not name or rule.value not in ("True", "False", "Unknown"):
        raise RuleError(
            f"unhealthy node condition {text!r}: expected TYPE or TYPE=STATUS with STATUS True, False or Unknown, "
            "for instance GpuMemWatch or AMDGPU*"
        )
    if rule.matches("Ready", "True"):
        raise RuleError(
            f"unhealthy node condition {text!r} matches Ready=True, so the operator would drain every healthy node: "
            "name the conditions of the health monitor, for instance AMDGPU*"
        )
    return rule


def _label_rule(text: str) -> Rule:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise RuleError(
            f"unhealthy node label {text!r}: expected KEY=VALUE, for instance "
            "sagemaker.amazonaws.com/node-health-status=Unschedulable*"
        )
    if name.strip("*?") == "":
        raise RuleError(f"unhealthy node label {text!r} matches every label: name its key")
    return Rule(name=name, value=value)


def is_shutdown(ready: Mapping[str, Any]) -> bool:
    """Return whether the condition Ready of a node says that its kubelet, which still reports, shuts the node down."""
    return ready.get("status") == "False" and _SHUTTING_DOWN in (ready.get("message") or "")
