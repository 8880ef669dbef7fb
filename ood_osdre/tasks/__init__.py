r"""Tasks that need a ratio itself: density, KL and mutual information, each beside its truth."""
