"""Whose a case or a tile is, told by the names of a site."""

import pytest

from tesla_med.tasks.subjects import BY_FOLDER, subjects_of


@pytest.mark.parametrize(
    ("names", "subjects"),
    [
        (["P01/T1", "P01/T2"], ["P01", "P01"]),
        (["P01/T1", "P01/T2", "P02/T1"], ["P01", "P01", "P02"]),
        (["data/P01/T1", "data/P01/T2"], ["P01", "P01"]),
        (["data/P01/v1/T1", "data/P02/v1/T1"], ["P01", "P02"]),
        (["P01/T1"], ["P01"]),
        (["T2/a", "T2/b"], ["T2/a", "T2/b"]),
        (["Task05/a", "Task05/b"], ["Task05/a", "Task05/b"]),
        (["Patient_7/a", "Patient_7/b"], ["Patient_7", "Patient_7"]),
        (["imagesTr/case1", "imagesTr/case2"], ["imagesTr/case1", "imagesTr/case2"]),
        (["Task05/imagesTr/p_00", "Task05/imagesTr/p_01"], ["Task05/imagesTr/p_00", "Task05/imagesTr/p_01"]),
        (["imagesTr/P01/T1", "imagesTr/P01/T2"], ["P01", "P01"]),
        (["imagesTr/P01/T1", "imagesTr/P02/T1"], ["P01", "P02"]),
        (["case1", "case2"], ["case1", "case2"]),
        (["P01/T1", "alone"], ["P01", "alone"]),
        ([], []),
    ],
)
def test_without_a_pattern(names, subjects):
    found, by = subjects_of(names, None, "case")
    assert list(found) == subjects
    told = {"the case" if name in subjects else BY_FOLDER for name in names}
    assert set(by.split(", else ")) - {""} == told
