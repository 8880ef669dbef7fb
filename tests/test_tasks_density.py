r"""Tests of densities from ratios: the likelihood, the suites and their command."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ood_osdre.errors import UserError
from ood_osdre.models import Prediction, RatioModel
from ood_osdre.objectives.base import Batch
from ood_osdre.objectives.endpoint import NormalisedLikelihood
from ood_osdre.tasks import density as normal_reference
from ood_osdre.tasks.__main__ import main
from ood_osdre.tasks.fit import FitOptions, fit_ratio, log_density
from ood_osdre.tasks.methods import METHODS
from ood_osdre.tasks.partition import (
    GaussianMixture,
    LogMass,
    grid_mass,
    isotropic,
    log_normal,
    trusted,
)
from ood_osdre.tasks.rows import Parts
from ood_osdre.tasks.suites import density as density_command
from ood_osdre.tasks.suites import planar as planar_suite
from ood_osdre.tasks.suites.density import (
    dequantised,
    estimate_image,
    estimate_table,
    levels_of,
)
from ood_osdre.tasks.suites.planar import (
    OPTIONS,
    PLANAR_METHODS,
    DensityJob,
    FourierFeatures,
    draw_pairs_of,
    estimate_planar,
)
from ood_osdre.tasks.suites.toy import planar_set


class Quadratic(RatioModel):
    r"""The log-ratio log c - a |x|^2 / 2, of a Gaussian with mass c (1 + a)^(-d/2)."""

    def __init__(self, a: float, c: float = 1.0) -> None:
        super().__init__()
        self.a, self.c = a, c

    def outputs(self, x: Tensor) -> Prediction:
        return Prediction(math.log(self.c) - self.a * x.square().sum(1) / 2)

    def log_ratio_at(self, outputs: Prediction) -> Tensor:
        return outputs.score


def draw_of(x_1: Tensor) -> Batch:
    noise, probe = torch.randn(2, *x_1.shape)
    return Batch(torch.full_like(x_1, math.nan), x_1, torch.rand(len(x_1)), noise, probe=probe)


PROPOSALS = {
    "reference": isotropic(3),
    "wide": isotropic(3, 1.6),
    "mixture": GaussianMixture(
        torch.tensor([[0.5, 0.0, 0.0], [-1.0, 0.0, 1.0]], dtype=torch.float64),
        torch.stack([1.2 * torch.eye(3), 1.5 * torch.eye(3)]).double(),
        torch.tensor([0.3, 0.7], dtype=torch.float64),
    ),
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_likelihood_is_the_kliep_loss_whatever_the_proposal(name: str) -> None:
    model = Quadratic(0.8, c=1.7)
    draw = draw_of(torch.randn(100_000, 3) * 0.7)
    term = NormalisedLikelihood(PROPOSALS[name])
    at = {k: model.outputs(x) for k, x in term.points(draw).items()}
    loss = term.loss(cast(Any, model), draw, at)
    mass = loss + model.log_ratio(draw.x_1)
    truth = 1.7 * (1 + 0.8) ** -1.5
    assert abs(mass.mean() - truth) < 5 * mass.std() / math.sqrt(len(mass))


def test_the_gain_of_a_likelihood_has_no_end() -> None:
    model = Quadratic(0.8, c=math.exp(80.0))  # the log-ratio is about 80
    x_1 = torch.randn(5, 3)
    draw = draw_of(x_1)
    term = NormalisedLikelihood(isotropic(3))
    at = {k: model.outputs(x) for k, x in term.points(draw).items()}
    at["proposal"] = model.outputs(torch.full_like(x_1, 100.0))  # its mass there is none
    loss = term.loss(cast(Any, model), draw, at)
    torch.testing.assert_close(loss, -model.log_ratio(x_1))


def test_a_likelihood_is_of_the_points_as_they_are() -> None:
    x = torch.randn(100, 2)
    options = FitOptions(steps=2, standardise="scale")
    method = normal_reference.likelihood_or("os-dre-likelihood", isotropic(2))
    with pytest.raises(UserError, match="standardise: got 'scale' with a likelihood"):
        fit_ratio(method, normal_reference.draw_pairs_of(x), 2, options)


@pytest.mark.parametrize(("dim", "std"), [(3, 0.5), (330, 0.1), (1000, 1.3)])
def test_log_density_of_a_mixture_in_any_dimension(dim: int, std: float) -> None:
    x = std * torch.randn(2, dim)
    truth = log_normal(x / std) - dim * math.log(std)
    torch.testing.assert_close(isotropic(dim, std).log_density(x), truth)


def test_likelihood_uses_the_interval_of_times() -> None:
    # Times on [0.25, 0.75] still choose both components in the right proportions.
    mixture = GaussianMixture(
        torch.tensor([[-5.0], [5.0]]), 0.1 * torch.ones(2, 1, 1), torch.tensor([0.2, 0.8])
    )
    draw = draw_of(torch.randn(4000, 1))._replace(t=0.25 + torch.rand(4000) / 2)
    y = NormalisedLikelihood(mixture, (0.25, 0.75)).points(draw)["proposal"]
    assert abs((y > 0).double().mean() - 0.8) < 0.03


def test_fourier_features_have_the_frequencies_they_say() -> None:
    features = FourierFeatures(2)
    norms = features.waves.norm(dim=1)
    torch.testing.assert_close(norms[[0, -1]], torch.tensor([0.5, 16.0]))
    x = torch.randn(5, 2)
    y = features(x)
    assert y.shape == (5, features.features)
    torch.testing.assert_close(y[:, :2], x)
    torch.testing.assert_close(y[:, 2:66] ** 2 + y[:, 66:] ** 2, torch.ones(5, 64))


def test_planar_likelihood_is_normalised_and_close() -> None:
    options = OPTIONS.replace(steps=120, batch_size=256, features=32, depth=2, lr=5e-3)
    planar = planar_set("moons")
    fit = fit_ratio(PLANAR_METHODS["os-dre-likelihood"], draw_pairs_of(planar), 2, options)
    x = planar.sample(2000, torch.Generator().manual_seed(9))
    mass = grid_mass(lambda y: log_density(fit, y), size=121)
    kl = (planar.log_density(x) - log_density(fit, x)).mean() + mass.value
    before = (planar.log_density(x) - log_normal(x)).mean()
    assert abs(mass.value) < 0.1
    assert kl < before / 10


@pytest.fixture
def quick_masses(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = partial(normal_reference.annealed_mass, chains=64, levels=50)
    monkeypatch.setattr(normal_reference, "annealed_mass", quick)
    monkeypatch.setattr(normal_reference, "DRAWS", 1000)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planar_suite, "SIZE", 41)
    monkeypatch.setattr(planar_suite, "PIXELS", 32)
    monkeypatch.setattr(planar_suite, "HELD_OUT", 500)
    small = OPTIONS.replace(steps=3, batch_size=32, features=8, depth=1)
    monkeypatch.setattr(planar_suite, "OPTIONS", small)


def test_rows_of_the_planar_suite_agree_with_each_other(small: None) -> None:
    rows = estimate_planar(DensityJob("checkerboard", "d3re", planar_suite.OPTIONS))
    assert [row["evaluations"] for row in rows] == [2, 5, 10]
    for row in rows:
        assert row["normalised_nll"] == pytest.approx(row["nll"] + row["log_mass"])
        assert row["kl"] == pytest.approx(row["normalised_nll"] - row["entropy"])
        assert row["entropy"] == pytest.approx(math.log(32))
        # Untrained, the density is about N(0, I).
        assert abs(row["log_mass"]) < 0.5
        assert row["image"].max() == pytest.approx(1 / (2 * math.pi), rel=0.3)


def test_names_of_methods_mean_one_objective_in_every_suite() -> None:
    planar = PLANAR_METHODS
    assert set(planar) == set(density_command.TABLE_METHODS) >= set(density_command.IMAGE_METHODS)
    for name, method in planar.items():
        other = normal_reference.likelihood_or(name, isotropic(2))
        assert (method.kernel, method.solver) == (other.kernel, other.solver)
        if "likelihood" in name:
            assert method.label == other.label
        else:
            assert method.objective is METHODS[name].objective is other.objective


def test_all_planar_methods_see_the_same_features() -> None:
    options = OPTIONS.replace(steps=1, batch_size=16, features=8, depth=1)
    planar = planar_set("8gaussians")
    waves = []
    for method in PLANAR_METHODS.values():
        fit = fit_ratio(method, draw_pairs_of(planar), 2, options)
        waves.append(next(b for k, b in fit.model.named_buffers() if k.endswith("waves")))
        assert fit.log_ratio(torch.zeros(3, 2)).shape == (3,)
    for other in waves[1:]:
        torch.testing.assert_close(other, waves[0])


def test_whitening_keeps_densities() -> None:
    factor = torch.tensor([[2.0, 0.0], [1.9, 0.1]])
    train = torch.randn(50_000, 2) @ factor.T + 3
    data = Parts(train, train[:10], train[10:20]).whitened()
    torch.testing.assert_close(data.train.T.cov(), torch.eye(2), atol=1e-5, rtol=0)
    # For Gaussian data the whitened reference is the data's own density.
    truth = torch.distributions.MultivariateNormal(torch.full((2,), 3.0), scale_tril=factor)
    ours = log_normal(data.test) + data.log_volume
    torch.testing.assert_close(ours, truth.log_prob(train[10:20]), atol=0.1, rtol=0)


@pytest.mark.parametrize("whiten", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rows_of_the_tabular_suite(whiten: bool, quick_masses: None) -> None:
    options = density_command.OPTIONS.replace(
        steps=20, batch_size=64, features=8, depth=1, lr=0.01
    )
    (row,) = estimate_table(DensityJob("iris", "os-dre-likelihood", options, None, whiten))
    assert row["dim"] == 4
    assert row["p0"] == ("whitened" if whiten else "standard")
    assert row["normalised_nll"] - row["nll"] in (
        pytest.approx(row["log_mass"]),
        pytest.approx(row["log_mass_ais"]),
    )
    assert abs(row["log_mass"] - row["log_mass_ais"]) < 5 * (
        row["log_mass_error"] + row["log_mass_ais_error"]
    )
    # Hardly trained, the density is about that of the reference: a Gaussian with the data's
    # covariance, which is a far better one, or without.
    assert row["normalised_nll"] < (4.5 if whiten else 6.5)


@pytest.mark.parametrize(
    ("importance", "annealed", "chosen"),
    [
        (LogMass(1.0, 0.1, 500), None, 1.0),
        (LogMass(1.0, 0.1, 500), LogMass(1.2, 0.1, 9), 1.0),  # within errors
        (LogMass(1.0, 0.1, 500), LogMass(0.2, 0.01, 9), 1.0),  # annealing missed a mode
        (LogMass(1.0, 0.1, 500), LogMass(9.0, 0.1, 9), 9.0),  # the proposal missed one
        (LogMass(1.0, 0.5, 5), LogMass(1.4, 0.1, 9), 1.4),  # few draws
        (LogMass(1.0, 0.5, 5), LogMass(0.4, 0.1, 9), 1.0),
        (LogMass(math.nan, math.nan, math.nan), LogMass(0.4, 0.1, 9), 0.4),
    ],
)
def test_which_mass_is_trusted(
    importance: LogMass, annealed: LogMass | None, chosen: float
) -> None:
    assert trusted(importance, annealed) == chosen


def test_solver_rows_of_the_tabular_suite(quick_masses: None) -> None:
    options = density_command.OPTIONS.replace(steps=3, batch_size=32, features=8, depth=1)
    rows = estimate_table(DensityJob("wine", "d3re", options, None, False))
    assert [row["evaluations"] for row in rows] == [10, 50]
    assert rows[0]["log_mass_ais"] is None


def test_command_writes_table_record_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small: None
) -> None:
    arguments = ["density", "--sets", "moons", "--methods", "os-dre-likelihood", "d3re"]
    assert main([*arguments, "--steps", "2", "--quiet", "--out", str(tmp_path)]) == 0
    assert "| moons | OS-DRE (likelihood) | rq | 1 |" in " ".join(capsys.readouterr().out.split())
    record = json.loads((tmp_path / "density-planar.json").read_text())
    assert [r["evaluations"] for r in record["results"]["rows"]] == [1, 2, 5, 10]
    assert all("image" not in r for r in record["results"]["rows"])
    with Image.open(tmp_path / "density-planar.png") as image:
        assert image.format == "PNG"
        assert len(np.unique(np.asarray(image))) > 10
    assert (tmp_path / "density-planar.png").stat().st_size < 300_000


def test_bits_of_the_gaussian_are_those_of_its_log_density() -> None:
    # An independent computation, in levels; a level is a bin of width one.
    data = dequantised(levels_of("digits"))
    (row,) = estimate_image(DensityJob("digits", "gaussian", density_command.IMAGE_OPTIONS, None))
    assert row["dim"] == 64
    # The entropy of the noise alone is no bits, and 17 levels need no more than log2 17 each.
    assert 0 < row["normalised_bits"] < math.log2(17)
    # Mixing the whitened coordinates back: log|L| is half the log-determinant of the covariance.
    assert len(data.train) == density_command.COPIES * 1438
    from sklearn.datasets import load_digits

    levels = np.random.default_rng(0).permutation(load_digits().data)
    cov = np.cov(levels[:1438].T) + np.eye(64) / 12
    slogdet = np.linalg.slogdet(cov)[1] / 2
    assert -data.log_volume == pytest.approx(slogdet, abs=0.5)


def test_images_by_the_command(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    quick_masses: None,
) -> None:
    monkeypatch.setattr(
        density_command,
        "IMAGE_OPTIONS",
        density_command.IMAGE_OPTIONS.replace(features=8, batch_size=32),
    )
    monkeypatch.setattr(density_command, "COPIES", 1)
    arguments = ["density", "--suite", "images", "--methods", "os-dre-likelihood", "--steps", "2"]
    assert main([*arguments, "--quiet", "--out", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "| digits | 64 | OS-DRE (likelihood) | rq |" in printed
    rows = json.loads((tmp_path / "density-images.json").read_text())["results"]["rows"]
    gaussian, ours = rows
    assert ours["normalised_bits"] == pytest.approx(
        ours["bits"] + ours["log_mass"] / (64 * math.log(2))
    )
    # Hardly trained, the ratio to the whitened reference is about one.
    assert ours["normalised_bits"] == pytest.approx(gaussian["normalised_bits"], abs=0.1)


def test_images_of_a_data_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_masses: None
) -> None:
    # Independent levels with a known entropy: 4 of 256, equally likely.
    rng = np.random.default_rng(0)
    names = [f"mnist/{i}.png" for i in range(400)]
    for name in names:
        path = tmp_path / "images_classic" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(100, 104, (3, 4), dtype=np.uint8)).save(path)
    path = tmp_path / "benchmark_imglist" / "cifar10" / "test_mnist.txt"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{name} -1\n" for name in names))

    monkeypatch.setattr(
        density_command,
        "IMAGE_OPTIONS",
        density_command.IMAGE_OPTIONS.replace(features=8, batch_size=64),
    )
    command = ["density", "--suite", "images", "--sets", "mnist", "--data-root", str(tmp_path)]
    assert main([*command, "--steps", "2", "--quiet", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "density-images.json").read_text())["results"]["rows"]
    assert [row["method"] for row in rows] == ["Gaussian", "OS-DRE"]
    # A Gaussian of the variance of a uniform variable on [0, 4], in bits.
    expected = math.log2(2 * math.pi * math.e * 16 / 12) / 2
    for row in rows:
        assert row["dim"] == 12
        assert row["normalised_bits"] == pytest.approx(expected, abs=0.1)

    path = tmp_path / "images_classic" / names[7]
    Image.fromarray(np.zeros((3, 5), dtype=np.uint8)).save(path)
    with pytest.raises(UserError, match=r"7\.png: cannot be read as an image of the first"):
        levels_of("mnist", tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"7\.png: cannot be read"):
        levels_of("mnist", tmp_path)
