r"""The package's metadata against what is on disk, without building anything."""

import configparser
import re
from pathlib import Path

import pytest

import ood_osdre
from ood_osdre.resources import KINDS, names

ROOT = Path(ood_osdre.__file__).parent.parent

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.cfg").is_file(), reason="needs a clone, not an installed package"
)


@pytest.fixture
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


def pairs(text: str) -> dict[str, str]:
    return {k.strip(): v.strip() for k, _, v in (line.partition("=") for line in lines(text))}


def test_packages_are_those_on_disk(setup: configparser.ConfigParser) -> None:
    package = Path(ood_osdre.__file__).parent
    folders = (p.parent.relative_to(ROOT) for p in package.rglob("*.py"))
    on_disk = {".".join(f.parts) for f in folders}
    data = set(pairs(setup["options"]["package_dir"]))

    listed = lines(setup["options"]["packages"])
    assert len(listed) == len(set(listed))
    assert set(listed) == on_disk | data


@pytest.mark.parametrize("kind", KINDS)
def test_yaml_folders_travel_as_package_data(setup: configparser.ConfigParser, kind: str) -> None:
    package = f"ood_osdre._{kind}"
    assert pairs(setup["options"]["package_dir"])[package] == kind

    patterns = [p.strip() for p in setup["options.package_data"][package].split(",")]
    shipped = {p for pattern in patterns for p in (ROOT / kind).glob(pattern)}
    # Read by name at run time, so every one has to be in the wheel.
    assert shipped >= set((ROOT / kind).rglob("*.yml"))
    # What lies in folders below is found by its path, such as OpenOOD's configurations.
    top = {p.stem for p in shipped if p.suffix == ".yml" and p.parent == ROOT / kind}
    assert top == set(names(kind))
    assert names(kind)


def test_the_page_s_template_travels_as_package_data(setup: configparser.ConfigParser) -> None:
    folder = ROOT / "ood_osdre" / "evaluation"
    patterns = setup["options.package_data"]["ood_osdre.evaluation"].split(",")
    shipped = {path for pattern in patterns for path in folder.glob(pattern.strip())}
    # Read at run time, so all that is no code has to be in the wheel.
    assert {p for p in folder.iterdir() if p.is_file() and p.suffix != ".py"} == shipped
    assert len(shipped) == 2


def test_version_is_stated_once(setup: configparser.ConfigParser) -> None:
    assert setup["metadata"]["version"] == "attr: ood_osdre.__version__"
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {ood_osdre.__version__}\n" in citation

    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "[project]" not in pyproject


def test_named_files_exist(setup: configparser.ConfigParser) -> None:
    assert (ROOT / setup["metadata"]["long_description"].removeprefix("file: ")).is_file()
    assert (ROOT / setup["metadata"]["license_files"]).is_file()
    assert (ROOT / "ood_osdre" / "py.typed").is_file()
    for folder in setup["mypy"]["files"].split(","):
        assert (ROOT / folder.strip()).is_dir()


def test_console_scripts_exist(setup: configparser.ConfigParser) -> None:
    for target in pairs(setup["options.entry_points"]["console_scripts"]).values():
        module, _, function = target.partition(":")
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        assert re.search(rf"^def {function}\(", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_dev_tools_are_pinned_and_torch_is_not(setup: configparser.ConfigParser) -> None:
    extras = setup["options.extras_require"]
    pins = {line.split("==")[0] for line in lines(extras["dev"]) if "==" in line}

    assert pins == {"mypy", "ruff"}
    assert "torch>=2.3" in lines(setup["options"]["install_requires"])
    assert not [r for r in lines(setup["options"]["install_requires"]) if "==" in r]
