"""An earlier run is neither replaced nor reused unless requested; it is resumed only with its own
settings.
"""

import pytest
import small_site as small

import tesla_med

CASE = 78


@pytest.fixture
def again(small_weights, tmp_path):
    """Run once, and return how to run again into the same folder."""
    small.make_volumes(tmp_path / "nii", 1)

    def adapt(**options):
        return small.run(tmp_path / "nii", small_weights, tmp_path / "out", **options)

    adapt()
    return adapt


OTHER = {
    "seed": {"seed": 7},
    "method": {"method": "source"},
    "pipeline": {"overrides": ("methods.tesla.learning_rate=0.004",)},
    "protocol": {"protocol": "N-M"},
    "save_probs": {"save_probs": True},
}


@pytest.mark.parametrize("options", [{}, OTHER["seed"]], ids=["same", "other"])
def test_neither_replaced_nor_reused_without_a_word(again, tmp_path, options):
    before = small.files_below(tmp_path / "out")
    with pytest.raises(tesla_med.TeslaMedError, match=r"earlier run.*--resume.*--overwrite"):
        again(**options)
    assert small.files_below(tmp_path / "out") == before


@pytest.mark.parametrize("key", OTHER)
def test_resume_refuses_other_settings_by_name(again, tmp_path, key):
    before = small.files_below(tmp_path / "out")
    with pytest.raises(tesla_med.TeslaMedError, match=rf"settings differ.*{key}[a-z_.]*: "):
        again(resume=True, **OTHER[key])
    assert small.files_below(tmp_path / "out") == before


def test_overwrite_leaves_nothing_of_the_earlier_run(again, tmp_path):
    again(overwrite=True, **OTHER["method"])
    assert small.record(tmp_path / "out")["method"]["name"] == "source"
    assert not (tmp_path / "out/checkpoints").exists()
    files = small.masks(tmp_path / "out")
    assert files["masks/Case00_mask.nii.gz"] == files["source_masks/Case00_mask.nii.gz"]


def test_resume_with_the_same_settings(again, tmp_path):
    before = small.masks(tmp_path / "out")
    again(resume=True)
    assert small.masks(tmp_path / "out") == before


def test_a_folder_that_is_no_run_is_never_touched(small_weights, tmp_path):
    small.make_volumes(tmp_path / "nii", 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("mine")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(tesla_med.TeslaMedError, match=r"not a run of tesla-med \(thesis\.txt\)"):
            small.run(tmp_path / "nii", small_weights, tmp_path / "out", **options)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]
