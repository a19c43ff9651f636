"""`python -m batchstate`."""

import sys

from batchstate.cli import main

if __name__ == "__main__":
    sys.exit(main())
