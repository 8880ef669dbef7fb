r"""Whatever network is accepted as a backbone trains, validates, is kept, written, read and exported."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ood_osdre import export
from ood_osdre.detectors.one_step import OneStepDetector
from ood_osdre.detectors.scorer import load_scorer
from ood_osdre.errors import UserError
from ood_osdre.evaluation.evaluate import FEW
from ood_osdre.models import copied, extract_features
from ood_osdre.training import fit as fitting
from ood_osdre.training.checkpoint import MODEL, checkpoint_path, read_checkpoint, write_checkpoint
from ood_osdre.training.optimisation import average_into
from ood_osdre.training.run import Outcome
from ood_osdre.training.trainer import Trainer

QUICK: dict[str, Any] = {
    "progress": False,
    "device": "cpu",
    "training__steps": 3,
    "training__warmup": 1,
    "training__batch_size": 4,
    "data__val_limit": 9,
}
IMAGES, REFERENCE = np.random.default_rng(0).integers(0, 256, (2, 20, 8, 8, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


def plain(norm: Callable[[nn.Conv2d], nn.Module] = lambda layer: layer) -> nn.Sequential:
    layers = norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = plain(), nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.body(x)).relu())


class Stateful(nn.Module):
    r"""Has an extra state that its output depends on, a mask of infinities and a last activation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.passes = plain(), 0
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.last: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        self.last = [self.body(x)]
        return self.last[0] * (1 + self.passes) + self.mask.exp().sum()

    def get_extra_state(self) -> object:
        return {"passes": (self.passes, b"ab"), 3: [torch.arange(2), None, 0.5]}

    def set_extra_state(self, state: dict) -> None:
        assert state[3][0].tolist() == [0, 1]
        assert state[3][1:] == [None, 0.5]
        self.passes, mark = state["passes"]
        assert mark == b"ab"


class HalfInside(nn.Module):
    r"""Computes in an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(plain(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x)


class Forgetful(nn.Module):
    r"""Keeps in an attribute what its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = plain(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.scale *= 2 if self.training else 1
        return self.scale * self.body(x)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Squeezing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze()


class Locked(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


KINDS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "weight_norm": lambda: plain(nn.utils.weight_norm),
    "spectral_norm": lambda: plain(nn.utils.spectral_norm),
    "parametrised": lambda: plain(nn.utils.parametrizations.spectral_norm),
    "extra state": Stateful,
    "autocast": HalfInside,
    "lazy": lazy,
    "bfloat16": lambda: plain().bfloat16(),
    "half": lambda: plain().half(),
    "double": lambda: plain().double(),
    "channels last": lambda: plain().to(memory_format=torch.channels_last),
    "frozen": lambda: plain().requires_grad_(False),
    "compiled": lambda: torch.compile(plain(), backend="eager"),
    "TorchScript": lambda: torch.jit.script(plain()),
}


@pytest.mark.filterwarnings("ignore")
def test_lazy_layers_get_their_weights_in_fit(tmp_path: Path) -> None:
    detector = OneStepDetector("digits", backbone=lazy(), size=8, data__crop=1, **QUICK)
    scores = detector.fit(IMAGES, REFERENCE).score(IMAGES)
    detector.save(tmp_path)
    loaded = OneStepDetector.load(tmp_path, backbone=lazy(), device="cpu")
    np.testing.assert_array_equal(loaded.score(IMAGES), scores)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_any_backbone_goes_all_the_way(kind: str, tmp_path: Path) -> None:
    backbone = KINDS[kind]()
    if kind != "frozen":
        dtype = {"bfloat16": torch.bfloat16, "half": torch.half, "double": torch.double}.get(kind)
        backbone(torch.rand(2, 3, 8, 8).to(dtype)).sum().backward()  # as any network has been
    untrained = copied(backbone)
    detector = OneStepDetector("digits", backbone=backbone, size=8, data__crop=1, **QUICK)
    scores = detector.fit(IMAGES, REFERENCE, folder=tmp_path / "run").score(IMAGES)
    pairs = zip(detector.scorer.ratio.parameters(), untrained.parameters(), strict=False)
    moved = [not torch.equal(after, before.float()) for after, before in pairs]
    assert any(moved) == (kind != "frozen")
    detector.save(tmp_path / "saved")
    for folder in ("run", "saved"):
        loaded = load_scorer(tmp_path / folder, backbone=untrained)
        np.testing.assert_array_equal(loaded.score(IMAGES), scores)


@pytest.mark.filterwarnings("ignore")
def test_old_style_norms_and_ties_are_exported(tmp_path: Path) -> None:
    backbone = nn.Sequential(plain(nn.utils.weight_norm), nn.utils.spectral_norm(nn.Linear(4, 4)))
    detector = OneStepDetector("digits", backbone=backbone, size=8, data__crop=1, **QUICK)
    scorer = detector.fit(IMAGES, REFERENCE).scorer
    assert export.export_scorer(scorer, tmp_path / "s.pt2", IMAGES) <= export.TOLERANCE


def test_a_tied_weight_is_averaged_and_written_once(tmp_path: Path) -> None:
    old, new = Tied(), Tied()
    expected = torch.lerp(old.a.weight, new.a.weight, 0.25).detach()
    average_into(old, new, decay=0.75)
    torch.testing.assert_close(old.b.weight.detach(), expected)
    assert old.a.weight is old.b.weight

    single = {k: v.clone() for k, v in old.state_dict().items()}
    sizes = []
    for tensors in (old.state_dict(), single):
        write_checkpoint(tmp_path, MODEL, tensors, {})
        sizes.append(checkpoint_path(tmp_path, MODEL).stat().st_size)
        read, _, _ = read_checkpoint(tmp_path, MODEL)
        assert all(torch.equal(read[k], v) for k, v in tensors.items())
        assert read.keys() == tensors.keys()
    assert sizes[0] + 32 < sizes[1] + 64  # one matrix of 4 x 4 less, and a line on it more


def test_directions_are_followed_and_not_averaged() -> None:
    old, new = (nn.utils.spectral_norm(nn.Linear(3, 3)) for _ in range(2))
    average_into(old, new, decay=0.9)
    assert torch.equal(old.weight_u, new.weight_u)
    assert not torch.equal(old.weight_orig, new.weight_orig)


def test_a_copy_of_torchscript_trains() -> None:
    twin = copied(torch.jit.script(plain()))
    twin(torch.rand(2, 3, 8, 8)).sum().backward()
    assert all(p.is_leaf and p.grad is not None for p in twin.parameters())


@pytest.mark.parametrize("how", ["no_grad", "inference", "double", "grads off"])
def test_a_caller_s_modes_do_not_matter_and_stay(how: str) -> None:
    def scores() -> np.ndarray:
        detector = OneStepDetector(
            "digits", backbone=None, size=8, data__crop=1, **QUICK, network__width=0.125
        )
        return detector.fit(IMAGES, REFERENCE).score(IMAGES)

    expected = scores()
    contexts = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    if how in contexts:
        with contexts[how]():
            found = scores()
    else:
        torch.set_default_dtype(torch.float64 if how == "double" else torch.float32)
        torch.set_grad_enabled(how == "double")
        found = scores()
        assert torch.is_grad_enabled() == (how == "double")
        assert torch.get_default_dtype() == (torch.float64 if how == "double" else torch.float32)
        torch.set_grad_enabled(True)
    np.testing.assert_array_equal(found, expected)


def states() -> list[object]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]  # type: ignore


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(plain(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        np.random.rand()
        random.random()
        return self.body(x)


def test_the_caller_s_random_numbers_are_left_as_found(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(torch.as_tensor(IMAGES).permute(0, 3, 1, 2), 5)
    detector = OneStepDetector("digits", backbone=Drawing(), size=8, data__crop=1, **QUICK)
    same = Drawing()
    before = states()
    detector.fit(loader, REFERENCE).score(loader)
    detector.save(tmp_path)
    OneStepDetector.load(tmp_path, same).calibrate(IMAGES, seen="warn")
    assert states() == before


# The rehearsal.


class Failing(nn.Module):
    r"""Fails in a pass of some number, or in one without gradients."""

    def __init__(self, late: str) -> None:
        super().__init__()
        self.body, self.late = plain(), late
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training
        if self.late == ("step" if self.training and self.count > 1 else ""):
            raise RuntimeError("too late")
        if self.late == "validation" and not self.training and self.count > 0:
            raise KeyError("too late")
        return self.body(x)


class Random(nn.Sequential):
    r"""Draws in evaluation mode, too."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x))


class Opaque(Stateful):
    def get_extra_state(self) -> object:
        return object()

    def set_extra_state(self, state: dict) -> None:
        assert state is not None


@pytest.mark.parametrize(
    ("backbone", "doing"),
    [
        (Failing("step"), r"step 2 fails.*RuntimeError: too late"),
        (Failing("validation"), "the validation fails.*too late"),
        (Opaque(), "saving and loading fails.*got a object, expected an extra state"),
        (Forgetful(), "scores otherwise once it is saved and loaded"),
        (Random(*plain()), "scores inputs otherwise one by one than together"),
        (
            plain(
                lambda layer: nn.Sequential(layer, nn.BatchNorm2d(4, track_running_stats=False))
            ),
            "not on chance or on the batch",
        ),
        (Squeezing(), r"^backbone: Squeezing returns \(4,\) for 1 input, expected .* \(1, F\)"),
        (Locked(), r"^Locked: cannot be copied \(.*lock"),
    ],
    ids=["step", "validation", "saving", "loading", "chance", "batch", "one image", "copying"],
)
def test_what_would_fail_late_fails_before_the_first_step(
    backbone: nn.Module, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "run", lambda *args, **options: pytest.fail("trained"))
    detector = OneStepDetector("digits", backbone=backbone, size=8, data__crop=1, **QUICK)
    with pytest.raises(UserError, match=doing) as raised:
        detector.fit(IMAGES, REFERENCE)
    assert "\n" not in str(raised.value)


def test_a_rehearsal_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    validated = []

    class Watched(fitting.Trainer):
        def run(self, *args: object, **options: object) -> Outcome:
            validated.append(self.validate)
            return super().run(*args, **options)  # type: ignore[arg-type]

    def weights(rehearsed: bool) -> dict[str, Tensor]:
        detector = OneStepDetector(
            "digits", backbone=None, size=8, data__crop=1, **QUICK, network__width=0.125
        )
        if not rehearsed:
            monkeypatch.setattr(fitting, "rehearse", lambda trainer: None)
        detector.fit(IMAGES, REFERENCE)
        return detector._trained.ratio.state_dict()  # type: ignore[union-attr]

    monkeypatch.setattr(fitting, "Trainer", Watched)
    with_one, without = weights(True), weights(False)
    assert all(torch.equal(v, without[k]) for k, v in with_one.items())
    brief = validated[0].brief(None)
    assert max(len(x) for x in (brief.id_val.images, *brief.near.values())) <= FEW


# Compiled networks, and those that tell nothing of their parameters.


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("part", ["", "in place", "body", "body.1"])
def test_layers_of_compiled_networks_are_read_by_their_own_names(part: str) -> None:
    net, x = Classifier(), torch.rand(2, 3, 2, 2)
    expected = extract_features(net, x, ["body.1"])
    if part == "in place":
        net.compile(backend="eager")
    elif part:
        parent, _, name = part.rpartition(".")
        module = net.get_submodule(part)
        setattr(net.get_submodule(parent), name, torch.compile(module, backend="eager"))
    else:
        net = torch.compile(net, backend="eager")
    net(x)  # compiled before any hook is set
    found = extract_features(net, x, ["body.1"])
    assert torch.equal(found.features, expected.features)
    assert torch.equal(found.logits, expected.logits)


def test_torchscript_that_offers_no_features_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="offers no features"):
        extract_features(torch.jit.script(Classifier()), torch.rand(2, 3, 2, 2))
