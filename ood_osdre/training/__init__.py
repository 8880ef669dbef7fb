r"""Training: batches, the loop, checkpoints and run folders, several processes."""
