r"""Runs OpenOOD's pipelines with this package's names: `python -m ood_osdre.plugin.openood`.

It takes the arguments of OpenOOD's own `main.py`, after :func:`register`:

    python -m ood_osdre.plugin.openood --config CONFIG.yml ... [--key value ...]

Without a GPU, or with `--num_gpus 0`, the pipeline runs on the CPU. It runs in one process.
"""

__all__ = ["main"]

import logging
import sys
from contextlib import nullcontext

import torch

from ...errors import UserError, exit_status
from . import register
from .host import on_cpu, require

log = logging.getLogger(__name__)


def main() -> int:
    r"""Runs the pipeline of the command line and returns the exit status."""

    def run() -> int:
        register()
        config = require("openood.utils").setup_config()
        # Its files count one GPU by default; several would each be a process, which it starts.
        gpus = config.num_gpus or 0
        if (count := gpus * (config.num_machines or 1)) > 1:
            raise UserError(f"num_gpus: got {count} on all machines, expected 0 or 1.")
        uses_gpu = gpus and torch.cuda.is_available()
        if gpus and not uses_gpu:
            log.warning("num_gpus: there is no GPU, so everything runs on the CPU.")
        with nullcontext() if uses_gpu else on_cpu():
            require("openood.pipelines.utils").get_pipeline(config).run()
        return 0

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
