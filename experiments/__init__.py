"""Benchmarks, tables and comparisons: commands that print what experiments/reports/ says."""

import kvjax  # noqa: F401  # first: from here on Ctrl-C during the imports is no traceback
