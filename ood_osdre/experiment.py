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

from ood_osdre import checkpoints
from ood_osdre.building import build_objective, build_path, build_ratio, build_times
from ood_osdre.config import Config
from ood_osdre.data import BenchmarkData, ImageSet
from ood_osdre.data.batches import PairBatches, Preprocess
from ood_osdre.errors import UserError
from ood_osdre.evaluation import (
    Validation,
    count_parameters,
    evaluate_benchmark,
    score_images,
)
from ood_osdre.paths import Moments
from ood_osdre.plots import score_density
from ood_osdre.ratio import OneStepRatio
from ood_osdre.records import RunRecord, write_text_atomic
from ood_osdre.scores import write_scores
from ood_osdre.tables import MetricsTable
from ood_osdre.training import Outcome, Trainer

# Images of each side from which second moments are computed; their error is far below a percent.
MOMENT_IMAGES = 5000


@dataclass(frozen=True)
class Scorer:
    r"""A trained ratio with the preprocessing it was trained with.

    Attributes:
        ratio: The ratio, in evaluation mode.
        preprocess: The preprocessing, with the statistics of the ID data.
        metadata: Configuration, classes and image statistics.
    """

    ratio: OneStepRatio
    preprocess: Preprocess
    metadata: Mapping[str, Any]

    def score(self, images: NDArray[np.uint8], batch_size: int = 512) -> NDArray[np.float32]:
        r"""Scores images of the training size.

        Arguments:
            images: The uint8 images, with shape :math:`(N, H, W, 3)`.
            batch_size: The number of images scored at once.

        Returns:
            The log-ratios in nats, larger = more ID, with shape :math:`(N)`.
        """
        return score_images(self.ratio, images, self.preprocess, batch_size)[0]


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
    preprocess = Preprocess(manifest.mean, manifest.std, device)
    classes = int(data.id_train.labels.max()) + 1
    reference, near = data.split_reference()
    metadata = {
        "config": config.to_dict(),
        "classes": classes,
        "mean": list(manifest.mean),
        "std": list(manifest.std),
        "size": manifest.size,
        "reference": data.reference_name,
        "checksums": {
            k: v for k, v in data.checksums.items() if not k.startswith(("near", "far"))
        },
    }

    ratio = build_ratio(config, classes).to(device)
    path = build_path(config).to(device)
    moments = Moments.of(_inputs(reference, preprocess), _inputs(data.id_train, preprocess))
    times = build_times(config, path, moments)
    validation = Validation(
        data.id_val,
        near,
        preprocess,
        config.evaluation.batch_size,
        config.data.val_limit,
        data.ood_val if config.evaluation.use_ood_val else None,
    )
    trainer = Trainer(
        ratio,
        build_objective(config, path, times, moments),
        PairBatches(
            data.id_train, reference, config.data, preprocess, times, options.batch_size,
            options.seed,
        ),
        options,
        path,
        validation,
        config.evaluation.select,
        folder,
        metadata,
    )  # fmt: skip
    outcome = trainer.run(time_budget, progress, resume)
    return Scorer(trainer.kept, preprocess, metadata), outcome, validation.describe()


def load_scorer(folder: Path, device: torch.device | str = "cpu") -> Scorer:
    r"""Loads the selected model of a run folder.

    Raises:
        UserError: If the folder holds none, or it is damaged.
    """
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
    folded = scorer.ratio.fold()
    if config.training.channels_last:
        folded.to(memory_format=torch.channels_last)
    done = evaluate_benchmark(
        folded, data, scorer.preprocess, config.evaluation.batch_size, progress
    )
    scores, title = done.scores, data.manifest.title
    table = MetricsTable.of(
        scores.metrics(),
        title=title,
        absent={
            role: [s.name for s in data.manifest.role(role) if s.name in data.absent]
            for role in ("near", "far")
        },
        accuracy=done.accuracy,
        seconds=done.seconds,
        parameters=count_parameters(scorer.ratio),
        counts=scores.counts(),
    )
    write_scores(folder / "scores.npz", scores)
    (id_scores,) = (s.score for s in scores.of("id").values())
    score_density(
        folder / "score_density.png",
        id_scores,
        {name: s.score for name, s in scores.of("near").items()},
        {name: s.score for name, s in scores.of("far").items()},
        f"{title}: {config.title}" if config.title else title,
    )
    table.to_csv(folder / "metrics.csv")
    write_text_atomic(folder / "metrics.md", table.to_markdown())
    RunRecord(
        config=config.to_dict(),
        seed=config.training.seed,
        benchmark=data.manifest.name,
        device=device_name(device),
        data={"checksums": data.checksums, "counts": scores.counts()},
        absent=data.absent,
        selection=selection,
        validation={} if outcome is None else {"best": outcome.best, "history": outcome.history},
        train_seconds=None if outcome is None else outcome.seconds,
        score_seconds=done.seconds,
    ).write(folder / "run.json")
    return table


def device_name(device: torch.device) -> str:
    r"""Returns the name of a device, a GPU's card included."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


def _inputs(images: ImageSet, preprocess: Preprocess) -> torch.Tensor:
    step = max(1, len(images) // MOMENT_IMAGES)
    return preprocess(torch.as_tensor(images.images[::step].copy()))
