r"""Tests on a CUDA device: precision, compilation, and a training loop that never waits for it."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ood_osdre.config import Config
from ood_osdre.data import ImageSet
from ood_osdre.data.transforms import Preprocess
from ood_osdre.evaluation.evaluate import score_images
from ood_osdre.training.batches import ImageBatches
from ood_osdre.training.build import build_ratio, prepare_objective
from ood_osdre.training.fit import assemble
from ood_osdre.training.trainer import Trainer

pytestmark = pytest.mark.gpu

CONFIG = Config.from_mapping(
    {
        "network": {"width": 0.25, "depths": [1, 1, 1, 1]},
        "objective": {"class_weight": 0.5, "time_score": 0.02, "weight": "constant"},
        "data": {"broaden": 0.33},
        "training": {"steps": 40, "batch_size": 32, "warmup": 4, "ema": 0.9, "clip": 1.0},
    }
)
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(default)


def image_set(low: int, high: int) -> ImageSet:
    images = RNG.integers(low, high, (96, 32, 32, 3), dtype=np.uint8)
    return ImageSet(images, np.arange(96) % 10, [f"{i}.png" for i in range(96)])


ID, REFERENCE = image_set(80, 256), image_set(0, 176)


def make(folder: Path | None = None, device: str = "cuda", **training: object) -> Trainer:
    torch.manual_seed(0)
    config = CONFIG.replace(training=CONFIG.training.replace(**training))
    options = config.training
    preprocess = Preprocess((0.5,) * 3, (0.25,) * 3, device)
    ratio = build_ratio(config, 10).to(device)
    batches = ImageBatches(
        ID, REFERENCE, config.data, preprocess, options.batch_size, options.seed
    )
    return assemble(ratio, partial(prepare_objective, config), batches, options, folder=folder)


def gap(trainer: Trainer) -> float:
    r"""Returns how far apart the averaged ratio holds the two sets, in nats."""
    preprocess = trainer.batches.preprocess  # type: ignore[attr-defined]
    one, zero = (
        score_images(trainer.averaged, images.images, preprocess)[0] for images in (ID, REFERENCE)
    )
    return float(one.mean() - zero.mean())


@pytest.mark.parametrize("amp", ["none", "bf16", "fp16"])
def test_every_precision_learns(amp: str) -> None:
    trainer = make(amp=amp)
    assert trainer.scaler.is_enabled() == (amp == "fp16")
    assert trainer.run(progress=False).finished
    assert gap(trainer) > 1


def test_a_compiled_objective_learns_the_same() -> None:
    eager, compiled = make(amp="none"), make(amp="none", compile=True)
    batch = eager.batches(0)
    losses = [trainer.step(batch) for trainer in (eager, compiled)]
    for name, value in losses[0].items():
        torch.testing.assert_close(losses[1][name], value, rtol=2e-3, atol=2e-3)


def test_a_step_never_waits_for_the_device() -> None:
    trainer = make(amp="bf16")
    trainer.step(trainer.batches(0))  # what is made once may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (1, 2):
            trainer.step(trainer.batches(step))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_scores_are_those_of_a_cpu() -> None:
    trainer = make(amp="bf16")
    trainer.run(progress=False)
    folded = trainer.averaged.fold()
    on_gpu, classes = score_images(folded, ID.images, trainer.batches.preprocess)  # type: ignore
    on_cpu, same = score_images(folded.cpu(), ID.images, Preprocess((0.5,) * 3, (0.25,) * 3))
    # Convolutions run in TF32: three digits.
    np.testing.assert_allclose(on_gpu, on_cpu, atol=2e-2 * float(on_cpu.std()) + 1e-2)
    assert classes is not None
    assert same is not None
    assert float(np.mean(classes == same)) > 0.95


def test_a_resumed_run_ends_close_to_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = make(amp="none")
    whole.run(progress=False)
    assert not make(tmp_path, amp="none").run(time_budget=0, progress=False).finished
    resumed = make(tmp_path, amp="none")
    assert resumed.run(progress=False, resume=True).step == 40
    assert gap(resumed) == pytest.approx(gap(whole), rel=0.1)
