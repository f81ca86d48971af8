"""The mutation program: what it changes, what it draws, and a whole run on a tiny project."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).resolve().parents[2]
LOSSES = '''"""A module with one function that is tested well and one that is not tested at all."""


def inside(value: float, low: float = 0.0) -> bool:
    """Return whether the value is above low."""
    return value > low


def untested(value: int) -> int:
    """Return the next value."""
    return value + 1
'''
TESTS = """from tesla_med.losses import inside


def test_inside():
    assert inside(0.5) is True
    assert inside(0.0) is False
    assert inside(-1.0) is False
    assert inside(2.0, 3.0) is False
"""


@pytest.fixture(scope="module")
def program():
    return programs.load("mutants")


@pytest.fixture
def project(tmp_path):
    """Make a project with one tiny module and its tests."""
    root = tmp_path / "project"
    for name, text in {
        "tesla_med/__init__.py": "",
        "tesla_med/losses.py": LOSSES,
        "tests/test_losses.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["slow: s", "gpu: g", "shared: d"]\n',
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def changes(program, text):
    return {(item.kind, item.before, item.after) for item in program.mutants("m.py", text)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = b < c", ("comparison", "b < c", "(b <= c)")),
        ("a = b is None", ("comparison", "b is None", "(b is not None)")),
        ("a = b - c", ("arithmetic", "b - c", "(b + c)")),
        ("a -= c", ("arithmetic", "a -= c", "a += c")),
        ("a -= c", ("dropped statement", "a -= c", "pass")),
        ("a = 3", ("constant", "3", "(4)")),
        ("a = 0.0", ("constant", "0.0", "(1.0)")),
        ("a = True", ("constant", "True", "(False)")),
        ("a = b and c", ("boolean", "b and c", "(b or c)")),
        ("a = not b", ("boolean", "not b", "(b)")),
        ("if a:\n    b()", ("boolean", "a", "(not (a))")),
        ("a.b = c", ("dropped statement", "a.b = c", "pass")),
        ("f(a)", ("dropped statement", "f(a)", "pass")),
        ("c = f(a, b)", ("argument swap", "f(a, b)", "(f(b, a))")),
        ("def f():\n    return a", ("return None", "return a", "return None")),
    ],
)
def test_each_kind_of_change(program, text, expected):
    assert expected in changes(program, text)


@pytest.mark.parametrize(
    "text",
    [
        '"""Words."""',
        "def f(a: Literal[1] = None) -> Literal[2]: ...",
        "log.info(a)",
        "a = f'{b:.1f}'",
        "if TYPE_CHECKING:\n    import a",
        "f(a=b, *c)[d:e]",
        "return_ = f(*a, b)",
        "a = 'x' % b",
    ],
)
def test_what_is_no_behaviour_is_left_alone(program, text):
    found = program.mutants("m.py", text)
    assert [item for item in found if item.kind != "dropped statement"] == []


def test_every_mutant_is_another_program_that_can_be_read(program):
    path = ROOT / "tesla_med/losses.py"
    text = path.read_text(encoding="utf-8")
    found = program.mutants("tesla_med/losses.py", text)
    unchanged = ast.dump(ast.parse(text))
    assert len({item.name for item in found}) == len(found) > 50
    for item in found:
        assert ast.dump(ast.parse(item.applied(text))) != unchanged
        assert text.splitlines()[: item.line - 1] == item.applied(text).splitlines()[: item.line - 1]


def test_text_before_a_change_may_have_wide_letters(program):
    text = 'a, b = "§é", c + d\n'
    (mutant,) = [item for item in program.mutants("m.py", text) if item.kind == "arithmetic"]
    assert mutant.applied(text) == 'a, b = "§é", (c - d)\n'


def test_samples_hold_every_file_and_the_smaller_samples(program):
    found = {name: program.mutants(name, "a = b + c\n" * size) for name, size in (("one", 2), ("two", 40))}
    drawn = program.sample(found, 21, 0)
    assert program.sample(found, 9, 0) == drawn[:9]
    assert program.sample(found, 21, 1) != drawn
    assert {item.file for item in drawn[:2]} == {"one", "two"}
    assert sum(item.file == "one" for item in drawn) == 1
    assert len(set(program.sample(found, 400, 0))) == 42


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a = max(b, c)", "argument swap"),
        ("a = torch.minimum(b, c)", "argument swap"),
        ("a = class_agreement(b, c, d)", "argument swap"),
        ("a = 1e-6", "constant"),
    ],
)
def test_what_no_test_could_notice_is_not_drawn(program, text, kind):
    found = program.mutants("m.py", text)
    assert kind in {item.kind for item in found}
    assert kind not in {item.kind for item in program.sample({"m.py": found}, 9, 0)}


def test_every_module_has_tests(program):
    found = program.every_mutant(ROOT, ())
    assert "tesla_med/tta/tesla.py" in found
    assert not set(found) & set(program.LEFT_OUT)
    for name in found:
        files = [part.split("::")[0] for part in program.tests_of(ROOT, name) if part.startswith("tests/")]
        assert files, name
        assert all((ROOT / part).is_file() for part in files), name
        if "/tta/_" in name:  # no method, so that no contract is selected by its name
            assert name.removeprefix("tesla_med/") in program.TESTS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tta/tesla.py", True),
        ("tta/adacontrast.py", True),
        ("tta/_shared/augmented.py", True),
        ("tta/base.py", True),
        ("tta/_shared/passes.py", False),
        ("engine/guard.py", False),
    ],
)
def test_bounds_and_defaults_are_tested_where_there_are_parameters(program, name, expected):
    arguments = program.tests_of(ROOT, f"tesla_med/{name}")
    assert [part in arguments for part in program.PARAMETERS] == [expected, expected]
    if "-k" in arguments:  # tests of defaults bear the name of a class, not of a method
        selected = arguments[arguments.index("-k") + 1].split(" or ")
        for part in program.PARAMETERS:
            file, _, test = part.partition("::")
            assert (test or Path(file).stem) in selected
            assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8")
    assert "docs" in program.COPIED


@pytest.mark.slow
def test_a_quick_run(program, project, capsys):
    out = project / "found.jsonl"
    call = ["--root", str(project), "--out", str(out), "--only", "tesla_med/losses.py"]
    assert program.main([*call, "--quick"]) == 0
    shown = capsys.readouterr().out
    results = {row["before"]: row["outcome"] for row in program.read(out) if "name" in row}
    assert len(results) > 1
    assert all(
        (outcome == program.SURVIVED) == (before in ("value + 1", "return value + 1", "1"))
        for before, outcome in results.items()
    )
    assert set(results.values()) == {program.KILLED, program.SURVIVED}
    assert (project / "tesla_med/losses.py").read_text(encoding="utf-8") == LOSSES
    count = len([row for row in program.read(out) if "name" in row])
    left = sum(outcome == program.SURVIVED for outcome in results.values())
    assert f"| tesla_med/losses.py | {count} | {count - left} | {left} |" in shown
    lines = out.read_text(encoding="utf-8")
    assert program.main([*call, "--quick"]) == 0  # nothing is run again
    assert out.read_text(encoding="utf-8") == lines
    capsys.readouterr()
    assert program.main([*call, "--table"]) == 0
    assert f"| all | {count} |" in capsys.readouterr().out
    assert program.main([*call, "--list"]) == 0
    assert f"{count} of {count} mutants in 1 files" in capsys.readouterr().out


def test_results_of_another_text_are_not_taken(program, project, capsys):
    out = project / "found.jsonl"
    call = ["--root", str(project), "--out", str(out)]
    found = program.every_mutant(project, ())["tesla_med/losses.py"]
    old = {"name": found[0].name, "sha": "another", "outcome": program.KILLED, "file": found[0].file}
    out.write_text(json.dumps(old) + '\n{"cut off', encoding="utf-8")
    assert program.main([*call, "--table"]) == 0
    assert "| all | 0 | 0 | 0 | n/a |" in capsys.readouterr().out


def test_tests_that_fail_anyway_end_it(program, project):
    path = project / "tests/test_losses.py"
    path.write_text(TESTS.replace("inside(2.0, 3.0) is False", "inside(2.0, 3.0)"), encoding="utf-8")
    with pytest.raises(SystemExit, match="killed without any mutation"):
        program.main(["--root", str(project), "--out", str(project / "found.jsonl"), "--quick"])


@pytest.mark.slow
def test_a_mutant_that_does_not_end_is_killed(program, project):
    place = program.Workplace(project, project / "copy")
    (project / "copy/tests/test_losses.py").write_text("def test():\n    while True: ...\n", encoding="utf-8")
    outcome, seconds = place.run(["tests/test_losses.py"], 2.0)
    assert outcome == program.TIMEOUT
    assert seconds >= 2.0
