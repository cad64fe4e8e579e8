"""Mutants of a Python file: small edits that change what it does, one at a time.

Edits are of the text, so that no other line moves. Left out are docstrings, annotations and
messages: whatever stands in a `raise`, is printed, or is help of a command line; and `strict=` of
zips, which only a mistake of ours would meet.
"""

import ast
from collections.abc import Iterator
import dataclasses
import re

_COMPARISONS = {
    ast.Lt: ("<", "<=", ">="),
    ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_NEGATED_BY_COMPARISON = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_ARITHMETIC = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: (r"\*\*", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: (r"\|", "&"),
}
_SAYING = re.compile(r"print|say|waiting|exit|fail|warn|warning|info|debug|\w*(Error|Warning)")
_KEYWORDS_LEFT_OUT = {"help", "metavar", "description", "epilog", "usage", "strict"}
_SYMMETRIC = {"isinstance", "max", "min", "suppress", "promote_types"}
_SKIPPED_FIELDS = {"annotation", "returns", "type_params", "format_spec", "type_comment"}
_TYPES = re.compile(r"[A-Z]\w*[a-z]\w*|None|int|float|str|bytes|bool|dict|list|tuple|set|type")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """An edit of a file.

    Attributes:
      lines: first and last line, from 1, of the statement, or of a compound statement's head.
      start, end: bytes of the file that `after` replaces.
    """

    operator: str
    lines: tuple[int, int]
    start: int
    end: int
    after: str

    def apply(self, text: bytes) -> bytes:
        return text[: self.start] + self.after.encode() + text[self.end :]

    def before(self, text: bytes) -> str:
        return text[self.start : self.end].decode()

    def is_valid(self, text: bytes) -> bool:
        """Returns True if the file still parses, to another syntax tree."""
        try:
            return ast.dump(ast.parse(self.apply(text))) != ast.dump(ast.parse(text))
        except SyntaxError:
            return False


def mutants(text: bytes) -> list[Mutant]:
    """Returns all mutants of a file, in the order of the text."""
    all_mutants = _File(text).mutants(ast.parse(text), (1, 1))
    return sorted(set(all_mutants), key=lambda m: (m.start, m.end, m.operator, m.after))


class _File:
    """Yields the mutants of nodes of one file."""

    def __init__(self, text: bytes):
        self._text = text
        lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    def mutants(self, node: ast.AST, lines: tuple[int, int]) -> Iterator[Mutant]:
        """Yields the mutants of a node and of its descendants; `lines` are its statement's."""
        if _is_left_out(node):
            return
        if isinstance(node, ast.stmt):
            lines = _lines(node)
            yield from self._of_statement(node, lines)
        yield from self._of_expression(node, lines)
        if isinstance(node, ast.Raise) or _emits_message(node):
            return
        for name, value in ast.iter_fields(node):
            if name in _SKIPPED_FIELDS:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.mutants(child, lines)

    def _of_statement(self, node: ast.stmt, lines: tuple[int, int]) -> Iterator[Mutant]:
        if _can_be_dropped(node):
            yield Mutant("statement", lines, *self._range(node), "pass")
        if isinstance(node, ast.Return) and not _is_none(node.value):
            yield Mutant("return", lines, *self._range(node.value), "None")
        if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
            yield from self._between(node.target, node.value, "arithmetic", lines, node.op)

    def _of_expression(self, node: ast.AST, lines: tuple[int, int]) -> Iterator[Mutant]:
        match node:
            case ast.Compare():
                sides = [node.left, *node.comparators]
                for left, right, op in zip(sides, sides[1:], node.ops, strict=False):
                    yield from self._between(left, right, "comparison", lines, op)
            case ast.BinOp() if type(node.op) in _ARITHMETIC and not _is_no_number(node):
                yield from self._between(node.left, node.right, "arithmetic", lines, node.op)
            case ast.BoolOp():
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield from self._between(left, right, "boolean", lines, node.op)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                name = "condition" if isinstance(node.op, ast.Not) else "arithmetic"
                yield Mutant(name, lines, *self._range(node), f"({self._segment(node.operand)})")
            case ast.Constant():
                if (after := _changed_constant(node.value, self._segment(node))) is not None:
                    yield Mutant("constant", lines, *self._range(node), after)
            case ast.Call():
                yield from self._of_call(node, lines)
        tests = [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else []
        for test in tests + (node.ifs if isinstance(node, ast.comprehension) else []):
            if not _has_a_negation_of_its_own(test):
                after = f"(not ({self._segment(test)}))"
                yield Mutant("condition", lines, *self._range(test), after)

    def _of_call(self, node: ast.Call, lines: tuple[int, int]) -> Iterator[Mutant]:
        if _emits_message(node):
            return
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in _KEYWORDS_LEFT_OUT:
                start, end = self._range(keyword)
                comma = re.match(rb"\s*,?", self._text[end:])
                yield Mutant("keyword", lines, start, end + comma.end(), "")
        if _name(node.func) in _SYMMETRIC:
            return
        for first, second in zip(node.args, node.args[1:], strict=False):
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                (start, stop), (again, end) = self._range(first), self._range(second)
                between = self._text[stop:again].decode()
                after = self._segment(second) + between + self._segment(first)
                yield Mutant("arguments", lines, start, end, after)

    def _between(self, left, right, operator, lines, op) -> Iterator[Mutant]:
        """Yields the mutants of the operator between two nodes."""
        if isinstance(op, ast.And | ast.Or):
            old, *new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
        else:
            old, *new = (_COMPARISONS | _ARITHMETIC)[type(op)]
        offset = self._range(left)[1]
        match = re.search(old.encode(), self._text[offset : self._range(right)[0]])
        for after in new if match else ():
            yield Mutant(operator, lines, offset + match.start(), offset + match.end(), after)

    def _range(self, node) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _segment(self, node) -> str:
        start, end = self._range(node)
        return self._text[start:end].decode()


def _lines(node: ast.stmt) -> tuple[int, int]:
    """Returns the lines of a statement, or of a compound statement's head."""
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    if not body:
        return node.lineno, node.end_lineno
    first = body[0].pattern if isinstance(body[0], ast.match_case) else body[0]
    return node.lineno, max(node.lineno, first.lineno - 1)


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.TypeAlias() | ast.Import() | ast.ImportFrom():
            return True
        case ast.keyword():
            return node.arg in _KEYWORDS_LEFT_OUT
        case ast.If():
            names = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
            return bool(names & {"__name__", "TYPE_CHECKING"})
        case ast.JoinedStr():
            return False
        case ast.Assign():
            return any(_name(target) == "__all__" for target in node.targets)
    return False


def _can_be_dropped(node: ast.stmt) -> bool:
    """Returns True if a statement has an effect and binds no name that is used later."""
    match node:
        case ast.Expr():
            return not isinstance(node.value, ast.Yield | ast.YieldFrom | ast.Await)
        case ast.Raise() | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break():
            return True
        case ast.Assert():
            return True
        case ast.Assign():
            read = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            names = [t for t in node.targets if isinstance(t, ast.Name | ast.Tuple | ast.List)]
            return not names or all(isinstance(t, ast.Name) and t.id in read for t in names)
    return False


def _changed_constant(value, segment: str) -> str | None:
    """Returns the source of a changed constant; None for strings with spaces."""
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int | float):
        return repr(value + 1)
    is_plain_text = isinstance(value, str) and re.fullmatch(
        r"""[rR]?(["'])(?!\1\1).*\1|""\"\"""", segment
    )
    return repr(f"{value}XX") if is_plain_text and not re.search(r"\s", value) else None


def _is_no_number(node: ast.BinOp) -> bool:
    """Returns True if an operator joins or formats strings, or joins types."""
    sides = (node.left, node.right)
    if isinstance(node.op, ast.BitOr):
        return any(_TYPES.fullmatch(_name(s)) or _is_none(s) for s in sides)
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str))
        for s in sides
    )


def _has_a_negation_of_its_own(test: ast.expr) -> bool:
    if isinstance(test, ast.Compare):
        return len(test.ops) == 1 and isinstance(test.ops[0], _NEGATED_BY_COMPARISON)
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def _emits_message(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and bool(_SAYING.fullmatch(_name(node.func)))


def _is_none(node: ast.AST | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _name(node: ast.AST) -> str:
    """Returns the last part of a dotted name, without brackets; "" for other expressions."""
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return getattr(node, "id", "") or getattr(node, "attr", "")
