r"""Runs a task with its truth beside every estimate: `python -m ood_osdre.tasks {density,kl,mi}`."""

import importlib
import sys
from collections.abc import Sequence

from ..errors import Parser, exit_status

TASKS = {
    "density": ("density", "densities of 2-D sets, tables and images"),
    "kl": ("kl", "the divergence of a drifting stream"),
    "mi": ("mutual_information", "mutual information"),
}
PROG = "python -m ood_osdre.tasks"
EPILOG = """\
examples:
  {prog} mi --help
  {prog} kl --seeds 3 --jobs 2 --out runs/kl
  {prog} density --suite tabular --sets mine.csv --whiten

TASK --help has the options of each task.
"""


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    r"""Runs the command and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The tasks import torch, which takes seconds that neither help nor a slip should wait for.
    listing = "\n".join(f"  {name:8} {text}" for name, (_, text) in TASKS.items())
    outer = Parser(
        prog=prog,
        description="Density-ratio tasks with their truth beside every estimate, in nats.",
        epilog=f"tasks:\n{listing}\n\n{EPILOG.format(prog=prog)}",
    )
    outer.add_argument("task", choices=tuple(TASKS), metavar="TASK")
    task = outer.parse_args(arguments[:1]).task

    return exit_status(lambda: _run(task, arguments[1:], prog))


def _run(task: str, arguments: Sequence[str], prog: str) -> int:
    module = importlib.import_module(f".suites.{TASKS[task][0]}", __package__)
    inner = Parser(prog=f"{prog} {task}", description=module.__doc__)
    module.add_arguments(inner)
    return int(module.run(inner.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
