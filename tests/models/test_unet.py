"""The U-Net of the release and MONAI networks by class name."""

from __future__ import annotations

import pytest
import torch

from tesla_med.config.models import LabelClass, ModelConfig, PipelineConfig
from tesla_med.errors import ConfigError
from tesla_med.models import MODELS, build_model, norm_layers
from tesla_med.models.base import default_device, parameter_count, to_model_range
from tesla_med.models.unet import UNet

pytestmark = pytest.mark.usefixtures("one_thread")


def pipeline(name, params, channels=1, classes=2):
    return PipelineConfig(
        name="made_up",
        title="made up",
        sites="made_up",
        channels=channels,
        classes=tuple(LabelClass(value=value, name=f"class {value}") for value in range(classes)),
        model=ModelConfig(name=name, params=params),
    )


# ------------------------------------------------------------ U-Net


def test_widths_and_sizes_at_every_level():
    network = UNet(1, 3, 4).eval()
    seen = {}
    for name in ("inc", "down1", "down2", "down3", "down4", "up1", "up2", "up3", "up4", "outc"):
        network.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: seen.update({name: tuple(output.shape[1:])})
        )
    network(torch.rand(2, 1, 64, 32))
    assert seen == {
        "inc": (4, 64, 32),
        "down1": (8, 32, 16),
        "down2": (16, 16, 8),
        "down3": (32, 8, 4),
        "down4": (32, 4, 2),
        "up1": (16, 8, 4),
        "up2": (8, 16, 8),
        "up3": (4, 32, 16),
        "up4": (4, 64, 32),
        "outc": (3, 64, 32),
    }


def test_middle_width_of_the_decoder_is_half_its_input():
    network = UNet(1, 2, 8)
    for up, inputs in ((network.up1, 128), (network.up2, 64), (network.up3, 32), (network.up4, 16)):
        first, second = up.conv.double_conv[0], up.conv.double_conv[3]
        assert (first.in_channels, first.out_channels, second.in_channels) == (
            inputs,
            inputs // 2,
            inputs // 2,
        )


def test_the_skip_comes_first_in_the_concatenation():
    network = UNet(1, 2, 4).eval()
    seen = {}
    network.inc.register_forward_hook(lambda m, i, output: seen.update(skip=output.clone()))
    network.up4.conv.register_forward_pre_hook(lambda m, inputs: seen.update(joined=inputs[0].clone()))
    network(torch.rand(1, 1, 32, 32))
    assert torch.equal(seen["joined"][:, :4], seen["skip"])


def test_upsampling_aligns_corners():
    network = UNet(1, 2, 4)
    corners = torch.tensor([[0.0, 3.0], [6.0, 9.0]]).view(1, 1, 2, 2)
    assert torch.allclose(network.up1.up(corners)[0, 0, 0], torch.tensor([0.0, 1, 2, 3]), atol=1e-6)


@pytest.mark.parametrize("size", [(48, 48), (33, 47), (20, 23), (1, 1), (17, 1), (16, 16)])
def test_other_sizes_are_padded_by_replication_and_cropped(size, make_network):
    network = make_network()
    images = torch.rand(2, 1, *size, generator=torch.Generator().manual_seed(0))
    legal = [max(-(-side // 16) * 16, 32) for side in size]
    rows = torch.arange(legal[0]).clamp_max(size[0] - 1)
    columns = torch.arange(legal[1]).clamp_max(size[1] - 1)
    padded = images[:, :, rows][:, :, :, columns]
    want = network.logits(padded)[..., : size[0], : size[1]]
    result = network(images)
    assert result.shape == (2, 2, *size)
    assert torch.allclose(result, want, atol=1e-6)


def test_the_head_is_the_last_convolution():
    network = UNet(1, 3, 4)
    names = {name.split(".")[0] for name, _ in network.head.named_parameters()}
    assert names == {"conv"}
    assert network.head.conv.out_channels == 3
    assert network.head.conv.kernel_size == (1, 1)


def test_built_from_a_pipeline():
    network = build_model(pipeline("unet", {"width": 2}, channels=3, classes=4))
    assert network(torch.rand(1, 3, 32, 32)).shape == (1, 4, 32, 32)
    assert parameter_count(network) == sum(value.numel() for value in network.parameters())
    assert build_model(pipeline("unet", {"width": 2}), {"width": 3}).inc.double_conv[0].out_channels == 3


def test_unknown_model_and_parameters():
    with pytest.raises(ConfigError, match=r"unknown model 'unett'. Did you mean 'unet'"):
        build_model(pipeline("unett", {}))
    with pytest.raises(ConfigError, match=r"model.params of 'unet'.*'widht'.*Did you mean 'width'"):
        build_model(pipeline("unet", {"widht": 4}))
    with pytest.raises(ConfigError, match="greater than or equal to 1, got 0"):
        build_model(pipeline("unet", {"width": 0}))


# ------------------------------------------------------------ MONAI

MONAI_UNET = {
    "class_name": "UNet",
    "arguments": {"channels": [4, 8, 16], "strides": [2, 2], "num_res_units": 0, "norm": "batch"},
    "divisor": 4,
}
MONAI_SEGRESNET = {"class_name": "SegResNet", "arguments": {"init_filters": 4, "norm": "batch"}, "divisor": 8}


@pytest.mark.parametrize("params", [MONAI_UNET, MONAI_SEGRESNET], ids=lambda item: item["class_name"])
def test_monai_networks(params):
    network = build_model(pipeline("monai", params, channels=2, classes=3))
    assert norm_layers(network)
    images = torch.rand(2, 2, 21, 30)
    logits = network(images)
    assert logits.shape == (2, 3, 21, 30)
    logits.square().sum().backward()
    head = list(network.head.parameters())
    assert head
    assert all(parameter.grad is not None for parameter in head)
    kept = network.network.eval()
    assert torch.equal(network.eval()(images), network(images))
    padded = torch.nn.functional.pad(images, (0, (-30) % 8, 0, (-21) % 8), mode="replicate")
    if params["divisor"] == 8:
        assert torch.allclose(network(images), kept(padded)[..., :21, :30], atol=1e-5)


def test_freezing_the_head_of_a_monai_network_leaves_the_rest():
    network = build_model(pipeline("monai", MONAI_SEGRESNET, classes=3))
    frozen = {id(parameter) for parameter in network.head.parameters()}
    shapes = [tuple(p.shape) for p in network.parameters() if id(p) in frozen]
    assert shapes[0][0] == 3
    assert len(frozen) < len(list(network.parameters())) / 2


def test_monai_defaults_have_no_batch_norm():
    params = {"class_name": "UNet", "arguments": {"channels": [4, 8], "strides": [2]}, "divisor": 2}
    assert norm_layers(build_model(pipeline("monai", params))) == []


def test_monai_errors():
    with pytest.raises(ConfigError, match=r"unknown MONAI network 'UNett'. Did you mean"):
        build_model(pipeline("monai", {"class_name": "UNett"}))
    with pytest.raises(ConfigError, match=r"UNet does not take these arguments.*it takes .*channels"):
        build_model(pipeline("monai", {"class_name": "UNet", "arguments": {"chanels": [4, 8]}}))
    with pytest.raises(ConfigError, match=r"key 'class_name' is missing"):
        build_model(pipeline("monai", {}))


@pytest.mark.parametrize("divisor", [1, 2])
def test_a_divisor_that_lets_features_shrink_to_one_pixel_is_refused(divisor):
    arguments = {"channels": [4, 8, 16], "strides": [2, 2], "norm": "batch"}
    params = {"class_name": "UNet", "arguments": arguments, "divisor": divisor}
    with pytest.raises(ConfigError, match=rf"divisor {divisor} is too small .* shrinks to 1 x 1"):
        build_model(pipeline("monai", params))


# ------------------------------------------------------------ shared parts


def test_model_range():
    images = torch.tensor([0.0, 0.25, 1.0])
    assert to_model_range(images, (-1.0, 1.0)).tolist() == [-1.0, -0.5, 1.0]
    assert to_model_range(images, (0.0, 1.0)).tolist() == [0.0, 0.25, 1.0]


def test_devices():
    assert default_device("cpu") == torch.device("cpu")
    assert default_device("auto").type in {"cpu", "cuda"}
    with pytest.raises(ConfigError, match="unknown device 'gpu'"):
        default_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            default_device("cuda")


def test_the_registry_knows_both():
    assert {"unet", "monai"} <= set(MODELS.names())
