"""The project's own files agree with each other, imports are light, the wheel is complete."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import oldest
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
HEAVY = (
    "torch",
    "monai",
    "nibabel",
    "SimpleITK",
    "matplotlib",
    "skimage",
    "scipy",
    "tensorboard",
    "kornia",
    "distributed",
)
TEXT = (".md", ".py", ".yaml", ".yml", ".toml", ".cff", ".j2", ".sh", "Makefile", "Dockerfile")


def settings():
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout


def own_files():
    """Return every text file that belongs to the project."""
    folders = ("tesla_med", "tests", "docs", "pipelines", "site_configs", "benchmarks")
    found = [path for path in ROOT.iterdir() if path.is_file()]
    found += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in found if path.name.endswith(TEXT)]


# ------------------------------------------------------------ agreement


def test_environment_is_in_step_with_the_package():
    content = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    project = settings()["project"]
    assert content["name"] == project["name"]
    assert f"python{project['requires-python']}" in content["dependencies"]
    pip = next(item["pip"] for item in content["dependencies"] if isinstance(item, dict))
    assert "-e ." in pip
    assert "pip" in content["dependencies"]


def test_versions_agree():
    import tesla_med

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == tesla_med.__version__
    assert tesla_med.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert citation["license"] == settings()["project"]["license"]


def test_python_version_is_the_same_everywhere():
    content = settings()
    low, above = oldest.python_range(content["project"])
    lowest, highest = f"3.{low[1]}", f"3.{above[1] - 1}"
    assert content["tool"]["mypy"]["python_version"] == lowest
    assert content["tool"]["ruff"]["target-version"] == f"py{lowest.replace('.', '')}"
    for page in ("README.md", "docs/how-to/install.md"):
        assert f"Python {lowest} to {highest}" in (ROOT / page).read_text(encoding="utf-8")


def test_make_runs_what_the_readme_says():
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^demo: .*\n\t.*tesla-med demo", make, re.MULTILINE)
    assert re.search(r"^test: .*\n\t.*pytest", make, re.MULTILINE)


# ------------------------------------------------------------ imports


def test_import_is_light():
    loaded = run("import sys, tesla_med; print(*sorted(sys.modules))").split()
    assert not [name for name in HEAVY if name in loaded]


def test_help_is_light():
    code = (
        "import sys\nfrom tesla_med.cli.app import run\n"
        "codes = [run(words) for words in (['--help'], ['adapt', '--help'], ['--version'])]\n"
        "print('loaded', codes, *sorted(sys.modules))"
    )
    output = run(code).rpartition("loaded")[2]
    assert output.startswith(" [0, 0, 0]")
    assert not [name for name in HEAVY if name in output.split()]


@pytest.mark.parametrize(
    "module", ["config.models", "config.files", "errors", "registry", "types", "io.files", "io.cases"]
)
def test_configuration_loads_no_network_library(module):
    loaded = run(f"import sys, tesla_med.{module}; print(*sorted(sys.modules))").split()
    assert not [name for name in ("torch", "monai") if name in loaded]


def test_public_names_exist():
    import tesla_med

    for name in tesla_med.__all__:
        assert getattr(tesla_med, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        _ = tesla_med.nothing_of_the_kind


def test_public_names_stay_what_they_are_whatever_was_imported():
    import importlib
    import pkgutil
    import types

    import tesla_med

    for found in pkgutil.walk_packages(tesla_med.__path__, "tesla_med."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    for name in tesla_med.__all__:
        for _ in range(2):
            assert not isinstance(getattr(tesla_med, name), types.ModuleType), name


# ------------------------------------------------------------ the wheel


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    """Build a wheel from a copy of the sources and return the names in it."""
    pytest.importorskip("hatchling")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("tesla_med", "site_configs", "pipelines"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)  # noqa: S603
    (wheel,) = target.glob("tesla_med-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("folder", ["site_configs", "pipelines"])
def test_wheel_holds_the_configuration(wheel_names, folder):
    expected = {f"tesla_med/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.yaml")}
    assert expected
    assert expected <= wheel_names


def test_wheel_holds_the_package(wheel_names):
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tesla_med").rglob("*.py")}
    assert expected <= wheel_names
    pages = {"tesla_med/reports/report.html.j2", "tesla_med/review/static/niivue.umd.js"}
    pages |= {f"tesla_med/reports/{name}" for name in ("_page.css", "_slices.css", "_slices.js")}
    assert {"tesla_med/py.typed", *pages} <= wheel_names
    assert not [name for name in wheel_names if name.startswith(("tests/", "docs/", "benchmarks/"))]


# ------------------------------------------------------------ portability


def test_no_file_names_a_path_of_one_machine():
    homes = re.compile(r"(?<![\w.:])/(?:home|Users|root|work|tmp)/\w|[A-Z]:\\Users\\")
    found = {}
    for path in own_files():
        lines = path.read_text(encoding="utf-8").splitlines()
        hits = [line.strip() for line in lines if homes.search(line) and "re.compile" not in line]
        if hits:
            found[path.relative_to(ROOT).as_posix()] = hits
    assert not found


def test_files_named_in_code_and_pages_exist():
    """A Markdown file that is mentioned by name is one of the project's."""
    known = {path.name for path in own_files() if path.suffix == ".md"}
    for path in own_files():
        named = set(re.findall(r"\b([A-Z]{3,}\.md)\b", path.read_text(encoding="utf-8")))
        assert named <= known, f"{path.name} names {named - known}"


def test_pictures_are_small():
    pictures = sorted((ROOT / "docs" / "images").glob("*"))
    assert {path.name for path in pictures} >= {"overlay.png", "report.png", "tensorboard.png"}
    for path in pictures:
        assert path.stat().st_size <= 300_000, f"{path.name} has {path.stat().st_size} bytes"
