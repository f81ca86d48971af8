"""Weights saved on a GPU load anywhere; those of another architecture are refused with the differences."""

import numpy as np
import pytest
import small_site as small
import torch
from safetensors.torch import load_file

import tesla_med

CASE = 79
STATUS = "the storage tags of a GPU are imitated; no GPU is used"


@pytest.fixture
def gpu_weights(small_weights, tmp_path, monkeypatch):
    """The small weights as a PyTorch file whose storages say that they were on a GPU."""
    state = load_file(str(small_weights))
    path = tmp_path / "gpu.pth"
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
        torch.save(state, path)
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_tags_are_those_of_a_gpu(gpu_weights):
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(gpu_weights, weights_only=True)


def test_a_run_with_device_auto(gpu_weights, small_weights, tmp_path):
    small.make_volumes(tmp_path / "nii", 1)
    for weights, name in ((small_weights, "own"), (gpu_weights, "gpu")):
        tesla_med.adapt_site(
            small.site(),
            tmp_path / "nii",
            weights=weights,
            out=tmp_path / name,
            method="source",
            device="auto",
            overrides=(*small.SMALL, *small.BARE),
        )
    assert small.labels(tmp_path / "own", "Case00").any()
    assert np.array_equal(*(small.labels(tmp_path / name, "Case00") for name in ("own", "gpu")))


def test_another_architecture_lists_the_keys(gpu_weights, tmp_path):
    small.make_volumes(tmp_path / "nii", 1)
    state = torch.load(gpu_weights, map_location="cpu", weights_only=True)
    first = next(name for name in state if name.endswith("weight"))
    state["encoder.stranger.weight"] = state.pop(first)
    torch.save(state, gpu_weights)
    with pytest.raises(tesla_med.TeslaMedError, match="another architecture") as error:
        small.run(tmp_path / "nii", gpu_weights, tmp_path / "out")
    assert f"1 missing: {first}" in str(error.value)
    assert "1 unexpected: encoder.stranger.weight" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_another_width_lists_the_shapes(gpu_weights, tmp_path):
    small.make_volumes(tmp_path / "nii", 1)
    with pytest.raises(tesla_med.TeslaMedError, match=r"other shape: .* instead of \(8,"):
        small.run(tmp_path / "nii", gpu_weights, tmp_path / "out", overrides=("model.params.width=8",))
