r"""Commands: argument parsing and printing, nothing else. The work is done by the library."""
