"""A method that finds nothing to adapt stops before the run and says how much it found; otherwise weights
change.
"""

import pytest
import small_site as small
import torch

from tesla_med.adapt import adapt_site
from tesla_med.config.files import load_pipeline
from tesla_med.errors import AdaptationError
from tesla_med.models.base import build_model
from tesla_med.models.checkpoint import make_card, save_checkpoint
from tesla_med.tta.base import METHODS

CASE = 41
SETTINGS = (
    *(
        "preprocessing.size=[32,32]",
        "guard.enabled=true",
        "protocols.N-O.tesla.updates_per_case=2",
        "reports=[]",
    ),
    "model.name=monai",
    "model.params={class_name: UNet, arguments: {channels: [4,8,16], strides: [2,2]}, divisor: 4}",
)
ADAPTING = [name for name, item in METHODS.items() if item.adapts and item.one_network]


@pytest.fixture
def instance_norm_weights(one_thread, tmp_path):
    """Weights of a MONAI UNet with its default norm: instance norms without parameters."""
    pipeline = load_pipeline("prostate", SETTINGS)
    torch.manual_seed(0)
    path = tmp_path / "monai.safetensors"
    save_checkpoint(path, build_model(pipeline), make_card(pipeline))
    return path


def adapt(weights, folder, **options):
    small.make_volumes(folder / "nii", 1)
    options |= {"weights": weights, "out": folder / "out", "device": "cpu", "overrides": SETTINGS}
    return adapt_site(small.site(), folder / "nii", **options)


def test_the_count_of_norm_layers_and_no_output(instance_norm_weights, tmp_path):
    with pytest.raises(AdaptationError, match=r"has 0 \(4 norm layers of other kinds\).*norm: batch"):
        adapt(instance_norm_weights, tmp_path, method="bn")
    assert not (tmp_path / "out").exists()


def test_the_count_of_parameters_where_everything_is_head(make_tta, make_network):
    network = make_network()
    for parameter in network.parameters():
        parameter.requires_grad_(False)

    class Headless(type(network)):
        head = property(lambda self: self)

    network.__class__ = Headless
    with pytest.raises(AdaptationError, match="found 0 parameters to adapt"):
        make_tta("tesla", network)


def test_a_method_that_needs_no_norm_layers_moves_the_weights(instance_norm_weights, tmp_path):
    result = adapt(instance_norm_weights, tmp_path)
    assert result.results[0].signals["weights_moved"] > 0


@pytest.mark.parametrize("name", ADAPTING)
def test_with_adaptation_on_the_network_differs_afterwards(make_tta, make_network, make_images, name):
    network = make_network()
    method = make_tta(name, network)
    images = make_images(4) ** 2
    method.start_epoch(0, [images])
    method.adapt(images)
    before, after = network.state_dict(), method.predictor.state_dict()
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    assert any(key.endswith("running_mean") for key in moved)
    if name != "bn":  # which adapts statistics alone
        assert any(key.endswith("weight") for key in moved)
