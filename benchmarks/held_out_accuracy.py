r"""Trains a classifier and reads its accuracy on ID training images that are held out.

    python benchmarks/held_out_accuracy.py cifar10 --data-root DIR [KEY=VALUE ...]

By this a network, its width, its recipe and its steps are chosen: no test set is scored. 5,000
training images, the same for every seed, are left out of training. Each run adds a line to
`benchmarks/records/held_out_accuracy.jsonl`.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from records import RECORDS, commit_text, line_of

from ood_osdre.cli import default_config
from ood_osdre.config import load_config
from ood_osdre.data import choose_benchmark, load_benchmark
from ood_osdre.errors import Parser, UserError, count, exit_status
from ood_osdre.evaluation.records import git_commit
from ood_osdre.files import local
from ood_osdre.stages import train_run

CLASSIFIER = ("estimator=classifier", "objective.endpoint=0", "objective.class_weight=1")
HELD = ("data.hold_out_id=5000", "data.broaden=0", "title=held-out accuracy")


def main(argv: Sequence[str] | None = None) -> int:
    r"""Trains one classifier and writes its line."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("id", choices=["cifar10", "cifar100"])
    add("overrides", nargs="*", metavar="KEY=VALUE", help="any key of the configuration")
    add("--data-root", type=local, default=Path("data"))
    add("--threads", type=count(1), default=2)
    add("--records", type=local, default=RECORDS, metavar="DIR")
    args = parser.parse_intermixed_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Trains one classifier and writes its line."""
    torch.set_num_threads(args.threads)
    config = load_config(
        default_config(args.id, gpu=False), [("id", args.id), *CLASSIFIER, *HELD, *args.overrides]
    )
    manifest, _ = choose_benchmark(args.id, args.data_root)
    data = load_benchmark(manifest, args.data_root, None, None, True)
    with tempfile.TemporaryDirectory() as folder:
        _, outcome, _ = train_run(config, data, Path(folder), torch.device("cpu"), progress=False)
    if not outcome.finished:
        raise UserError(f"stopped: {outcome.reason}; nothing was written.")
    line = {
        "id": args.id,
        "overrides": args.overrides,
        "accuracy": round(100 * outcome.best["val_accuracy"], 2),
        "seed": config.training.seed,
        "steps": config.training.steps,
        "threads": args.threads,
        "amp": outcome.amp,
        "config": config.to_dict(),
        "checksums": {k: v[:16] for k, v in data.checksums.items() if k.startswith("id_train")},
        "commit": commit_text(git_commit()),
    }
    # Several may run side by side, and a line is one write.
    with (args.records / "held_out_accuracy.jsonl").open("a") as file:
        file.write(line_of(line))
    print(f"{args.id}: {line['accuracy']} %; {args.overrides}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
