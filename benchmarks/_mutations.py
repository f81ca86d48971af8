"""Mutations of Python source: small changes, one at a time, that a test should notice.

An AST mutator of its own, since what is needed of mutmut and cosmic-ray is just what they lack: mutmut 3
mutates a whole package into a folder of its own and runs its own pytest there, with neither a sample by file
nor tests by module, and cosmic-ray works on the tree itself and knows neither dropped statements, swapped
arguments nor results of None. Only the text of one node is replaced, so that the rest of the file stays as it
is.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
SYMMETRIC = ("min", "max", "minimum", "maximum", "corrcoef", "agreement", "class_agreement")
"""Functions whose first two arguments may change places: nothing could notice it."""
NEGLIGIBLE = 1e-3
"""Floats below it keep a division from failing; twice as much does so, too."""
SILENT = ("log", "warnings")
"""Objects whose calls are not dropped: what they say is not behaviour."""
UNTOUCHED = {"annotation", "returns", "decorator_list", "bases"}
"""Fields of nodes that hold no behaviour of their own."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: path in the project.
        line: where the change starts, from 1.
        kind: comparison, arithmetic, constant, boolean, dropped statement, argument swap or return None.
        before: the text that is replaced, on one line.
        after: what it is replaced by.
        start: first character of the text in the file.
        end: the one after its last.
        sha: of the file, so that results for another text of it are not taken for this.
    """

    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    sha: str

    @property
    def name(self) -> str:
        """Unique among the mutants of a file."""
        return f"{self.file}:{self.line}:{self.start}:{self.kind}:{self.after}"

    @property
    def equivalent(self) -> bool:
        """Whether no test could notice it: arguments of a symmetric function, or twice a negligible float."""
        node = (
            ast.parse(self.before, mode="eval").body if self.kind in ("argument swap", "constant") else None
        )
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            return called in SYMMETRIC
        value = node.value if isinstance(node, ast.Constant) else None
        return isinstance(value, float) and 0 < value < NEGLIGIBLE

    def applied(self, source: str) -> str:
        """Return the text of the file with the change."""
        return source[: self.start] + self.after + source[self.end :]


def mutants(file: str, source: str) -> list[Mutant]:
    """Return every mutant of a file, in order."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    sha = hashlib.sha256(source.encode()).hexdigest()[:12]

    def place(line: int, offset: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:offset].decode())

    found = {}
    for node, kind, after in _changes(ast.parse(source)):
        if after.strip("()") == ast.unparse(node).strip("()"):  # such as swapped arguments that are the same
            continue
        start = place(node.lineno, node.col_offset)
        end = place(node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)
        before = source[start:end]
        item = Mutant(file, node.lineno, kind, " ".join(before.split()), after, start, end, sha)
        found[item.name] = item
    return list(found.values())


def _changes(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, str, str]]:
    """Yield (node to replace, kind, text) in the order of the source."""
    for node in _nodes(tree):
        if isinstance(node, ast.stmt):
            yield from _of_statement(node)
        elif isinstance(node, ast.expr):
            for kind, changed in _of_expression(node):
                yield node, kind, f"({ast.unparse(ast.fix_missing_locations(changed))})"


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is below it, without what holds no behaviour and without f-strings."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in UNTOUCHED:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                    continue
                yield from _nodes(child)


def _of_statement(node: ast.stmt) -> Iterator[tuple[ast.stmt | ast.expr, str, str]]:
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield node, "return None", "return None"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if ast.unparse(node.value.func).split(".")[0] not in SILENT:
            yield node, "dropped statement", "pass"
    elif isinstance(node, ast.AugAssign):
        yield node, "dropped statement", "pass"
        swapped = ARITHMETIC.get(type(node.op))
        if swapped is not None:
            yield node, "arithmetic", ast.unparse(ast.AugAssign(node.target, swapped(), node.value))
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
        yield node, "dropped statement", "pass"
    elif isinstance(node, ast.If):
        yield node.test, "boolean", f"(not ({ast.unparse(node.test)}))"


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    changed = copy.deepcopy(node)
    if isinstance(changed, ast.Compare) and len(changed.ops) == 1 and type(changed.ops[0]) in COMPARISONS:
        changed.ops = [COMPARISONS[type(changed.ops[0])]()]
        yield "comparison", changed
    elif isinstance(changed, ast.BinOp) and type(changed.op) in ARITHMETIC and not _is_text(changed.left):
        changed.op = ARITHMETIC[type(changed.op)]()
        yield "arithmetic", changed
    elif isinstance(changed, ast.BoolOp):
        changed.op = ast.And() if isinstance(changed.op, ast.Or) else ast.Or()
        yield "boolean", changed
    elif isinstance(changed, ast.UnaryOp) and isinstance(changed.op, (ast.Not, ast.USub)):
        yield "boolean" if isinstance(changed.op, ast.Not) else "arithmetic", changed.operand
    elif isinstance(changed, ast.IfExp):
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield "boolean", changed
    elif isinstance(changed, ast.Constant) and isinstance(changed.value, (bool, int, float)):
        yield "constant", ast.Constant(_other(changed.value))
    elif isinstance(changed, ast.Call) and len(changed.args) > 1:
        first, second = changed.args[:2]
        if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            changed.args[:2] = [second, first]
            yield "argument swap", changed


def _other(value: float) -> float:
    """Return another constant of the same type."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else 2.0 * value if value else 1.0


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
