"""Images of several channels: one file per channel, one grid, from training to the report."""

import csv

import nibabel as nib
import numpy as np
import pytest
import small_site as small

from tesla_med import adapt_site, train_source
from tesla_med.actions.check import check_site
from tesla_med.config.files import load_pipeline
from tesla_med.config.models import Files, MaskLayer, Region
from tesla_med.config.models import PipelineConfig as Pipeline
from tesla_med.errors import ConfigError
from tesla_med.io.cases import find_cases
from tesla_med.io.volumes import read_case
from tesla_med.prepare.transforms import Preprocessor

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("T2", "ADC", "DWI", "KTRANS")


def site(channels=2):
    masks = (MaskLayer(pattern="*_segmentation.nii.gz", write=1),)
    return small.site(files=Files(image=tuple(f"*_{name}.nii.gz" for name in NAMES[:channels]), masks=masks))


def make(folder, count=2, channels=2, **changes):
    """Write cases of several channels: the first as generated, the others darker where it is brighter."""
    for path in small.make_volumes(folder, count, **changes):
        name = path.name.removesuffix(".nii.gz")
        for number, channel in enumerate(NAMES[1:channels], 1):
            small.copy_image(
                path, folder / f"{name}_{channel}.nii.gz", lambda a, n=number: 50 * n + (a.max() - a) // n
            )
        path.rename(folder / f"{name}_T2.nii.gz")


def pipeline(channels=2, *texts) -> Pipeline:
    few = ("train.steps=30", "train.validate_every=15", "train.batch_size=4", "train.learning_rate=0.01")
    return load_pipeline("prostate", (*small.SMALL, *small.FEW, *few, f"channels={channels}", *texts))


@pytest.mark.slow
@pytest.mark.parametrize("channels", [2, 4])
def test_a_site_is_trained_adapted_scored_and_reported(tmp_path, channels):
    make(tmp_path / "source", 2, channels, name="source")
    make(tmp_path / "target", 2, channels, name="hard")
    recipe, own = pipeline(channels), site(channels)
    trained = train_source(recipe, [own], tmp_path / "source", tmp_path / "weights", device="cpu")
    for op_set in ("intensity", "generic"):
        out = tmp_path / op_set
        result = adapt_site(
            own,
            tmp_path / "target",
            pipeline=pipeline(channels, f"methods.tesla.op_set={op_set}"),
            weights=trained.weights,
            out=out,
            device="cpu",
        )
        assert [item.status for item in result.results] == ["ok", "ok"]
        assert {item.used for item in result.results} == {"adapted"}
        image = nib.load(tmp_path / "target/Case00_T2.nii.gz")
        mask = nib.load(out / "masks/Case00_T2_mask.nii.gz")
        assert mask.shape == image.shape
        assert np.array_equal(mask.affine, image.affine)
        with (out / "report/metrics.csv").open(newline="") as stream:
            assert all(row["dice"] for row in csv.DictReader(stream))
        assert "Case00_T2" in (out / "report/report.html").read_text(encoding="utf-8")


def test_every_channel_is_scaled_on_its_own(tmp_path):
    make(tmp_path, 1, 3)
    case = find_cases(tmp_path, site(3), channels=3).cases[0]
    assert [path.name for path in case.files] == [f"Case00_{name}.nii.gz" for name in NAMES[:3]]
    volume = read_case(case, site(3))
    assert volume.array.shape == (3, 32, 32, small.SLICES)
    for scaling in ("minmax", "percentile"):
        recipe = pipeline(3, f"preprocessing.intensity.scaling={scaling}", "preprocessing.size=null")
        images = Preprocessor(recipe.preprocessing, Region(), 2)(volume).images
        assert images.shape[1] == 3
        for channel in range(3):
            assert float(images[:, channel].min()) == 0
            assert float(images[:, channel].max()) == pytest.approx(1)


def test_a_channel_that_is_missing_or_elsewhere_is_named(tmp_path):
    make(tmp_path / "nii", 3)
    (tmp_path / "nii/Case01_ADC.nii.gz").unlink()
    moved = tmp_path / "nii/Case02_ADC.nii.gz"
    small.copy_image(moved, moved, shift_mm=7.0)
    found = check_site(site(), pipeline(), tmp_path / "nii")
    assert [bool(item.problems) for item in found.cases] == [False, True, True]
    assert "channel 2 has no file" in found.cases[1].problems[0]
    assert "*_ADC.nii.gz" in found.cases[1].problems[0]
    assert "channel 2" in found.cases[2].problems[0]
    assert "7 mm" in found.cases[2].problems[0]


def test_patterns_and_channels_must_be_as_many(tmp_path):
    make(tmp_path / "nii", 1)
    with pytest.raises(ConfigError, match=r"3 channels.*one pattern per channel, got 2"):
        find_cases(tmp_path / "nii", site(), channels=3)
    assert len(find_cases(tmp_path / "nii", site()).cases) == 2  # of one channel they are alternatives
