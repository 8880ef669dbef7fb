r"""Puts the folder above on the path: what all benchmarks share is there."""

import sys
from pathlib import Path

ABOVE = str(Path(__file__).resolve().parents[1])
if ABOVE not in sys.path:
    sys.path.insert(1, ABOVE)  # behind the script's own
