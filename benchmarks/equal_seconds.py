r"""Writes a study at equal training seconds, from the records of one at equal steps.

    python benchmarks/equal_seconds.py paths_heads [--seconds S]

Each method gets as many steps of its head as fit into S seconds at its own seconds a step, and a
twentieth of them as warm-up and between validations. A method's seconds a step are those of its
fastest run, as a busy machine only lengthens them; S is by default what the first method took for
its own steps. The new study is `studies/NAME_seconds.yml`; it is committed before its first run.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import yaml
from records import RECORDS, Run, read_runs
from studies import STUDIES, load_study

from ood_osdre.errors import Parser, UserError, exit_status, number
from ood_osdre.files import local, write_text_atomic
from ood_osdre.resources import read_yaml

FRACTION = 20


def seconds_a_step(runs: Sequence[Run], method: str) -> float:
    r"""Returns the least seconds that a step of a method's head took.

    Raises:
        UserError: If no run of it has trained a head.
    """
    found = [run.validation for run in runs if run.method == method]
    # A further way to score a head has trained nothing.
    rates = [v["seconds"] / v["step"] for v in found if v.get("step") and "seconds" in v]
    if not rates:
        raise UserError(
            f"{method}: no record says how long its head trained; run the study first."
        )
    return min(rates)


def at_equal_seconds(
    values: dict[str, Any], rates: dict[str, float], seconds: float, name: str
) -> dict[str, Any]:
    r"""Returns the values of a study whose methods train for equal seconds.

    Arguments:
        values: Those of the study at equal steps.
        rates: Each method's seconds a step.
        seconds: The seconds of each.
        name: The name of that study.
    """
    methods = {}
    for method, rate in rates.items():
        steps = max(FRACTION, round(seconds / rate))
        own = values["methods"][method]
        further = [f"head.training.steps={steps}"]
        further += [f"head.training.{k}={steps // FRACTION}" for k in ("warmup", "eval_every")]
        methods[method] = {**own, "options": [*own.get("options", []), *further]}
    protocol = (
        f"The study {name}, but that each head trains for {seconds:.0f} seconds, at the seconds a "
        "step of its fastest run there; benchmarks/equal_seconds.py wrote it. All else is as there."
    )
    return {**values, "protocol": protocol, "methods": methods}


def main(argv: Sequence[str] | None = None) -> int:
    r"""Writes the study."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("study", metavar="STUDY", help="the study at equal steps, all of whose methods have heads")
    add("--seconds", type=number(), metavar="S")
    add("--studies", type=local, default=STUDIES, metavar="DIR")
    add("--records", type=local, default=RECORDS, metavar="DIR")
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Writes the study, and prints the steps of each method."""
    study = load_study(args.study, args.studies)
    runs = read_runs(args.records / f"{args.study}.jsonl")
    rates = {method: seconds_a_step(runs, method) for method in study.methods}
    first = next(iter(rates))
    steps = [r.config["head"]["training"]["steps"] for r in runs if r.method == first]
    seconds = args.seconds or rates[first] * steps[0]
    values: Any = read_yaml(args.studies / f"{args.study}.yml")
    values = at_equal_seconds(values, rates, seconds, args.study)
    values.pop("shared", None)
    path = args.studies / f"{args.study}_seconds.yml"
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=99)
    write_text_atomic(path, text)
    load_study(path.stem, args.studies)
    for method, rate in rates.items():
        print(f"{method}: {1e3 * rate:.2f} ms a step, {round(seconds / rate):,} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
