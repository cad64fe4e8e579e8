"""Benchmarks, tables and comparisons: the commands behind the figures of experiments/reports/."""

import kvjax  # noqa: F401  # first: from here on Ctrl-C during the imports is no traceback
