"""The calculator that an assistant calls while it answers (nanochat, commit 0f00788).

Expressions consist of digits, + - * / . ( ) and blanks; commas are dropped and `**` is refused.
Values are Python's: integers stay integers, `/` gives a float. Expressions are parsed by Python and
evaluated here, so that nothing but arithmetic can run.

Two modes of writing the result:

    nanochat  as Python does: 16 / 2 is 8.0. GSM8K's texts have 8 instead, so that in 978 of the
      test set's 4,282 calls a model trained on GSM8K reads another result than in training.
    dataset   as GSM8K does: without .0, rounded to 10 digits
"""

import ast
import operator

MODES = ("nanochat", "dataset")
MAX_CHARACTERS = 1000  # maximum length of an expression; nanochat limits time instead (3 s)
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
    """Returns the calculator's output; None if the expression is refused or has no value.

    Args:
      mode: one of MODES.
    """
    answer = value(expression)
    if answer is None:
        return None
    if mode == "dataset" and isinstance(answer, float):
        answer = round(answer, 10)
        answer = int(answer) if answer.is_integer() else answer
    try:
        return str(answer)
    except ValueError:  # above Python's limit of digits
        return None


def value(expression: str) -> int | float | None:
    """Returns the value of an expression; None if it is refused or has none."""
    text = expression.replace(",", "")
    if not text.strip() or len(text) > MAX_CHARACTERS or not _ALLOWED.issuperset(text):
        return None
    if "**" in text:
        return None
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_evaluate(left), _evaluate(right))
    raise ValueError("not arithmetic")
