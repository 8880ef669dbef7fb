r"""Builds the path, the distribution of training times and the weight of a configuration."""

__all__ = ["NOISES", "SCHEDULES", "WEIGHTS", "build_path", "build_times", "build_weight"]

from collections.abc import Callable

from ..config import Config
from ..sections import PathConfig
from .gaussian import GaussianPath, Moments
from .noises import BridgeNoise, DDBINoise, DequantisationNoise, NoiseModel
from .schedules import (
    FollmerSchedule,
    KumaraswamySchedule,
    LinearSchedule,
    Schedule,
    TrigonometricSchedule,
    VariancePreservingSchedule,
)
from .times import (
    BridgeWeight,
    Constant,
    InverseVarianceTimes,
    InverseVarianceWeight,
    LogitNormalTimes,
    NoiseVarianceWeight,
    Times,
    UniformTimes,
    Weight,
)

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "linear": LinearSchedule,
    "trigonometric": TrigonometricSchedule,
    "vp": VariancePreservingSchedule,
    "follmer": FollmerSchedule,
    "kumaraswamy_affine": lambda: KumaraswamySchedule(kind="affine"),
    "kumaraswamy_spherical": lambda: KumaraswamySchedule(kind="spherical"),
}
#: Builds a noise model by name, of the path's options and whether its variance is learnt.
NOISES: dict[str, Callable[[PathConfig, bool], NoiseModel]] = {
    "dequantisation": lambda o, learnable: DequantisationNoise(o.eps),
    "bridge": lambda o, learnable: BridgeNoise(o.gamma2, o.eps, learnable),
    "ddbi": lambda o, learnable: DDBINoise(o.gamma2, o.eps, learnable),
}
#: Builds a weight by name, of the path and the second moments of its ends.
WEIGHTS: dict[str, Callable[[GaussianPath, Moments], Weight]] = {
    "constant": lambda path, moments: Constant(),
    "bridge": lambda path, moments: BridgeWeight(),
    "inverse_variance": InverseVarianceWeight,
    "noise_variance": lambda path, moments: NoiseVarianceWeight(path),
}


def build_path(config: Config) -> GaussianPath:
    r"""Builds the path from the reference to ID data."""
    path = config.path
    # A learnable path gains mostly by the bridge's variance: about fourfold on images.
    learnable = config.objective.path_variance > 0
    noise = NOISES[path.noise](path, learnable)
    return GaussianPath(SCHEDULES[path.schedule](), noise, path.t_min)


def build_times(config: Config, path: GaussianPath, moments: Moments) -> Times:
    r"""Builds the distribution of training times, on the path's interval.

    Arguments:
        config: The configuration.
        path: The path.
        moments: The second moments of its ends.
    """
    (low, high), stratified = path.t_range, config.times.stratified
    if config.times.kind == "uniform":
        return UniformTimes(low, high, stratified=stratified)
    if config.times.kind == "logit_normal":
        return LogitNormalTimes(low=low, high=high, stratified=stratified)
    return InverseVarianceTimes(path, moments, stratified=stratified)


def build_weight(config: Config, path: GaussianPath, moments: Moments) -> Weight:
    r"""Builds the weight of the score-matching terms; arguments as for :func:`build_times`."""
    return WEIGHTS[config.objective.weight](path, moments)
