r"""Entry point of `python -m ood_osdre.data`."""

import sys

from .check import main

if __name__ == "__main__":
    sys.exit(main())
