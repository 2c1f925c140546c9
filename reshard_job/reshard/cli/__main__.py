"""`python -m reshard.cli`: the same as the command `reshard`."""

import sys

from reshard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
