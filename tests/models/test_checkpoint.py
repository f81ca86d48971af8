"""Weights and their card: written, read back, and refused where they do not fit."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from tesla_med.config.files import load_pipeline
from tesla_med.config.models import LabelClass, ModelConfig, PipelineConfig, Preprocessing
from tesla_med.errors import CheckpointError, OutputError
from tesla_med.models.base import build_model
from tesla_med.models.checkpoint import (
    load_state,
    make_card,
    read_card,
    read_state,
    save_checkpoint,
    steadiness_of,
)
from tesla_med.models.unet import UNet

pytestmark = pytest.mark.usefixtures("one_thread")

PIPELINE = PipelineConfig(
    name="made_up",
    title="made up",
    sites="made_up",
    classes=(LabelClass(value=0, name="background"), LabelClass(value=7, name="thing")),
    preprocessing=Preprocessing(size=(48, 32)),
    model=ModelConfig(name="unet", params={"width": 4}),
)


@pytest.fixture
def saved(tmp_path, make_network):
    """A network and its weights on disk."""
    network = make_network()
    path = tmp_path / "weights.safetensors"
    save_checkpoint(path, network, make_card(PIPELINE, ("A", "B"), {"steps": 5}))
    return network, path


def check_same(network, state):
    own = network.state_dict()
    assert own.keys() == state.keys()
    assert all(torch.equal(own[key], state[key]) for key in own)


# ------------------------------------------------------------ round trip


def test_round_trip(saved):
    network, path = saved
    check_same(network, read_state(path))
    other = UNet(1, 2, 4)
    load_state(other, read_state(path), path)
    check_same(network, other.state_dict())
    assert sorted(item.name for item in path.parent.iterdir()) == ["weights.json", "weights.safetensors"]


@pytest.mark.parametrize(
    ("extra", "want"),
    [({}, (1.0, 1.0)), ({"steadiness": [0.9, 0.8]}, (0.9, 0.8)), ({"steadiness": [0.9]}, (1.0, 1.0))],
)
def test_how_steady_a_network_is_on_its_training(extra, want):
    assert steadiness_of(make_card(load_pipeline("prostate"), extra=extra)) == want
    assert steadiness_of(None) == (1.0, 1.0)


def test_a_network_with_a_tensor_under_two_names_is_saved(tmp_path):
    blocks = {
        "kernel_size": [3] * 3,
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2] * 2,
        "filters": [4, 8, 8],
    }
    changes = ("model.name=monai", f"model.params={{class_name: DynUNet, divisor: 4, arguments: {blocks}}}")
    pipeline = load_pipeline("prostate", changes)
    model, path = build_model(pipeline), tmp_path / "dyn.safetensors"
    save_checkpoint(path, model, make_card(pipeline))
    other = build_model(pipeline)
    load_state(other, read_state(path), path)
    images = torch.rand(1, 1, 16, 16)
    assert torch.equal(model.eval()(images), other.eval()(images))


def test_the_card(saved):
    _, path = saved
    card = read_card(path)
    assert card == make_card(PIPELINE, ("A", "B"), {"steps": 5})
    assert card.pipeline == "made_up"
    assert card.channels == 1
    assert card.classes == PIPELINE.classes
    assert card.preprocessing == PIPELINE.preprocessing
    assert card.model == PIPELINE.model
    assert card.training_sites == ("A", "B")
    assert card.extra == {"steps": 5}
    assert {"tesla-med", "torch", "monai", "python"} <= set(card.versions)
    plain = json.loads(path.with_suffix(".json").read_text())
    assert plain["classes"][1] == {"value": 7, "name": "thing", "color": "#e6550d", "snomed": ""}


def test_a_card_in_the_way_of_nothing(tmp_path):
    assert read_card(tmp_path / "weights.safetensors") is None


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"pipeline": "p", "unknown": 1}', '"text"', "\x00", '{"pipeline": NaN}']
)
def test_a_broken_card(text, saved):
    _, path = saved
    path.with_suffix(".json").write_text(text)
    with pytest.raises(CheckpointError, match=r"weights\.json: not a model card.*move it away"):
        read_card(path)


def test_a_card_that_is_not_text(saved):
    _, path = saved
    path.with_suffix(".json").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(CheckpointError, match="not a model card"):
        read_card(path)


def test_writing_where_nothing_can_be_written(tmp_path, make_network):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError):
        save_checkpoint(tmp_path / "file" / "w.safetensors", make_network(), make_card(PIPELINE))


# ------------------------------------------------------------ other people's files

WRAPPERS = {
    "plain": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3},
    "model": lambda state: {"model": state},
    "model_state_dict": lambda state: {"model_state_dict": state, "optimizer": {"lr": 0.1}},
    "module": lambda state: {f"module.{key}": value for key, value in state.items()},
    "nested": lambda state: {"model": {"state_dict": state}, "epoch": 3},
    "both": lambda state: {"state_dict": {f"module.{key}": value for key, value in state.items()}},
}


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".ckpt", ".PTH"])
def test_pytorch_files(suffix, tmp_path, make_network):
    network, path = make_network(), tmp_path / f"weights{suffix}"
    torch.save(network.state_dict(), path)
    check_same(network, read_state(path))


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapped_state_dicts(wrap, tmp_path, make_network):
    network, path = make_network(), tmp_path / "weights.pth"
    torch.save(wrap(network.state_dict()), path)
    other = make_network(seed=5)
    load_state(other, read_state(path), path)
    check_same(network, other.state_dict())


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_half_precision_is_cast(suffix, tmp_path, make_network):
    from safetensors.torch import save_file

    network, path = make_network(), tmp_path / f"weights{suffix}"
    half = {
        key: value.half() if value.is_floating_point() else value
        for key, value in network.state_dict().items()
    }
    save_file(half, str(path)) if suffix == ".safetensors" else torch.save(half, path)
    state = read_state(path)
    assert all(value.dtype in (torch.float32, torch.int64) for value in state.values())
    assert state["inc.double_conv.1.num_batches_tracked"].dtype == torch.int64
    for key, value in network.state_dict().items():
        assert torch.allclose(state[key], value, rtol=1e-3, atol=1e-4) or not value.is_floating_point()


def test_missing_batch_counts_are_no_fault(tmp_path, make_network):
    network, other = make_network(), UNet(1, 2, 4)
    state = {key: value for key, value in network.state_dict().items() if "num_batches" not in key}
    load_state(other, state, tmp_path / "weights.pth")
    assert torch.equal(other.up4.conv.double_conv[0].weight, network.up4.conv.double_conv[0].weight)
    assert torch.equal(other.inc.double_conv[1].running_mean, network.inc.double_conv[1].running_mean)


class RunsCode:
    """What a pickle can do when it is opened without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_file_that_would_run_code_is_refused(wrapped, tmp_path):
    mark, path = tmp_path / "ran", tmp_path / "weights.pth"
    content = {"state_dict": {"weight": torch.zeros(1)}, "hook": RunsCode(mark)}
    torch.save(content if wrapped else RunsCode(mark), path)
    with pytest.raises(CheckpointError, match=r"weights\.pth: refused.*could run code.*state_dict alone"):
        read_state(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists()  # it would have


def test_a_bare_pickle_that_would_run_code_is_refused(tmp_path):
    mark, path = tmp_path / "ran", tmp_path / "weights.pth"
    path.write_bytes(pickle.dumps(RunsCode(mark), protocol=2))
    with pytest.raises(CheckpointError, match=r"weights\.pth"):
        read_state(path)
    assert not mark.exists()


def test_a_whole_pickled_model_is_refused(tmp_path, make_network):
    path = tmp_path / "weights.pth"
    torch.save(make_network(), path)
    with pytest.raises(CheckpointError, match="refused, it holds more than weights"):
        read_state(path)


# ------------------------------------------------------------ damaged and wrong files


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_truncated_files(suffix, share, tmp_path, make_network):
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save(make_network().state_dict(), path)
    else:
        save_checkpoint(path, make_network(), make_card(PIPELINE))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match=rf"weights\{suffix}: "):
        read_state(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_files_that_are_something_else(suffix, tmp_path):
    path = tmp_path / f"weights{suffix}"
    path.write_text("this is not a checkpoint, whatever its name says")
    with pytest.raises(CheckpointError, match=rf"weights\{suffix}"):
        read_state(path)


def test_no_file_and_another_suffix(tmp_path):
    with pytest.raises(CheckpointError, match=r"no weights at .*missing\.pth.*--weights"):
        read_state(tmp_path / "missing.pth")
    with pytest.raises(CheckpointError, match="a folder, but not that of an nnU-Net or a MONAI bundle"):
        read_state(tmp_path)
    (tmp_path / "a.safetensors").mkdir()
    for name in ("last.pt", "source.statistics.safetensors", "source.safetensors", "._source.safetensors"):
        (tmp_path / name).write_text("")
    with pytest.raises(CheckpointError, match=r"holds source\.safetensors and last\.pt; give a file"):
        read_state(tmp_path)
    (tmp_path / "weights.h5").write_text("")
    with pytest.raises(CheckpointError, match=r"expected one of \.safetensors.*got '\.h5'"):
        read_state(tmp_path / "weights.h5")


@pytest.mark.parametrize("content", [[1, 2], {"weight": [1.0]}, torch.zeros(2), {"a": {"b": 1}}])
def test_no_state_dict(content, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"weights\.pth: expected one state dict"):
        read_state(path)


def test_another_architecture_lists_what_differs(saved, tmp_path):
    network, path = saved
    state = dict(network.state_dict())
    del state["outc.conv.weight"]
    state["extra.weight"] = torch.zeros(1)
    state["inc.double_conv.0.weight"] = torch.zeros(8, 1, 3, 3)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        load_state(network, state, path)
    text = str(raised.value)
    assert str(path) in text
    assert "1 missing: outc.conv.weight" in text
    assert "1 unexpected: extra.weight" in text
    assert "1 other shape: inc.double_conv.0.weight (8, 1, 3, 3) instead of (4, 1, 3, 3)" in text
    assert "model.params" in text
    check_same(network, before)


def test_long_lists_are_cut(saved):
    network, path = saved
    with pytest.raises(CheckpointError, match=r"\d+ missing: .* and \d+ more"):
        load_state(network, {}, path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_numbers(value, saved):
    network, path = saved
    state = read_state(path)
    before = {key: item.clone() for key, item in state.items()}
    state["up1.conv.double_conv.1.running_var"][0] = value
    with pytest.raises(CheckpointError, match="NaN or infinite weights"):
        load_state(network, state, path)
    check_same(network, before)
