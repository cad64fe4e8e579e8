"""The folder of this package, and the folders beside it in a checkout.

An installed package has only PACKAGE. Code that needs another says so if it is missing.
"""

import pathlib

import kvjax

PACKAGE = pathlib.Path(kvjax.__file__).parent
ROOT = PACKAGE.parent
CONFIGS = ROOT / "configs"
EXPERIMENTS = ROOT / "experiments"
RESULTS = EXPERIMENTS / "results"
