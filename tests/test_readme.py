r"""The examples of README and tutorial, run on images that scikit-learn ships, and links of all pages."""

import doctest
import json
import math
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch

from ood_osdre.data import load_digits_benchmark
from ood_osdre.detectors.one_step import OneStepDetector

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    r"""Detectors train for a moment."""
    torch.set_default_dtype(torch.float32)
    few = {"training__steps": 20, "training__warmup": 2, "training__batch_size": 16}
    init = OneStepDetector.__init__

    def shortened(self: OneStepDetector, *args: object, **options: object) -> None:
        init(self, *args, progress=False, data__val_limit=50, **few, **options)  # type: ignore

    monkeypatch.setattr(OneStepDetector, "__init__", shortened)


@pytest.mark.usefixtures("quick")
def test_the_readme_goes_from_data_to_scores() -> None:
    data = load_digits_benchmark()
    space = {
        "id_images": data.id_train.images,
        "reference_images": data.reference.images,
        "new_images": data.far["flower"].images,
        "fresh_id_images": data.id_test.images,
    }
    text = README.read_text(encoding="utf-8")
    test = doctest.DocTestParser().get_doctest(text, space, "README.md", str(README), 0)
    assert len(test.examples) == 4
    failures = doctest.DocTestRunner().run(test, clear_globs=False)
    assert failures.failed == 0
    assert test.globs["scores"].shape == (475,)
    assert set(test.globs["decisions"].tolist()) <= {1, -1}
    # Flowers are no digits: twenty steps suffice to flag more of them than of digits.
    assert (test.globs["decisions"] == -1).mean() > 0.1


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 130


@pytest.mark.usefixtures("quick")
def test_the_tutorial_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plt, "show", lambda: None)
    notebook = json.loads((README.parent / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))
    space: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]  # images are not committed
            exec("".join(cell["source"]), space)  # noqa: S102
    plt.close("all")
    assert "flower_grey" in capsys.readouterr().out
    estimate = space["mutual_information"](space["x"], space["y"])
    assert estimate.low < -0.5 * math.log(1 - 0.9**2) < estimate.high


@pytest.mark.slow
def test_the_example_of_the_densities_page_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    text = (README.parent / "docs" / "density.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(block, {})  # noqa: S102
    assert capsys.readouterr().out


def anchors(text: str) -> set[str]:
    r"""Returns the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(
        r"^#+ +(.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_no_link_between_pages_is_dead() -> None:
    root = README.parent
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("data_manifests/*.md")]
    pages += [root / "benchmarks" / "RESULTS.md", *root.glob("docs/*.ipynb")]
    dead = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"""(?:\]\(|src=")([^)"\s]+)""", text):
            path, _, anchor = target.partition("#")
            if "://" in path:
                continue
            there = (page.parent / path).resolve() if path else page
            known = there.exists() and not (
                anchor and anchor not in anchors(there.read_text(encoding="utf-8"))
            )
            if not known:
                dead.append(f"{page.relative_to(root)}: {target}")
    assert not dead
    assert len(pages) > 10
