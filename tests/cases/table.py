"""Write docs/reference/cases.md from the tests of this folder: ``python tests/cases/table.py``."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "reference" / "cases.md"
HEAD = """# Cases

These are problems that users of such tools meet, by number, and the rule that applies here. Each has a
test in `tests/cases/`; `python tests/cases/table.py` generates this page from the tests, and a test keeps it
up to date. A case marked "failed at 866c00e" went wrong at that commit, and a test of it fails there.

| case | rule | status |
|---|---|---|
"""

SEEN_FAILING = frozenset((17, 34, 37, 44, 64, 68, 80, 83, *range(94, 122)))
"""Cases of which a test fails at commit 866c00e by what it asserts of the outcome."""


def rows() -> list[tuple[int, str, str]]:
    """Return (number, rule, status) of every file, sorted by number."""
    found = []
    for path in sorted(HERE.glob("test_case_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        values = {
            target.id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id in ("CASE", "STATUS")
        }
        rule = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
        status = values.get("STATUS", "tested")
        seen = "; failed at 866c00e" if values["CASE"] in SEEN_FAILING else ""
        found.append((values["CASE"], rule, status + seen))
    return sorted(found)


def page() -> str:
    """Return the page."""
    lines = [
        f"| {number} | {rule.replace('|', chr(92) + '|')} | {status} |" for number, rule, status in rows()
    ]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
