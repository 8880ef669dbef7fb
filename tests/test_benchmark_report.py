r"""The report: every page's tables match the records, and what is wrong is told."""

import re
import shutil
from pathlib import Path

import pytest

from ood_osdre.errors import UserError

pytestmark = pytest.mark.usefixtures("benchmarks")


def test_pages_match_their_records() -> None:
    import report

    assert report.check_pages(change=False) == 0


def test_a_changed_number_fails_the_check(
    benchmarks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import report

    page = (benchmarks.parent / "docs" / "experiments" / "speed.md").read_text()
    start = page.index("<!-- table: int8 -->")
    block = page[start : page.index("<!-- end -->", start)]
    path = tmp_path / "page.md"
    changed = re.sub(r"\d+\.\d+", "1.23", block, count=1)
    assert changed != block
    path.write_text(f"{changed}<!-- end -->\n")
    monkeypatch.setattr(report, "pages", lambda: [path])
    monkeypatch.setattr(report.figures, "FIGURES", {})
    assert report.main(["--check"]) == 1
    assert report.main([]) == 0
    assert path.read_text() == f"{block}<!-- end -->\n"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- table: int8 -->\n", "not closed"),
        ("<!-- table: no-such -->\n<!-- end -->\n", "no such table"),
        ("<!-- table:int8 -->\n<!-- end -->\n", "misspelt"),
        ("<!-- table: int8 --> \n<!-- end -->\n", "misspelt"),
        ("<!-- Table: int8 -->\n<!-- end -->\n", "misspelt"),
    ],
)
def test_a_page_that_cannot_be_made_is_told(page: str, message: str) -> None:
    import report

    with pytest.raises(UserError, match=message):
        report.render(page)


def test_a_record_cut_short_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import report

    (tmp_path / "int8.json").write_text('{"results": {"auroc"')
    (tmp_path / "pack_short.jsonl").write_text('{"method"')
    monkeypatch.setattr(report, "RECORDS", tmp_path)
    for name, message in (("int8", "not a run record"), ("short", "not a line of JSON")):
        with pytest.raises(UserError, match=rf"{name}: .*{message}"):
            report.render(f"<!-- table: {name} -->\n<!-- end -->\n")
    text = report.render("<!-- table: main -->\n<!-- end -->\n")
    assert "Not run yet: `python benchmarks/study.py main" in text


def test_a_figure_of_other_scores_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import figures
    import report

    from ood_osdre.evaluation.scores import read_scores, write_scores

    shutil.copytree(figures.RESULTS / "digits", tmp_path / "digits")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    name = "digits/score_density.png"
    monkeypatch.setattr(figures, "FIGURES", {name: figures.FIGURES[name]})
    assert report.check_figures(change=False) == 0

    scores = read_scores(tmp_path / "digits" / "scores.npz")
    (own,) = scores.of("id").values()
    own.score[:] += 1.0
    write_scores(tmp_path / "digits" / "scores.npz", scores)
    assert report.check_figures(change=False) == 1
    assert report.check_figures(change=True) == 1
    assert report.check_figures(change=False) == 0
