"""The page of the cases is made of the tests, and no number is used twice."""

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("case_table", Path(__file__).parent / "table.py")
table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(table)


def test_the_page_is_up_to_date():
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), "run: python tests/cases/table.py"


def test_numbers_are_those_of_the_files_and_used_once():
    numbers = [number for number, _, _ in table.rows()]
    assert len(numbers) == len(set(numbers))
    files = [int(path.name.split("_")[2]) for path in sorted(table.HERE.glob("test_case_*.py"))]
    assert sorted(files) == numbers


def test_every_rule_is_a_sentence():
    assert all(rule.endswith(".") and len(rule) > 20 for _, rule, _ in table.rows())
