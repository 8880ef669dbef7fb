r"""Tests for the ood_osdre.evaluation.tables module."""

import csv
import math
import statistics
from pathlib import Path

import pytest

from ood_osdre.errors import UserError
from ood_osdre.evaluation.metrics import OODMetrics
from ood_osdre.evaluation.tables import MetricsTable, aggregate

A = OODMetrics(0.9, 0.2, 0.91, 0.92, 0.3)
B = OODMetrics(0.7, 0.6, 0.71, 0.72, 0.5)
C = OODMetrics(1.0, 0.0, 0.99, 0.98, 0.1)
METRICS = {"near": {"cifar100": A, "tin": B}, "far": {"mnist": C}}
CSV = """\
benchmark,set,role,runs,images,FPR@95,FPR@95_std,AUROC,AUROC_std,AUPR_IN,AUPR_IN_std,\
AUPR_OUT,AUPR_OUT_std,FPR@95_ID,FPR@95_ID_std,ID_ACC,ID_ACC_std,parameters,seconds,seconds_std
"t, u",id,id,1,,,,,,,,,,,,90.000000,,10,,
"t, u",tin,near,1,5,60.000000,,70.000000,,71.000000,,72.000000,,50.000000,,,,,,
"t, u",nearood,near,1,,60.000000,,70.000000,,71.000000,,72.000000,,50.000000,,,,,,
"t, u",all,all,1,,60.000000,,70.000000,,71.000000,,72.000000,,50.000000,,,,,,
"""
MARKDOWN = """\
# t, u

| Set | Images | FPR@95 | AUROC | AUPR_IN | AUPR_OUT | FPR@95_ID |
| :-- | --: | --: | --: | --: | --: | --: |
| tin | 7,793 | 60.00 | 70.00 | 71.00 | 72.00 | 50.00 |
| nearood |  | 60.00 | 70.00 | 71.00 | 72.00 | 50.00 |
| all |  | 60.00 | 70.00 | 71.00 | 72.00 | 50.00 |

- ID accuracy: 94.50 %
- All metrics in percent.
"""


def average(*values: OODMetrics) -> OODMetrics:
    return OODMetrics(*(math.fsum(v) / len(v) for v in zip(*values, strict=True)))


def test_rows_and_means() -> None:
    table = MetricsTable.of(METRICS, "t")
    assert list(table.rows) == ["cifar100", "tin", "nearood", "mnist", "farood", "all"]
    assert [*table.roles.values()] == ["near", "near", "near", "far", "far", "all"]
    assert table.mean("nearood") == pytest.approx(average(A, B))
    assert table.mean("farood") == pytest.approx(C)
    # Over sets, not over the two means.
    assert table.mean("all") == pytest.approx(average(A, B, C))


def test_partial_means_never_have_the_full_name() -> None:
    absent = {"near": ["cifar100"], "far": []}
    table = MetricsTable.of({"near": {"tin": B}, "far": {"mnist": C}}, "t", absent=absent)
    near, everything = "nearood (partial: cifar100 absent)", "all (partial: cifar100 absent)"
    assert list(table.rows) == ["tin", near, "mnist", "farood", everything]
    assert table.mean(near) == pytest.approx(B)
    assert "Absent near sets: cifar100." in table.to_terminal()
    # Without any near set, there is no mean at all.
    table = MetricsTable.of({"far": {"mnist": C}}, "t", absent={"near": ["cifar100", "tin"]})
    assert list(table.rows) == ["mnist", "farood", "all (partial: cifar100, tin absent)"]
    # A benchmark without near sets lacks nothing.
    assert list(MetricsTable.of({"far": {"mnist": C}}, "t").rows) == ["mnist", "farood", "all"]


NEAR = {"cifar100": A, "held": B, "tin": C}
PARTS = {"held": "cifar100"}
TINY = {"cifar100": "held"}
FAR = {"mnist": A}
REST = "the reference holds classes of this set; "


@pytest.mark.parametrize(
    ("overlaps", "mark", "near", "note"),
    [
        (TINY, " (in reference)", (B, C), REST + "the means count held, its part without them."),
        ({}, "", (A, C), "held: a part of cifar100; only near_held counts it, in place of"),
    ],
)
def test_a_companion_counts_where_the_reference_holds_classes_of_its_set(
    overlaps: dict, mark: str, near: tuple, note: str, tmp_path: Path
) -> None:
    tables = [
        MetricsTable.of(
            {"near": NEAR, "far": FAR}, "t", counts={"cifar100": 9}, overlaps=overlaps, parts=PARTS
        )
    ] * 2
    table = aggregate(tables)
    whole = f"cifar100{mark}"
    means = ["nearood", "near_held", "mnist", "farood", "all"]
    assert list(table.rows) == [whole, "held", "tin", *means]
    assert table.roles["near_held"] == "near"
    assert table.mean("nearood") == pytest.approx(average(*near))
    assert table.mean("near_held") == pytest.approx(average(B, C))  # whatever the reference
    assert table.mean("all") == pytest.approx(average(*near, A))
    for text in (table.to_terminal(), table.to_markdown()):
        assert note in text
        assert text.count("(in reference)") == 2 * bool(overlaps)  # the row and its note
    table.to_csv(tmp_path / "metrics.csv")
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = {row["set"]: row for row in csv.DictReader(file)}
    assert rows[whole]["images"] == "9"
    assert float(rows["near_held"]["AUROC"]) == pytest.approx(50 * (B.auroc + C.auroc))


def test_means_say_what_they_lack_without_a_companion() -> None:
    def rows(overlaps: dict, near: dict, absent: tuple = (), parts: dict | None = None) -> dict:
        return MetricsTable.of(
            {"near": near, "far": FAR}, "t", {"near": absent}, overlaps=overlaps, parts=parts
        ).rows

    alone = rows({"cifar100": None}, {"cifar100": A, "tin": C})
    near, everything = "nearood (partial: cifar100 in reference)", "all (partial: cifar100 in"
    assert list(alone)[:3] == ["cifar100 (in reference)", "tin", near]
    assert list(alone)[-1].startswith(everything)
    assert alone[near][0] == pytest.approx(C)
    # Both reasons; an absent set is lacking only where it would count.
    both = rows({"cifar100": None}, {"cifar100": A, "tin": C}, ("far",))
    assert "nearood (partial: far absent; cifar100 in reference)" in both
    assert "nearood (partial: held absent)" in rows(TINY, {"tin": C}, ("cifar100", "held"), PARTS)
    plain = rows({}, {"cifar100": A, "tin": C}, ("held",), PARTS)
    assert {"nearood", "near_held (partial: held absent)"} <= plain.keys()
    # Nothing is left to take a mean of.
    assert list(rows({"tin": None}, {"tin": C})) == [
        "tin (in reference)", "mnist", "farood", "all (partial: tin in reference)"
    ]  # fmt: skip


def test_runs_with_and_without_such_a_reference_are_not_joined() -> None:
    tables = [MetricsTable.of({"near": NEAR}, "t", overlaps=o, parts=PARTS) for o in (TINY, {})]
    with pytest.raises(UserError, match="rows differ"):
        aggregate(tables)


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({"mid": {"tin": A}}, "mid"),
        ({"near": {"tin": A}, "far": {"tin": B}}, "'tin'.*'tin'"),
        ({"near": {"nearood": A}}, "nearood"),
        ({"far": {"all": A}}, "all"),
        ({"near": {"near_held": A}}, "near_held"),
        ({"near": {}, "far": {}}, r"near: \[\], far: \[\]"),
    ],
)
def test_refuses_rows_of_one_name_and_none(metrics: dict, found: str) -> None:
    with pytest.raises(UserError, match=f"title: got .*{found}.*; expected"):
        MetricsTable.of(metrics, "title")


def test_aggregate_is_mean_and_sample_deviation_over_runs() -> None:
    runs = [(A, B, 0.90, 2.0), (B, C, 0.92, 3.0), (C, C, 0.97, 7.0)]
    tables = [
        MetricsTable.of({"near": {"x": x, "y": y}}, "t", accuracy=acc, seconds=s, parameters=1234)
        for x, y, acc, s in runs
    ]
    table = aggregate(tables)
    spread = table.std("nearood")
    assert spread is not None
    # Deviation of the runs' means, not mean of the sets' deviations.
    for i in range(5):
        values = [(x[i] + y[i]) / 2 for x, y, *_ in runs]
        assert table.mean("nearood")[i] == pytest.approx(statistics.mean(values))
        assert spread[i] == pytest.approx(statistics.stdev(values))
    assert table.runs == 3
    text = table.to_terminal()
    for note in (
        "over n = 3 runs",
        "ID accuracy: 93.00 ± 3.61 %",
        "Scoring: 4.0 ± 2.6 s",
        "Parameters: 1,234",
    ):
        assert note in text
    assert aggregate([aggregate(tables[:2]), tables[2]]).rows == table.rows


def test_aggregate_refuses_different_benchmarks() -> None:
    table = MetricsTable.of(METRICS, "t")
    partial = MetricsTable.of({"near": {"tin": B}}, "t", absent={"near": ["cifar100"]})
    for other, what in ((partial, "rows"), (MetricsTable.of(METRICS, "u"), "title")):
        with pytest.raises(UserError, match=f"{what} differ"):
            aggregate([table, other])


def test_statistics_of_some_runs_only_are_left_out() -> None:
    table = aggregate([MetricsTable.of(METRICS, "t", accuracy=a) for a in (0.9, None)])
    assert table.accuracy == ()
    assert "ID accuracy" not in table.to_terminal()


def test_csv_is_what_is_committed(tmp_path: Path) -> None:
    table = MetricsTable.of(
        {"near": {"tin": B}}, "t, u", accuracy=0.9, parameters=10, counts={"tin": 5}
    )
    table.to_csv(tmp_path / "metrics.csv")
    assert (tmp_path / "metrics.csv").read_bytes().decode() == CSV
    aggregate([table, table]).to_csv(tmp_path / "metrics.csv")
    with open(tmp_path / "metrics.csv", newline="") as file:
        first, *rows = csv.DictReader(file)
    assert (first["runs"], first["ID_ACC"], first["ID_ACC_std"]) == ("2", "90.000000", "0.000000")
    assert {row["AUROC_std"] for row in rows} == {"0.000000"}


def test_text_states_title_percentages_and_convention() -> None:
    table = MetricsTable.of({"near": {"tin": B}}, "t, u", accuracy=0.945, counts={"tin": 7793})
    assert table.to_markdown().startswith(MARKDOWN)
    assert table.std("tin") is None
    for text in (table.to_terminal(), table.to_markdown()):
        assert "fraction of ID flagged when 95 % of OOD is caught (OOD positive, " in text
        assert "log-ratios in nats; larger = more ID" in text


@pytest.mark.parametrize("runs", [1, 2])
def test_columns_of_the_terminal_table_line_up(runs: int) -> None:
    table = aggregate([MetricsTable.of(METRICS, "t", counts={"tin": 7793})] * runs)
    title, rule, header, _, *body = table.to_terminal().splitlines()
    rows = body[: body.index(rule)]
    assert (title, set(rule)) == ("t", {"-"})
    assert {len(line) for line in (header, *rows)} == {len(rule)}
    assert header.split() == [
        "Set",
        "Images",
        "FPR@95",
        "AUROC",
        "AUPR_IN",
        "AUPR_OUT",
        "FPR@95_ID",
    ]
    assert [row.split()[0] for row in rows] == list(table.rows)
    assert rows[1].split()[:3] == ["tin", "7,793", "60.00"]
