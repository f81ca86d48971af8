"""Masks of MONAI bundles: how voxels find their way back, and how overlapping regions are painted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bundles import (
    READ,
    SIGMOID_STEPS,
    SOFTMAX_STEPS,
    STEPS,
    after,
    agreement,
    config,
    load,
    make_bundle,
    make_image,
    mask,
    metadata,
    of_monai,
)

from tesla_med import adapt_site
from tesla_med.actions.predict import predict
from tesla_med.config.bundle_painting import Painting, painting
from tesla_med.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ("reports=[]", "protocols.N-O.tesla.updates_per_case=2")
BRATS = "$lambda x: torch.where(x[[2]] > 0, 4, torch.where(x[[0]] > 0, 1, torch.where(x[[1]] > 0, 2, 0)))"
PAINT = {"_target_": "Lambdad", "keys": "pred", "func": BRATS}
LEAST = (-0.07, -0.1, -0.03)
"""What the output must be above in each of the nested regions."""
NESTED = metadata(3, ["Tumor core", "Whole tumor", "Enhancing tumor"])


def nested(bundle, least):
    """Give the network of a bundle three outputs, core, whole and enhancing, of which each holds another."""
    path = bundle / "models" / "model.pt"
    content = torch.load(path, weights_only=True)
    state = content["model"]
    weight = [name for name, value in state.items() if value.dim() == 5 and value.shape[1] == 3][-1]
    bias = f"{weight.removesuffix('weight')}bias"
    state[weight] = state[weight][:, :1].repeat(1, 3, 1, 1, 1)
    state[bias] = state[bias][:1] - torch.tensor(least)
    torch.save(content, path)


def painted(regions):
    found = np.zeros(regions.shape[1:])
    for index, inside in enumerate(regions):
        found[inside > 0] = index + 1
    return found


# ------------------------------------------------------------ the way back


@pytest.mark.parametrize(("place", "nearest"), [(1, None), (1, True), (1, False), (2, None), (2, True)])
@pytest.mark.parametrize("steps", [SOFTMAX_STEPS, SIGMOID_STEPS], ids=["softmax", "sigmoid"])
def test_masks_are_those_of_monai_with_either_interpolation(tmp_path, steps, place, nearest):
    coarse = [*READ, STEPS[0], STEPS[1] | {"pixdim": [1.6, 2.1, 1.3]}, *STEPS[2:]]
    content = config(preprocessing=coarse, postprocessing=after(*steps, place=place, nearest=nearest))
    content["preprocessing"] = {"_target_": "Compose", "transforms": coarse}
    about = metadata() if steps is SOFTMAX_STEPS else NESTED
    bundle, image = make_bundle(tmp_path / "b", content, about), make_image(tmp_path / "i" / "c.nii.gz")
    predict(image, bundle, out=tmp_path / "out", overrides=QUICK[:1])
    theirs = of_monai(bundle, image)
    theirs = painted(theirs) if len(theirs) > 1 else theirs[0]
    assert len(np.unique(theirs)) > 1
    assert agreement(mask(tmp_path / "out"), theirs) == (1.0, 1.0)
    assert load(bundle).pipeline.preprocessing.bundle.nearest is (nearest is not False)
    assert not any("resamples" in note for note in load(bundle).notes)


@pytest.mark.parametrize(
    ("keys", "nearest", "expected"),
    [
        (["pred"], [False], False),
        (["label", "pred"], [False, True], True),
        (["label", "pred"], [True, False], False),
        (["label"], [False], True),
        ("pred", "$@top < 0", False),
        ("pred", "$@top > 0", True),
    ],
)
def test_the_interpolation_of_the_prediction_counts(tmp_path, keys, nearest, expected):
    content = config(postprocessing=after(*SOFTMAX_STEPS, nearest=nearest))
    content["postprocessing"]["transforms"][1]["keys"] = keys
    bundle = make_bundle(tmp_path / "b", content)
    assert load(bundle).pipeline.preprocessing.bundle.nearest is expected


def test_labels_that_are_interpolated_are_said(tmp_path):
    content = config(postprocessing=after(*SOFTMAX_STEPS, place=2, nearest=False))
    assert any("resamples masks" in note for note in load(make_bundle(tmp_path / "b", content)).notes)


@pytest.mark.parametrize("steps", [None, SOFTMAX_STEPS])
def test_without_an_inverse_the_way_back_is_by_the_nearest_voxel(tmp_path, steps):
    own = None if steps is None else {"_target_": "Compose", "transforms": list(steps)}
    loaded = load(make_bundle(tmp_path / "b", config(postprocessing=own)))
    assert loaded.pipeline.preprocessing.bundle.nearest is True
    assert any("by the nearest voxel" in note for note in loaded.notes)


# ------------------------------------------------------------ what outputs mean


def notes_of(path, *steps, about=None, **given):
    return load(make_bundle(path, config(postprocessing=after(*steps), **given), about)).notes


@pytest.mark.parametrize("limit", [0, 0.0, 1, 1.0, 0.3, False])
def test_thresholds_other_than_a_half_are_said(tmp_path, limit):
    sigmoid, threshold = SIGMOID_STEPS
    notes = notes_of(tmp_path / "b", sigmoid, threshold | {"threshold": limit}, about=NESTED)
    assert any(f"threshold of {limit} is not used" in note for note in notes)
    assert not any(
        "threshold" in note for note in notes_of(tmp_path / "half", sigmoid, threshold, about=NESTED)
    )


def test_softmax_without_argmax_is_said(tmp_path):
    softmax, argmax = SOFTMAX_STEPS
    notes = notes_of(tmp_path / "b", softmax, SIGMOID_STEPS[1])
    assert any("compares each class with a threshold" in note for note in notes)
    assert any("takes no argmax" in note for note in notes_of(tmp_path / "none", softmax))
    assert not any("argmax" in note for note in notes_of(tmp_path / "both", softmax, argmax))


@pytest.mark.parametrize(
    "step",
    [
        {"_target_": "AsDiscreted", "keys": "label", "argmax": True},
        {"_target_": "AsDiscreted", "keys": ["label"], "threshold": 0.2},
        {"_target_": "Activationsd", "keys": "label", "softmax": True},
    ],
)
def test_what_is_done_to_other_keys_does_not_count(tmp_path, step):
    bundle = make_bundle(tmp_path / "b", config(postprocessing=after(*SIGMOID_STEPS, step)), NESTED)
    loaded = load(bundle)
    assert loaded.pipeline.model.params["regions"] is True
    assert not any("threshold" in note for note in loaded.notes)


def test_outputs_whose_meaning_is_hidden_are_refused(tmp_path):
    hidden = {"_target_": "Lambdad", "keys": "pred", "func": "$lambda x: (torch.sigmoid(x) > 0.3).float()"}
    with pytest.raises(CheckpointError, match=r"meaning .* unknown; postprocessing::transforms::0"):
        notes_of(tmp_path / "b", hidden)
    notes = notes_of(tmp_path / "one", hidden, about=metadata(1, ["tumour"]), outputs=1)
    assert any("not done: Lambdad" in note for note in notes)
    assert any("the largest output counts" in note for note in notes_of(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="nothing of one output"):
        notes_of(tmp_path / "softmax", *SOFTMAX_STEPS, about=metadata(1, ["tumour"]), outputs=1)


def test_a_background_among_regions_is_said(tmp_path):
    notes = notes_of(tmp_path / "b", *SIGMOID_STEPS)
    assert any("'background', is painted like the others, with the value 1" in note for note in notes)
    assert not any("'Tumor core'" in note for note in notes_of(tmp_path / "n", *SIGMOID_STEPS, about=NESTED))


# ------------------------------------------------------------ regions


@pytest.mark.parametrize("place", [1, 2, 3])
def test_nested_regions_are_painted_as_the_bundle_paints_them(tmp_path, place):
    content = config(postprocessing=after(*SIGMOID_STEPS, PAINT, place=place, nearest=place > 1))
    bundle, image = make_bundle(tmp_path / "b", content, NESTED), make_image(tmp_path / "i" / "c.nii.gz")
    nested(bundle, LEAST)
    predict(image, bundle, out=tmp_path / "out", overrides=QUICK[:1])
    theirs = of_monai(bundle, image)[0]
    assert set(np.unique(theirs)) == {0, 1, 2, 4}
    assert agreement(mask(tmp_path / "out"), theirs) == (1.0, 1.0)
    loaded = load(bundle)
    assert [(item.value, item.name) for item in loaded.pipeline.classes[1:]] == [
        (2, "Whole tumor"),
        (1, "Tumor core"),
        (4, "Enhancing tumor"),
    ]
    assert not any("Lambdad" in note or "overlapping" in note for note in loaded.notes)
    adapt_site(None, image, weights=bundle, method="tesla", out=tmp_path / "a", guard=False, overrides=QUICK)
    predict(image, tmp_path / "a" / "checkpoints" / "c.safetensors", out=tmp_path / "p", overrides=QUICK[:1])
    assert np.array_equal(mask(tmp_path / "p"), mask(tmp_path / "a"))
    assert set(np.unique(mask(tmp_path / "p"))) <= {0, 1, 2, 4}


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    "step",
    [
        PAINT | {"func": "$lambda x: x[[0]] + x[[1]] + x[[2]]"},
        PAINT | {"func": "$scripts.paint"},
        PAINT | {"overwrite": "other"},
        PAINT | {"keys": "@key"},
        {"_target_": "LabelFilterd", "keys": "pred", "applied_labels": [1]},
        {"_target_": "scripts.Paintd", "keys": "pred"},
        {"_target_": "CopyItemsd", "keys": "other", "names": "pred"},
    ],
)
def test_what_may_paint_regions_otherwise_is_refused(tmp_path, step, trust):
    content = config(postprocessing=after(*SIGMOID_STEPS, step), key="pred")
    bundle = make_bundle(tmp_path / "b", content, NESTED)
    with pytest.raises(CheckpointError, match=r"postprocessing::transforms::3.*take the step out"):
        load(bundle, trust=trust)
    softmax = config(postprocessing=after(*SOFTMAX_STEPS, step), key="pred")
    assert any("not done" in note for note in load(make_bundle(tmp_path / "s", softmax)).notes)


@pytest.mark.parametrize(
    "step",
    [
        {"_target_": "KeepLargestConnectedComponentd", "keys": "pred"},
        {"_target_": "Lambdad", "keys": "image", "func": "$print"},
    ],
)
def test_what_calls_no_region_otherwise_is_said(tmp_path, step):
    bundle = make_bundle(tmp_path / "b", config(postprocessing=after(*SIGMOID_STEPS, step)), NESTED)
    notes = load(bundle).notes
    assert any(f"not done: {step['_target_']}" in note for note in notes)
    assert any("lies inside of a later one is not seen" in note for note in notes)


def test_two_paintings_are_refused(tmp_path):
    bundle = make_bundle(tmp_path / "b", config(postprocessing=after(*SIGMOID_STEPS, PAINT, PAINT)), NESTED)
    with pytest.raises(CheckpointError, match="transforms::4"):
        load(bundle)


def test_a_painting_before_the_threshold_is_refused(tmp_path):
    sigmoid, threshold = SIGMOID_STEPS
    bundle = make_bundle(tmp_path / "b", config(postprocessing=after(sigmoid, PAINT, threshold)), NESTED)
    with pytest.raises(CheckpointError, match="transforms::2"):
        load(bundle)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$lambda m: torch.where(m[1:2] == 1, 7, torch.where(m[[0]] > 0.5, 3.0, 0))", ((0, 1), (3, 7))),
        ("$lambda m: torch.where(m[[1]] > 0, 7, torch.where(m[[1]] > 0, 3, 0))", None),
        ("$lambda m: torch.where(m[[1]] > 0, 7, torch.where(m[[0]] > 0, 7, 0))", None),
        ("$lambda m: torch.where(m[[1]] > 0, 7, torch.where(m[[0]] > 0, 3, 1))", None),
        ("$lambda m: torch.where(m[[1]] > 0, 7, torch.where(m[[0]] > 0, 0, 0))", None),
        ("$lambda m: torch.where(m[[1]] > 0, 7, 0)", None),
        ("$lambda m: torch.where(m[[1]] > 1, 7, torch.where(m[[0]] > 0, 3, 0))", None),
        ("$lambda m: torch.where(m[[1]] < 0.5, 7, torch.where(m[[0]] > 0, 3, 0))", None),
        ("$lambda m: torch.where(m[1] > 0, 7, torch.where(m[0] > 0, 3, 0))", None),
        ("$lambda m: torch.where(m[0:2] > 0, 7, torch.where(m[[0]] > 0, 3, 0))", None),
        ("$lambda m: torch.where(n[[1]] > 0, 7, torch.where(m[[0]] > 0, 3, 0))", None),
        ("$lambda m: torch.where(m[[1]] > 0, 7.5, torch.where(m[[0]] > 0, 3, 0))", None),
        ("$lambda m: torch.where(m[[1]] > 0, input=7, other=0)", None),
        ("$lambda m, n: torch.where(m[[1]] > 0, 7, torch.where(m[[0]] > 0, 3, 0))", None),
        ("$lambda m: np.where(m[[1]] > 0, 7, torch.where(m[[0]] > 0, 3, 0))", None),
        ("$lambda m: torch.where(m[[1]] > True, 7, torch.where(m[[0]] > 0, 3, 0))", None),
        ("$torch.where", None),
        ("$lambda m: (", None),
        ("lambda m: 0", None),
        (None, None),
    ],
)
def test_only_plain_paintings_are_read(text, expected):
    assert painting(text, 2) == (None if expected is None else Painting(*expected))
