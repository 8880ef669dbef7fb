r"""Whatever scores, scores with the folded model: the same numbers, without the temporal basis."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from openood_host import HostLoaders, HostNet, pictures, write_run
from torch import Tensor, nn

from ood_osdre import OneStepDetector, load_scorer
from ood_osdre.config import HeadConfig
from ood_osdre.detectors.scorer import read_model
from ood_osdre.export import DeployedScorer
from ood_osdre.models.ratio import OneStepRatio
from ood_osdre.plugin import pytorch_ood
from ood_osdre.plugin.openood import OSDRENet, OSDREPostprocessor

RAW = pictures(12, 0)
IMAGES = torch.as_tensor(RAW)
PIXELS = IMAGES.permute(0, 3, 1, 2) / 255
HEAD = {"width": 8, "depth": 1, "training": {"steps": 5, "batch_size": 16}}
needs_pytorch_ood = pytest.mark.skipif(pytorch_ood.REASON is not None, reason="no pytorch-ood")


@pytest.fixture(autouse=True)
def single_precision() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    r"""Makes the evaluation of any ratio that is not folded an error."""

    def refuse(*args: object) -> None:
        raise AssertionError("a ratio that is not folded was evaluated")

    return lambda: monkeypatch.setattr(OneStepRatio, "log_ratio_of", refuse)


def by_postprocessor(net: nn.Module, x: Tensor, **options: object) -> Tensor:
    return OSDREPostprocessor(**options).postprocess(net, x)[1]


#: Log-ratios of the images, given a run folder and the images normalised.
HOSTS: dict[str, Callable[[Path, Tensor], Tensor]] = {
    "load_scorer": lambda run, x: torch.as_tensor(load_scorer(run).score(RAW)),
    "detector": lambda run, x: torch.as_tensor(OneStepDetector.load(run, device="cpu").score(RAW)),
    "export": lambda run, x: DeployedScorer(load_scorer(run))(IMAGES)[0],
    "network": lambda run, x: OSDRENet.load(run).evaluate(x)[1],
    "network mode": lambda run, x: by_postprocessor(OSDRENet.load(run), x),
    "network mode, not folded": lambda run, x: by_postprocessor(OSDRENet.load(run, False), x),
    "network mode, bare ratio": lambda run, x: by_postprocessor(read_model(run).ratio, x),
    "checkpoint mode": lambda run, x: by_postprocessor(
        HostNet(), x, mode="checkpoint", checkpoint=str(run)
    ),
    "pytorch-ood": lambda run, x: (
        -pytorch_ood.OneStepRatioDetector(load_scorer(run)).predict(PIXELS)
    ),
    "pytorch-ood, detector": lambda run, x: (
        -pytorch_ood.OneStepRatioDetector(OneStepDetector.load(run, device="cpu")).predict(PIXELS)
    ),
    "pytorch-ood, bare ratio": lambda run, x: (
        -pytorch_ood.OneStepRatioDetector(read_model(run).ratio).predict(x)
    ),
}


@pytest.mark.parametrize(
    "host",
    [pytest.param(name, marks=[needs_pytorch_ood] * ("pytorch" in name)) for name in HOSTS],
)
def test_every_host_scores_with_the_folded_model(
    host: str, tmp_path: Path, forbid: Callable[[], None]
) -> None:
    write_run(tmp_path)
    trained = read_model(tmp_path)
    x = trained.preprocess(IMAGES)
    with torch.no_grad():
        whole = trained.ratio.log_ratio(x)
    forbid()
    with torch.no_grad():
        found = HOSTS[host](tmp_path, x)

    scale = whole.std()
    assert torch.allclose(found / scale, whole / scale, atol=1e-5)
    expected = torch.as_tensor(load_scorer(tmp_path).score(RAW))
    assert torch.allclose(found / scale, expected / scale, atol=1e-6)


def test_heads_on_features_are_folded(tmp_path: Path, forbid: Callable[[], None]) -> None:
    loaders, net = HostLoaders(), HostNet().eval()
    postprocessor = OSDREPostprocessor(
        mode="features", reference=loaders.reference, broaden=0, head=HEAD
    )
    postprocessor.setup(net, loaders.id, {})
    head = postprocessor.mode.ratio
    head.save(tmp_path)
    x = torch.cat([batch["data"] for batch in loaders.id["test"]])
    with torch.no_grad():
        whole = head.trained.log_ratio(net(x, return_feature=True)[1])
    forbid()
    saved = OSDREPostprocessor(mode="features", checkpoint=str(tmp_path))
    for made in (postprocessor, saved):
        assert torch.allclose(made.postprocess(net, x)[1], whole, atol=1e-5)


@needs_pytorch_ood
def test_heads_in_pytorch_ood_are_folded(forbid: Callable[[], None]) -> None:
    detector = pytorch_ood.FeatureRatioDetector(nn.Identity(), HeadConfig.of(HEAD, "head"))
    x = torch.randn(120, 3)
    detector.fit([(x, torch.arange(120) % 2 - 1)])
    with torch.no_grad():
        whole = detector.head.trained.log_ratio(x)
    forbid()
    assert torch.allclose(-detector.predict(x), whole, atol=1e-5)


def test_a_network_is_folded_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    net, x, folds = OSDRENet.load(tmp_path, folded=False), torch.randn(4, 3, 32, 32), []
    fold = OSDRENet.fold
    monkeypatch.setattr(OSDRENet, "fold", lambda self: (folds.append(1), fold(self))[1])
    postprocessor = OSDREPostprocessor()
    before = {k: v.clone() for k, v in net.state_dict().items()}

    def check(count: int) -> None:
        for _ in range(2):
            conf = postprocessor.postprocess(net, x)[1]
            with torch.no_grad():
                assert torch.allclose(conf, net.ratio.log_ratio(x), rtol=1e-4, atol=1e-4)
        assert len(folds) == count

    check(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(x).logsumexp(dim=1).sum().backward()
    optimizer.step()
    check(2)
    net.load_state_dict(before)
    check(3)
    with torch.no_grad():
        net.ratio.network.head.weight.mul_(2)
    check(4)
    # A write that PyTorch does not count is seen by setup.
    net.ratio.network.head.weight.data.mul_(2)
    postprocessor.setup(net, {}, {})
    check(5)
    assert np.isfinite(postprocessor.postprocess(net, x)[1]).all()
