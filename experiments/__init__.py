"""Benchmarks, tables and comparisons: commands that print what README and LOG say."""

import kvjax  # noqa: F401  # first: from here on Ctrl-C during the imports is no traceback
