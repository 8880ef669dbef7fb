r"""Tests for the ood_osdre.evaluation.metrics module."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import DTypeLike
from sklearn.metrics import auc, precision_recall_curve, roc_curve

from ood_osdre.errors import UserError
from ood_osdre.evaluation.metrics import (
    OODMetrics,
    check_scores,
    curves,
    ood_metrics,
    threshold95,
)

# Few distinct values, hence many ties within and across the sets.
TIED = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=60)
tied = settings(max_examples=50, deadline=None)


def openood(
    id_scores: np.ndarray, ood_scores: np.ndarray, drop_intermediate: bool = False
) -> tuple[float, ...]:
    r"""OpenOOD v1.5's formulas, in its own order of operations."""
    conf = np.concatenate((id_scores, ood_scores))
    ood = np.repeat((0, 1), (len(id_scores), len(ood_scores)))
    fpr, tpr, _ = roc_curve(ood, -conf, drop_intermediate=drop_intermediate)
    precision_in, recall_in, _ = precision_recall_curve(1 - ood, conf)
    precision_out, recall_out, _ = precision_recall_curve(ood, -conf)
    return (
        auc(fpr, tpr),
        fpr[np.argmax(tpr >= 0.95)],
        auc(recall_in, precision_in),
        auc(recall_out, precision_out),
    )


@given(TIED, TIED)
@tied
def test_matches_openood_with_ties(a: list[float], b: list[float]) -> None:
    expected = openood(np.array(a), np.array(b))
    np.testing.assert_allclose(ood_metrics(a, b)[:4], expected, atol=1e-12)


@pytest.mark.parametrize("digits", [0, 2, 16])
@pytest.mark.parametrize("sizes", [(400, 900), (2000, 20), (7, 10_001)])
@pytest.mark.parametrize("drop_intermediate", [False, True])
def test_matches_openood_as_it_is(
    digits: int, sizes: tuple[int, int], drop_intermediate: bool
) -> None:
    rng = np.random.default_rng(0)
    id_scores = rng.normal(1, 1, sizes[0]).round(digits)
    ood_scores = rng.normal(0, 1.5, sizes[1]).round(digits)
    expected = openood(id_scores, ood_scores, drop_intermediate)
    np.testing.assert_allclose(ood_metrics(id_scores, ood_scores)[:4], expected, rtol=1e-12)


def test_is_exact_where_openood_drops_the_vertex() -> None:
    scores = np.arange(20.0)
    assert openood(scores, scores, drop_intermediate=True)[1] == 1.0
    assert openood(scores, scores, drop_intermediate=False)[1] == 0.95
    assert ood_metrics(scores, scores).fpr95 == 0.95


@given(TIED, TIED)
@tied
def test_curves_and_thresholds_are_those_of_the_metrics(a: list[float], b: list[float]) -> None:
    metrics, found = ood_metrics(a, b), curves(a, b)
    areas = [np.trapezoid(y, x) for x, y in found]
    np.testing.assert_allclose(areas, (metrics.auroc, metrics.aupr_in, metrics.aupr_out))
    assert np.mean(np.array(a) <= threshold95(b)) == pytest.approx(metrics.fpr95)
    kept = -threshold95(-np.array(a))
    assert np.mean(np.array(b) >= kept) == pytest.approx(metrics.fpr95_id)
    assert np.mean(np.array(b) < threshold95(b)) < 0.95 <= np.mean(np.array(b) <= threshold95(b))


@given(TIED, TIED)
@tied
def test_auroc_is_the_mann_whitney_statistic(a: list[float], b: list[float]) -> None:
    pairs = np.subtract.outer(a, b)
    expected = np.mean((pairs > 0) + (pairs == 0) / 2)
    assert ood_metrics(a, b).auroc == pytest.approx(expected, abs=1e-12)


@given(TIED, TIED)
@tied
def test_fpr_is_that_of_the_first_threshold_reached(a: list[float], b: list[float]) -> None:
    metrics = ood_metrics(a, b)
    # The smallest threshold with 95 % of OOD at or below it; the largest with 95 % of ID above.
    caught = np.sort(b)[-(-19 * len(b) // 20) - 1]
    kept = np.sort(a)[::-1][-(-19 * len(a) // 20) - 1]
    assert metrics.fpr95 == pytest.approx(np.mean(np.array(a) <= caught))
    assert metrics.fpr95_id == pytest.approx(np.mean(np.array(b) >= kept))


@given(TIED, TIED)
@tied
def test_swapping_and_negating_the_sets_swaps_the_sides(a: list[float], b: list[float]) -> None:
    auroc, fpr95, aupr_in, aupr_out, fpr95_id = ood_metrics(a, b)
    swapped = ood_metrics(np.negative(b), np.negative(a))
    assert swapped == OODMetrics(auroc, fpr95_id, aupr_out, aupr_in, fpr95)


@given(TIED, TIED)
@tied
def test_increasing_maps_order_and_repetition_change_nothing(
    a: list[float], b: list[float]
) -> None:
    metrics = ood_metrics(a, b)
    assert ood_metrics(np.exp(a) - 7, np.exp(b) - 7) == metrics
    assert ood_metrics(a[::-1], sorted(b)) == metrics
    assert ood_metrics(3 * a, 3 * b)[:4] == pytest.approx(metrics[:4])


def test_larger_is_more_id() -> None:
    assert ood_metrics([3.0, 4.0], [1.0, 2.0]) == OODMetrics(1.0, 0.0, 1.0, 1.0, 0.0)


def test_names_are_not_swapped() -> None:
    # Uninformative scores: each AUPR is (1 + prevalence) / 2, and OOD is the rarer class.
    metrics = ood_metrics(np.zeros(300), np.zeros(100))
    assert metrics == OODMetrics(0.5, 1.0, (1 + 0.75) / 2, (1 + 0.25) / 2, 1.0)
    # One ID image in ten far below everything, OOD below the other nine.
    metrics = ood_metrics([-9.0, *[1.0] * 9], np.zeros(10))
    assert (metrics.fpr95, metrics.fpr95_id) == (0.1, 1.0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_accepts_any_real_dtype_and_columns(dtype: DTypeLike) -> None:
    a, b = np.array([1, 2, 3], dtype), np.array([0, 2], dtype)
    expected = ood_metrics([1.0, 2.0, 3.0], [0.0, 2.0])
    assert ood_metrics(a, b) == ood_metrics(a[:, None], b[:, None]) == expected
    assert ood_metrics(torch.from_numpy(a), torch.from_numpy(b)) == expected
    assert check_scores("ID", a[:, None]).shape == (3,)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_refuses_scores_that_are_not_finite(value: float, dtype: DTypeLike) -> None:
    scores = np.zeros(9, dtype)
    scores[[2, 4, 5, 8]] = value
    names = [f"svhn/{i}.png" for i in range(9)]
    with pytest.raises(
        UserError, match=r"svhn scores: 4 of 9 .* svhn/2.png, svhn/4.png, .*5.png;"
    ):
        check_scores("svhn", scores, names)
    with pytest.raises(UserError, match=r"OOD scores: 4 of 9 .* index 2, index 4"):
        ood_metrics(np.zeros(3), scores)
    with pytest.raises(UserError, match="ID scores: 4 of 9"):
        ood_metrics(scores, np.zeros(3))


@pytest.mark.parametrize(
    ("scores", "found"),
    [
        ([], r"float64 of shape \(0,\)"),
        (np.zeros((0, 1)), r"shape \(0, 1\)"),
        (0.0, r"shape \(\)"),
        (np.zeros((1, 3)), r"shape \(1, 3\)"),
        (np.zeros((3, 2)), r"shape \(3, 2\)"),
        (np.zeros((3, 1, 1)), r"shape \(3, 1, 1\)"),
        (["a"], "<U1"),
        ([1j], "complex128"),
        ([True], "bool"),
        (np.array([None]), "object"),
    ],
)
def test_refuses_what_is_not_a_set_of_scores(scores: object, found: str) -> None:
    with pytest.raises(UserError, match=f"ID scores: got .*{found}.*, expected real numbers"):
        check_scores("ID", scores)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"shape \(3,\), expected .* shape \(2,\)"):
        check_scores("ID", np.zeros(3), ["a", "b"])
