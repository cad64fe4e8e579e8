"""Arithmetic on printed figures: a decimal stands for all numbers that round to it.

`holds("98.91 - 98.28 == 0.63")` is true if numbers that round to these three can satisfy it.
Numbers with a decimal point count as rounded at their last digit ("10." to the nearest integer),
numbers without one as exact. Inequalities ignore the rounding: they compare the printed numbers.
"""

import ast
from collections.abc import Callable
import math
import operator
from typing import NamedTuple

_EDGE = 1e-9  # a number halfway between two decimals may round to either


class Span(NamedTuple):
    """An interval of numbers, with arithmetic."""

    least: float
    most: float

    @property
    def middle(self) -> float:
        return (self.least + self.most) / 2

    def meets(self, other: "Span") -> bool:
        """Returns whether the two have a number in common."""
        return max(self.least, other.least) <= min(self.most, other.most) + _EDGE


def span(printed: str) -> Span:
    """Returns the interval of numbers that round to a decimal; an integer stands for itself."""
    figure, (_, point, decimals) = float(printed), printed.partition(".")
    half = 0.5 * 10.0 ** -len(decimals) if point else 0.0
    return Span(figure - half, figure + half)


def holds(text: str) -> bool:
    """Returns whether printed figures can satisfy a comparison, or several joined by "and"."""
    tree = ast.parse(text, mode="eval").body
    comparisons = tree.values if isinstance(tree, ast.BoolOp) else [tree]
    return all(_holds(comparison, text) for comparison in comparisons)


def _holds(tree: ast.Compare, source: str) -> bool:
    sides = [_evaluate(side, source) for side in (tree.left, *tree.comparators)]
    pairs = zip(sides, tree.ops, sides[1:], strict=False)
    return all(_COMPARISONS[type(op)](left, right) for left, op, right in pairs)


def value(expression: str) -> float:
    """Returns the value of an expression, the middle of its interval."""
    return _evaluate(ast.parse(expression, mode="eval").body, expression).middle


_COMPARISONS: dict[type, Callable[[Span, Span], bool]] = {
    ast.Eq: Span.meets,
    ast.Lt: lambda left, right: left.middle < right.middle - _EDGE,
    ast.LtE: lambda left, right: left.middle <= right.middle + _EDGE,
    ast.Gt: lambda left, right: left.middle > right.middle + _EDGE,
    ast.GtE: lambda left, right: left.middle >= right.middle - _EDGE,
}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_FUNCTIONS = {"exp": math.exp, "log": math.log, "ceil": math.ceil}


def _evaluate(node: ast.expr, source: str) -> Span:
    match node:
        case ast.Constant():
            return span(ast.get_source_segment(source, node))
        case ast.UnaryOp(op=ast.USub()):
            least, most = _evaluate(node.operand, source)
            return Span(-most, -least)
        case ast.BinOp():
            left, right = (_evaluate(side, source) for side in (node.left, node.right))
            ends = [_OPERATORS[type(node.op)](x, y) for x in left for y in right]
            return Span(min(ends), max(ends))
        case ast.Call(func=ast.Name(id="mean")):
            spans = [_evaluate(argument, source) for argument in node.args]
            return Span(*(sum(ends) / len(ends) for ends in zip(*spans, strict=True)))
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            return Span(*map(_FUNCTIONS[name], _evaluate(argument, source)))  # increasing
    raise ValueError(f"{source!r}: cannot be evaluated")
