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
    "Rates",
    "Schedule",
    "ScheduleRates",
    "Times",
    "TrigonometricSchedule",
    "UniformTimes",
    "VariancePreservingSchedule",
    "Weight",
]

from .gaussian import GaussianPath, Moments, Rates
from .noises import BridgeNoise, DDBINoise, DequantisationNoise, NoiseModel
from .schedules import (
    FollmerSchedule,
    KumaraswamySchedule,
    LinearSchedule,
    Schedule,
    ScheduleRates,
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
