"""The benchmark of source models: a whole quick run, taken up again, and the arithmetic of its tables."""

from __future__ import annotations

import json
from pathlib import Path

import programs
import pytest

from tesla_med.models.loading import load_model

FAST = ("--device", "cpu", "--quick", "--steps", "2", "--volumes", "1", "--set")
FEW = ("protocols.N-O.tesla.updates_per_case=1", "methods.tesla.weak_views=1", "preprocessing.size=[32,32]")


@pytest.fixture(scope="module")
def zoo():
    return programs.load("zoo")


def row(model="m", site="s", seed=1, *, source=80.0, bn=82.0, default=85.0, trusted=True, **candidates):
    given = candidates or {"source": source, "adapted": default}
    return {
        "model": model,
        "site": site,
        "seed": seed,
        "trusted": trusted,
        "dice": {"source": source, "bn": bn, "released": 81.0, "unguarded": 84.0, "default": default},
        "candidates": {name: {"dice": value} for name, value in given.items()},
        "classes": [
            {"dice": default / 100, "predicted_dice": 0.8, "predicted_low": 0.7, "predicted_high": 0.84}
        ],
    }


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_quick_run_is_taken_up_where_it_was(zoo, tmp_path, capsys, monkeypatch):
    wanted = ["robust, group norm", "robust, MONAI DynUNet", "reference"]
    call = [*FAST, *FEW, "--out", str(tmp_path), "--models", *wanted]
    assert zoo.main(call) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 models to do" in printed  # the reference weights are for real sites
    files = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert files == ["robust-MONAI-DynUNet-1.json", "robust-group-norm-1.json"]
    content = json.loads((tmp_path / "results" / files[1]).read_text())
    assert not content["batch_norm"]
    assert [item["site"] for item in content["volumes"]] == ["easy", "hard"]
    for item in content["volumes"]:
        assert set(item["candidates"]) == {"source", "part", "adapted"}
        found = zoo.judged(item, zoo.load_pipeline("prostate"))
        assert "bn" not in found["dice"]
        assert found["dice"]["default"] == item["candidates"][found["taken"]]["dice"]
        assert found["dice"]["source"] == item["candidates"]["source"]["dice"]
        never = zoo.load_pipeline("prostate", ("guard.head_start=1000",))
        assert zoo.judged(item, never)["taken"] in ("adapted", "source", "part")
    weights = tmp_path / "weights/robust-group-norm-1/source.safetensors"
    model = load_model(weights, zoo.load_pipeline("prostate")).model
    assert any(type(layer).__name__ == "GroupNorm" for layer in model.modules())
    monkeypatch.setattr(zoo, "measure", lambda *_: pytest.fail("it is finished"))
    assert zoo.main(call) == 0
    assert "0 of 2 models to do" in capsys.readouterr().out


def test_every_model_has_a_pipeline_that_can_be_built(zoo, tmp_path):
    for quick in ((), ("--quick",)):
        options = zoo.parse(["--out", str(tmp_path), *quick])
        place = zoo.Place({}, {}, {})
        for name in options.models:
            if zoo.MODELS[name].sites:
                zoo.pipeline_for(zoo.MODELS[name], options, place)
    half = zoo.pipeline_for(zoo.MODELS["robust, half width"], zoo.parse(["--out", "x"]), place)
    assert half.model.params["width"] == 32


def test_means_losses_and_counts(zoo):
    rows = [
        row(seed=1),
        row(seed=2, default=74.0, source=80.0),
        row(seed=2, default=5.0, source=6.5, bn=60.0, trusted=False, adapted=6.5, own=60.0),
    ]
    line = zoo.table(rows).splitlines()[-1]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["m", "s", "2", "55.5", "74.7", "81.0", "84.0", "54.7", "6.0", "2", "1", "1", "1", "1"]


def test_what_is_behind_is_named(zoo):
    text = zoo.summary([row(default=81.4), row(site="t", default=81.6)])
    assert "More than 0.5 below the better of source and bn: m on s by 0.1." in text
    assert "0.0 % by more than 1" in text
    assert "none." in zoo.summary([row()])


def test_the_candidates_by_hand(zoo):
    def volume(own, half, steady_own, steady_half):
        signals = {"consistency_own": steady_own, "consistency_half": steady_half}
        return row(own=own, half=half, adapted=60.0) | {"signals": signals}

    rows = [volume(70.0, 40.0, 0.9, 0.8), volume(None, 55.0, 0.9, 0.9)]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in zoo.candidates(rows).splitlines()
    ]
    found = dict(zip(lines[0], lines[2], strict=True))
    names = ("source", "own", "half", "part", "mixed", "adapted", "best", "chosen")
    assert [found[name] for name in names] == ["", "35.0", "47.5", "", "", "60.0", "65.0", "62.5"]
    assert lines[3][2:] == lines[2][2:]  # of one model and site the mean is its own


def test_the_steadiest_seed_of_each_volume(zoo):
    def volume(case, seed, steady):
        return row(seed=seed) | {"case": case, "signals": {"consistency_adapted": steady}}

    rows = [volume("a", 1, 0.5), volume("a", 2, 0.7), volume("b", 1, 0.9), volume("b", 2, 0.9)]
    assert [(item["case"], item["seed"]) for item in zoo.steadiest(rows)] == [("a", 2), ("b", 1)]


def test_the_audit_by_hand(zoo):
    rows = [row(default=70.0), row(default=82.0), row(default=86.0)]
    last = zoo.audit(rows).splitlines()[-1]
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells == ["all", "", "3", "", "6.0", "67 %"]


def test_the_page_shows_what_the_results_say(zoo):
    """Tables and sentences of the page are those that ``--table`` prints of the results beside it."""
    reference = Path(zoo.__file__).parents[1] / "docs" / "reference"
    page = (reference / "results.md").read_text(encoding="utf-8")
    said = zoo.summary(zoo.finished(zoo.parse(["--out", str(reference / "results" / "zoo"), "--table"])))
    assert len(said.splitlines()) > 20
    assert [line for line in said.splitlines() if line not in page] == []
