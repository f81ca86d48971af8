"""The released operations and reference weights of the development data: same numbers here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tesla_med.augment.ops import OP_SETS, OPS
from tesla_med.config.files import load_pipeline
from tesla_med.models.checkpoint import load_state, read_state
from tesla_med.models.loading import load_model
from tesla_med.models.unet import UNet

pytestmark = [pytest.mark.shared, pytest.mark.usefixtures("one_thread")]

MAGNITUDES = ("0.0", "0.25", "0.75", "1.0")
WEIGHTS = {"prostate": ("prostate_source_unet", 2), "spinal_cord": ("spinal_source_unet", 3)}
each_task = pytest.mark.parametrize("task", WEIGHTS)


@pytest.fixture(scope="module")
def stored(shared):
    with np.load(shared / "reference" / "policy_ops.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


# ------------------------------------------------------------ operations


def test_every_released_operation_is_stored(stored):
    names = {key.split("_")[0] for key in stored} - {"image"}
    assert names == set(OP_SETS["released_mri"])
    assert len(stored) == 1 + 2 * len(MAGNITUDES) * len(names)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("name", OP_SETS["released_mri"])
def test_an_operation_gives_the_stored_image_and_theta(name, magnitude, stored):
    image = stored["image"]
    result, theta = OPS.get(name)(image, torch.tensor([float(magnitude)]))
    assert (theta - stored[f"{name}_{magnitude}_theta"]).abs().max() < 1e-6
    difference = (result - stored[f"{name}_{magnitude}_image"]).abs().max()
    assert difference < 1e-5


@pytest.mark.parametrize("name", OP_SETS["released_mri"])
def test_the_policy_gives_the_stored_image(name, stored, monkeypatch):
    from tesla_med.augment.policy import AdversarialPolicy, Draw

    monkeypatch.setitem(OP_SETS, "single", (name,))
    policy = AdversarialPolicy("single", 1, torch.Generator(), torch.Generator())
    with torch.no_grad():
        policy.raw_magnitudes.fill_(float(torch.tensor(0.75).logit()))
    signs = {0: torch.ones(1)} if policy.ops[0].signed else {}
    view = policy.apply_draw(stored["image"], Draw(torch.zeros(1, dtype=torch.long), signs, {}))
    assert (view.theta - stored[f"{name}_0.75_theta"]).abs().max() < 1e-6
    assert (view.images - stored[f"{name}_0.75_image"]).abs().max() < 1e-5


def test_stored_operations_differ_from_the_image(stored):
    same = []
    for key, value in stored.items():
        if key.endswith("_image") and (value - stored["image"]).abs().max() < 1e-3:
            same.append(key)
    assert same in ([], ["Posterize_1.0_image"])


# ------------------------------------------------------------ weights


@each_task
def test_reference_weights_load_strictly(task, shared):
    name, classes = WEIGHTS[task]
    path = shared / "reference" / f"{name}.safetensors"
    network, state = UNet(1, classes), read_state(path)
    own = set(network.state_dict())
    assert set(state) <= own
    assert all(key.endswith("num_batches_tracked") for key in own - set(state))
    assert all(value.dtype == torch.float32 for key, value in state.items() if "num_batches" not in key)
    load_state(network, state, path)
    for key, value in state.items():
        assert torch.equal(network.state_dict()[key], value), key


@each_task
def test_reference_weights_through_the_pipeline(task, shared):
    path = shared / "reference" / f"{WEIGHTS[task][0]}.safetensors"
    loaded = load_model(path, load_pipeline(task))
    assert "has no card" in loaded.warnings[0]
    with torch.no_grad():
        logits = loaded.model.eval()(torch.zeros(1, 1, 32, 40))
    assert logits.shape == (1, WEIGHTS[task][1], 32, 40)
    assert torch.isfinite(logits).all()


def test_reference_weights_find_the_prostate(shared):
    """A middle slice of a source-site volume, prepared as the weights were trained."""
    import nibabel
    from torch.nn import functional

    folder = shared / "data" / "prostate" / "RUNMC"
    image_path = next(path for path in sorted(folder.glob("Case*.nii.gz")) if "_seg" not in path.name)
    mask_path = image_path.with_name(image_path.name.replace(".nii.gz", "_segmentation.nii.gz"))
    image, mask = (nibabel.as_closest_canonical(nibabel.load(path)) for path in (image_path, mask_path))
    volume = torch.from_numpy(image.get_fdata(dtype=np.float32))
    volume = (volume - volume.min()) / (volume.max() - volume.min())
    reference = torch.from_numpy(mask.get_fdata(dtype=np.float32)) > 0
    index = int(reference.sum(dim=(0, 1)).argmax())
    resized = functional.interpolate(volume[None, None, :, :, index], (256, 256), mode="bilinear")
    wanted = functional.interpolate(reference[None, None, :, :, index].float(), (256, 256)) > 0
    path = shared / "reference" / "prostate_source_unet.safetensors"
    model = load_model(path, load_pipeline("prostate")).model.eval()
    with torch.no_grad():
        found = model(2 * resized - 1).argmax(dim=1, keepdim=True) == 1
    dice = 2 * (found & wanted).sum() / (found.sum() + wanted.sum())
    assert dice > 0.85
