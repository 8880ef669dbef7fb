r"""One run: train a ratio on a benchmark, score its test sets, write the run folder.

A finished run folder holds `metrics.csv`, `metrics.md`, `scores.npz`, `score_density.png` and
`run.json`, besides the selected model (`model.json` and its tensors) and `log.jsonl`.
"""

__all__ = ["Scorer", "evaluate_run", "load_scorer", "train_run"]

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import Config
from ..data import BenchmarkData
from ..data.preprocess import Preprocess
from ..errors import UserError
from ..files import write_text_atomic
from ..models.build import build_ratio
from ..models.ratio import RatioModel
from ..objectives.build import prepare_objective
from ..paths.gaussian import Moments
from ..training import checkpoint as checkpoints
from ..training import distributed
from ..training.batches import PairBatches
from ..training.trainer import Outcome, Trainer
from .evaluate import (
    Validation,
    check_neighbours,
    count_parameters,
    deployed,
    evaluate_benchmark,
    score_images,
)
from .plots import draw_scores
from .records import RunRecord
from .run_folders import identity, run_table
from .scores import Scores, write_scores
from .tables import MetricsTable


@dataclass(frozen=True)
class Scorer:
    r"""A trained ratio with the preprocessing it was trained with.

    Attributes:
        ratio: The ratio, in evaluation mode.
        preprocess: The preprocessing, with the statistics of the ID data.
        metadata: Configuration, classes and image statistics.
    """

    ratio: RatioModel
    preprocess: Preprocess
    metadata: Mapping[str, Any]

    def score(self, images: NDArray[np.uint8], batch_size: int = 512) -> NDArray[np.float32]:
        r"""Scores images of the training size.

        Arguments:
            images: The uint8 images, with shape :math:`(N, H, W, 3)`.
            batch_size: The number of images scored at once.

        Returns:
            The log-ratios in nats, larger = more ID, with shape :math:`(N)`.

        Raises:
            UserError: If the images are not uint8, of another shape or size.
        """
        kind = getattr(images, "dtype", type(images).__name__)
        shape = tuple(getattr(images, "shape", ()))
        fits = isinstance(images, np.ndarray) and kind == np.uint8 and len(shape) == 4
        if not fits or shape[3] != 3 or not shape[0]:
            raise UserError(
                f"images: got {kind} with shape {shape}, expected uint8 with shape (N, H, W, 3), "
                "not empty; OneStepDetector takes other forms."
            )
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(f"'batch_size' should be an integer >= 1, got {batch_size!r}.")
        self.refuse_other_size(images, "images")
        return score_images(self.ratio, images, self.preprocess, batch_size)[0]

    def refuse_other_size(self, images: NDArray[np.uint8], name: str) -> None:
        r"""Raises an error if images are of another size than those of training.

        Arguments:
            images: The images, with shape :math:`(N, H, W, 3)`.
            name: What the error calls them.
        """
        height, width = images.shape[1:3]
        size = self.metadata.get("size", height)
        if (height, width) != (size, size):
            raise UserError(
                f"{name}: got {height}x{width} pixels, expected {size}x{size}, the training size."
            )


def train_run(
    config: Config,
    data: BenchmarkData,
    folder: Path,
    device: torch.device,
    time_budget: float | None = None,
    resume: bool = False,
    progress: bool = True,
) -> tuple[Scorer, Outcome, str]:
    r"""Trains on the ID and reference sets of a benchmark.

    Arguments:
        config: The configuration.
        data: The benchmark; its test sets are not read.
        folder: The folder of checkpoints and log.
        device: Where to train.
        time_budget: The number of seconds after which to save and stop.
        resume: Whether to go on from the folder's checkpoint, if there is one.
        progress: Whether to show a progress bar.

    Returns:
        The selected scorer, how far the run came, and the selection rule.
    """
    manifest, options = data.manifest, config.training
    torch.manual_seed(options.seed)
    # Batches have one shape, for which the fastest convolution is worth finding.
    torch.backends.cudnn.benchmark = True
    preprocess = Preprocess(manifest.mean, manifest.std, device)
    classes = int(data.id_train.labels.max()) + 1
    reference, near = data.split_reference()
    metadata = _metadata(config, data, classes)

    ratio = build_ratio(config, classes).to(device)
    check_neighbours(ratio, data.id_train)
    moments = Moments.of(*(preprocess.sample(s.images) for s in (reference, data.id_train)))
    times, objective = prepare_objective(config, moments, ratio)
    if config.evaluation.use_ood_val and data.ood_val is None:
        raise UserError(
            f"evaluation.use_ood_val: benchmark {manifest.name} has no OOD validation set here."
        )
    validation = Validation(
        data.id_val,
        near,
        preprocess,
        config.evaluation.batch_size,
        config.data.val_limit,
        data.ood_val if config.evaluation.use_ood_val else None,
        data.id_train,
    )
    batches = PairBatches(
        data.id_train,
        reference,
        config.data,
        preprocess,
        times,
        options.batch_size,
        options.seed,
    )
    trainer = Trainer(
        ratio,
        objective,
        batches,
        options,
        validation,
        config.evaluation.select,
        folder,
        metadata,
    )
    outcome = trainer.run(time_budget, progress, resume)
    selection = validation.describe(config.evaluation.select)
    return Scorer(trainer.kept, preprocess, metadata), outcome, selection


def load_scorer(folder: str | Path, device: torch.device | str = "cpu") -> Scorer:
    r"""Loads the selected model of a run folder.

    Arguments:
        folder: The run folder.
        device: Where to score.

    Returns:
        The scorer.

    Raises:
        UserError: If the folder holds none, or it is damaged.
    """
    folder = Path(folder)
    tensors, metadata = checkpoints.read_checkpoint(folder, checkpoints.MODEL)
    source = folder / f"{checkpoints.MODEL}.json"
    try:
        config = Config.from_mapping(metadata["config"], str(source))
        ratio = build_ratio(config, metadata["classes"])
        preprocess = Preprocess(metadata["mean"], metadata["std"], device)
    except KeyError as error:
        raise UserError(f"{source}: {error} is missing, expected a trained model.") from None
    checkpoints.restore(ratio, tensors, source)
    if config.training.channels_last:
        ratio.to(memory_format=torch.channels_last)
    return Scorer(ratio.to(device).eval(), preprocess, metadata)


def evaluate_run(
    scorer: Scorer,
    data: BenchmarkData,
    config: Config,
    folder: Path,
    selection: str,
    outcome: Outcome | None = None,
    progress: bool = True,
) -> MetricsTable:
    r"""Scores the test sets, once, with the folded scorer, and writes the run folder.

    Arguments:
        scorer: The scorer.
        data: The benchmark.
        config: The configuration that the record names.
        folder: The run folder.
        selection: How the scorer was selected.
        outcome: How it was trained; None if it was loaded.
        progress: Whether to show a progress bar.

    Returns:
        The table of the run.
    """
    device = scorer.preprocess.device
    model = deployed(scorer.ratio, config.evaluation, data.id_train, scorer.preprocess)
    if config.training.channels_last:
        model.to(memory_format=torch.channels_last)
    done = evaluate_benchmark(
        model, data, scorer.preprocess, config.evaluation.batch_size, progress
    )
    table = run_table(
        done.scores,
        data,
        accuracy=done.accuracy,
        seconds=done.seconds,
        parameters=count_parameters(scorer.ratio),
        reference=data.reference_name or scorer.metadata.get("reference"),
        steps=config.training.steps,
    )
    if not distributed.is_first():
        return table
    title = data.manifest.title
    _write_results(
        folder, done.scores, table, f"{title}: {config.title}" if config.title else title
    )
    RunRecord(
        config=config.to_dict(),
        seed=config.training.seed,
        benchmark=data.manifest.name,
        device=device_name(device),
        data={
            "reference": table.reference,
            "counts": done.scores.counts(),
            **identity(data),
        },
        absent=data.absent,
        selection=selection,
        validation={} if outcome is None else {"best": outcome.best, "history": outcome.history},
        train_seconds=None if outcome is None else outcome.seconds,
        score_seconds=done.seconds,
        results={
            "accuracy": done.accuracy,
            "parameters": table.parameters,
            "evaluations": done.evaluations,
        },
    ).write(folder / "run.json")
    return table


def _write_results(folder: Path, scores: Scores, table: MetricsTable, title: str) -> None:
    r"""Writes the scores, their densities and the table."""
    write_scores(folder / "scores.npz", scores)
    draw_scores(folder / "score_density.png", scores, title)
    table.to_csv(folder / "metrics.csv")
    write_text_atomic(folder / "metrics.md", table.to_markdown())


def device_name(device: torch.device) -> str:
    r"""Returns the name of a device, a GPU's card included."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


def _metadata(config: Config, data: BenchmarkData, classes: int) -> dict[str, Any]:
    r"""Returns what is stored with the model: how to build it, and on what it was trained."""
    manifest = data.manifest
    return {
        "config": config.to_dict(),
        "classes": classes,
        "mean": list(manifest.mean),
        "std": list(manifest.std),
        "size": manifest.size,
        "reference": data.reference_name,
        **identity(data, trained=True),
    }
