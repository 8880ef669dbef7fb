r"""Detectors for your own data: a ratio of inputs, and a ratio of a frozen network's features."""

__all__ = [
    "FeatureRatio",
    "GivenClassifier",
    "HeadData",
    "OneStepDetector",
    "Scorer",
    "TrainedModel",
    "fit_head",
    "load_scorer",
    "read_classifier",
    "read_model",
]

from .classifiers import GivenClassifier, read_classifier
from .feature_head import fit_head
from .feature_ratio import FeatureRatio
from .head_data import HeadData
from .one_step import OneStepDetector
from .scorer import Scorer, TrainedModel, load_scorer, read_model
