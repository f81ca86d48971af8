"""How networks are run: layout of weights, precision, and how many batches there are."""

import pytest
import torch
from torch import nn

from tesla_med.config.files import load_pipeline
from tesla_med.models.base import build_model, norm_layers
from tesla_med.tta._mechanics.execution import LAYOUTS, layout_of
from tesla_med.tta.base import MethodContext


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), torch.channels_last),
        (nn.Sequential(nn.Conv3d(2, 3, 3), nn.InstanceNorm3d(3, affine=True)), torch.channels_last_3d),
        (nn.Sequential(nn.Conv3d(2, 3, 3), nn.Conv2d(2, 3, 3)), None),
        (nn.Linear(2, 2), None),
    ],
)
def test_layout_by_the_rank_of_the_weights(model, layout):
    assert layout_of(model) is layout
    if layout is not None:  # the other one is refused by torch
        model.to(memory_format=layout)
        other = next(item for item in LAYOUTS.values() if item is not layout)
        with pytest.raises(RuntimeError, match="rank"):
            model.to(memory_format=other)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_networks_compute_in_the_precision_that_is_asked_for(precision, make_tta, make_images):
    method, seen = make_tta("source", precision=precision), []
    norm_layers(method.model)[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    assert method.predict(make_images(2)).dtype == torch.float32
    assert seen == [getattr(torch, precision)]


def test_passes_are_captured_unless_it_is_said(make_tta):
    method = make_tta("tent")
    assert MethodContext(torch.device("cpu")).cuda_graphs
    assert method.graph_pool().wanted
    method.use_less_memory(2)  # graphs hold memory
    assert not method.graph_pool().wanted


def test_statistics_of_a_case_are_those_of_as_many_slices_where_memory_is_short(make_tta, make_images):
    method, images = make_tta("tent"), make_images(6)
    layer = norm_layers(method.model)[0]

    def mean_of():
        with method.own_statistics(method.model, images, 6):
            return layer.running_mean.clone()

    whole = mean_of()
    method.use_less_memory(2)
    assert torch.allclose(mean_of(), whole, atol=1e-5)  # a mean over parts of one size is that of all
    images[5] = 1.0 - images[5]
    method = make_tta("tent")
    layer = norm_layers(method.model)[0]
    whole = mean_of()
    method.use_less_memory(5)  # five and one, which counts as one
    assert torch.allclose(mean_of(), whole, atol=1e-5)


def test_without_batch_norms_no_pass_is_made_for_statistics(make_tta, make_images, monkeypatch):
    network = build_model(load_pipeline("prostate", ("model.params.width=4", "model.params.norm=instance")))
    method = make_tta("tent", network, predict_statistics="volume")
    sizes, logits = [], type(network).logits
    monkeypatch.setattr(type(network), "logits", lambda self, x: sizes.append(len(x)) or logits(self, x))
    method.predict(make_images(3))
    assert sizes == [3]


@pytest.mark.parametrize("batch", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("updates", [None, 4])
@pytest.mark.parametrize("draw", ["ordered", "replacement"])
def test_updates_and_slices_are_counted_as_they_come(draw, updates, batch, make_tta, make_images):
    method = make_tta("tent", draw=draw, updates_per_case=updates, batch_slices=batch)
    sizes = [len(part) for part in method.batches(make_images(5))]
    assert method.updates(5) == len(sizes)
    assert method.slices_seen(5) == sum(sizes)
    if draw == "replacement" and updates:
        assert len(sizes) == updates
