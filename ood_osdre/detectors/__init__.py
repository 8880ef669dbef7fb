r"""Detectors for your own data: a ratio of inputs, and a ratio of a frozen network's features."""
