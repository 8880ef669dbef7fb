r"""Laws of a network whose ratio reads features that the class term alone trains."""

import copy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ood_osdre.config import Config
from ood_osdre.data import ImageSet
from ood_osdre.data.transforms import Preprocess
from ood_osdre.detectors import Scorer, read_classifier, read_model
from ood_osdre.errors import UserError
from ood_osdre.export import TOLERANCE, export_scorer
from ood_osdre.models import ShieldedBackbone, SpeedBackbone, SummedScore
from ood_osdre.objectives import Batch
from ood_osdre.paths import Moments
from ood_osdre.plugin.openood.network import OSDRENet
from ood_osdre.training.batches import ImageBatches
from ood_osdre.training.build import build_ratio, prepare_objective
from ood_osdre.training.checkpoint import model_metadata
from ood_osdre.training.fit import fit

READS = ["content", "layers", "branch"]
SIZE, CLASSES = 16, 3


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


def configuration(shield: str = "branch", **objective: float) -> Config:
    training = {"steps": 4, "batch_size": 8, "lr": 0.05, "optimizer": "sgd", "warmup": 1}
    clean = {"class_weight": 0.5, "endpoint_clean": True, "weight": "constant"}
    return Config.from_mapping(
        {
            "network": {"kind": "speed", "width": 0.125, "shield": shield},
            "objective": {**clean, **objective},
            "training": {**training, "amp": "none"},
        }
    )


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("shield", READS)
def test_the_class_term_alone_trains_what_it_would_train_without_a_ratio(
    shield: str, amp: bool
) -> None:
    config = configuration(shield, time_score=0.1)
    ratio = build_ratio(config, CLASSES).train()
    nn.init.normal_(ratio.network.head.weight)
    trunk, head = copy.deepcopy((ratio.network.backbone.trunk, ratio.network.class_head))
    x_0, x_1, noise = torch.randn(3, 6, 3, SIZE, SIZE).cumsum(dim=4)
    draw = Batch(x_0 + 1, x_1, torch.rand(6), noise, torch.arange(6) % CLASSES)
    objective = prepare_objective(config, Moments.of(x_0, x_1), ratio)[1]

    def gradients(term: str) -> dict[str, Tensor]:
        ratio.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = objective(ratio, draw)[term].mean()
        loss.backward()
        named = ratio.network.backbone.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}

    for term in ("endpoint", "time_score"):
        names = gradients(term).keys()
        assert names
        assert not any(name.startswith("trunk.") for name in names)
    # A classifier of its own, which sees ID images alone, in the same precision.
    trunk.train()
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        logits = head(trunk(x_1)).float()
    F.cross_entropy(logits, draw.label).backward()
    expected = {f"trunk.{name}": p.grad for name, p in trunk.named_parameters()}
    found = gradients("class")
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
        assert gradient.abs().max() > 0
    for name, gradient in gradients("total").items():
        if name in expected:
            torch.testing.assert_close(gradient, 0.5 * expected[name], rtol=1e-5, atol=1e-7)


def test_statistics_are_those_of_id_images_and_features_those_that_are_deployed() -> None:
    config = configuration()
    ratio = build_ratio(config, CLASSES).train()
    backbone = ratio.network.backbone
    trunk = copy.deepcopy(backbone.trunk).train()
    x_0, x_1 = 3 + torch.randn(6, 3, SIZE, SIZE), torch.randn(6, 3, SIZE, SIZE)
    draw = Batch(x_0, x_1, torch.rand(6), torch.zeros_like(x_0), torch.zeros(6).long())
    objective = prepare_objective(config, Moments.of(x_0, x_1), ratio)[1]
    objective(ratio, draw)
    trunk(x_1)
    for name, found in backbone.trunk.state_dict().items():
        torch.testing.assert_close(found, trunk.state_dict()[name])
    features = backbone(torch.cat([x_0, x_1]))[:, : trunk.features]
    torch.testing.assert_close(features, trunk.eval()(torch.cat([x_0, x_1])))
    # To methods that look for gradients at their inputs nothing is shielded.
    x = x_1.clone().requires_grad_()
    backbone.eval()(x)[:, : trunk.features].sum().backward()
    assert x.grad is not None


def trained(folder: Path, **options: str) -> Config:
    config = configuration().replace(**options)
    images = np.random.default_rng(0).integers(0, 256, (2, 24, SIZE, SIZE, 3), dtype=np.uint8)
    images[1] //= 2
    names = [f"{i}.png" for i in range(24)]
    sets = [ImageSet(part, np.arange(24) % CLASSES, names) for part in images]
    preprocess = Preprocess((0.5,) * 3, (0.25,) * 3)
    batches = ImageBatches(*sets, config.data, preprocess, config.training.batch_size, 0)
    metadata = model_metadata(config, CLASSES, preprocess, SIZE, "other")
    recipe = partial(prepare_objective, config)
    ratio = build_ratio(config, CLASSES)
    fit(ratio, recipe, batches, config.training, folder=folder, metadata=metadata, progress=False)
    return config


@pytest.mark.parametrize("estimator", ["one_step", "direct"])
def test_a_trained_network_folds_loads_exports_and_sums(tmp_path: Path, estimator: str) -> None:
    config = trained(tmp_path, estimator=estimator)
    model = read_model(tmp_path)
    scorer, x = Scorer.of(model), torch.randn(5, 3, SIZE, SIZE)
    expected = model.ratio.predict(x)
    folded = scorer.ratio.predict(x)
    assert expected.score.std() > 0
    assert folded.logits.shape == (5, CLASSES)
    torch.testing.assert_close(folded.score, expected.score, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(folded.logits, expected.logits)
    if estimator == "one_step":  # the folded network is the same
        assert export_scorer(scorer, tmp_path / "scorer.pt2") <= TOLERANCE

    parts = SummedScore([model.ratio], ["own"], ["log_ratio", "energy"]).predict(x).parts
    expected_parts = torch.stack([expected.score, expected.logits.logsumexp(dim=1)], dim=1)
    torch.testing.assert_close(parts, expected_parts)

    # Hosts and heads get the classifier that it is.
    holder = getattr(model.ratio, "network", model.ratio)
    net = OSDRENet(model.ratio).eval()
    logits, features = net(x, return_feature=True)
    torch.testing.assert_close(logits, expected.logits)
    torch.testing.assert_close(
        features @ net.get_fc_layer().weight.T + net.get_fc_layer().bias, logits
    )
    given = read_classifier(str(tmp_path), config, CLASSES, SIZE)
    assert given.network["shield"] == "none"
    assert isinstance(given.model.backbone, SpeedBackbone)
    torch.testing.assert_close(given.model.predict(x).logits, expected.logits)
    assert isinstance(holder.backbone, ShieldedBackbone)


def test_a_shield_needs_classes() -> None:
    with pytest.raises(UserError, match=r"network.shield: needs two ID classes, got 0"):
        build_ratio(configuration(), 0)
