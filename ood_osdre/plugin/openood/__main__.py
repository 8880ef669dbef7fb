r"""Runs OpenOOD's pipelines with this package's names: `python -m ood_osdre.plugin.openood`.

It takes the arguments of OpenOOD's own `main.py`, after :func:`register`:

    python -m ood_osdre.plugin.openood --config CONFIG.yml ... [--key value ...]
"""

__all__ = ["main"]

import sys

from ...errors import exit_status
from . import register
from .host import require


def main() -> int:
    r"""Runs the pipeline of the command line and returns the exit status."""

    def run() -> int:
        register()
        config = require("openood.utils").setup_config()
        require("openood.pipelines.utils").get_pipeline(config).run()
        return 0

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
