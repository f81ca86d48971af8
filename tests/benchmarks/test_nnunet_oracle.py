"""The program that compares with nnU-Net: its plans can be read, its figures are right."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest

from tesla_med.config.nnunet import read_model

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "nnunet_oracle.py"
spec = importlib.util.spec_from_file_location("benchmark_nnunet_oracle", PROGRAM)
program = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = program
spec.loader.exec_module(program)


@pytest.mark.parametrize("case", program.CASES)
def test_every_case_has_plans_that_can_be_read(case, tmp_path):
    given = program.GIVEN | program.CASES[case]
    assert set(given) == set(program.GIVEN)
    name, plans, dataset = program.plans_of(given)
    folder = tmp_path / f"nnUNetTrainer__nnUNetPlans__{name}"
    folder.mkdir()
    (folder / "plans.json").write_text(json.dumps(plans), encoding="utf-8")
    (folder / "dataset.json").write_text(json.dumps(dataset), encoding="utf-8")
    found = read_model(folder)
    assert len(found["model"]["params"]["patch"]) == given["dimensions"]
    assert found["channels"] == len(given["channels"])
    strides = np.prod(found["model"]["params"]["strides"], axis=0)
    assert (np.array(found["model"]["params"]["patch"]) % strides == 0).all()


def test_images_and_labels_lie_on_one_grid(tmp_path):
    given = program.GIVEN | program.CASES["two channels"]
    program.write_images(given, tmp_path, np.random.default_rng(0))
    images = sorted((tmp_path / "images").iterdir())
    assert [path.name for path in images][:2] == ["case_000_0000.nii.gz", "case_000_0001.nii.gz"]
    image, labels = nibabel.load(images[0]), nibabel.load(tmp_path / "labels" / "case_000.nii.gz")
    assert image.shape == labels.shape == (48, 48, 24)
    assert np.allclose(image.affine, labels.affine)
    assert (np.asarray(image.dataobj)[:5] == 0).all()
    assert set(np.unique(labels.dataobj)) == {0, 1, 2}


def test_five_labels_are_all_there(tmp_path):
    program.write_images(program.GIVEN | program.CASES["five labels"], tmp_path, np.random.default_rng(0))
    for path in (tmp_path / "labels").iterdir():
        assert set(np.unique(nibabel.load(path).dataobj)) == set(range(6))


def test_the_smallest_dice_of_a_class():
    first, second = np.array([0, 0, 1, 1, 2, 2, 2]), np.array([0, 0, 1, 2, 2, 2, 2])
    assert program.least_dice(first, second) == pytest.approx(2 / 3)
    assert program.least_dice(first, first) == 1
    assert program.least_dice(np.zeros(3), np.array([0, 0, 5])) == 0  # a class that only one of them has


def test_masks_of_a_reader_in_the_order_of_the_file():
    mask = np.arange(24).reshape(2, 3, 4)
    assert np.array_equal(program.in_file_order(mask, "3d", np.eye(4)), mask.transpose(2, 1, 0))
    affine = np.array([[0, -1.0, 0, 0], [0, 0, 2, 0], [3, 0, 0, 0], [0, 0, 0, 1]])
    image = nibabel.Nifti1Image(mask.transpose(2, 1, 0).astype(np.int16), affine)
    turned = np.asarray(nibabel.as_closest_canonical(image).dataobj).transpose(2, 1, 0)
    assert np.array_equal(program.in_file_order(turned, "reoriented", affine), mask.transpose(2, 1, 0))


def row(**more):
    given = {"case": "3d", "image": "case_000", "voxels": 10, "classes": 3, "agreement_percent": 100.0}
    given |= {"least_dice": 1.0, "least_dice_exact": 1.0, "input_difference": 1e-7}
    return given | {"logit_difference_relative": 1e-6, "half_difference_relative": 0.1} | more


@pytest.mark.parametrize(
    ("more", "good"),
    [
        ({}, True),
        ({"agreement_percent": 99.98}, False),
        ({"least_dice": 0.99}, True),
        ({"least_dice_exact": 0.99}, False),
        ({"logit_difference_relative": 0.01}, False),
        ({"logit_difference_relative": None, "input_difference": None}, False),
    ],
)
def test_what_passes(more, good):
    assert program.passed(row(**more)) is good
    lines = program.table([row(**more)]).splitlines()
    assert len(lines) == 3
    assert lines[2].endswith("FAILED") is not good
    assert len({line.removesuffix(" FAILED").count("|") for line in lines}) == 1
    assert ("other size" in lines[2]) == (more.get("logit_difference_relative", 0) is None)


def test_the_table_of_the_page_is_that_of_the_record():
    root = PROGRAM.parents[1] / "docs" / "reference"
    record = json.loads((root / "results" / "nnunet_oracle.json").read_text(encoding="utf-8"))
    assert {item["case"] for item in record["images"]} == set(program.CASES)
    assert all(program.passed(item) for item in record["images"])
    assert program.table(record["images"]) in (root / "nnunet.md").read_text(encoding="utf-8")
