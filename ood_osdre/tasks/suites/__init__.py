r"""The commands of the tasks: suites with a known truth, their tables and figures."""
