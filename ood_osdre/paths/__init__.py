r"""Gaussian paths from the reference to ID data: schedules, noise, times and weights of time."""

__all__ = [
    "BridgeNoise",
    "BridgeWeight",
    "Constant",
    "DDBINoise",
    "DequantisationNoise",
    "FollmerSchedule",
    "GaussianPath",
    "InverseVarianceTimes",
    "InverseVarianceWeight",
    "KumaraswamySchedule",
    "LinearSchedule",
    "LogitNormalTimes",
    "Moments",
    "NoiseModel",
    "NoiseVarianceWeight",
    "Schedule",
    "Times",
    "TrigonometricSchedule",
    "UniformTimes",
    "VariancePreservingSchedule",
    "Weight",
]

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
