r"""Detectors for your own data: a ratio of inputs, and a ratio of a frozen network's features."""

__all__ = [
    "FeatureRatio",
    "OneStepDetector",
    "Scorer",
    "TrainedModel",
    "load_scorer",
    "read_model",
]

from .feature_ratio import FeatureRatio
from .one_step import OneStepDetector
from .scorer import Scorer, TrainedModel, load_scorer, read_model
