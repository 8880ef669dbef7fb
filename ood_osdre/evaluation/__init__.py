r"""Evaluation: scores, metrics, calibration, tables, plots and run records."""
