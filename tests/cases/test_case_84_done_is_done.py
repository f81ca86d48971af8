"""A mask has its final name before its case counts as done; no work continues after the command returns."""

import threading

import nibabel as nib
import numpy as np
import pytest
import small_site as small
from small_volumes import noise, write

CASE = 84
STATUS = "masks are written by the run itself, so no worker needs a time limit"
CLASSES = 30
MANY = f"classes=[{', '.join(f'{{value: {value}, name: c{value}}}' for value in range(CLASSES))}]"


@pytest.fixture
def volumes(tmp_path):
    """Two volumes that are larger than most of these tests have."""
    for index in range(2):
        write(tmp_path / f"nii/Case0{index}.nii.gz", noise((96, 96, 16), index))
    return tmp_path / "nii"


def test_many_classes(volumes, known_weights, tmp_path):
    seen, before = [], threading.active_count()

    def progress(stage, done, total):
        if stage == "cases":
            written = sorted((tmp_path / "out/masks").glob("*.nii.gz"))
            assert all(np.asarray(nib.load(path).dataobj).shape == (96, 96, 16) for path in written)
            seen.append((done, total))
            assert len(written) >= done

    overrides = (MANY, "preprocessing.size=[96,96]")
    result = small.run(
        volumes,
        known_weights(classes=CLASSES),
        tmp_path / "out",
        method="source",
        overrides=overrides,
        save_probs=True,
        progress=progress,
    )
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert threading.active_count() == before
    assert small.record(result.out)["complete"]
    assert len(np.unique(small.labels(result.out, "Case00"))) > CLASSES / 2
    probs = nib.load(result.out / "probs/Case01_prob.nii.gz")
    assert probs.shape[-1] == CLASSES
