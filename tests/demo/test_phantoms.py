from __future__ import annotations

import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from pydantic import ValidationError

from tesla_med.demo import volumes as phantoms
from tesla_med.demo.volumes import ScannerSettings, make_case, make_site, preset, tissue_signal
from tesla_med.errors import ConfigError, OutputError


@pytest.mark.parametrize("task", phantoms.TASKS)
@pytest.mark.parametrize("name", ["source", "easy", "hard"])
def test_case_shape_types_and_labels(task: phantoms.Task, name: str) -> None:
    settings = preset(task, name).model_copy(update={"orientation": "RAS"})
    image, labels, affine = make_case(task, settings, np.random.default_rng(3), (48, 40, 6))
    assert image.shape == labels.shape == (48, 40, 6)
    assert image.dtype == np.int16
    assert labels.dtype == np.uint8
    assert image.min() >= 0
    assert image.max() > 0.8 * settings.intensity_scale
    assert set(np.unique(labels)) == ({0, 1} if task == "prostate" else {0, 1, 2})
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    assert spacing == pytest.approx([settings.field_of_view_mm / 48] * 2 + [settings.slice_thickness_mm])


def test_same_seed_same_case_and_other_seed_another() -> None:
    settings = preset("prostate")
    one, other, third = (make_case("prostate", settings, np.random.default_rng(s)) for s in (1, 1, 2))
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)
    assert not np.array_equal(one[0], third[0])
    assert not np.array_equal(one[1], third[1])


@pytest.mark.parametrize("codes", ["RAS", "LPS", "RPI", "SAR", "AIL", "PSL"])
def test_orientation_keeps_every_voxel_where_it_was(codes: str) -> None:
    base = preset("prostate", "hard")
    straight, turned = (
        make_case(
            "prostate",
            base.model_copy(update={"orientation": c}),
            np.random.default_rng(5),
            (20, 24, 5),
        )
        for c in ("RAS", codes)
    )
    assert "".join(nib.aff2axcodes(turned[2])) == codes
    back = nib.as_closest_canonical(nib.Nifti1Image(turned[0], turned[2]))
    np.testing.assert_array_equal(np.asarray(back.dataobj), straight[0])
    np.testing.assert_allclose(back.affine, straight[2], atol=1e-9)
    labels = nib.as_closest_canonical(nib.Nifti1Image(turned[1], turned[2]))
    np.testing.assert_array_equal(np.asarray(labels.dataobj), straight[1])


def test_hard_stack_is_oblique() -> None:
    affine = make_case("prostate", preset("prostate", "hard"), np.random.default_rng(0))[2]
    direction = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    assert np.abs(direction).max(axis=0).min() == pytest.approx(np.cos(np.deg2rad(8.0)))
    np.testing.assert_allclose(direction.T @ direction, np.eye(3), atol=1e-12)


def test_contrast_equations() -> None:
    spin = ScannerSettings(repetition_time_ms=3000, echo_time_ms=100)
    density, t1, t2, _ = phantoms.TISSUES["muscle"]
    expected = density * (1 - np.exp(-3000 / t1)) * np.exp(-100 / t2)
    assert tissue_signal("muscle", spin) == pytest.approx(expected)
    gradient = ScannerSettings(
        sequence="gradient_echo", repetition_time_ms=600, echo_time_ms=18, flip_angle_deg=90
    )
    density, t1, _, t2_star = phantoms.TISSUES["grey_matter"]
    expected = density * (1 - np.exp(-600 / t1)) * np.exp(-18 / t2_star)
    assert tissue_signal("grey_matter", gradient) == pytest.approx(expected)
    assert tissue_signal("csf", preset("spinal_cord")) > tissue_signal("grey_matter", preset("spinal_cord"))
    assert tissue_signal("grey_matter", preset("spinal_cord")) > tissue_signal(
        "white_matter", preset("spinal_cord")
    )
    low_field = gradient.model_copy(update={"field_strength_t": 1.5})
    assert tissue_signal("grey_matter", low_field) > tissue_signal("grey_matter", gradient)


def test_shift_goes_from_source_to_hard() -> None:
    source, hard = preset("prostate"), preset("prostate", "hard")
    assert preset("prostate", "hard", shift=0.0) == source
    assert preset("prostate", "hard", shift=1.0) == hard
    middle = preset("prostate", "hard", shift=0.5)
    assert middle.noise == pytest.approx((source.noise + hard.noise) / 2)
    assert middle.orientation == source.orientation
    assert preset("prostate", "hard", shift=0.51).orientation == hard.orientation


def test_noise_bias_and_coil_do_what_they_say() -> None:
    still = {"noise": 0.0, "bias": 0.0, "blur_mm": 0.0, "orientation": "RAS"}
    base = preset("prostate").model_copy(update=still)
    clean = make_case("prostate", base, np.random.default_rng(7))[0].astype(float)
    noisy = make_case("prostate", base.model_copy(update={"noise": 0.05}), np.random.default_rng(7))[0]
    assert 0.02 < np.std(noisy - clean) / base.intensity_scale < 0.09
    assert noisy[clean < 30].mean() > clean[clean < 30].mean() + 20  # Rician: the floor rises
    coil = make_case("prostate", base.model_copy(update={"endorectal": 1.0}), np.random.default_rng(7))[0]
    ratio = coil / np.maximum(clean, 1)
    assert np.median(ratio[28:36, 20:28]) > 2 * np.median(ratio[:, 58:])


@pytest.mark.parametrize("task", phantoms.TASKS)
def test_flare_brightens_the_edge_at_the_surface_coil(task: phantoms.Task) -> None:
    settings = preset(task).model_copy(update={"noise": 0.0, "orientation": "RAS"})
    flared = settings.model_copy(update={"flare": 2.0})
    plain, bright = (
        make_case(task, item, np.random.default_rng(2))[0].astype(float) for item in (settings, flared)
    )
    if task == "prostate":  # the coil lies on the belly, for the cord at the neck
        plain, bright = plain[:, ::-1], bright[:, ::-1]
    ratio = bright.mean(axis=(0, 2)) / plain.mean(axis=(0, 2))
    assert ratio[0] / ratio[32] > 2
    assert ratio[40] == pytest.approx(ratio[63], rel=0.02)


def test_errors() -> None:
    with pytest.raises(ConfigError, match="liver"):
        preset("liver")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'hard'"):
        preset("prostate", "hart")
    with pytest.raises(ConfigError, match=r"\[0, 1\]"):
        preset("prostate", "hard", shift=1.5)
    with pytest.raises(ConfigError, match="16 x 16"):
        make_case("prostate", preset("prostate"), np.random.default_rng(0), (8, 32, 4))
    with pytest.raises(ConfigError, match="tissue"):
        tissue_signal("stone", preset("prostate"))
    with pytest.raises(ValidationError, match="each pair"):
        ScannerSettings(orientation="RLA")


def test_prostate_site_has_the_names_of_the_real_sites(tmp_path: Path) -> None:
    settings = preset("prostate").model_copy(update={"matrix": 32, "slices": 4})
    images = make_site(tmp_path / "UCL", "prostate", settings, 2, seed=4)
    assert [path.name for path in images] == ["Case00.nii.gz", "Case01.nii.gz"]
    image = nib.load(images[1])
    mask = nib.load(tmp_path / "UCL" / "Case01_segmentation.nii.gz")
    assert image.shape == mask.shape == (32, 32, 4)
    assert image.get_data_dtype() == np.int16
    assert mask.get_data_dtype() == np.uint8
    np.testing.assert_allclose(image.affine, mask.affine)
    expected = make_case("prostate", settings, np.random.default_rng([4, 1]))
    np.testing.assert_array_equal(np.asarray(image.dataobj), expected[0])
    np.testing.assert_array_equal(np.asarray(mask.dataobj), expected[1])
    with pytest.raises(OutputError, match=r"Case00\.nii\.gz"):
        make_site(tmp_path / "UCL", "prostate", settings, 2, seed=4)
    with pytest.raises(ConfigError, match="distinct"):
        make_site(tmp_path / "other", "prostate", settings, 2, seed=4, names=["a", "a"])


def test_cord_site_has_the_names_of_the_real_sites(tmp_path: Path) -> None:
    settings = preset("spinal_cord").model_copy(update={"matrix": 48, "slices": 3})
    images = make_site(tmp_path, "spinal_cord", settings, 1, seed=0, names=["sub-jun01"])
    assert [path.name for path in images] == ["sub-jun01_T2starw.nii.gz"]
    cord = np.asarray(nib.load(tmp_path / "sub-jun01_T2starw_seg-manual.nii.gz").dataobj)
    grey = np.asarray(nib.load(tmp_path / "sub-jun01_T2starw_gmseg-manual.nii.gz").dataobj)
    assert set(np.unique(cord)) == {0, 1} == set(np.unique(grey))
    assert cord[grey == 1].all()
    assert 0.08 < grey.sum() / cord.sum() < 0.5


def test_a_case_is_fast() -> None:
    settings = preset("prostate", "hard")
    make_case("prostate", settings, np.random.default_rng(0))
    start = time.process_time()
    for seed in range(3):
        make_case("prostate", settings, np.random.default_rng(seed))
    assert (time.process_time() - start) / 3 < 0.4
