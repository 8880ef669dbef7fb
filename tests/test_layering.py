r"""The dependency direction of the package, and its laziness, as tests."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ood_osdre

ROOT = Path(ood_osdre.__file__).parent
# What may know about hosts and tasks; all the rest is the core.
OUTER = {"plugin", "tasks"}
# What commands need before they know what to do.
TORCH_FREE = ["__init__", "cli", "config", "errors", "files", "options", "resources", "sections"]
TORCH_FREE += ["data/__main__", "data/manifests"]
TORCH_FREE += [f"evaluation/{name}" for name in ("metrics", "records", "scores", "tables")]
HEAVY = {"torch", "torchvision", "timm"}


def modules() -> list[str]:
    paths = (p.relative_to(ROOT).with_suffix("") for p in ROOT.rglob("*.py"))
    return sorted(p.as_posix() for p in paths)


def imports(name: str, nodes: list[ast.AST]) -> Iterator[str]:
    r"""Yields the absolute dotted names that a module imports in some of its nodes."""
    package = ["ood_osdre", *Path(name).parts[:-1]]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield stem
            # `from . import plugin` names a module on the right.
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def everywhere(name: str) -> set[str]:
    tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
    return set(imports(name, list(ast.walk(tree))))


def at_import_time(name: str) -> set[str]:
    r"""Returns what a module imports when it is imported: not in functions, not for types."""
    found: list[ast.AST] = []
    pending: list[ast.AST] = [ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        found.append(node)
        pending += ast.iter_child_nodes(node)
    return set(imports(name, found))


@pytest.mark.parametrize("name", [m for m in modules() if m.split("/")[0] not in OUTER])
def test_core_imports_no_host_no_task_no_benchmark(name: str) -> None:
    forbidden = {"openood", "benchmarks", *(f"ood_osdre.{o}" for o in OUTER)}

    found = {i for i in everywhere(name) if any(f"{i}.".startswith(f"{f}.") for f in forbidden)}
    assert not found


@pytest.mark.parametrize("name", modules())
def test_modules_name_their_own_package_relatively(name: str) -> None:
    tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
    absolute = {
        stem
        for node in ast.walk(tree)
        if not (isinstance(node, ast.ImportFrom) and node.level)
        for stem in imports(name, [node])
    }

    assert not {i for i in absolute if i.split(".")[0] == "ood_osdre"}


@pytest.mark.parametrize("name", TORCH_FREE)
def test_leaves_do_not_import_torch(name: str) -> None:
    assert not {i for i in at_import_time(name) if i.split(".")[0] in HEAVY}


@pytest.mark.parametrize("name", TORCH_FREE)
def test_leaves_import_without_torch_in_a_fresh_interpreter(name: str) -> None:
    r"""The same, with whatever they import in turn."""
    if name.startswith("data/") and not (ROOT / "data" / "__init__.py").exists():
        pytest.skip("no such package")
    module = "ood_osdre" if name == "__init__" else f"ood_osdre.{name.replace('/', '.')}"
    code = f"import sys, {module}; print(sorted({HEAVY} & set(sys.modules)))"

    assert run(code) == "[]"


def test_package_is_lazy() -> None:
    code = """
import sys, ood_osdre
assert set(ood_osdre.__all__) <= set(dir(ood_osdre))
assert not {"yaml", "torch", "ood_osdre.config"} & set(sys.modules)
ood_osdre.Config
assert "torch" not in sys.modules
print("lazy")
"""
    assert run(code) == "lazy"


@pytest.mark.parametrize("name", ood_osdre.__all__)
def test_lazy_names_resolve(name: str) -> None:
    value = getattr(ood_osdre, name)

    assert value.__name__ == name
    assert getattr(ood_osdre, name) is value
    assert value.__module__.startswith("ood_osdre.")


def test_lazy_register_is_the_typed_one() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    blocks = [n for n in tree.body if isinstance(n, ast.If)]
    typed = {
        n.module: tuple(a.name for a in n.names)
        for n in blocks[0].body
        if isinstance(n, ast.ImportFrom)
    }

    assert {k: sorted(v) for k, v in typed.items()} == {
        k: sorted(v) for k, v in ood_osdre._HOMES.items()
    }
    assert sorted(n for names in typed.values() for n in names) == sorted(ood_osdre.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Detector'"):
        _ = ood_osdre.Detector


@pytest.mark.parametrize("name", modules())
def test_modules_say_what_they_export(name: str) -> None:
    tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{name}: no docstring"

    if len(tree.body) > 1 and not name.endswith("__main__"):
        first = tree.body[1]
        assert isinstance(first, ast.Assign), f"{name}: opens without __all__"
        assert ast.unparse(first.targets[0]) == "__all__", f"{name}: opens without __all__"


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT.parent,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
