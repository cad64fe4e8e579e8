"""The folder of this package, and the folders beside it in a checkout.

An installed package has only PACKAGE, with the configs in it. Code that needs another folder says
so if it is missing.
"""

import pathlib

import kvjax

PACKAGE = pathlib.Path(kvjax.__file__).parent
ROOT = PACKAGE.parent
CONFIGS = PACKAGE / "configs"  # of an installed package; a checkout has them beside it
CONFIGS = CONFIGS if CONFIGS.is_dir() else ROOT / "configs"
EXPERIMENTS = CONFIGS.parent / "experiments"  # beside them: site-packages may have another
RESULTS = EXPERIMENTS / "results"
