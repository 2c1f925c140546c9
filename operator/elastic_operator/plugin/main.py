"""Entry point of `kubectl-etj`, which kubectl runs for `kubectl etj`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from elastic_operator.plugin.cluster import connect
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.plugin.kubeconfig import load
from elastic_operator.plugin.options import parser
from elastic_operator.plugin.output import write_json, write_note, write_text
from elastic_operator.plugin.verbs import Answer, run

_INTERRUPTED = 130
"""What shells expect of a program that was ended by Ctrl-C."""


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> int:
    """Answer one command; the exit code.

    Data goes to stdout, everything else to stderr.
    """
    options = parser().parse_args(arguments)
    if "name" in options:
        options.name = options.name.rpartition("/")[2]
    try:
        config = load(options.kubeconfig, options.context, os.environ if environment is None else environment)
        cluster = connect(config, options.namespace)
        with cluster.client:
            _print(run(cluster, options), as_json=options.output == "json")
    except PluginError as error:
        write_note(f"error: {error}")
        return error.code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Somebody reads no further, for instance `head`. What Python would flush at its end has nowhere to go.
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
