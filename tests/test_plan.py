"""What a run will be, before anything is written."""

from __future__ import annotations

import json

import pytest
import small_site as small

from tesla_med.config.files import load_pipeline, load_site
from tesla_med.config.models import Region, SiteConfig
from tesla_med.config.resolve import other_sites, resolve
from tesla_med.errors import CheckpointError, ConfigError, DataError
from tesla_med.plan import RunRequest, make_plan

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.fixture
def volumes(tmp_path):
    small.make_volumes(tmp_path / "nii", 2)
    return tmp_path / "nii"


def plan(volumes, weights, **options):
    site = options.pop("site", small.site())
    return make_plan(RunRequest(site, volumes, weights=weights, device="cpu", **options))


def test_defaults_come_from_site_and_pipeline(volumes, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = plan(volumes, weights)
    assert (made.method, made.protocol, made.reset, made.seed) == ("tesla", "N-O", "case", 0)
    assert made.out.as_posix() == "runs/X/tesla-N-O"
    assert plan(volumes, weights, protocol="N-M").reset == "site"
    assert plan(volumes, weights, pipeline="prostate_paper").reset == "site"
    assert plan(volumes, weights, method="source").out.as_posix() == "runs/X/source-N-O"
    assert list(made.items.names) == ["Case00", "Case01"]
    assert not list(tmp_path.glob("runs"))


def test_the_card_decides_what_the_network_sees(volumes, weights):
    made = plan(volumes, weights)
    assert made.pipeline.preprocessing.size == (32, 32)
    assert any("preprocessing.size" in note for note in made.notes)
    kept = plan(volumes, weights, overrides=("preprocessing.size=[48,48]",))
    assert kept.pipeline.preprocessing.size == (48, 48)
    assert any("--set departs" in note for note in kept.notes)


def test_settings_and_manifest_are_json(volumes, weights):
    made = plan(volumes, weights, protocol="N-M", seed=4)
    settings = json.loads(json.dumps(made.settings()))
    assert settings["seed"] == 4
    assert settings["cases"] == ["Case00", "Case01"]
    assert settings["pipeline"]["methods"]["tesla"]["op_set"] == "released_mri"
    manifest = json.loads(json.dumps(made.manifest()))
    assert manifest["method"]["parameters"]["epochs"] == 5
    assert manifest["notice"].startswith("Not a medical device")


def test_settings_tell_everything_that_changes_a_mask(volumes, weights):
    first = plan(volumes, weights).settings()
    for options in (
        {"seed": 1},
        {"method": "bn"},
        {"protocol": "N-M"},
        {"reset": "never"},
        {"overrides": ("precision=bfloat16",)},
        {"overrides": ("site.region={kind: square, size_mm: 90}",)},
    ):
        assert plan(volumes, weights, **options).settings() != first, options
    assert plan(volumes, weights, overrides=("reports=[]",)).settings() == first


def test_overrides_reach_loaded_configurations(volumes, weights):
    texts = ("predict_batch=3", "site.terms=Ours")
    pipeline = load_pipeline("prostate")
    made = plan(volumes, weights, pipeline=pipeline, overrides=texts)
    assert made.pipeline.predict_batch == 3
    assert made.site.terms == "Ours"
    assert pipeline.predict_batch == 16
    with pytest.raises(ConfigError, match="no_key"):
        plan(volumes, weights, pipeline=pipeline, overrides=("no_key=3",))
    with pytest.raises(ConfigError, match="spacing"):
        plan(volumes, weights, overrides=("site.spacing=guess",))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reset": "sometimes"}, "reset 'sometimes'"),
        ({"reset": "sites"}, "Did you mean 'site'"),
        ({"protocol": "Y-O"}, "'Y-O'"),
        ({"method": "telsa"}, "Did you mean 'tesla'"),
        ({"device": "tpu"}, "tpu"),
        ({"pipeline": "prostrate"}, "Did you mean 'prostate"),
        ({"pipeline": "spinal_cord"}, "spinal_cord"),
        ({"site": "prostate/Z"}, "prostate/Z"),
    ],
)
def test_wrong_names(volumes, weights, options, words):
    arguments = {"device": "cpu"} | options
    with pytest.raises(ConfigError, match=words):
        make_plan(RunRequest(arguments.pop("site", small.site()), volumes, weights=weights, **arguments))


def test_weights(volumes, weights, tmp_path):
    with pytest.raises(CheckpointError, match="--weights"):
        plan(volumes, None)
    with pytest.raises(CheckpointError, match=r"nothing\.safetensors"):
        plan(volumes, tmp_path / "nothing.safetensors")
    own = small.site(weights=str(weights))
    assert make_plan(RunRequest(own, volumes, device="cpu")).weights == weights
    (tmp_path / "cut.safetensors").write_bytes(weights.read_bytes()[:500])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        plan(volumes, tmp_path / "cut.safetensors")


def test_no_images(weights, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no files of its own"):
        plan(tmp_path / "empty", weights)
    with pytest.raises(DataError, match="no such file"):
        plan(tmp_path / "missing", weights)


def test_parts_of_other_sites_are_left_alone(weights, tmp_path):
    small.make_volumes(tmp_path / "UCL", 1)
    small.make_volumes(tmp_path / "plain", 1)
    made = plan(tmp_path, weights)
    assert list(made.items.names) == ["plain/Case00"]
    assert [path.name for path, _ in made.items.skipped] == ["UCL"]
    assert made.manifest()["skipped"] == [{"file": "UCL", "reason": "the folder of another site"}]


def test_other_sites():
    names = {site.id for site in other_sites(load_site("prostate/F"))}
    assert names == {"A", "B", "C", "D", "E"}


def test_resolve_refuses_what_does_not_belong_together(tmp_path):
    with pytest.raises(ConfigError, match="not one of pipeline"):
        resolve(load_site("gm2018-UCL"), "prostate", ())
    site, pipeline = resolve("gm2018-UCL", None, ())
    assert (site.id, pipeline.name) == ("gm2018-UCL", "spinal_cord")
    with pytest.raises(ConfigError, match="give --site"):
        resolve(None, None, ())
    with pytest.raises(CheckpointError, match=r"weights\.pth: no such file or folder"):
        resolve(None, None, (), tmp_path / "weights.pth")
    (tmp_path / "weights.pth").touch()
    with pytest.raises(ConfigError, match="no card"):
        resolve(None, None, (), tmp_path / "weights.pth")


def test_notes_say_what_is_not_available_in_practice(volumes, weights):
    region = Region(kind="mask", size_mm=60, pattern="*_segmentation.nii.gz", slices="mask")
    made = plan(volumes, weights, site=small.site(region=region, spacing="nominal"))
    assert any("slices come from a reference mask" in note for note in made.notes)
    assert any("nominal" in note for note in made.notes)
    assert isinstance(made.site, SiteConfig)
