"""How a MONAI bundle paints overlapping regions into one mask, read from the text of its function."""

from __future__ import annotations

import ast
from dataclasses import dataclass

LONGEST = 5000
"""Characters of a function that is read."""
LARGEST = 65535
"""Value that a class may have in a mask."""


@dataclass(frozen=True)
class Painting:
    """Regions in the order in which they are painted, each over those before it.

    Attributes:
        order: the channels.
        values: what they are in the mask, in the same order.
    """

    order: tuple[int, ...]
    values: tuple[int, ...]


def painting(text: object, count: int) -> Painting | None:
    """Return how ``$lambda x: torch.where(x[[2]] > 0, 4, torch.where(..., 0))`` paints; None of others.

    The first condition that holds decides, so the regions are painted in the reverse order.

    Args:
        text: the function, as the configuration has it.
        count: number of channels, each of which must be asked for once.
    """
    function = _function(text)
    if function is None:
        return None
    mask, node = ast.unparse(function.args), function.body
    found: list[tuple[int, int]] = []
    while isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.where":
        if len(node.args) != 3 or node.keywords:
            return None
        channel, value = _channel(node.args[0], mask), _number(node.args[1])
        if channel is None or value is None:
            return None
        found.append((channel, value))
        node = node.args[2]
    channels, values = [item[0] for item in found[::-1]], [item[1] for item in found[::-1]]
    each_once = sorted(channels) == list(range(count))
    if _number(node) != 0 or not each_once or len(set(values)) != count or not all(values):
        return None
    return Painting(tuple(channels), tuple(values))


def _function(text: object) -> ast.Lambda | None:
    """Return a function of one argument; None of other texts."""
    if not isinstance(text, str) or not text.startswith("$") or len(text) > LONGEST:
        return None
    try:
        tree = ast.parse(text[1:].strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if isinstance(tree, ast.Lambda) and ast.unparse(tree.args).isidentifier() else None


def _channel(node: ast.expr, mask: str) -> int | None:
    """Return c of ``x[[c]] > 0``, the condition that a voxel is in region c; None of others."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return None
    left, limit = node.left, node.comparators[0]
    number = limit.value if isinstance(limit, ast.Constant) else None
    if not isinstance(number, int | float) or isinstance(number, bool):
        return None
    above = isinstance(node.ops[0], ast.Gt) and 0 <= number < 1
    equal = isinstance(node.ops[0], ast.Eq) and number == 1
    if not (above or equal) or not isinstance(left, ast.Subscript) or ast.unparse(left.value) != mask:
        return None
    part = left.slice
    if isinstance(part, ast.List) and len(part.elts) == 1:
        return _number(part.elts[0])
    if (
        isinstance(part, ast.Slice)
        and part.lower is not None
        and part.upper is not None
        and part.step is None
    ):
        first, end = _number(part.lower), _number(part.upper)
        return first if first is not None and end == first + 1 else None
    return None


def _number(node: ast.expr) -> int | None:
    value = node.value if isinstance(node, ast.Constant) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return int(value) if 0 <= value <= LARGEST and value == int(value) else None
