r"""Gaussian paths from the reference to ID data: schedules, noise, times and weights of time."""
