r"""Tasks that need a ratio itself: density, KL and mutual information, each beside its truth.

For data of your own: :func:`fit_density`, :class:`KLTracker` and :class:`DriftMonitor` from here,
and :func:`ood_osdre.tasks.mutual_information.mutual_information`. They are looked up on first use,
so that `--help` does not wait for torch.
"""

__all__ = ["Density", "DriftMonitor", "FitOptions", "KLTracker", "fit_density"]

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .drift import DriftMonitor
    from .methods import FitOptions
    from .own_density import Density, fit_density
    from .tracking import KLTracker

_HOMES = {
    "Density": "own_density",
    "DriftMonitor": "drift",
    "FitOptions": "methods",
    "KLTracker": "tracking",
    "fit_density": "own_density",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
