r"""Images: benchmarks on disk and in memory, and how they become network inputs.

What is imported here needs no PyTorch, so that commands read manifests and report on data at once;
batches on a device are the business of :mod:`ood_osdre.training.batches`.
"""

__all__ = [
    "BenchmarkData",
    "ImageSet",
    "Manifest",
    "SetSpec",
    "choose_benchmark",
    "hold_out_reference",
    "load_benchmark",
    "load_digits_benchmark",
    "load_manifest",
]

from .benchmark import BenchmarkData, choose_benchmark, load_benchmark, load_digits_benchmark
from .manifests import Manifest, SetSpec, load_manifest
from .sets import ImageSet, hold_out_reference
