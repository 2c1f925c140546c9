"""A process that has imported torch and DeepSpeed and forks ranks from there: importing is most of a short run.

Started by `rank_client`, once for each process of pytest. Reads one JSON object per line: a script, its arguments, and
for every rank an environment and a log. Answers with a line of exit codes, as soon as all ranks have ended or one has
failed, which ends the others: they would wait for it for ever. Ends with its input, and so do its ranks.
"""

import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys

from forked import fork

PRELOADED = (
    "reshard_rank",  # what these two import, most scripts import
    "dcp_ranks",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # by deepspeed.initialize, and with it torch's whole compiler
    "torch.utils.cpp_extension",  # to find operators that were built before
)
PAUSE_SECONDS = 0.01


def rank_main(script, arguments, environment, log):
    """In the child: what `python SCRIPT ARGUMENTS` would do."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def wait(ranks):
    """Exit codes in order; None for a rank that another one's failure, or the end of the input, has ended."""
    codes = dict.fromkeys(ranks)
    while None in codes.values() and not any(codes.values()):
        for rank in [rank for rank, code in codes.items() if code is None]:
            found, status = os.waitpid(rank, os.WNOHANG)
            if found:
                codes[rank] = os.waitstatus_to_exitcode(status)
        if select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
            break
    for rank in [rank for rank, code in codes.items() if code is None]:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
    return list(codes.values())


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # what is there by now is the ranks' in common
    for line in sys.stdin:
        request = json.loads(line)
        what = request["script"], request["arguments"]
        own = zip(request["environments"], request["logs"], strict=True)
        ranks = [fork(functools.partial(rank_main, *what, environment, log)) for environment, log in own]
        answers.write(json.dumps(wait(ranks)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
