r"""What a study is: a question, and the runs of the main command that are to answer it.

A study is a file `studies/NAME.yml` of values only. Its methods are options of the main command,
`section.key=value`. Lists of options may hold lists, so that some can be shared by YAML's anchors,
which are set under `shared`:

    plain: &plain [objective.class_weight=0, data.broaden=0]
    end-point: {options: [*plain, objective.endpoint=1]}

An option may name the folder of another method's run of the same seed, as `{run:METHOD}`: a head
on features needs its classifier. `{seed}` stands for the seed, where a part of a run has its own.
Nothing here imports torch.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

from ood_osdre.errors import UserError
from ood_osdre.options import Count, Natural, Options, Text
from ood_osdre.resources import read_yaml

STUDIES = Path(__file__).parent / "studies"
# How an option names the run of another method.
RUN = re.compile(r"\{run:([^{}]*)\}")


# Of a method's name, what a folder's should not hold.
REPLACED = (
    (" + ", "-"), (", ", "-"), (": ", "-"), (" = ", "_"), (" ", "_"), ("/", "_"), ("(", ""), (")", ""), ("∞", "inf"), ("³", "3"),
)  # fmt: skip


def slug(name: str) -> str:
    r"""Returns the folder name of a method."""
    for old, new in REPLACED:
        name = name.replace(old, new)
    return name


def _flatten(value: object) -> object:
    r"""Returns a list without lists in it; what is no list is for the validator to refuse."""
    if not isinstance(value, list):
        return value
    parts = [_flatten(item) for item in value]
    return [item for part in parts for item in (part if isinstance(part, list) else [part])]


Overrides: TypeAlias = Annotated[list[Text], BeforeValidator(_flatten)]
Names: TypeAlias = Annotated[list[Text], Field(min_length=1)]
References: TypeAlias = Annotated[list[Text | None], Field(min_length=1)]
Seeds: TypeAlias = Annotated[list[Natural], Field(min_length=1)]


class Method(Options):
    r"""A method of a study.

    Attributes:
        options: Its options, after those that all methods share.
        variants: Further ways to score the trained model, `evaluation.key=value`, by name.
        variant: The name of its own way to score among those; it needs none without others.
        group: The table that the method belongs to.
        seeds: Its seeds; null for the study's.
        steps: Its number of steps; null for the study's.
        references: Which of the study's references it is trained with; null for all. A classifier
            that sees none needs one alone.
        curve: Whether its loss curve is kept; null for what the study says.
    """

    options: Overrides = Field(default_factory=list)
    variants: dict[Text, Overrides] = Field(default_factory=dict)
    variant: str = ""
    group: str = ""
    seeds: Seeds | None = None
    steps: Count | None = None
    references: References | None = None
    curve: bool | None = None

    @property
    def needs(self) -> list[str]:
        r"""The methods whose runs its options name, those of its variants too."""
        options = [*self.options, *itertools.chain(*self.variants.values())]
        return list(dict.fromkeys(RUN.findall("\n".join(options))))


class Study(Options):
    r"""A study.

    Attributes:
        question: What is asked.
        protocol: What was fixed before the first run, when, and by which commit.
        config: The configuration that all methods start from; `{id}` stands for the ID data set.
        ids: The in-distribution data sets.
        benchmarks: The manifests.
        references: The reference sets; null for the manifests' own.
        common: Options of every method.
        steps: To how many steps a training is shortened; null for the configuration's.
        seeds: The training seeds.
        curve: Whether loss curves are kept.
        keep: The methods of which the plot of scores of the first seed is kept below `results/`.
        shared: Lists that others refer to by YAML's anchors; read nowhere else.
        methods: The methods by name, as the tables have them.
    """

    question: Text
    protocol: Text
    config: Text
    ids: Names
    benchmarks: Names
    references: References = Field(default=[None])
    common: Overrides = Field(default_factory=list)
    steps: Count | None = None
    seeds: Seeds
    curve: bool = False
    keep: list[Text] = Field(default_factory=list)
    shared: dict[str, Any] = Field(default_factory=dict)
    methods: Annotated[dict[Text, Method], Field(min_length=1)]

    def _conflicts(self) -> Iterator[str]:
        if RUN.search("\n".join(self.common)):
            yield "common: names the run of a method, expected the options of methods to do that."
        for name in self.keep:
            if name not in self.methods:
                yield f"keep: got {name!r}, which is no method."
        folders: dict[str, str] = {}
        for name, method in self.methods.items():
            if (other := folders.setdefault(slug(name), name)) != name:
                yield f"methods: {name!r} and {other!r} have one folder, expected other names."
            for need in method.needs:
                if need not in self.methods:
                    yield f"methods: {name!r} needs the run of {need!r}, which is no method."
                elif set(self.seeds_of(name)) - set(self.seeds_of(need)):
                    yield f"methods: {name!r} needs the run of {need!r}, which has fewer seeds."
            for reference in self.references_of(name):
                if reference not in self.references:
                    yield f"methods: {name!r} has reference {reference!r}, which the study lacks."
        try:
            self.ordered(list(self.methods))
        except RecursionError:
            yield "methods: their runs need each other in a circle."

    def seeds_of(self, name: str) -> list[int]:
        r"""Returns the seeds of a method."""
        return self.methods[name].seeds or self.seeds

    def references_of(self, name: str) -> list[str | None]:
        r"""Returns the references that a method is trained with."""
        return self.methods[name].references or self.references

    def ordered(self, names: list[str]) -> list[str]:
        r"""Returns methods with all whose runs they need, each after those that it needs."""
        found: dict[str, None] = {}

        def add(name: str) -> None:
            if name not in found:
                for need in self.methods[name].needs:
                    add(need)
                found[name] = None

        for name in names:
            add(name)
        return list(found)


def load_study(name: str, folder: Path = STUDIES) -> Study:
    r"""Returns the study of a name.

    Arguments:
        name: The name of a file in `folder`, without its suffix.
        folder: Where studies are.

    Raises:
        UserError: If there is none, or one of its keys is not as expected.
    """
    path = folder / f"{name}.yml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yml")))
        raise UserError(f"study {name!r}: no such file in {folder}, expected one of {known}.")
    return Study.of(read_yaml(path), str(path))
