r"""Tests for the ood_osdre.resources module."""

import re
from pathlib import Path

import pytest

from ood_osdre import resources
from ood_osdre.errors import UserError


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "site-packages" / "ood_osdre"
    for folder in (package / "_configs", package.parent / "configs"):
        folder.mkdir(parents=True)
    (package / "_configs" / "small.yml").write_text("")
    (package.parent / "configs" / "strange.yml").write_text("")
    monkeypatch.setattr(resources, "PACKAGE", package)
    return package


def test_every_name_is_found() -> None:
    for kind in resources.KINDS:
        for name in resources.names(kind):
            assert resources.find(kind, name).stem == name


def test_installed_package_reads_its_own_copy(installed: Path) -> None:
    assert resources.names("configs") == ["small"]
    assert resources.find("configs", "small") == installed / "_configs" / "small.yml"


def test_clone_reads_the_file_one_edits(installed: Path) -> None:
    (installed.parent / "setup.cfg").write_text("")
    (installed.parent / "configs" / "small.yml").write_text("")

    assert resources.find("configs", "small") == installed.parent / "configs" / "small.yml"
    assert resources.names("configs") == ["small", "strange"]


def test_path_is_found(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    path.write_text("")
    assert resources.find("configs", str(path)) == path


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("smal", "no such name or file .did you mean 'small'.."),
        ("../configs/strange", "no such name or file"),
        ("{folder}", "is a folder"),
    ],
)
def test_unknown_names_are_told_with_what_is_expected(
    installed: Path, name: str, found: str
) -> None:
    name = name.format(folder=installed)
    expected = "expected one of small, or the path of a YAML file of your own"
    message = rf"^configuration '{re.escape(name)}': {found}, {expected}\.$"
    with pytest.raises(UserError, match=message):
        resources.find("configs", name)
