"""Where this package lies, and what lies beside it in a checkout.

Only PACKAGE is there in an installed package: whoever needs the others says so if they are not.
"""

import pathlib

import kvjax

PACKAGE = pathlib.Path(kvjax.__file__).parent
ROOT = PACKAGE.parent
CONFIGS = ROOT / "configs"
EXPERIMENTS = ROOT / "experiments"
RESULTS = EXPERIMENTS / "results"
