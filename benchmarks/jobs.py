r"""The runs of a study: what is trained with which options, where, and in which order."""

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from studies import RUN, Method, Study, slug

from ood_osdre import cli
from ood_osdre.data.manifests import load_manifest
from ood_osdre.errors import UserError

Setting: TypeAlias = tuple[str, str, str | None]


@dataclass(frozen=True)
class Job:
    r"""A training and the ways to score it.

    Attributes:
        name: The method's name.
        method: The method.
        setting: The ID data set, the benchmark and the reference, null for the manifest's own.
        config: The name of the configuration that it starts from.
        steps: To how many steps it is shortened; null for the configuration's.
        seed: The seed.
        folder: Where it trains.
        overrides: The options, `section.key=value`.
        needs: The folders of the runs that they name, by their methods.
    """

    name: str
    method: Method
    setting: Setting
    config: str
    steps: int | None
    seed: int
    folder: Path
    overrides: Sequence[str]
    needs: Mapping[str, Path]

    @property
    def command(self) -> list[str]:
        r"""The options of the main command, but for those of the machine."""
        given = {
            **dict(zip(("--id", "--benchmark", "--reference"), self.setting, strict=True)),
            "--config": self.config,
            "--max-steps": self.steps,
        }
        texts = [str(text) for k, v in given.items() if v is not None for text in (k, v)]
        return [*texts, *self.overrides]


def check_settings(study: Study) -> None:
    r"""Raises a :class:`UserError` for a benchmark, ID data set or reference that is not there."""
    for id_name, benchmark in itertools.product(study.ids, study.benchmarks):
        known = [spec.name for spec in load_manifest(benchmark, id_name).role("reference")]
        for reference in study.references:
            if reference is not None and reference not in known and not Path(reference).exists():
                expected = f"one of {', '.join(known)} or a path" if known else "null"
                raise UserError(
                    f"references: got {reference!r}, expected {expected} for {benchmark}."
                )


def plan(study: Study, only: Sequence[str], seeds: Sequence[int] | None, out: Path) -> list[Job]:
    r"""Returns all jobs in an order in which each follows those that it needs, seeds outermost.

    Arguments:
        study: The study.
        only: The methods; those that they need are taken, too.
        seeds: The seeds; None for those of the study and its methods.
        out: The scratch folder of the study.
    """
    jobs = []
    names = study.ordered(list(only))
    asked = {name: seeds or study.seeds_of(name) for name in names}
    for seed in sorted({seed for given in asked.values() for seed in given}):
        for name in names:
            if seed in asked[name]:
                settings = itertools.product(
                    study.ids, study.benchmarks, study.references_of(name)
                )
                jobs += [_job(study, name, setting, seed, out) for setting in settings]
    return jobs


def _job(study: Study, name: str, setting: Setting, seed: int, out: Path) -> Job:
    method, needs = study.methods[name], {}
    for need in method.needs:
        # What sees no reference is trained once, with any of them.
        others = study.references_of(need)
        reference = setting[2] if setting[2] in others else others[0]
        needs[need] = run_folder(out, (*setting[:2], reference), need, seed)

    def filled(options: Sequence[str]) -> list[str]:
        named = [RUN.sub(lambda m: str(needs[m[1]]), option) for option in options]
        return [option.replace("{seed}", str(seed)) for option in named]

    options = filled([*study.common, *method.options])
    method = method.replace(variants={k: filled(v) for k, v in method.variants.items()})
    return Job(
        name,
        method,
        setting,
        config=study.config.replace("{id}", setting[0]),
        steps=method.steps or study.steps,
        seed=seed,
        folder=run_folder(out, setting, name, seed),
        overrides=[f"training.seed={seed}", f"title={name}", *options],
        needs=needs,
    )


def run_folder(out: Path, setting: Setting, name: str, seed: int) -> Path:
    r"""Returns where a run of a study trains; a variant has a folder in it."""
    return out / slug("-".join(filter(None, setting))) / slug(name) / f"seed-{seed}"


@cache
def _no_options() -> argparse.Namespace:
    r"""Returns the main command's options where none is given; its parser reads many files."""
    return cli.parser().parse_args([])


def config_of(job: Job, further: Sequence[str] = ()) -> dict[str, Any]:
    r"""Returns the configuration of a job, with further options of a variant.

    Runs that options name are `{run:METHOD}` in it, wherever they are.

    Raises:
        UserError: If an option is not one of the main command's, or there are too few steps.
    """
    args = argparse.Namespace(**vars(_no_options()))
    args.id, args.benchmark, args.reference = job.setting
    args.max_steps, args.overrides = job.steps, [*job.overrides, *further]
    try:
        config = cli.read_config(args, job.config)
    except UserError as error:
        raise UserError(f"{job.name}: {error}") from None
    if job.steps not in (None, config.training.steps):
        raise UserError(
            f"{job.name}: steps: got {job.steps}, expected at most training.steps "
            f"({config.training.steps}), which an option can raise."
        )
    return named(job, config.to_dict())


def named(job: Job, config: Mapping[str, Any]) -> dict[str, Any]:
    r"""Returns a configuration with the names of other runs in place of their folders."""
    text = json.dumps(config)
    for name, folder in job.needs.items():
        text = text.replace(json.dumps(str(folder))[1:-1], f"{{run:{name}}}")
    named: dict[str, Any] = json.loads(text)
    return named
