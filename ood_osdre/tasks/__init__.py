r"""Tasks that need a ratio itself: density, KL and mutual information, each beside its truth.

For data of your own: :func:`fit_density`, :func:`mutual_information`, :class:`KLTracker` and
:class:`DriftMonitor`. They are imported on first use, so that `--help` does not wait for torch.
"""

__all__ = [
    "Density",
    "DriftMonitor",
    "FitOptions",
    "KLTracker",
    "fit_density",
    "mutual_information",
]

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .density import Density, fit_density
    from .information import mutual_information
    from .methods import FitOptions
    from .tracking import DriftMonitor, KLTracker

_HOMES = {
    "Density": "density",
    "DriftMonitor": "tracking",
    "FitOptions": "methods",
    "KLTracker": "tracking",
    "fit_density": "density",
    "mutual_information": "information",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
