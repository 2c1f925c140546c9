"""Entry point of `kubectl-etj`, which kubectl runs for `kubectl etj`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from elastic_operator.plugin import completion
from elastic_operator.plugin.cluster import connect
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.plugin.kubeconfig import load_config
from elastic_operator.plugin.options import parse
from elastic_operator.plugin.output import write_json, write_note, write_text, write_yaml
from elastic_operator.plugin.terminal import has_screen, uses_colour
from elastic_operator.plugin.verbs import LOCAL_VERBS, Answer, run

_INTERRUPTED = 130
"""Exit code of a program that was ended by Ctrl-C, by the convention of shells."""


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> int:
    """Run one command; return the exit code. Data goes to stdout, notes and errors go to stderr."""
    environment = os.environ if environment is None else environment
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == [completion.COMMAND]:
        write_text("\n".join(completion.complete(words[1:], environment)))
        return Exit.OK
    options = parse(words)
    options.is_coloured = uses_colour(options.color, environment) and options.verb != "report"
    options.has_screen = has_screen(environment)
    if options.verb == "completion":
        write_text(completion.make_script(options.shell))
        return Exit.OK
    try:
        if local := LOCAL_VERBS.get(options.verb):
            _print(local(options), options)
            return Exit.OK
        config = load_config(options.kubeconfig, options.context, environment)
        with connect(config, options.namespace) as cluster:
            _print(run(cluster, options), options)
    except PluginError as error:
        write_note(f"error: {error}")
        return error.code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader, for instance `head`, has closed the pipe. Python's flush at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.OK


def _print(answer: Answer, options: argparse.Namespace) -> None:
    if answer.note:
        write_note(answer.note)
    if options.output == "json" and answer.value is not None:
        write_json(answer.value)
    elif options.output == "yaml" and answer.value is not None:
        write_yaml(answer.value)
    elif answer.text:
        write_text(answer.text, is_coloured=options.is_coloured)
    sys.stdout.flush()
