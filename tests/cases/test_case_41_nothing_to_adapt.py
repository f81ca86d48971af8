"""A method that finds nothing to adapt stops before the run and says how much it found; otherwise weights
change.
"""

import pytest
import small_site as small
from lines import run, sets, work_there
from safetensors.numpy import load_file

CASE = 41
NETWORK = "model.params={class_name: UNet, arguments: {channels: [4,8,16], strides: [2,2]}, divisor: 4}"
TRAIN = ("train.steps=2", "train.validate_every=2", "train.batch_size=2", "train.augment=none")
ADAPT = ("preprocessing.size=[32,32]", "protocols.N-O.tesla.updates_per_case=2", "reports=[]")


@pytest.fixture
def instance_norm(tmp_path, monkeypatch):
    """A folder with weights of a MONAI UNet with its default norm: instance norms without parameters."""
    folder = work_there(tmp_path, monkeypatch, 2)
    texts = sets("model.name=monai", NETWORK, "preprocessing.size=[32,32]", *TRAIN)
    words = ["train", "--pipeline", "prostate", "--sites", "X", "--volumes", "nii", "--device", "cpu"]
    assert run([*words, "--out", "weights", *texts]) == 0
    return folder


def adapt(*more):
    words = ["adapt", "--site", "prostate/X", "--volumes", "nii", "--device", "cpu", "--out", "out"]
    return run([*words, "--weights", "weights/source.safetensors", *sets(*ADAPT), *more])


def test_the_count_of_norm_layers_and_no_output(instance_norm, capsys):
    assert adapt("--method", "bn") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "has 0 (4 norm layers of other kinds)" in told
    assert "norm: batch" in told
    assert not (instance_norm / "out").exists()
    assert adapt("--no-guard") == 0  # a method that needs no norm layers
    before, after = (
        load_file(instance_norm / name)
        for name in ("weights/source.safetensors", "out/checkpoints/Case00.safetensors")
    )
    assert any((before[key] != after[key]).any() for key in before)
    assert all(case["used"] == "adapted" for case in small.record(instance_norm / "out")["cases"])


@pytest.mark.parametrize("method", ["bn", "tent", "pl", "shot", "tesla"])
def test_with_adaptation_on_the_weights_differ_afterwards(small_weights, tmp_path, method):
    small.make_volumes(tmp_path / "nii", 1)
    result = small.run(tmp_path / "nii", small_weights, tmp_path / "out", method=method)
    assert result.results[0].used == "adapted"
    before, after = (
        load_file(path) for path in (small_weights, result.out / "checkpoints/Case00.safetensors")
    )
    moved = {key for key in before if (before[key] != after[key]).any()}
    assert any(key.endswith("running_mean") for key in moved)
    if method != "bn":  # which adapts statistics alone
        assert any(key.endswith("weight") for key in moved)
