r"""Models of a log-ratio: temporal bases, networks, the one-step ratio and its baselines."""
