"""Series and masks of a made-up run, for tests of exports."""

from __future__ import annotations

import dicom_files
import nibabel as nib
import numpy as np
from pydicom.uid import generate_uid


def write_series(folder, array, **fields):
    """Write a series as scanners do: with a frame of reference, a patient and a study."""
    fields = {"FrameOfReferenceUID": generate_uid(entropy_srcs=["frame"]), "StudyDate": "20240101", **fields}
    fields |= {"StudyTime": "120000", "PatientSex": "M", "PatientBirthDate": "19500101", "StudyID": "1"}
    return dicom_files.write_series(folder, array, AccessionNumber="accession-4712", **fields)


def voxels(shape, seed):
    return np.random.default_rng(seed).integers(0, 900, shape).astype(np.uint16)


def replace_mask(out, name, seed, filled=0.3):
    path = out / "masks" / f"{name}_mask.nii.gz"
    image = nib.load(path)
    values = (np.random.default_rng(seed).random(image.shape) < filled).astype(np.uint8)
    nib.save(nib.Nifti1Image(values, image.affine, image.header), path)
    return values
