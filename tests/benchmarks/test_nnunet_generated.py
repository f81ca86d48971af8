"""The benchmark of nnU-Nets on generated scanners: its model is read back, its scanners differ, its table."""

import argparse
import json

import numpy as np
import programs
import pytest
import torch


@pytest.fixture(scope="module")
def program():
    return programs.load("nnunet_generated")


def test_every_scanner_differs_from_the_one_that_is_trained_on_and_more_with_its_strength(program):
    usual = program.cases(program.scanner(), 1, 0)[0]
    for setting, strengths in program.SHIFTS.values():
        assert list(strengths) == sorted(strengths)
        moved = []
        for strength in strengths[::5]:
            image, labels, _ = program.cases(program.scanner(**{setting: strength}), 1, 0)[0]
            assert np.array_equal(labels, usual[1])
            moved.append(float((program.normalised(image) - program.normalised(usual[0])).square().mean()))
        assert 0 < moved[0] < moved[1]


def test_the_table_counts_models_volumes_and_the_worst(program):
    rows = [
        {
            "seed": seed,
            "shift": "noise",
            "strength": 0.3,
            "guard": guard,
            "volume": 0,
            "source": 60.0,
            "dice": dice,
        }
        for seed, guard, dice in ((1, False, 70.0), (1, True, 58.5), (2, False, 66.0), (2, True, 64.0))
    ]
    lines = program.table(rows).splitlines()
    assert lines[2] == "| noise | 2 | 2 | 60.0 | 68.0 | 61.2 | -1.5 |"
    assert lines[3] == "| all | 2 | 2 | 60.0 | 68.0 | 61.2 | -1.5 |"


@pytest.mark.slow
def test_a_model_is_trained_written_as_nnunets_is_and_adapted(program, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "TRAINED_ON", 2)
    model = program.train(tmp_path / "model", 1, 2)
    assert {item.name for item in model.iterdir()} == {"plans.json", "dataset.json", "fold_0"}
    saved = torch.load(model / "fold_0" / "checkpoint_final.pth", weights_only=True)
    assert saved["inference_allowed_mirroring_axes"] == (2,)
    options = argparse.Namespace(
        device="cpu", set=("protocols.N-O.tesla.updates_per_case=1", "methods.tesla.corrected_views=[smooth]")
    )
    found = program.adapted(
        model, program.cases(program.scanner(noise=0.3), 1, 5), tmp_path / "out", options, 1, guard=False
    )
    assert len(found) == 1
    assert set(found[0]) == {"source", "dice"}
    manifest = json.loads((tmp_path / "out" / "run" / "run.json").read_text(encoding="utf-8"))
    assert manifest["method"]["parameters"]["corrected_views"] == ["smooth"]
