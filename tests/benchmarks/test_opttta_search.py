"""The program that runs OptTTA with its whole budget: parts, a second call, and its table."""

from __future__ import annotations

import json
from itertools import combinations

import programs
import pytest
import small_site
import yaml

from tesla_med.demo.recipes import RECIPES
from tesla_med.tta._shared.opttta_views import OPERATIONS

pytestmark = pytest.mark.usefixtures("one_thread")
POLICIES = 21


@pytest.fixture(scope="module")
def program():
    return programs.load("opttta_search")


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """A generated site of two volumes and a source model, as words of the command line."""
    folder = tmp_path_factory.mktemp("search")
    small_site.make_volumes(folder / "data/prostate/hard", 2, seed=3, name="hard")
    about = {"pipeline": "prostate", "institution": "hard", **RECIPES["prostate"].describe("hard")}
    (folder / "prostate").mkdir()
    (folder / "prostate/hard.yaml").write_text(yaml.safe_dump(about), encoding="utf-8")
    few = [f"methods.opttta.{name}={value}" for name, value in FEW.items()]
    words = ["--task", "prostate", "--sites", str(folder / "prostate/hard.yaml"), "--device", "cpu"]
    words += ["--data", str(folder / "data"), "--weights", str(small_site.weights_with_statistics(folder))]
    return [*words, "--set", *small_site.SMALL, *few]


FEW = {"first_steps": 1, "later_steps": 2, "batch_slices": 2, "views": 2, "learning_rate": 0.05}


def without_times(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    for item in [found, *found["volumes"]]:
        for name in ("command", "seconds", "search_seconds"):
            item.pop(name, None)
    return found


def test_parts_and_a_call_that_was_cut_off_make_what_one_call_makes(program, call, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert program.main([*call, "--out", str(whole)]) == 0
    assert "the time is up" not in capsys.readouterr().out
    assert program.main([*call, "--out", str(parts), "--part", "1/2"]) == 0
    assert not list(parts.glob("*.json"))  # half of the sub-policies are missing
    assert program.main([*call, "--out", str(parts), "--part", "2/2", "--minutes", "0"]) == 0
    assert "the time is up" in capsys.readouterr().out
    assert len(list((parts / "hard-1").glob("*.pt"))) == (POLICIES + 1) // 2
    assert program.main([*call, "--out", str(parts), "--part", "2/2"]) == 0
    assert without_times(parts / "hard-1.json") == without_times(whole / "hard-1.json")
    found = without_times(whole / "hard-1.json")
    sets = list(combinations(OPERATIONS, 5))
    best = sorted(range(POLICIES), key=found["totals"].__getitem__)[:3]
    assert found["kept"] == [list(sets[index]) for index in best]
    learned = [item for item in found["learned"] if "bias/brightness" in item]
    assert all(item["bias/brightness"] != 0 for item in learned)
    assert [item["case"] for item in found["volumes"]] == ["Case00", "Case01"]
    assert all(0 <= item["dice"] <= 100 for item in found["volumes"])
    before = (whole / "hard-1/00.pt").stat().st_mtime_ns
    assert program.main([*call, "--out", str(whole)]) == 0
    assert (whole / "hard-1/00.pt").stat().st_mtime_ns == before
    assert program.main(["--table", "--out", str(whole)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("Case0" in line for line in lines[-2:]) == 2
