r"""Detectors for your own data: a ratio of inputs, and a ratio of a frozen network's features."""

__all__ = [
    "FeatureRatio",
    "FeatureRatioOptions",
    "OneStepDetector",
    "Scorer",
    "TrainedModel",
    "input_shape",
    "load_scorer",
    "model_metadata",
    "read_model",
]

from .feature_ratio import FeatureRatio, FeatureRatioOptions
from .one_step import OneStepDetector
from .scorer import (
    Scorer,
    TrainedModel,
    input_shape,
    load_scorer,
    model_metadata,
    read_model,
)
