"""Folders of this package, and those beside it in a checkout.

An installed package has only PACKAGE, with the configs in it.
"""

import pathlib

import kvjax

PACKAGE = pathlib.Path(kvjax.__file__).parent
ROOT = PACKAGE.parent
CONFIGS = PACKAGE / "configs"  # in an installed package; in a checkout beside it
CONFIGS = CONFIGS if CONFIGS.is_dir() else ROOT / "configs"
