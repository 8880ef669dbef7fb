r"""Tests for the modules ood_osdre.evaluation.plots and .score_plots."""

import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure
from PIL import Image

from ood_osdre.evaluation import score_plots as plots
from ood_osdre.evaluation.plots import Line, Panel, as_svg, over_steps, save_png, stroke
from ood_osdre.evaluation.score_plots import draw_scores, held_out, rankings, score_label
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
    far = {"mnist": SHAPES["thousands away"], "_svhn": ID - 2.5}
    scores, title = scores_of(ID, near={"tin": ID - 1}, far=far), "CIFAR-10, pack: $x^$ a_b"
    draw_scores(tmp_path / "d.png", scores, title)
    left, right = figures[0].axes
    legends = [ax.get_legend_handles_labels()[1] for ax in (left, right)]

    assert left.get_xlim() == right.get_xlim()
    assert left.get_xlabel() == right.get_xlabel() == "log-ratio (nats), larger = more ID"
    assert [ax.get_title() for ax in (left, right)] == ["Near OOD", "Far OOD"]
    assert figures[0].get_suptitle() == title
    assert [name.split("\n")[0] for name in legends[0]] == ["id (ID)", "tin"]
    assert legends[0][0].startswith("id (ID)\nn = 500; 95 % kept at ≥ ")
    assert [name.split("\n")[0].strip() for name in legends[1][1:]] == ["mnist", "_svhn"]
    assert legends[1][1].startswith("mnist\nn = 400; AUROC 100.00; 95 % caught at ≤ -3")
    assert legends[1][1].endswith(" (100 % further left)")
    assert "further" not in legends[0][1] + legends[1][2]

    # One scale, and a line where 95 % of each set is caught, or kept.
    assert left.get_ylim() == right.get_ylim()
    marks = [line.get_xdata()[0] for line in left.lines if len(line.get_xdata()) == 2]
    kept, caught = marks
    assert np.mean(kept <= ID) == 0.95
    assert np.mean(ID - 1 <= caught) == 0.95

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
    draw_scores(tmp_path / "d.png", scores_of(SHAPES[id_shape], far=SHAPES), "t")
    (ax,) = figures[0].axes
    assert np.isfinite([*ax.get_xlim(), *ax.get_ylim()]).all()
    assert ax.get_title() == "Far OOD"
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


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


def test_curves_hold_few_points_and_their_areas_are_those_of_the_metrics() -> None:
    rng = np.random.default_rng(3)
    scores = scores_of(rng.normal(1, 1, 3000), far={"a": rng.normal(0, 1, 2000)})
    metrics = scores.metrics()["far"]["a"]
    areas = metrics.auroc, metrics.aupr_out, metrics.aupr_in
    for panel, area in zip(rankings(scores), areas, strict=True):
        (line,) = panel.lines
        assert line.x.size <= 402
        assert (line.x.min(), line.x.max()) == (0, 1)
        assert np.trapezoid(line.y, line.x) == pytest.approx(area, abs=2e-3)


def test_held_out_data_say_what_lies_outside() -> None:
    far = np.linspace(-900, -800, 20)
    panel = held_out(scores_of(np.linspace(0, 9, 90), near={"b": far}), 1.5)
    of_id, others = panel.lines
    assert (of_id.note, of_id.mark) == ("n = 90; decided OOD below 1.5", 1.5)
    assert (others.note, others.mark) == ("n = 20 (100 % further left)", None)
    (of_id, _) = held_out(scores_of(np.linspace(0, 9, 90), near={"b": far}), None).lines
    assert (of_id.note, of_id.mark) == ("n = 90", None)


def test_the_axis_of_losses_has_numbers() -> None:
    x = np.arange(2000.0, 5000.0, 1000.0)
    for low, high in ((0.02, 0.9), (0.15, 6.0), (1e-4, 1e3)):
        line = Line("loss", x, np.array([high, low, low]), stroke(0))
        text = as_svg(Panel("Losses", "step", "loss", [line], log=True), "salt")
        shown = {float(n) for n in re.findall(r"<text[^>]*>([\d.e-]+)</text>", text)}
        assert len([n for n in shown if low <= n <= high]) >= 2, shown


def test_over_steps_leaves_out_what_is_no_number() -> None:
    entries = [
        {"step": 1, "loss_total": 10.0, "val_near": 0.5, "val_log_mass_0": 1.0, "path": [1, 2]},
        {"step": 2, "loss_total": float("nan"), "val_near": None},
        {"step": None, "loss_total": 3.0},
        {"step": 3, "loss_total": 0.1, "val_near": 0.75, "val_log_mass_0": 2.0},
    ]
    losses, validation, calibration = over_steps("head", entries, {"val_near": "held out"})
    assert losses.title == "Losses of head"
    assert (losses.lines[0].x.tolist(), losses.lines[0].y.tolist()) == ([1, 3], [10.0, 0.1])
    assert losses.log
    assert not validation.log
    assert (validation.level, calibration.level) == (None, 0.0)
    assert [line.name for line in validation.lines] == ["held out"]
    assert over_steps("", []) == over_steps("", entries[:1]) == []  # one point is no curve


def test_what_scores_are_called() -> None:
    scores = scores_of(ID, far={"a": ID})
    classifier = {"estimator": "classifier", "evaluation": {"score": "msp"}}
    assert score_label({"estimator": "one_step"}, scores) == "log-ratio (nats)"
    assert score_label({**classifier, "head": {}}, scores) == "score of a classifier (msp)"
    assert score_label({**classifier, "head": {"rank": 4}}, scores) == "log-ratio (nats)"
    assert score_label({}, Scores(["a"])) == "sum of standardised parts"


def test_letters_beside_a_picture_stay_grey(tmp_path: Path) -> None:
    figure = Figure(figsize=(5, 3))
    ax = figure.subplots()
    x = np.linspace(-3, 3, 200)
    ax.imshow(np.exp(-((np.hypot(x, x[:, None]) - 1.5) ** 2)) * (1 + 0.3 * np.cos(3 * x)))
    ax.set_title("a picture in viridis, with letters in grey", color="0.3")
    figure.savefig(tmp_path / "full.png")
    save_png(figure, tmp_path / "reduced.png")
    full, reduced = (
        np.asarray(Image.open(tmp_path / f"{n}.png").convert("RGB"), dtype=int)
        for n in ("full", "reduced")
    )
    grey = np.ptp(full, axis=2) == 0
    assert np.ptp(reduced[grey], axis=1).max() <= 3
    assert np.abs(reduced - full)[grey].max() <= 6
    size = [(tmp_path / f"{n}.png").stat().st_size for n in ("full", "reduced")]
    assert size[1] < 0.6 * size[0]
