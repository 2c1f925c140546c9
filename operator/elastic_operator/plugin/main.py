"""Entry point of `kubectl-etj`, which kubectl runs for `kubectl etj`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from elastic_operator.plugin.cluster import connect
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.plugin.kubeconfig import load_config
from elastic_operator.plugin.options import make_parser
from elastic_operator.plugin.output import write_json, write_note, write_text
from elastic_operator.plugin.verbs import Answer, run

_INTERRUPTED = 130
"""Exit code of a program that was ended by Ctrl-C, by the convention of shells."""


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> int:
    """Run one command; return the exit code. Data goes to stdout, notes and errors go to stderr."""
    options = make_parser().parse_args(arguments)
    if "name" in options:
        options.name = options.name.rpartition("/")[2]
    try:
        config = load_config(options.kubeconfig, options.context, os.environ if environment is None else environment)
        with connect(config, options.namespace) as cluster:
            _print(run(cluster, options), as_json=options.output == "json")
    except PluginError as error:
        write_note(f"error: {error}")
        return error.code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader, for instance `head`, has closed the pipe. Python's flush at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.OK


def _print(answer: Answer, *, as_json: bool) -> None:
    if answer.note:
        write_note(answer.note)
    if as_json:
        write_json(answer.value)
    elif answer.text:
        write_text(answer.text)
    sys.stdout.flush()
