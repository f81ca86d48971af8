"""The lowest versions that are allowed, and the files of other installers, agree with pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

import oldest
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


def test_every_dependency_has_one_lower_bound():
    project = oldest.read()
    found = oldest.lowest(project)
    named = [
        *project["dependencies"],
        *(text for texts in project["optional-dependencies"].values() for text in texts),
    ]
    assert set(found) == {re.split(r"[\[>]", text)[0] for text in named}
    assert found["torch"] == "2.6"
    assert set(oldest.lowest(project, ())) == {text.split(">")[0] for text in project["dependencies"]}


@pytest.mark.parametrize(
    ("dependencies", "problem"),
    [
        (["torch"], "no lower bound"),
        (["torch<3"], "no lower bound"),
        (["a>=1", "a>=2"], "two lower bounds: 1 and 2"),
    ],
)
def test_what_cannot_be_a_constraint_is_refused(dependencies, problem):
    with pytest.raises(ValueError, match=problem):
        oldest.lowest({"dependencies": dependencies})


def test_an_upper_bound_and_extras_are_left_out():
    project = {"dependencies": ["a[b]>=1.2,<2"], "optional-dependencies": {"c": ["d>=3"], "e": ["f>=4"]}}
    assert oldest.lowest(project) == {"a": "1.2", "d": "3", "f": "4"}
    assert oldest.lowest(project, ("e",)) == {"a": "1.2", "f": "4"}


def test_the_installed_versions_are_in_the_ranges():
    from importlib.metadata import PackageNotFoundError, version

    packaging = pytest.importorskip("packaging.version")
    for name, low in oldest.lowest(oldest.read(), ("dicom", "review", "study")).items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        assert packaging.Version(installed) >= packaging.Version(low), name


def test_conda_and_docker_install_what_pyproject_says():
    """Neither lists a dependency of its own: both install the project, and torch for the CPU at most."""
    content = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    (pip,) = (item["pip"] for item in content["dependencies"] if isinstance(item, dict))
    assert pip == ["-e ."]
    assert [item for item in content["dependencies"] if isinstance(item, str)] == [
        f"python{oldest.read()['requires-python']}",
        "pip",
    ]
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    installs = [line.split("pip install ")[1] for line in lines if "pip install" in line]
    assert [item.split(" --index-url ")[0] for item in installs] == [
        "--no-cache-dir torch torchvision",
        "--no-cache-dir .",
    ]
    (base,) = (line for line in lines if line.startswith("FROM "))
    version = re.fullmatch(r"FROM python:3\.(\d+)-slim", base)
    low, high = oldest.python_range()
    assert version
    assert low <= (3, int(version[1])) < high


def test_the_classifiers_name_the_range_of_python():
    low, high = oldest.python_range()
    classifiers = oldest.read()["classifiers"]
    start = "Programming Language :: Python :: 3."
    named = [item.rpartition(" ")[2] for item in classifiers if item.startswith(start)]
    assert named == [f"3.{minor}" for minor in range(low[1], high[1])]


def test_the_makefile_tests_the_oldest():
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^test-oldest:\n((?:\t.*\n)+)", make, re.MULTILINE)
    assert recipe
    lines = recipe[1].splitlines()
    assert any("tests/oldest.py > $(OLDEST)/constraints.txt" in line for line in lines)
    assert any("-c $(OLDEST)/constraints.txt" in line for line in lines)
    assert "pytest" in lines[-1]
