r"""OS-DRE inside the harnesses that people already use."""
