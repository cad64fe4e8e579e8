"""Source files as digests of what they compute: a study does not mix runs of other code."""

import ast
from collections.abc import Iterable, Mapping, Sequence
import hashlib
import pathlib

from kvjax.foundation.checkout import ROOT


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_of(places: Iterable[pathlib.Path]) -> dict[str, str]:
    """By file what it says, without its comments and docstrings; of folders all files.

    Files of the package are named from there, others from the checkout's root.
    """
    files = [f for p in places for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    named = lambda file: file.relative_to(ROOT).as_posix().removeprefix("kvjax/")
    return {named(file): digest(_bare(file.read_text())) for file in files}


def _bare(source: str) -> str:
    """A file without docstrings and comments, in one form."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Files that differ from those of another time."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def in_short(names: Sequence[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
