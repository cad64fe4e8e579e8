"""Turns formulas such as W_Q W_Kᵀ in a text into MathML, which browsers draw without a script."""

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
    """Returns a text, already escaped for HTML, with its formulas as MathML."""
    return _FORMULA.sub(_math, text)


def _math(match: re.Match) -> str:
    if match["top"]:
        inside = f"<mfrac>{_row(match['top'])}{_row(match['bottom'])}</mfrac>"
    else:
        left_side = f"<mi>{match['named']}</mi><mo>=</mo>" if match["named"] else ""
        inside = left_side + _row(match["plain"])
    return f"<math>{inside}</math>"


def _row(text: str) -> str:
    """Returns the MathML of a product of terms and norms."""
    text = re.sub(r"([A-Z])_([A-Za-z])(ᵀ|\^T|)", _term, text)
    text = re.sub(r"\|([^|]*)\|(²?)", _norm, text)
    return f"<mrow>{text.replace(' ', '')}</mrow>"


def _term(match: re.Match) -> str:
    parts = f"<mi>{match[1]}</mi><mi>{match[2]}</mi>"
    return f"<msubsup>{parts}<mi>T</mi></msubsup>" if match[3] else f"<msub>{parts}</msub>"


def _norm(match: re.Match) -> str:
    norm = f"<mrow><mo>|</mo>{match[1]}<mo>|</mo></mrow>"
    return f"<msup>{norm}<mn>2</mn></msup>" if match[2] else norm
