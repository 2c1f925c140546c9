"""One rank of a real DeepSpeed run that loads virtual commits. Started by `reshard_run.launch`.

A run's `virtual` is the virtual commit, `nodes` the first rank of each pretended node; ranks of one node share memory.
"""

import bisect
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reshard_rank

from elastic_trainer.virtual import open_virtual_commit


def main():
    task, rank = json.loads(sys.argv[1]), int(os.environ["RANK"])
    with ExitStack() as stack:
        for run in task["runs"]:
            if "virtual" not in run:
                continue
            bounds = [*run["nodes"], int(os.environ["WORLD_SIZE"])]
            node = bisect.bisect_right(bounds, rank) - 1
            scratch = Path(run["scratch"]) / f"node{node}"
            scratch.mkdir(exist_ok=True)
            ranks = range(bounds[node], bounds[node + 1])
            made = stack.enter_context(open_virtual_commit(Path(run["virtual"]), ranks=ranks, scratch=scratch))
            run["load"] = str(made.folder)
            if made.loaded is not None:
                told = {
                    "read": made.loaded.bytes_read,
                    "needed": made.loaded.bytes_needed,
                    "ranges": made.loaded.ranges,
                }
                (scratch / f"loaded-by-{rank}.json").write_text(json.dumps(told))
        sys.argv[1] = json.dumps(task)
        reshard_rank.main()  # ends with a barrier: all ranks have loaded


if __name__ == "__main__":
    main()
