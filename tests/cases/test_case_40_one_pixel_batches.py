"""Slices are padded so that no batch norm receives a single value; a network in which that cannot be
avoided is refused.
"""

import pytest
import small_site as small
from lines import run, sets, work_there, write_site

CASE = 40
ARGUMENTS = "{channels: [4, 8, 16], strides: [2, 2], norm: batch}"


@pytest.fixture
def one_patch(tmp_path, monkeypatch):
    """One slice of 4 x 4 pixels below nii/, and its site."""
    image = small.make_volumes(tmp_path / "source", 1)[0]
    small.copy_image(image, tmp_path / "nii/Case00.nii.gz", lambda array: array[10:14, 10:14, 2:3])
    write_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("method", ["tesla", "bn", "tent"])
@pytest.mark.parametrize("size", ["[8,8]", "null"])
def test_a_run_on_one_4x4_slice(one_patch, small_weights, method, size):
    texts = (*small.FEW, f"preprocessing.size={size}")
    result = small.run(
        one_patch / "nii", small_weights, one_patch / "out", method=method, overrides=texts, save_probs=True
    )
    assert result.results[0].status in ("ok", "empty")
    assert result.results[0].used == "adapted"
    assert small.labels(result.out, "Case00").shape == (4, 4, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_a_last_batch_of_one_slice(small_weights, tmp_path, monkeypatch, size):
    folder = work_there(tmp_path, monkeypatch, 1)
    small.copy_image(
        folder / "nii/Case00.nii.gz", folder / "odd/Case00.nii.gz", lambda array: array[..., : size + 1]
    )
    overrides = (f"protocols.N-M.tesla.batch_slices={size}",)
    result = small.run(folder / "odd", small_weights, folder / "out", protocol="N-M", overrides=overrides)
    assert [(item.status, item.used) for item in result.results] == [("ok", "adapted")]


@pytest.mark.parametrize("divisor", [1, 2])
@pytest.mark.parametrize("command", ["adapt", "train"])
def test_a_divisor_that_lets_features_shrink_to_one_pixel_is_refused(
    one_patch, small_weights, capsys, divisor, command
):
    params = f"model.params={{class_name: UNet, arguments: {ARGUMENTS}, divisor: {divisor}}}"
    words = ["--out", "out", "--device", "cpu", *sets("model.name=monai", params)]
    if command == "adapt":
        words += ["--volumes", "nii", "--site", "prostate/X", "--weights", small_weights]
    else:
        words += ["--volumes", "source", "--pipeline", "prostate", "--sites", "X"]
    assert run([command, *words]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"divisor {divisor} is too small" in told
    assert "shrinks to 1 x 1" in told
