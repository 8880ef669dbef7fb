r"""The verbs of the command `ood-osdre` that are not a command of their own elsewhere."""
