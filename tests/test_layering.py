r"""The plan of the house, as tests: the direction of imports, laziness, and the size of folders."""

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ood_osdre

ROOT = Path(ood_osdre.__file__).parent
MOST_FILES, MOST_FLOORS, MOST_LINES = 13, 9, 350
# What may import hosts and tasks; all the rest is the core.
OUTER = {"plugin", "tasks", "commands"}
# Each may import what is on its right; those of one group do not know each other.
ORDER = "__main__ | commands | plugin tasks | cli | runs export | stages | detectors | evaluation | training | objectives | models"
ORDER += " | paths data | config | sections | resources | options files | errors progress"
# What commands need before they know what to do.
TORCH_FREE = [
    "",
    "__main__",
    "commands.fit",
    "commands.score",
    "commands.monitor",
    "cli",
    "config",
    "errors",
    "files",
    "options",
    "resources",
    "sections",
]
TORCH_FREE += ["data.__main__", "data.manifests", "training.run"]
TORCH_FREE += [f"evaluation.{name}" for name in ("metrics", "records", "scores", "tables")]
SOURCES = {
    ".".join(("ood_osdre", *p.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): p
    for p in ROOT.rglob("*.py")
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def walk(tree: ast.AST, late: bool) -> Iterator[ast.AST]:
    r"""Yields the nodes of a module; without `late`, none in functions and none for types."""
    for node in ast.iter_child_nodes(tree):
        if not late and isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if late or not is_typing:
            yield node
            yield from walk(node, late)


def imports(name: str, late: bool = True) -> set[str]:
    r"""Returns the modules, of ours and of others, that a module imports.

    Arguments:
        name: The module.
        late: Whether those count that are imported in a function, or for types alone.
    """
    found = set()
    package = name if SOURCES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in walk(TREES[name], late):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            stem = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            names = {f"{stem}.{alias.name}" for alias in node.names}
            found |= names & SOURCES.keys()
            # `from . import trainer` needs the module alone, `from .trainer import Trainer` that one.
            if not names <= SOURCES.keys():
                found.add(stem)
    return found - {name}


def graph(late: bool, packages: bool = False) -> dict[str, set[str]]:
    r"""Returns which of our modules each of them imports.

    Arguments:
        late: See :func:`imports`.
        packages: Whether a package's own file is run with each of its modules, and has imports.
            Without, the modules alone count.
    """
    edges: dict[str, set[str]] = {}
    for name, path in SOURCES.items():
        is_package = path.name == "__init__.py"
        targets = set() if is_package and not packages else imports(name, late) & SOURCES.keys()
        if packages:
            parts = [target.split(".") for target in targets]
            targets |= {".".join(p[:i]) for p in parts for i in range(1, len(p))}
        # A package runs before the modules that it holds, which may be its own imports.
        edges[name] = {target for target in targets if not f"{name}.".startswith(f"{target}.")}
    return edges


def circle(edges: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_through_others() -> None:
    assert not circle(graph(late=False, packages=True))


def test_nor_through_functions_and_types() -> None:
    assert not circle(graph(late=True))


def test_imports_go_from_left_to_right() -> None:
    rank = {name: i for i, group in enumerate(ORDER.split("|")) for name in group.split()}
    assert rank.keys() == {name.split(".")[1] for name in SOURCES if "." in name}
    found = {
        f"{name}: {target}"
        for name, targets in graph(late=True).items()
        for target in targets
        if (folder := name.split(".")[1]) != (other := target.split(".")[1])
        and rank[folder] >= rank[other]
    }
    assert not found


def test_floors_are_few() -> None:
    r"""A floor is the longest chain of imports below a module, packages' own files left out."""
    edges = graph(late=True)
    floors: dict[str, int] = {}
    for name in TopologicalSorter(edges).static_order():
        floors[name] = 1 + max((floors[target] for target in edges[name]), default=0)
    assert not {name: floor for name, floor in floors.items() if floor > MOST_FLOORS}


def test_folders_and_modules_are_small() -> None:
    folders = Counter(path.parent.relative_to(ROOT).as_posix() for path in SOURCES.values())
    assert not {folder: n for folder, n in folders.items() if n > MOST_FILES}
    lines = {n: len(p.read_text(encoding="utf-8").splitlines()) for n, p in SOURCES.items()}
    assert not {name: n for name, n in lines.items() if n > MOST_LINES}


def test_the_core_imports_no_host_no_task_no_benchmark() -> None:
    forbidden = {"openood", "pytorch_ood", "benchmarks", *(f"ood_osdre.{o}" for o in OUTER)}
    found = {
        f"{name}: {target}"
        for name in SOURCES
        if [*name.split("."), ""][1] not in OUTER
        for target in imports(name)
        if any(f"{target}.".startswith(f"{f}.") for f in forbidden)
    }
    assert not found


def test_modules_name_their_own_package_relatively() -> None:
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            assert "ood_osdre" not in {n.split(".")[0] for n in names}, f"{name}:{node.lineno}"


def test_what_a_fresh_interpreter_loads() -> None:
    r"""One interpreter imports the modules one after the other and tells what came with each."""
    code = """
import importlib, json, sys
loaded, heavy = {}, {"torch", "torchvision", "timm", "sklearn", "pydantic", "yaml"}
for name in sys.argv[1:]:
    importlib.import_module(f"ood_osdre.{name}".rstrip("."))
    loaded[name] = sorted(heavy & set(sys.modules))
import ood_osdre
assert set(ood_osdre.__all__) <= set(dir(ood_osdre))
ood_osdre.Config, ood_osdre.UserError, ood_osdre.ood_metrics
loaded["names"] = sorted({"torch"} & set(sys.modules))
print(json.dumps(loaded))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *TORCH_FREE], capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout)
    assert loaded.pop("") == []
    assert not {name for name, found in loaded.items() if set(found) - {"pydantic", "yaml"}}


@pytest.mark.parametrize("name", ood_osdre.__all__)
def test_lazy_names_resolve(name: str) -> None:
    value = getattr(ood_osdre, name)
    assert value.__name__ == name
    assert getattr(ood_osdre, name) is value
    assert value.__module__.startswith("ood_osdre.")


def test_the_lazy_register_is_the_typed_one() -> None:
    (block,) = (n for n in TREES["ood_osdre"].body if isinstance(n, ast.If))
    typed = {
        n.module: sorted(a.name for a in n.names)
        for n in block.body
        if isinstance(n, ast.ImportFrom)
    }
    assert typed == {home: sorted(names) for home, names in ood_osdre._HOMES.items()}
    assert sorted(n for names in typed.values() for n in names) == sorted(ood_osdre.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Detector'"):
        _ = ood_osdre.Detector


def test_every_module_says_what_it_is_and_what_it_exports() -> None:
    for name, tree in TREES.items():
        assert ast.get_docstring(tree), f"{name}: no docstring"
        if len(tree.body) > 1 and not name.endswith("__main__"):
            first = tree.body[1]
            assert isinstance(first, ast.Assign), f"{name}: opens without __all__"
            assert ast.unparse(first.targets[0]) == "__all__", f"{name}: opens without __all__"
