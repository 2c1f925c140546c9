"""Completion of the command line: scripts for shells, and the candidates for one word.

The scripts call `kubectl-etj __complete WORD...`, which prints one candidate a line. The candidates are read from the
parser, so that no list of flags has to be kept. Only names of jobs and nodes need a cluster; if it does not answer
within two seconds, there are none.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence

from elastic_operator.plugin.cluster import Cluster, connect
from elastic_operator.plugin.errors import PluginError
from elastic_operator.plugin.kubeconfig import load_config
from elastic_operator.plugin.options import make_parser

COMMAND = "__complete"
"""First argument of the program when a shell asks for candidates."""

_PATIENCE_SECONDS = 2.0

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
"""Names that a shell may see; the API server permits no others."""

Names = Callable[[str], Sequence[str]]
"""Returns the names of the cluster's `jobs` or `nodes`."""

_SCRIPTS: Mapping[str, str] = {
    "bash": """\
# kubectl-etj: load with  source <(kubectl-etj completion bash)
_kubectl_etj() {
    local IFS=$'\\n'
    COMPREPLY=($(kubectl-etj __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _kubectl_etj kubectl-etj""",
    "zsh": """\
#compdef kubectl-etj
# kubectl-etj: load with  source <(kubectl-etj completion zsh)
_kubectl_etj() {
    local -a candidates
    candidates=("${(@f)$(kubectl-etj __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    (( ${#candidates[1]} )) && compadd -- "${candidates[@]}"
}
compdef _kubectl_etj kubectl-etj""",
    "fish": """\
# kubectl-etj: load with  kubectl-etj completion fish | source
function __kubectl_etj
    set -l words (commandline -opc) (commandline -ct)
    kubectl-etj __complete $words[2..-1] 2>/dev/null
end
complete -c kubectl-etj -f -a '(__kubectl_etj)'""",
    "kubectl": """\
#!/bin/sh
# Save as kubectl_complete-etj on the PATH, executable: kubectl runs it to complete `kubectl etj`.
kubectl-etj __complete "$@" 2>/dev/null
echo :4""",
}


def make_script(shell: str) -> str:
    """Return the script of a shell; `kubectl` is the program that kubectl looks for."""
    return _SCRIPTS[shell]


def complete(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the candidates for the last of `words`; asks the cluster only for names.

    Args:
        words: words of the command line after the program's name; the last one may be empty.
        environment: environment variables, for the kubeconfig.
    """
    options = _read_common(words)

    def ask(kind: str) -> Sequence[str]:
        with contextlib.suppress(PluginError):
            credentials = load_config(options.get("--kubeconfig"), options.get("--context"), environment)
            with connect(credentials, options.get("--namespace")) as cluster:
                return _list_names(dataclasses.replace(cluster, patience_seconds=_PATIENCE_SECONDS), kind)
        return ()

    return find_candidates(words, ask)


def find_candidates(words: Sequence[str], names: Names) -> list[str]:
    """Return what may stand in place of the last word: verbs, flags, values of a flag, or names.

    Args:
        words: as for `complete`.
        names: returns names of jobs or nodes; called only if the word may be one.
    """
    *before, word = words or [""]
    parser, verb = make_parser(), ""
    verbs: Mapping[str, argparse.ArgumentParser] = next(
        action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    pending: argparse.Action | None = None
    num_arguments = 0
    for item in before:
        if item.startswith("-"):
            pending = _option(parser, item)
        elif pending is not None:
            pending = pending if pending.nargs == "+" else None
        elif not verb:
            verb, parser = item, verbs.get(item, parser)
        else:
            num_arguments += 1
    if word.startswith("-"):
        found = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    elif pending is not None:
        found = list(names("nodes")) if pending.dest == "lose" else list(map(str, pending.choices or ()))
    elif not verb:
        found = list(verbs)
    else:
        found = _positional(parser, num_arguments, names)
    return sorted(item for item in found if item.startswith(word))


def _positional(parser: argparse.ArgumentParser, position: int, names: Names) -> list[str]:
    arguments = [action for action in parser._actions if not action.option_strings]
    if position >= len(arguments) or isinstance(arguments[position], argparse._SubParsersAction):
        return []
    action = arguments[position]
    return list(names("jobs")) if action.dest == "name" else list(map(str, action.choices or ()))


def _option(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    """Return the option of this name if it takes a value in a word of its own."""
    action = parser._option_string_actions.get(name)
    return action if action is not None and action.nargs != 0 else None


def _read_common(words: Sequence[str]) -> dict[str, str]:
    """Read the flags that choose the cluster and the namespace from an unfinished command line."""
    aliases = {
        "-n": "--namespace",
        "--namespace": "--namespace",
        "--context": "--context",
        "--kubeconfig": "--kubeconfig",
    }
    found = {aliases[name]: value for name, value in itertools.pairwise(words) if name in aliases}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in aliases:
            found[aliases[name]] = value
    return found


def _list_names(cluster: Cluster, kind: str) -> list[str]:
    items = cluster.nodes() if kind == "nodes" else cluster.jobs()
    names = [str(item["metadata"]["name"]) for item in items]
    return [name for name in names if _NAME.fullmatch(name)]
