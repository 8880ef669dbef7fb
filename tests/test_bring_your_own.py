r"""The page docs/bring_your_own.md, run block by block at a small size."""

import re
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from ood_osdre.detectors.one_step import OneStepDetector

PAGE = Path(__file__).parent.parent / "docs" / "bring_your_own.md"
# What makes the page's job small: fewer steps, smaller images, no download.
SMALLER = {
    "pretrained=True": "pretrained=False",
    "size=224": "size=40",
    "training__steps=2000": "training__steps=2",
    "training__batch_size=32": "training__batch_size=4, progress=False, device='cpu'",
    "training__steps=200)": "training__steps=2, training__batch_size=4, progress=False)",
    "training__steps=500)": "training__steps=50, training__batch_size=16, progress=False)",
}

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs a clone")


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def write_folder(folder: Path, count: int, seed: int, groups: int = 1) -> None:
    rng = np.random.default_rng(seed)
    for i in range(count):
        # Files come in all sizes.
        size = (int(rng.integers(30, 70)), int(rng.integers(30, 70)), 3)
        path = folder / (f"class{i % groups}" if groups > 1 else "") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(path)


def test_every_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "flowers" / "train", 12, 0, groups=3)
    write_folder(tmp_path / "flowers" / "calibration", 19, 1, groups=3)
    write_folder(tmp_path / "photographs", 12, 2)
    write_folder(tmp_path / "inbox", 3, 3)
    code = blocks()
    if find_spec("pytorch_ood") is None:  # an extra
        code = [block for block in code if "pytorch_ood" not in block]
    for long, short in SMALLER.items():
        assert any(long in block for block in code), long
        code = [block.replace(long, short) for block in code]

    space: dict[str, Any] = {}
    seen = []
    for i, block in enumerate(code):
        script = tmp_path / f"block{i}.py"
        script.write_text(block, encoding="utf-8")
        space = runpy.run_path(str(script), space)
        seen.append(space)

    assert seen[0]["scores"].shape == (3,)
    assert seen[0]["detector"].scorer.metadata["classes"] == 3
    assert set(seen[1]["decisions"].tolist()) <= {1, -1}
    assert ((seen[1]["decisions"] == -1) == (seen[1]["p"] <= 0.05)).all()
    first, same = seen[2]["detector"], seen[2]["same"]
    assert (first.score("inbox") == same.score("inbox")).all()
    assert (first.pvalue("inbox") == same.pvalue("inbox")).all()
    printed = capsys.readouterr().out
    assert "mirrored" in printed
    assert "FPR@95: fraction of ID flagged when 95 % of OOD is caught" in printed
    x = torch.zeros(3, 8)
    assert space["log_ratios"].shape == (5,)
    if "outlier_scores" in space:
        assert torch.equal(
            space["outlier_scores"], -torch.as_tensor(space["detector"].score(x.numpy()))
        )


@pytest.mark.parametrize("name", ["test_resnet", "test_vit2"])
def test_a_timm_model_at_224_pixels(name: str, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    backbone = timm.create_model(name, num_classes=0, **IMAGE_SIZE.get(name, {}))
    detector = OneStepDetector(
        "digits",
        backbone=backbone,
        size=224,
        device="cpu",
        progress=False,
        training__steps=2,
        training__batch_size=2,
    )
    rng = np.random.default_rng(0)
    id_images, reference = (
        rng.integers(low, low + 100, (6, 224, 224, 3), dtype=np.uint8) for low in (0, 100)
    )
    scores = detector.fit(id_images, reference).score(id_images)
    assert np.isfinite(scores).all()

    detector.save(tmp_path)
    loaded = OneStepDetector.load(tmp_path, backbone=backbone)
    assert (loaded.score(id_images) == scores).all()


# A vision transformer has its size built in.
IMAGE_SIZE = {"test_vit2": {"img_size": 224}}
