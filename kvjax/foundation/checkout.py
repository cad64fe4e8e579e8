"""Paths of this package's folders, and of the folders next to it in a checkout.

An installed package has only PACKAGE, with the configs in it.
"""

import functools
import glob
import hashlib
import pathlib

import kvjax

PACKAGE = pathlib.Path(kvjax.__file__).parent
ROOT = PACKAGE.parent
CONFIGS = PACKAGE / "configs"  # where an installed package has them
CONFIGS = CONFIGS if CONFIGS.is_dir() else ROOT / "configs"


@functools.cache
def package_digest() -> str:
    """Returns the SHA-256 of kvjax's Python files and their names."""
    digest = hashlib.sha256()
    for path in sorted(glob.glob(f"{glob.escape(str(PACKAGE))}/**/*.py", recursive=True)):
        with open(path, "rb") as file:
            digest.update(f"{path.removeprefix(f'{PACKAGE}/')}\0".encode() + file.read())
    return digest.hexdigest()
