r"""Tests for the ood_osdre.evaluation.tables module."""

import csv
import math
import statistics
from pathlib import Path

import pytest

from ood_osdre.evaluation.metrics import OODMetrics
from ood_osdre.evaluation.tables import MetricsTable, aggregate

A = OODMetrics(0.9, 0.2, 0.91, 0.92, 0.3)
B = OODMetrics(0.7, 0.6, 0.71, 0.72, 0.5)
C = OODMetrics(1.0, 0.0, 0.99, 0.98, 0.1)
METRICS = {"near": {"cifar100": A, "tin": B}, "far": {"mnist": C}}


def average(*values: OODMetrics) -> OODMetrics:
    return OODMetrics(*(math.fsum(v) / len(v) for v in zip(*values, strict=True)))


def test_rows_and_means() -> None:
    table = MetricsTable.of(METRICS, "t")

    assert list(table.rows) == ["cifar100", "tin", "nearood", "mnist", "farood", "all"]
    assert [*table.roles.values()] == ["near", "near", "near", "far", "far", "all"]
    assert table.mean("nearood") == pytest.approx(average(A, B))
    assert table.mean("farood") == pytest.approx(C)
    # Over sets, not over the two means
    assert table.mean("all") == pytest.approx(average(A, B, C))


def test_partial_means_never_have_the_full_name() -> None:
    absent = {"near": ["cifar100"], "far": []}
    table = MetricsTable.of({"near": {"tin": B}, "far": {"mnist": C}}, "t", absent=absent)
    near, everything = "nearood (partial: cifar100 absent)", "all (partial: cifar100 absent)"

    assert list(table.rows) == ["tin", near, "mnist", "farood", everything]
    assert table.mean(near) == pytest.approx(B)
    assert "Absent near sets: cifar100." in table.to_terminal()

    # Without any near set, there is no mean at all
    table = MetricsTable.of({"far": {"mnist": C}}, "t", absent={"near": ["cifar100", "tin"]})

    assert list(table.rows) == ["mnist", "farood", "all (partial: cifar100, tin absent)"]

    # A benchmark without near sets lacks nothing
    assert list(MetricsTable.of({"far": {"mnist": C}}, "t").rows) == ["mnist", "farood", "all"]


@pytest.mark.parametrize(
    ("metrics", "absent", "match"),
    [
        ({"mid": {"tin": A}}, {}, "unknown role 'mid'"),
        ({"near": {"tin": A}, "far": {"tin": B}}, {}, "'tin' appears twice"),
        ({"near": {"tin": A}}, {"near": ["tin"]}, "'tin' appears twice"),
        ({"near": {"nearood": A}}, {}, "name of another row"),
        ({"near": {"tin": A._replace(auroc=math.nan)}}, {}, "not finite"),
        ({"near": {}, "far": {}}, {"near": ["tin"]}, "no OOD scores"),
    ],
)
def test_refuses_ambiguous_sets(metrics: dict, absent: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MetricsTable.of(metrics, "t", absent=absent)


def test_aggregate_is_mean_and_sample_deviation_over_runs() -> None:
    runs = [(A, B, 0.90, 2.0), (B, C, 0.92, 3.0), (C, C, 0.97, 7.0)]
    tables = [
        MetricsTable.of({"near": {"x": x, "y": y}}, "t", accuracy=acc, seconds=s, parameters=1234)
        for x, y, acc, s in runs
    ]
    table = aggregate(tables)
    spread = table.std("nearood")
    assert spread is not None

    # Deviation of the runs' means, not mean of the sets' deviations
    for i in range(5):
        values = [(x[i] + y[i]) / 2 for x, y, *_ in runs]
        assert table.mean("nearood")[i] == pytest.approx(statistics.mean(values))
        assert spread[i] == pytest.approx(statistics.stdev(values))

    text = table.to_terminal()

    assert table.runs == 3
    assert "over n = 3 runs" in text
    assert "ID accuracy: 93.00 ± 3.61 %" in text
    assert "Scoring: 4.0 ± 2.6 s" in text
    assert "Parameters: 1,234" in text
    assert aggregate([aggregate(tables[:2]), tables[2]]).rows == table.rows


def test_one_run_shows_no_deviation() -> None:
    table = aggregate([MetricsTable.of(METRICS, "t", accuracy=0.9, seconds=1.0)])

    assert table.runs == 1
    assert table.std("tin") is None
    assert "±" not in table.to_terminal() + table.to_markdown()


def test_aggregate_refuses_different_benchmarks() -> None:
    table = MetricsTable.of(METRICS, "t")
    partial = MetricsTable.of({"near": {"tin": B}}, "t", absent={"near": ["cifar100"]})

    with pytest.raises(ValueError, match="whose rows differ"):
        aggregate([table, partial])
    with pytest.raises(ValueError, match="whose title differ"):
        aggregate([table, MetricsTable.of(METRICS, "u")])
    with pytest.raises(ValueError, match="no tables"):
        aggregate([])


def test_statistics_of_some_runs_only_are_left_out() -> None:
    table = aggregate([MetricsTable.of(METRICS, "t", accuracy=a) for a in (0.9, None)])

    assert table.accuracy == ()
    assert "ID accuracy" not in table.to_terminal()


def test_text_states_title_percentages_and_convention() -> None:
    table = MetricsTable.of(METRICS, "CIFAR-10, pack", accuracy=0.945, counts={"tin": 7793})

    for text in (table.to_terminal(), table.to_markdown()):
        assert "CIFAR-10, pack" in text.splitlines()[0]
        assert "fraction of ID flagged when 95 % of OOD is caught (OOD positive, " in text
        assert "log-ratios in nats; larger = more ID" in text
        assert text.count("94.50") == 1
        assert "7,793" in text

    lines = [line for line in table.to_terminal().splitlines() if line.startswith("tin ")]

    assert lines[0].split() == ["tin", "7,793", "60.00", "70.00", "71.00", "72.00", "50.00"]
    assert "| nearood |  | 40.00 | 80.00 | 81.00 | 82.00 | 40.00 |" in table.to_markdown()


def test_columns_of_the_terminal_table_line_up() -> None:
    one = MetricsTable.of(METRICS, "t", counts={"tin": 7793})

    for table in (one, aggregate([one, one])):
        _, rule, header, *body = table.to_terminal().splitlines()
        rows = body[1 : body.index(rule, 1)]

        assert {len(line) for line in (header, *rows)} == {len(rule)}


@pytest.mark.parametrize("runs", [1, 2])
def test_csv_round_trip(runs: int, tmp_path: Path) -> None:
    one = MetricsTable.of(METRICS, "t, u", accuracy=0.9, parameters=10, counts={"tin": 5})
    aggregate([one] * runs).to_csv(tmp_path / "metrics.csv")

    with open(tmp_path / "metrics.csv", newline="") as file:
        first, *rows = csv.DictReader(file)

    assert first["role"] == "id"
    assert float(first["ID_ACC"]) == 90
    assert first["parameters"] == "10"
    assert first["AUROC"] == first["seconds"] == ""
    assert [row["set"] for row in rows] == list(one.rows)

    for row in rows:
        assert row["benchmark"] == "t, u"
        assert row["runs"] == str(runs)
        assert row["ID_ACC"] == row["parameters"] == ""
        assert row["images"] == ("5" if row["set"] == "tin" else "")
        assert row["AUROC_std"] == ("0.000000" if runs > 1 else "")
        columns = ("AUROC", "FPR@95", "AUPR_IN", "AUPR_OUT", "FPR@95_ID")
        expected = [100 * v for v in one.mean(row["set"])]
        assert [float(row[c]) for c in columns] == pytest.approx(expected, abs=1e-6)
