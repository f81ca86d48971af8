"""Two processes learn together: what batch norms, gradients and shares of batches are in each of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from tesla_med.config.files import load_pipeline
from tesla_med.models.base import build_model
from tesla_med.models.normalisation import batch_statistics
from tesla_med.tta._mechanics import ranks

CODE = """
import sys
from pathlib import Path
import torch
from torch import nn
from tesla_med.config.files import load_pipeline
from tesla_med.errors import AdaptationError
from tesla_med.models.base import build_model
from tesla_med.models.normalisation import batch_statistics
from tesla_med.tta._mechanics import ranks

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
ranks.join(rank, 2, folder / "meeting", torch.device("cpu"))
found = {"joined": ranks.joined()}
found["shares"] = list(ranks.shares([torch.arange(5), torch.arange(1)]))
for name, counts in {"one more": (2, 1 + rank), "another shape": (2, 2)}.items():
    batches = [torch.zeros(2 + (rank if name == "another shape" else 0), 3)] * counts[1]
    try:
        list(ranks.shares(batches))
    except AdaptationError as error:
        found[name] = str(error)
found["agree"] = [ranks.all_agree(yes) for yes in (True, rank == 0, False)]
for name, given in torch.load(folder / "given.pt", weights_only=False).items():
    model, images = given
    ours = next(ranks.shares([images])).requires_grad_()
    with batch_statistics(model, momentum=0.1), ranks.together(model):
        output = model(ours)
    (output.square().mean() + output[:, 0].mean()).backward()
    ranks.share_gradients(model.parameters())
    found[name] = {
        "output": output.detach(), "images": ours.grad,
        "gradients": {key: item.grad for key, item in model.named_parameters() if item.grad is not None},
        "buffers": dict(model.named_buffers()),
        "undone": all("forward" not in vars(layer) for layer in model.modules()),
    }
torch.distributed.destroy_process_group()
found["after"] = ranks.joined()
torch.save(found, folder / f"found-{rank}.pt")
"""


def models():
    """Return networks whose norms are plain, without scale and shift, and the U-Net's with its shifts."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1))
    bare = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, affine=False), nn.Conv2d(3, 2, 1))
    solid = nn.Sequential(nn.Conv3d(1, 3, 3), nn.BatchNorm3d(3))
    unet = build_model(load_pipeline("prostate", ("model.params.width=4",)))
    flat, deep = torch.rand(4, 1, 32, 32), torch.rand(4, 1, 8, 8, 8)
    return {"plain": (plain, flat), "bare": (bare, flat), "solid": (solid, deep), "unet": (unet.eval(), flat)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(models(), folder / "given.pt")
    processes = [
        subprocess.Popen([sys.executable, "-c", CODE, str(rank), str(folder)])  # noqa: S603 - this interpreter
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    return [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def whole():
    """Return the same from whole batches in one process."""
    result = {}
    for name, (model, given) in models().items():
        images = given.clone().requires_grad_()
        with batch_statistics(model, momentum=0.1):
            output = model(images)
        (output.square().mean() + output[:, 0].mean()).backward()
        gradients = {key: item.grad for key, item in model.named_parameters() if item.grad is not None}
        result[name] = {"output": output, "images": images.grad, "gradients": gradients}
        result[name]["buffers"] = dict(model.named_buffers())
    return result


NAMES = ("plain", "bare", "solid", "unet")


def test_alone_nothing_changes():
    batch, model = torch.rand(3, 2), nn.BatchNorm2d(2).train()
    assert ranks.joined() == 1
    assert next(ranks.shares([batch])) is batch
    assert ranks.all_agree(True) is True
    assert ranks.all_agree(False) is False
    with ranks.together(model):
        assert "forward" not in vars(model)
    ranks.share_gradients([nn.Parameter(batch)])


def test_two_meet_and_part(found):
    assert [item["joined"] for item in found] == [2, 2]
    assert [item["after"] for item in found] == [1, 1]


def test_every_image_is_in_a_share_and_shares_are_as_long(found):
    shares = [[part.tolist() for part in item["shares"]] for item in found]
    assert shares == [[[0, 2, 4], [0]], [[1, 3, 0], [0]]]


@pytest.mark.parametrize("name", ["one more", "another shape"])
def test_batches_that_differ_are_noticed_in_both(found, name):
    for item in found:
        assert "processes that learn together have different batches" in item[name]


def test_one_that_disagrees_is_enough(found):
    assert [item["agree"] for item in found] == [[True, False, False]] * 2


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_whole_batch(found, whole, name):
    for rank, item in enumerate(found):
        torch.testing.assert_close(item[name]["output"], whole[name]["output"][rank::2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_whole_batch(found, whole, name):
    for item in found:
        assert item[name]["gradients"].keys() == whole[name]["gradients"].keys()
        for key, gradient in whole[name]["gradients"].items():
            torch.testing.assert_close(item[name]["gradients"][key], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_images_go_through_the_statistics_of_all(found, whole, name):
    for rank, item in enumerate(found):  # each process has the mean over its own images: half as many
        wanted = 2 * whole[name]["images"][rank::2]
        torch.testing.assert_close(item[name]["images"], wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_running_statistics_move_as_by_the_whole_batch(found, whole, name):
    for item in found:
        for key, wanted in whole[name]["buffers"].items():
            if "tracked" not in key:
                torch.testing.assert_close(item[name]["buffers"][key], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_both_processes_stay_equal_bit_for_bit(found, name):
    first, second = (item[name] for item in found)
    for kind in ("gradients", "buffers"):
        for key, value in first[kind].items():
            assert torch.equal(value, second[kind][key]), key


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_as_before_afterwards(found, name):
    assert all(item[name]["undone"] for item in found)
