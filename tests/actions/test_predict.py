"""Frozen weights, adapted ones too: the masks of the run they came from, again."""

from __future__ import annotations

import pytest
import small_site as small

from tesla_med.actions.predict import predict
from tesla_med.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("volumes")
    small.make_volumes(folder, 2)
    return folder


def again(volumes, weights, out, **options):
    options = {"site": small.site(), "overrides": (*small.BARE, "keep_largest=false")} | options
    return predict(volumes, weights, out=out, device="cpu", **options)


def test_source_weights(volumes, weights, tmp_path):
    run = small.run(volumes, weights, tmp_path / "run")
    result = again(volumes, weights, tmp_path / "out")
    assert small.files_below(result.out / "masks") == {
        **small.files_below(run.out / "source_masks"),
        "labels.json": (run.out / "masks/labels.json").read_bytes(),
    }
    assert {item.method for item in result.results} == {"source"}
    assert result.mean_dice == result.mean_dice_source == run.mean_dice_source


def texts_for(statistics):
    """Overrides for predictions by running statistics, the volume's, or a mixture with the source's."""
    if statistics == "mixed":
        return ("methods.tesla.predict_statistics=volume", "methods.tesla.statistics_share=0.5")
    return (f"methods.tesla.predict_statistics={statistics}",)


@pytest.mark.parametrize("statistics", ["volume", "running", "mixed"])
@pytest.mark.parametrize("method", ["tesla", "bn"])
def test_site_weights_repeat_every_mask(volumes, weights, tmp_path, statistics, method):
    texts = texts_for(statistics)
    run = small.run(volumes, weights, tmp_path / "run", protocol="N-M", method=method, overrides=texts)
    result = again(volumes, run.out / "checkpoints/adapted.safetensors", tmp_path / "out")
    assert small.files_below(result.out / "masks") == small.files_below(run.out / "masks")
    assert result.mean_dice == run.mean_dice
    assert not (result.out / "checkpoints").exists()


@pytest.mark.parametrize("statistics", ["volume", "running", "mixed"])
@pytest.mark.parametrize(("method", "protocol"), [("tesla", "N-O"), ("tesla", "N-M"), ("bn", "N-O")])
def test_case_weights_repeat_their_mask(volumes, weights, tmp_path, statistics, method, protocol):
    texts = texts_for(statistics)
    run = small.run(
        volumes, weights, tmp_path / "run", protocol=protocol, reset="case", method=method, overrides=texts
    )
    for name in ("Case00", "Case01"):
        checkpoint = run.out / "checkpoints" / f"{name}.safetensors"
        result = again(volumes / f"{name}.nii.gz", checkpoint, tmp_path / name)
        place = f"masks/{name}_mask.nii.gz"
        assert small.masks(result.out)[place] == small.masks(run.out)[place]


@pytest.mark.parametrize("reset", ["case", "site"])
def test_weights_repeat_masks_with_neighbours_mixed_in(volumes, weights, tmp_path, reset):
    texts = ("methods.tesla.neighbour_share=0.33",)
    run = small.run(volumes, weights, tmp_path / "run", protocol="N-M", reset=reset, overrides=texts)
    for name in ("Case00", "Case01"):
        checkpoint = run.out / f"checkpoints/{name if reset == 'case' else 'adapted'}.safetensors"
        place = f"masks/{name}_mask.nii.gz"
        found = []
        for share in ((), ("methods.source.neighbour_share=0",)):
            out = tmp_path / f"{name}{len(share)}"
            options = {"overrides": (*small.BARE, "keep_largest=false", *share)}
            result = again(volumes / f"{name}.nii.gz", checkpoint, out, **options)
            found.append(small.masks(result.out)[place])
        assert found[0] == small.masks(run.out)[place]
        assert found[1] != found[0]


def test_without_a_site_every_image_is_taken(volumes, weights, tmp_path, monkeypatch):
    """Whatever the folders are called: neither like another site nor like this run."""
    nii = tmp_path / "nii"
    for folder in ("", "HK", "A", "volumes", "image"):
        small.make_volumes(nii / folder, 1, names=[f"scan{folder}"])
        (nii / folder / f"scan{folder}_segmentation.nii.gz").unlink()
    monkeypatch.chdir(tmp_path)
    result = again(nii, weights, None, site=None)
    names = {item.case for item in result.results}
    assert names == {"scan", "HK/scanHK", "A/scanA", "volumes/scanvolumes", "image/scanimage"}
    assert result.mean_dice is None
    assert result.out.parts[0] == "runs"
    assert (tmp_path / result.out / "masks/HK/scanHK_mask.nii.gz").is_file()


def test_without_site_and_card(volumes, weights, tmp_path):
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes(weights.read_bytes())
    with pytest.raises(ConfigError, match="--pipeline"):
        again(volumes, bare, tmp_path / "out", site=None)
    texts = (*small.SMALL, *small.BARE)
    result = again(volumes, bare, tmp_path / "out", site=None, pipeline="prostate", overrides=texts)
    assert any("no card" in note for note in result.notes)
    with pytest.raises(CheckpointError, match="another architecture"):
        again(volumes, bare, tmp_path / "out2", pipeline="prostate")
    assert not (tmp_path / "out2").exists()


def test_wrong_task(volumes, weights, tmp_path):
    image = volumes / "Case00.nii.gz"
    with pytest.raises(CheckpointError, match="classes"):
        again(image, weights, tmp_path / "out", site="gm2018-UCL")
    assert not (tmp_path / "out").exists()
