r"""The import of OpenOOD, which may fail in many ways, none of which is ours to raise unasked.

OpenOOD imports every method it has, and with them packages that its own installation does not
declare. A plugin that failed with it could not even be tested, so whatever exception that import
raises is kept, and said by :func:`explain_import` or :func:`require`.
"""

__all__ = ["Foreign", "base_postprocessor", "explain_import", "is_importable", "require"]

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

from ...errors import UserError, one_line

#: An object of OpenOOD's, which is not annotated.
Foreign: TypeAlias = Any

#: What an evaluation needs, and what brings everything else with it.
NEEDED = "openood.evaluation_api"


@cache
def _attempt() -> Exception | None:
    try:
        import_module(NEEDED)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is kept for whoever asks
        return error
    return None


def is_importable() -> bool:
    r"""Returns whether OpenOOD can be imported here. The first call tries."""
    return _attempt() is None


def explain_import() -> str:
    r"""Returns one line on whether OpenOOD can be imported, and if not, why."""
    error = _attempt()
    if error is None:
        return f"OpenOOD: importable, from {import_module('openood').__path__[0]}."
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "openood":
        return "OpenOOD: not installed; it is not on PyPI, clone it and put it on PYTHONPATH."
    message = one_line(error, None)
    return f"OpenOOD: its import failed with {type(error).__name__}: {message}"


def require(name: str) -> ModuleType:
    r"""Imports a module of OpenOOD.

    Arguments:
        name: Its dotted name.

    Raises:
        UserError: If OpenOOD cannot be imported, saying why.
    """
    if not is_importable():
        raise UserError(explain_import())
    return import_module(name)


class _StandIn:
    r"""What a postprocessor derives from where OpenOOD is not."""

    def __init__(self, config: Foreign) -> None:
        self.config = config


def base_postprocessor() -> type[Any]:
    r"""Returns OpenOOD's class of postprocessors, or a stand-in of the same constructor."""
    if not is_importable():
        return _StandIn
    base: type[Any] = import_module("openood.postprocessors").BasePostprocessor
    return base
