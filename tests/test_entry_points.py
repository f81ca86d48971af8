"""Entries of other distributions: installed beside the package, they are found by name like its own."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_site as small

import tesla_med
from tesla_med.config.files import load_pipeline
from tesla_med.config.models import SiteConfig
from tesla_med.models.base import build_model
from tesla_med.models.checkpoint import make_card, save_checkpoint

DOCS = Path(__file__).parents[1] / "docs" / "how-to" / "extend.md"
GROUPS = ("methods", "tasks", "models", "reports", "metrics")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Return a folder that holds the example of the documentation, as an installer would leave it."""
    folder = tmp_path_factory.mktemp("site")
    text = DOCS.read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL))
    for name, content in blocks.items():
        (folder / name).write_text(content, encoding="utf-8")
    declared = re.findall(r'\[project\.entry-points\."(tesla_med\.\w+)"\]\n(\w+) = "(\w+)"', text)
    assert {group for group, _, _ in declared} == {f"tesla_med.{name}" for name in GROUPS}
    assert {f"{module}.py" for _, _, module in declared} == set(blocks)
    about = folder / "hospital-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hospital\nVersion: 1.0\n", encoding="utf-8")
    broken = "[tesla_med.reports]\nbroken = no_such_module\n\n"
    lines = [f"[{group}]\n{name} = {module}\n" for group, name, module in declared]
    other = folder / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n", encoding="utf-8")
    (other / "entry_points.txt").write_text(broken, encoding="utf-8")
    (about / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def listed(folder: Path, what: str) -> tuple[list[str], str]:
    """Return the names that a fresh process lists, and what it warned of."""
    paths = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "tesla_med", "list", what, "--json"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [row[what.removesuffix("s")] for row in json.loads(done.stdout)[what]], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("what", GROUPS)
def test_entries_of_another_distribution_are_found(installed, what):
    names, said = listed(installed, what)
    assert f"hospital_{what.removesuffix('s')}" in names
    assert len(names) > 1, "its own are still there"
    broken = "report 'broken' of no_such_module cannot be loaded: No module named 'no_such_module'"
    assert (broken in said) == (what == "reports")


# ------------------------------------------------------------ the examples work


@pytest.fixture
def imported(installed, monkeypatch):
    """Register the examples in this process, and take them out again."""
    from tesla_med.models.base import MODELS
    from tesla_med.reports.base import REPORTS
    from tesla_med.scoring.metrics import METRICS
    from tesla_med.tasks.base import TASKS
    from tesla_med.tta.base import METHODS

    for registry in (METHODS, TASKS, MODELS, REPORTS, METRICS):
        assert registry.names(), "read its own entries before the example can be found"
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.syspath_prepend(str(installed))
    for name in GROUPS:
        importlib.import_module(f"hospital_{name.removesuffix('s')}")
    yield
    for name in GROUPS:
        del sys.modules[f"hospital_{name.removesuffix('s')}"]


@pytest.mark.usefixtures("imported", "one_thread")
def test_method_metric_and_report_of_the_example_work_in_a_run(tmp_path):
    weights = small.train_weights(tmp_path)
    volumes = tmp_path / "volumes"
    small.make_volumes(volumes, count=1)
    reports = ("reports=[table,hospital_report]",)
    result = small.run(volumes, weights, tmp_path / "out", reports=reports, method="hospital_method")
    assert result.results[0].used == "adapted"
    with (result.out / "report" / "metrics.csv").open(newline="") as stream:
        row = next(csv.DictReader(stream))
    assert 0 <= float(row["hospital_metric"]) <= 1
    assert 0 <= float(row["hospital_metric_source"]) <= 1
    assert (result.out / "report" / "worklist.txt").is_file()


@pytest.mark.usefixtures("imported", "one_thread")
def test_network_and_task_of_the_example_work_in_a_run(tmp_path):
    overrides = (
        *small.FEW,
        "model.name=hospital_model",
        "model.params={width: 4}",
        *small.BARE,
        *small.SMALL[-2:],
    )
    pipeline = load_pipeline("prostate", overrides).model_copy(update={"task": "hospital_task"})
    site = SiteConfig(id="memory", pipeline="prostate", institution="Nowhere")
    stacks = tmp_path / "stacks"
    stacks.mkdir()
    for name in "ab":
        truth = np.zeros((3, 32, 32), np.uint8)
        truth[:, 10:20, 12:22] = 1
        np.save(stacks / f"{name}_mask.npy", truth)
        np.save(stacks / f"{name}.npy", 0.5 * truth + 0.3)
    weights = tmp_path / "weights.safetensors"
    save_checkpoint(weights, build_model(pipeline), make_card(pipeline))
    result = tesla_med.adapt_site(
        site, stacks, pipeline=pipeline, weights=weights, out=tmp_path / "out", device="cpu"
    )
    assert [item.status for item in result.results] == ["ok", "ok"]
    scored = tesla_med.evaluate(result.out, stacks)
    assert sorted(scored) == ["a", "b"]
