"""The benchmark of models of one's own: its images, its table."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "your_own_model.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("benchmark_your_own_model", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_ball_has_a_brighter_core(program):
    image, labels = program.ball(np.random.default_rng(0))
    means = [image[labels == value].mean() for value in (0, 1, 2)]
    assert np.allclose(means, [0, 1, 2], atol=0.05)
    assert (labels == 2).sum() < (labels == 1).sum() < (labels == 0).sum()


def test_every_shift_changes_the_image_but_none(program):
    image, _ = program.ball(np.random.default_rng(0))
    for shift in program.SHIFTS:
        changed = program.shifted(image, shift, np.random.default_rng(1))
        assert changed.shape == image.shape
        assert np.array_equal(changed, image) == (shift == "none")


def test_the_table_has_means_and_the_worst_change(program):
    about = {"model": "M", "shift": "noise", "method": "tesla", "seed": 0}
    rows = [
        about | {"guard": False, "dice_source": 50.0, "dice": 60.0},
        about | {"guard": False, "dice_source": 70.0, "dice": 90.0},
        about | {"guard": True, "dice_source": 50.0, "dice": 49.0},
        about | {"guard": True, "dice_source": 70.0, "dice": 90.0},
    ]
    last = program.table(rows).splitlines()[-1]
    assert last == "| M | noise | 2 | tesla | 60.0 | 75.0 | 69.5 | -1.0 |"


@pytest.mark.slow
def test_quick_run(program, shared, tmp_path, monkeypatch, capsys):
    folder = shared / "foreign" / "nnunet_2d_batchnorm_regions_2folds" / "nnUNetTrainer__nnUNetPlans__2d"
    if not folder.is_dir():
        pytest.skip("needs the models of other people")
    out = tmp_path / "own.json"
    monkeypatch.setattr(
        "sys.argv", ["x", "--weights", str(folder), "--quick", "--device", "cpu", "--out", str(out)]
    )
    program.main()
    assert out.is_file()
    assert "| noise | 1 | tesla |" in capsys.readouterr().out
