"""A child that does one thing. Helper of `rank_server` and `dcp_ranks`, which have imported torch before."""

import os
import sys
import traceback


def fork(do):
    """Process id of a child that calls `do` and ends, as `python` would after a script that does no more."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        do()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        # Tearing torch down at the interpreter's end now and then aborts: "terminate called without ...".
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
