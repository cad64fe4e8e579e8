"""The calculator that an assistant calls while it answers (nanochat, commit 0f00788).

Allowed are digits and + - * / . ( ) and blanks, commas are dropped, `**` is refused. Values are
Python's: whole numbers stay whole, `/` gives a float. Nothing is evaluated that could be anything
but arithmetic: Python's parser reads the text, and only numbers and operators are followed.

Two ways to write the result:

    nanochat  as Python does: 16 / 2 is 8.0. The training texts of GSM8K say 8, and a model trained
              on them is told 8.0: of the 4,282 calls in its test set 978 differ by that.
    dataset   as the data set does: without .0, rounded to 10 digits
"""

import ast
import operator

MODES = ("nanochat", "dataset")
MAX_CHARACTERS = 1000  # of an expression; nanochat has no limit but 3 s
_ALLOWED = frozenset("0123456789*+-/.() ")
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def result(expression: str, mode: str = "nanochat") -> str | None:
    """What the calculator answers; None if it answers nothing.

    Args:
      mode: one of MODES.
    """
    found = value(expression)
    if found is None:
        return None
    if mode == "dataset" and isinstance(found, float):
        found = round(found, 10)
        found = int(found) if found.is_integer() else found
    try:
        return str(found)
    except ValueError:  # more digits than Python writes
        return None


def value(expression: str) -> int | float | None:
    """The value of an expression; None for what is refused or has none."""
    text = expression.replace(",", "")
    if not text.strip() or len(text) > MAX_CHARACTERS or not _ALLOWED.issuperset(text):
        return None
    if "**" in text:
        return None
    try:
        return _of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _of(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_of(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_of(left), _of(right))
    raise ValueError("no arithmetic")
