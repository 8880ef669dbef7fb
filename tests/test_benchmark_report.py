r"""The report: every page's tables match the records, and what is wrong is told."""

from pathlib import Path

import pytest

from ood_osdre.errors import UserError

pytestmark = pytest.mark.usefixtures("benchmarks")


def test_pages_match_their_records() -> None:
    import report

    assert report.main(["--check"]) == 0


def test_a_changed_number_fails_the_check(
    benchmarks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import report

    page = (benchmarks / "RESULTS.md").read_text()
    start = page.index("<!-- table: int8 -->")
    block = page[start : page.index("<!-- end -->", start)]
    path = tmp_path / "page.md"
    path.write_text(f"{block.replace('95.27', '95.28')}<!-- end -->\n")
    monkeypatch.setattr(report, "PAGES", (path,))
    assert report.main(["--check"]) == 1
    assert report.main([]) == 0
    assert path.read_text() == f"{block}<!-- end -->\n"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- table: int8 -->\n", "not closed"),
        ("<!-- table: no-such -->\n<!-- end -->\n", "no such table"),
    ],
)
def test_a_page_that_cannot_be_made_is_told(page: str, message: str) -> None:
    import report

    with pytest.raises(UserError, match=message):
        report.render(page)


def test_a_record_cut_short_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import report

    (tmp_path / "int8").mkdir()
    (tmp_path / "int8" / "run.json").write_text('{"results": {"auroc"')
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    with pytest.raises(UserError, match="int8: JSONDecodeError"):
        report.render("<!-- table: int8 -->\n<!-- end -->\n")
