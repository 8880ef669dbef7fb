r"""Tests for the ood_osdre.evaluation.plots module."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure

from ood_osdre.evaluation import plots
from ood_osdre.evaluation.plots import draw_scores
from ood_osdre.evaluation.scores import Scores

RNG = np.random.default_rng(0)
ID = RNG.normal(2, 1, 500)
SHAPES = {
    "normal": RNG.normal(0, 1, 400),
    "heavy": RNG.standard_t(1.5, 400),
    "constant": np.zeros(50),
    "mostly tied": np.r_[np.zeros(90), RNG.normal(0, 1, 10)],
    "one": np.ones(1),
    "two": np.array([-1.0, 1.0]),
    "thousands away": RNG.normal(-4000, 300, 400),
    "both sides": np.r_[RNG.normal(-1e6, 1, 200), RNG.normal(1e6, 1, 200)],
    "half away": np.r_[RNG.normal(0, 1, 200), RNG.normal(-5000, 1, 200)],
}


def scores_of(id_scores: np.ndarray, **roles: dict[str, np.ndarray]) -> Scores:
    scores = Scores()
    for role, sets in {"id": {"id": id_scores}, **roles}.items():
        for name, values in sets.items():
            scores.add(role, name, values, np.zeros(len(values)), ["x"] * len(values))
    return scores


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    r"""Collects the figures as they are saved."""
    saved = []
    save = Figure.savefig

    def savefig(self: Figure, path: Path, **options: float) -> None:
        saved.append(self)
        save(self, path, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


@pytest.mark.filterwarnings("error")
def test_draws_two_panels_with_shared_range(tmp_path: Path, figures: list[Figure]) -> None:
    before = dict(matplotlib.rcParams)
    far = {"mnist": SHAPES["thousands away"], "svhn": ID - 2.5}
    scores, title = scores_of(ID, near={"tin": ID - 1}, far=far), "CIFAR-10, pack: $x^$ a_b"
    draw_scores(tmp_path / "d.png", scores, title)
    left, right = figures[0].axes
    legends = [ax.get_legend_handles_labels()[1] for ax in (left, right)]

    assert left.get_xlim() == right.get_xlim()
    assert left.get_xlabel() == right.get_xlabel() == "log-ratio (nats), larger = more ID"
    assert [ax.get_title() for ax in (left, right)] == ["Near OOD", "Far OOD"]
    assert figures[0].get_suptitle() == title
    assert [name.split(":")[0] for name in legends[0]] == ["ID", "tin"]
    assert legends[1][1] == "mnist: AUROC 100.00 (100 % further left)"
    assert "further" not in legends[0][1] + legends[1][2]

    pixels = image.imread(tmp_path / "d.png")
    assert pixels.shape[1] > pixels.shape[0] > 500
    assert pixels.std() > 0.05
    assert list(tmp_path.iterdir()) == [tmp_path / "d.png"]
    assert dict(matplotlib.rcParams) == before


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("id_shape", ["normal", "constant", "both sides"])
def test_draws_degenerate_and_extreme_scores(
    id_shape: str, tmp_path: Path, figures: list[Figure]
) -> None:
    draw_scores(tmp_path / "d.pdf", scores_of(SHAPES[id_shape], far=SHAPES), "t")
    (ax,) = figures[0].axes
    assert np.isfinite([*ax.get_xlim(), *ax.get_ylim()]).all()
    assert ax.get_title() == "Far OOD"
    assert (tmp_path / "d.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("name", SHAPES)
def test_density_has_the_mass_of_what_is_inside(name: str) -> None:
    scores, (low, high) = SHAPES[name], (-12.0, 12.0)
    x, y = plots._density(scores, low, high)
    mass = np.trapezoid(y, x) if x.size == y.size else y @ np.diff(x)
    assert mass == pytest.approx(np.mean((scores >= low) & (scores <= high)), abs=0.02)


def test_density_matches_a_normal_and_subsamples_without_changing_it() -> None:
    scores = np.random.default_rng(1).normal(1, 2, 60_000)
    x, y = plots._density(scores, -8, 10)
    expected = np.exp(-((x - 1) ** 2) / 8) / np.sqrt(8 * np.pi)
    np.testing.assert_allclose(y, expected, atol=0.01)
    np.testing.assert_array_equal(plots._density(scores[::-1], -8, 10)[1], y)


def test_range_follows_the_id_scores() -> None:
    low, high = plots._range(ID, [SHAPES["thousands away"], ID - 3, SHAPES["both sides"]])
    assert -5 < low < np.quantile(ID - 3, 0.005)
    assert np.quantile(ID, 0.995) < high < 7
