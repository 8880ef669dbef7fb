r"""Laws of the fast network: what its first layer does, how it starts, and where it is prepared."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ood_osdre.config import Config
from ood_osdre.data import ImageSet
from ood_osdre.data.transforms import Preprocess
from ood_osdre.errors import UserError
from ood_osdre.models import CoefficientNetwork, SpeedBackbone, extract_features
from ood_osdre.models.speed import EPS, deployed
from ood_osdre.training import optimisation
from ood_osdre.training import trainer as trainer_module
from ood_osdre.training.batches import ImageBatches
from ood_osdre.training.build import build_ratio, prepare_objective
from ood_osdre.training.checkpoint import MODEL, read_checkpoint, restore
from ood_osdre.training.fit import assemble
from ood_osdre.training.trainer import Trainer

RNG = np.random.default_rng(0)
CONFIG = Config.from_mapping(
    {
        "network": {"kind": "speed", "width": 0.125},
        "objective": {"class_weight": 1.0},
        "data": {"crop": 2, "flip": "alternating"},
        "training": {
            "steps": 6,
            "batch_size": 8,
            "optimizer": "sgd",
            "lr": 0.05,
            "weight_decay": 0.5,
            "warmup": 2,
            "decay": "linear",
            "checkpoint_every": 2,
            "amp": "none",
        },
    }
)


def smooth(count: int, side: int = 16) -> ImageSet:
    r"""Images whose neighbouring pixels and channels are alike, as those of photographs."""
    coarse = torch.randn(
        count, 3, side // 4, side // 4, generator=torch.Generator().manual_seed(1)
    )
    mixed = coarse + 2 * coarse.mean(dim=1, keepdim=True)
    fine = nn.functional.interpolate(mixed, size=(side, side), mode="bilinear")
    noisy = (fine * 40 + 128 + 3 * torch.randn(fine.shape)).clamp(0, 255)
    images = noisy.permute(0, 2, 3, 1).byte().numpy()
    return ImageSet(images, np.arange(count) % 3, [f"{i}.png" for i in range(count)])


ID, REFERENCE = smooth(24), smooth(20)


def make(folder: Path | None = None, config: Config = CONFIG) -> Trainer:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    preprocess, options = Preprocess((0.5,) * 3, (0.25,) * 3), config.training
    batches = ImageBatches(ID, REFERENCE, config.data, preprocess, options.batch_size, 0)
    ratio = build_ratio(config, 3)
    return assemble(
        ratio, partial(prepare_objective, config), batches, options, select=None, folder=folder
    )


def patches(images: Tensor) -> np.ndarray:
    r"""Every 2x2 patch of images, channel after channel, with shape (N, 12); by slices alone."""
    corners = [images[:, :, i : images.shape[2] - 1 + i, j : images.shape[3] - 1 + j]
               for i in (0, 1) for j in (0, 1)]  # fmt: skip
    stacked = torch.stack(corners, dim=2).flatten(1, 2)
    return stacked.permute(0, 2, 3, 1).reshape(-1, 12).double().numpy()


@pytest.mark.parametrize("grey", [False, True])
def test_whitened_patches_have_variance_one_and_no_covariance(grey: bool) -> None:
    x = torch.randn(70, 3, 16, 20).cumsum(dim=3) * torch.tensor([0.4, 0.2, 0.3])[:, None, None] + 1
    x = x.mean(dim=1, keepdim=True).expand_as(x) if grey else x
    backbone = SpeedBackbone()
    backbone.prepare(x)
    outputs = nn.functional.conv2d(x, backbone.whitening)
    assert torch.equal(outputs[:, 12:], -outputs[:, :12])

    whitened = outputs[:, :12].permute(0, 2, 3, 1).reshape(-1, 12).numpy()
    values = np.linalg.eigvalsh(np.cov(patches(x), rowvar=False, bias=True)).clip(min=0)
    expected = np.diag(values / (values + EPS))
    np.testing.assert_allclose(np.cov(whitened, rowvar=False, bias=True), expected, atol=1e-6)
    assert (np.diag(expected) > 0.97).sum() == (4 if grey else 12)


def test_convolutions_start_as_identities_on_their_first_channels() -> None:
    backbone = SpeedBackbone()
    for group in backbone.groups:
        for layer in (m for m in group if isinstance(m, nn.Conv2d)):
            x = torch.randn(2, layer.in_channels, 6, 6)
            y = layer(x)
            torch.testing.assert_close(y[:, : x.shape[1]], x)
            assert y.shape[1] == x.shape[1] or (y[:, x.shape[1] :].std() > 0.1)


@pytest.mark.parametrize("side", [16, 32, 47])
def test_features_are_the_largest_of_the_last_map_at_every_size(side: int) -> None:
    backbone, x = SpeedBackbone(0.25).eval(), torch.randn(2, 3, side, side)
    maps = backbone.groups(nn.functional.gelu(nn.functional.conv2d(x, backbone.whitening)))
    assert backbone(x).shape == (2, backbone.features) == (2, 32)
    assert torch.equal(backbone(x), maps.flatten(2).max(dim=2).values)
    if side == 32:
        assert torch.equal(backbone(x), nn.functional.max_pool2d(maps, 3).flatten(1))


def test_its_groups_are_layers_by_name() -> None:
    network = CoefficientNetwork(SpeedBackbone(), 128, 4, classes=3)
    sizes = [
        extract_features(
            network.backbone, torch.randn(2, 3, 32, 32), [f"groups.{i}"]
        ).features.shape
        for i in range(3)
    ]
    assert sizes == [(2, 32), (2, 128), (2, 128)]
    assert not hasattr(network.backbone, "feature_map")


def test_norms_are_merged_where_that_changes_nothing() -> None:
    backbone = SpeedBackbone(0.25)
    for m in backbone.modules():
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(m.running_mean)
            nn.init.uniform_(m.running_var, 0.5, 2.0)
            if m.affine:
                nn.init.uniform_(m.weight, 0.5, 2.0)
                nn.init.uniform_(m.bias)
    # The largest value of a cell becomes its least by a scale below 0.
    backbone.groups[1][2].weight.data[3] = -1.0
    x = torch.randn(4, 3, 32, 32)
    merged, expected = deployed(backbone), backbone.eval()(x)
    torch.testing.assert_close(merged(x), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(deployed(merged)(x), merged(x), rtol=0, atol=0)
    norms = [name for name, m in merged.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms == ["groups.1.2"]
    read = deployed(backbone, ["groups.2", "groups.0.4"])
    assert read.state_dict().keys() == backbone.state_dict().keys()


def test_small_images_are_refused() -> None:
    with pytest.raises(UserError, match=r"speed takes images of at least 16 .* got 15 x 40"):
        SpeedBackbone().prepare(torch.zeros(2, 3, 15, 40))


def test_the_assembler_whitens_once_and_training_leaves_it(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    trainer = make(tmp_path)
    backbone = trainer.ratio.network.backbone
    before = backbone.whitening.clone()
    fresh = SpeedBackbone(0.125)
    assert backbone.is_prepared
    assert not fresh.is_prepared
    fresh.prepare(trainer.batches.ends()[1])
    assert torch.equal(fresh.whitening, before)

    groups = trainer.ratio.network.backbone.groups.state_dict()["0.0.weight"].clone()
    trainer.run(progress=False)
    for model in (trainer.ratio, trainer.averaged, trainer.kept):
        assert torch.equal(model.network.backbone.whitening, before)
    assert not torch.equal(backbone.groups.state_dict()["0.0.weight"], groups)

    # A network that comes with its weights keeps them, whatever it is trained on.
    batches = ImageBatches(REFERENCE, ID, CONFIG.data, Preprocess((0.1,) * 3, (0.3,) * 3), 8, 0)
    assemble(trainer.ratio, partial(prepare_objective, CONFIG), batches, CONFIG.training)
    assert torch.equal(backbone.whitening, before)

    # What is built anew takes it from the checkpoint, and folds to the same scorer.
    loaded = build_ratio(CONFIG, 3)
    restore(loaded, read_checkpoint(tmp_path, MODEL)[0], tmp_path)
    x = trainer.batches(0).x_1
    expected = trainer.kept.log_ratio(x)
    assert expected.std() > 0
    assert torch.equal(loaded.eval().log_ratio(x), expected)
    torch.testing.assert_close(loaded.fold().log_ratio(x), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loaded.fold().predict(x).logits, trainer.kept.predict(x).logits)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, part = make(tmp_path / "whole"), make(tmp_path / "part")
    whole.run(progress=False)
    batches = part.batches

    def interrupted(step: int) -> object:
        if step == 5:  # in the second epoch of both sets, one step after the last checkpoint
            raise KeyboardInterrupt
        return batches(step)

    part.batches = interrupted  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        part.run(progress=False)
    resumed = make(tmp_path / "part")
    resumed.run(progress=False, resume=True)
    for name, module in whole.modules().items():
        other = resumed.modules()[name].state_dict()
        assert all(torch.equal(x, other[key]) for key, x in module.state_dict().items())


def test_a_precision_is_chosen_once_by_steps_that_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimisation, "_has_bf16_instructions", lambda: True)
    trials = []

    def chosen(step: Callable[[str], object]) -> str:
        for amp in ("none", "bf16"):
            step(amp)
            torch.rand(3)
            trials.append(amp)
        return "bf16"

    monkeypatch.setattr(trainer_module, "faster_precision", chosen)
    auto = CONFIG.replace(training=CONFIG.training.replace(amp="auto"))
    given = CONFIG.replace(training=CONFIG.training.replace(amp="bf16"))
    expected, measured = make(config=given), make(tmp_path, config=auto)
    state = torch.get_rng_state()
    expected.run(progress=False)
    assert measured.outcome.amp == ""
    assert not measured.run(time_budget=0, progress=False).finished  # one step
    assert measured.outcome.amp == "bf16"
    assert torch.equal(torch.get_rng_state(), state)

    resumed = make(tmp_path, config=auto)
    monkeypatch.setattr(trainer_module, "faster_precision", None)
    assert resumed.run(progress=False, resume=True).amp == "bf16"
    assert trials == ["none", "bf16"]
    single = make()
    single.run(progress=False)
    for key, x in expected.ratio.state_dict().items():
        assert torch.equal(x, resumed.ratio.state_dict()[key]), key
    head = "network.class_head.weight"
    assert not torch.equal(single.ratio.state_dict()[head], expected.ratio.state_dict()[head])
