"""Digests of source files without comments and docstrings.

A study refuses to mix runs of different code.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
import hashlib
import pathlib

from kvjax.foundation.checkout import ROOT


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_of(paths: Iterable[pathlib.Path]) -> dict[str, str]:
    """Returns the digest of each file, and of all Python files in folders, by name.

    Names are relative to the package, or to the checkout for files outside the package.
    """
    files = []
    for path in paths:
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    names = [file.relative_to(ROOT).as_posix().removeprefix("kvjax/") for file in files]
    digests = [digest(_bare(file.read_text())) for file in files]
    return dict(zip(names, digests, strict=True))


def _bare(source: str) -> str:
    """Returns a file's source without docstrings and comments, in a normal form."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the files whose digests differ, or that only one of the mappings has."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def in_short(names: Sequence[str], count: int = 3) -> str:
    """Joins the first names, and states how many follow."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
