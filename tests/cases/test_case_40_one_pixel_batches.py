"""Slices are padded so that no batch norm receives a single value; a network in which that cannot be
avoided is refused.
"""

import pytest
import small_site as small
import torch

from tesla_med.config.files import load_pipeline
from tesla_med.engine.driver import Driver
from tesla_med.errors import ConfigError
from tesla_med.models.base import build_model, norm_layers
from tesla_med.prepare.stream import SiteImages

CASE = 40
ARGUMENTS = "{channels: [4, 8, 16], strides: [2, 2], norm: batch}"


def monai_unet(divisor=4):
    params = f"model.params={{class_name: UNet, arguments: {ARGUMENTS}, divisor: {divisor}}}"
    return build_model(load_pipeline("prostate", ("model.name=monai", params)))


def smallest_batch(network):
    """Watch how few values a channel the batch norms get; return the growing list."""
    seen = []
    for layer in norm_layers(network):
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][:, 0].numel()))
    return seen


@pytest.mark.parametrize("name", ["tesla", "bn"])
@pytest.mark.parametrize("make", ["unet", "monai"])
def test_a_batch_of_one_4x4_patch_is_adapted_to(make_tta, make_network, name, make):
    network = make_network() if make == "unet" else monai_unet()
    method = make_tta(name, network, batch_slices=1)
    seen = smallest_batch(method.predictor)
    images = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    method.adapt(images)
    probs = method.predict(images)
    assert probs.shape == (1, 2, 4, 4)
    assert torch.isfinite(probs).all()
    assert min(seen) == 4


def test_a_last_batch_of_one_slice_is_adapted_to(make_tta, make_images):
    class Slices(SiteImages):
        def __iter__(self):
            yield from (make_images(2), make_images(1, seed=1))

    sizes = []
    method = make_tta("tesla", batch_slices=2, epochs=1)
    adapt = method.adapt
    method.adapt = lambda images: sizes.append(len(images)) or adapt(images)
    driver = Driver(method, "N-M", "site")
    driver.adapt_to_site(Slices((), lambda _: None))
    assert sizes == [2, 1]
    assert driver.finite


def test_a_run_on_one_4x4_slice_of_8x8_pixels(small_weights, tmp_path):
    image = small.make_volumes(tmp_path / "source", 1)[0]
    small.copy_image(image, tmp_path / "nii/Case00.nii.gz", lambda array: array[10:14, 10:14, 2:3])
    result = small.run(
        tmp_path / "nii", small_weights, tmp_path / "out", overrides=("preprocessing.size=[8,8]",)
    )
    assert result.results[0].status in ("ok", "empty")
    assert small.labels(result.out, "Case00").shape == (4, 4, 1)


@pytest.mark.parametrize("divisor", [1, 2])
def test_a_divisor_that_lets_features_shrink_to_one_pixel_is_refused(divisor):
    with pytest.raises(ConfigError, match=rf"divisor {divisor} is too small .* shrinks to 1 x 1"):
        monai_unet(divisor)
