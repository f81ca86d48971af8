"""The one state dict in a file is found under any name and behind any prefix; or what is there is listed."""

import pytest
import small_site as small
import torch
from lines import run, sets, write_site
from safetensors.torch import load_file

CASE = 101
SETTINGS = sets(*(*small.SMALL, *small.FEW, *small.BARE))
LAYERS = {"0.weight": torch.ones(2), "1.bias": torch.ones(1)}


def prefixed(prefix):
    return lambda state: {prefix + key: value for key, value in state.items()}


def lightning(state):
    inner = prefixed("net.")(state)
    return {"epoch": 3, "state_dict": inner, "hyper_parameters": {}, "optimizer_states": [{"state": {}}]}


def with_optimizer(state):
    moments = {
        index: {"exp_avg": value, "step": torch.ones(())} for index, value in enumerate(state.values())
    }
    return {"best": 0.9, "weights_of_the_network": state, "optimizer": {"state": moments}}


SAVED = {
    "compiled.pth": prefixed("_orig_mod."),
    "compiled_and_wrapped.pt": prefixed("module._orig_mod."),
    "compiled_inside.pth": lambda state: {
        key.replace("down1.", "down1._orig_mod.", 1): value for key, value in state.items()
    },
    "lightning.ckpt": lightning,
    "nnunet.pth": lambda state: {"network_weights": state, "current_epoch": 9, "trainer_name": "a"},
    "best.pth.tar": with_optimizer,
    "two.pth": lambda state: {"ema": LAYERS, "state_dict": state},
}
REFUSED = {
    "none.pth": (lambda _: {"epoch": 3, "scores": [0.1]}, ["epoch (int)", "scores (list)"]),
    "several.pth": (lambda _: {"ema": LAYERS, "student": LAYERS}, ["2 of them: ema, student"]),
    "other.pth": (lambda _: prefixed("a.")(LAYERS), ["2 tensors found", "expected", "a.0.weight"]),
    "mixed.pth": (lambda state: {"x": 1, **prefixed("net.")(state)}, ["x (int)"]),
}


@pytest.fixture
def adapt(small_weights, tmp_path):
    """Save the weights in some way under a name, adapt with them, and return the exit code."""
    small.make_volumes(tmp_path / "nii", 1)
    state = load_file(str(small_weights))

    def call(name, save):
        torch.save(save(dict(state)), tmp_path / name)
        site = write_site(tmp_path)
        words = ["--site", str(site), "--volumes", str(tmp_path / "nii"), "--method", "source"]
        out = ["--weights", str(tmp_path / name), "--out", str(tmp_path / "out"), "--device", "cpu"]
        return run(["adapt", *words, *out, *SETTINGS])

    return call


@pytest.mark.parametrize("name", SAVED)
def test_they_are_found(name, adapt, small_weights, tmp_path):
    assert adapt(name, SAVED[name]) == 0
    masks = small.files_below(tmp_path / "out/masks")
    (tmp_path / "out").rename(tmp_path / "first")
    assert adapt("plain.pth", dict) == 0
    assert masks == small.files_below(tmp_path / "out/masks")


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_found_is_listed(name, adapt, capsys, tmp_path):
    save, words = REFUSED[name]
    assert adapt(name, save) == 2
    said = capsys.readouterr().err
    for word in (name, *words):
        assert word in said
    assert not (tmp_path / "out").exists()
