"""Texts of a MONAI configuration that begin with ``$``, worked out without running them.

MONAI evaluates them as Python. Here numbers, texts, lists and references are combined by operators and
nothing else: no call, no name, no attribute but the data types of torch and numpy. Whatever goes beyond that
raises ``NotPlain``, so that a text can be refused, or left to MONAI by a user who trusts it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

REFERENCE = re.compile(r"@(\w+(?:(?:::|#)\w+)*)")
"""A reference to another key, ``@a`` or ``@a::b::0``; older files separate by ``#``."""
MARKS = ("@", "$", "%")
"""How a text begins that stands for something else: a reference, an expression or a macro."""
LONGEST, LARGEST = 1000, 1e18
"""Characters of an expression, and the number that a result may reach: beyond lies no sensible setting."""
DTYPES = frozenset(("float16", "float32", "float64", "bfloat16", "half", "float", "double")) | frozenset(
    ("uint8", "int8", "int16", "int32", "int64", "long", "int", "bool")
)
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


class NotPlain(Exception):  # noqa: N818 - not an error yet: who asked decides
    """A text cannot be worked out without running it."""


def work_out(text: str, look_up: Callable[[str], Any]) -> Any:
    """Return the value of an expression, its ``$`` taken off.

    Args:
        text: the expression.
        look_up: returns the value of the key that a reference names.

    Raises:
        NotPlain: it holds more than operators over numbers, texts, lists and references.
    """
    if len(text) > LONGEST:
        raise NotPlain(f"an expression of more than {LONGEST} characters")
    names: dict[str, str] = {}

    def placeholder(found: re.Match[str]) -> str:
        name = f"reference_{len(names)}"
        names[name] = found[1].replace("#", "::")
        return name

    try:
        tree = ast.parse(REFERENCE.sub(placeholder, text).strip(), mode="eval")
        return _Reader(names, look_up).value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotPlain(f"it is not a Python expression ({type(error).__name__})") from None
    except (TypeError, ArithmeticError, KeyError, IndexError) as error:
        raise NotPlain(f"it cannot be worked out ({error})") from None


class _Reader:
    """Reads the nodes of an expression that are on the list."""

    def __init__(self, names: dict[str, str], look_up: Callable[[str], Any]) -> None:
        self.names, self.look_up = names, look_up

    def value(self, node: ast.expr) -> Any:
        reader = getattr(self, f"_{type(node).__name__.lower()}", None)
        if reader is None:
            raise NotPlain(f"it holds {_in_words(node)}")
        return _checked(reader(node))

    def _constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bytes | complex) or node.value is Ellipsis:
            raise NotPlain("it holds a constant that is neither number nor text")
        return node.value

    def _name(self, node: ast.Name) -> Any:
        if node.id not in self.names:
            raise NotPlain(f"it names {node.id!r}")
        return self.look_up(self.names[node.id])

    def _attribute(self, node: ast.Attribute) -> str:
        """Return the name of a data type."""
        known = isinstance(node.value, ast.Name) and node.value.id in ("torch", "np", "numpy")
        if not known or node.attr not in DTYPES:
            raise NotPlain(f"it holds {_in_words(node)}")
        return node.attr

    def _list(self, node: ast.List) -> list[Any]:
        return [self.value(item) for item in node.elts]

    def _tuple(self, node: ast.Tuple) -> list[Any]:
        return [self.value(item) for item in node.elts]

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        if type(node.op) not in _UNARY:
            raise NotPlain("it holds an operator over bits")
        return _UNARY[type(node.op)](self.value(node.operand))

    def _binop(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if type(node.op) not in _BINARY:
            raise NotPlain("it holds an operator over bits or matrices")
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        joined = isinstance(node.op, ast.Add) and type(left) is type(right) and isinstance(left, str | list)
        repeated = isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int)
        if repeated and right > 100:
            raise NotPlain("it repeats a list more than 100 times")
        if isinstance(node.op, ast.Pow) and numbers and (abs(right) > 64 or abs(left) > LARGEST):
            raise NotPlain("it holds a power that is too large")
        if not (numbers or joined or repeated):
            raise NotPlain(f"it combines {type(left).__name__} and {type(right).__name__}")
        return _BINARY[type(node.op)](left, right)

    def _boolop(self, node: ast.BoolOp) -> Any:
        found = None
        for item in node.values:
            found = self.value(item)
            if bool(found) != isinstance(node.op, ast.And):
                return found
        return found

    def _compare(self, node: ast.Compare) -> bool:
        left = self.value(node.left)
        for kind, item in zip(node.ops, node.comparators, strict=True):
            right = self.value(item)
            if any(isinstance(part, list | dict) and _nested(part) for part in (left, right)):
                raise NotPlain("it compares lists of lists or mappings")
            if type(kind) not in _COMPARE:
                raise NotPlain("it asks what is in a list")
            if not _COMPARE[type(kind)](left, right):
                return False
            left = right
        return True

    def _ifexp(self, node: ast.IfExp) -> Any:
        return self.value(node.body if self.value(node.test) else node.orelse)

    def _subscript(self, node: ast.Subscript) -> Any:
        content, index = self.value(node.value), self.value(node.slice)
        if isinstance(content, list) and isinstance(index, int):
            return content[index]
        if isinstance(content, dict) and isinstance(index, str):
            return content[index]
        raise NotPlain("it takes a part of something that is not a list")


def _nested(value: list[Any] | dict[str, Any]) -> bool:
    return isinstance(value, dict) or any(isinstance(item, list | dict) for item in value)


def _checked(value: Any) -> Any:
    """Return a value unless it is too large, or holds what is still to be followed or worked out."""
    if isinstance(value, int | float) and not abs(value) <= LARGEST:
        raise NotPlain("its value is not finite or too large")
    if isinstance(value, str | list) and len(value) > 10 * LONGEST:
        raise NotPlain("its value is too long")
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and item[:1] in MARKS:
            raise NotPlain(f"it takes {item[:60]!r} out of another key, where it is not worked out")
    return value


def threshold(text: str) -> float | None:
    """Return T of ``lambda v: v > T``, which many configurations choose a foreground by; None of others."""
    found = re.fullmatch(r"\s*lambda\s+(\w+)\s*:\s*(\w+)\s*>\s*(-?\d+(?:\.\d*)?)\s*", text)
    return float(found[3]) if found is not None and found[1] == found[2] else None


def _in_words(node: ast.expr) -> str:
    names = {"Call": "a call", "Lambda": "a function", "ListComp": "a loop", "JoinedStr": "a formatted text"}
    text = ast.unparse(node)
    return f"{names.get(type(node).__name__, 'something to run')}, {text[:60]}"
