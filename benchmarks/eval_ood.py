r"""Trains a one-step ratio detector and evaluates it; see `--help`.

The same command is installed as `ood-osdre-eval`.
"""

import sys

from ood_osdre.cli import main

if __name__ == "__main__":
    sys.exit(main())
