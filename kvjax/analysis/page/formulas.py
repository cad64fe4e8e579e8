"""Formulas in texts, such as W_Q W_Kᵀ, as MathML, which browsers draw without a script."""

import re

_TERM = r"[A-Z]_[A-Za-z](?:ᵀ|\^T)?"
_PRODUCT = rf"{_TERM}(?: {_TERM})*"
_NORM = rf"\|{_PRODUCT}\|²?"
_NORMS = rf"{_NORM}(?: {_NORM})*"
_FORMULA = re.compile(
    rf"(?<![\w|&;])(?:(?P<top>{_NORMS}) over (?P<bottom>{_NORMS})"
    rf"|(?:(?P<named>[A-Z]) = )?(?P<plain>{_NORMS}|{_PRODUCT}))(?![\w|])"
)


def set_in(text: str) -> str:
    """Returns escaped text with its formulas as MathML; other text stays as it is."""
    return _FORMULA.sub(_math, text)


def _math(found: re.Match) -> str:
    if found["top"]:
        inside = f"<mfrac>{_row(found['top'])}{_row(found['bottom'])}</mfrac>"
    else:
        named = f"<mi>{found['named']}</mi><mo>=</mo>" if found["named"] else ""
        inside = named + _row(found["plain"])
    return f"<math>{inside}</math>"


def _row(text: str) -> str:
    """Returns a product of terms and norms."""
    text = re.sub(r"([A-Z])_([A-Za-z])(ᵀ|\^T|)", _term, text)
    text = re.sub(r"\|([^|]*)\|(²?)", _norm, text)
    return f"<mrow>{text.replace(' ', '')}</mrow>"


def _term(found: re.Match) -> str:
    parts = f"<mi>{found[1]}</mi><mi>{found[2]}</mi>"
    return f"<msubsup>{parts}<mi>T</mi></msubsup>" if found[3] else f"<msub>{parts}</msub>"


def _norm(found: re.Match) -> str:
    norm = f"<mrow><mo>|</mo>{found[1]}<mo>|</mo></mrow>"
    return f"<msup>{norm}<mn>2</mn></msup>" if found[2] else norm
