"""STUDY.yaml and the file of a SLURM cluster: what is read, what is refused, in which words."""

import pytest
import yaml

from tesla_med.config.study import load_slurm, load_study, site_entries
from tesla_med.errors import ConfigError

LEAST = {"name": "trial", "volumes": "nii", "sites": ["prostate/D", {"site": "E", "volumes": "~/e"}]}


def written(folder, content, name="study.yaml"):
    path = folder / name
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_a_short_study_has_defaults(tmp_path):
    study = load_study(written(tmp_path, LEAST))
    assert [(item.site, item.volumes) for item in study.sites] == [("prostate/D", None), ("E", "~/e")]
    assert (study.methods, study.protocols, study.seeds) == (("tesla",), ("N-O",), (0,))
    assert (study.weights, study.set, study.threads) == ((), (), 1)


def test_one_value_stands_for_a_list_and_a_number_for_that_many_seeds(tmp_path):
    given = {"weights": "w.safetensors", "methods": "bn", "protocols": "N-M", "seeds": 3, "set": "a=1"}
    study = load_study(written(tmp_path, LEAST | given))
    assert (study.weights, study.methods, study.protocols) == (("w.safetensors",), ("bn",), ("N-M",))
    assert (study.seeds, study.set) == ((0, 1, 2), ("a=1",))
    assert load_study(written(tmp_path, LEAST | {"seeds": [5, 2]})).seeds == (5, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": ["bn"]}, "key 'method'.*methods"),
        ({"sites": [{"site": "D", "volume": "x"}]}, r"key 'sites\.0\.volume'.*volumes"),
        ({"sites": []}, "key 'sites'"),
        ({"sites": "D"}, "key 'sites'"),
        ({"name": None}, "key 'name'"),
        ({"name": "../x"}, "key 'name'"),
        ({"volumes": None}, "no folder of images for site 'prostate/D'"),
        ({"protocols": ["N-X"]}, r"key 'protocols\.0'.*N-O"),
        ({"methods": ["bn", "bn"]}, "key 'methods': 'bn' is given twice"),
        ({"seeds": 0}, "key 'seeds': expected how many seeds, 1 or more, or a list"),
        ({"seeds": [0, -1]}, r"key 'seeds\.1'"),
        ({"threads": 0}, "key 'threads'"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_key(tmp_path, change, message):
    path = written(tmp_path, LEAST | change)
    with pytest.raises(ConfigError, match=rf"study\.yaml: .*{message}"):
        load_study(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no study file at .*nothing\.yaml"):
        load_study(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match=r"no cluster file at .*nothing\.yaml"):
        load_slurm(tmp_path / "nothing.yaml")


def test_a_pattern_stands_for_site_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a"):
        (tmp_path / f"{name}.yaml").write_text("institution: Nowhere\n", encoding="utf-8")
    sites = [{"site": "[ab].yaml", "volumes": "x"}, "prostate/D", str(tmp_path / "a*.yaml")]
    study = load_study(written(tmp_path, LEAST | {"sites": sites}))
    found = [(item.site, item.volumes) for item in site_entries(study.sites)]
    assert found == [("a.yaml", "x"), ("b.yaml", "x"), ("prostate/D", None), (str(tmp_path / "a.yaml"), None)]
    nothing = load_study(written(tmp_path, LEAST | {"sites": ["none/*.yaml"]}))
    with pytest.raises(ConfigError, match=r"'none/\*.yaml' matches no file"):
        site_entries(nothing.sites)


def test_a_cluster_is_checked_too(tmp_path):
    cluster = load_slurm(written(tmp_path, {"jobs": 8, "memory": "16GB", "gpus": 1}, "slurm.yaml"))
    assert (cluster.jobs, cluster.gpus, cluster.walltime) == (8, 1, "24:00:00")
    for change, message in (({"gpus": 2}, "'gpus'"), ({"queue": "gpu"}, "'queue'"), ({"jobs": 0}, "'jobs'")):
        path = written(tmp_path, {"jobs": 8, "memory": "16GB"} | change, "slurm.yaml")
        with pytest.raises(ConfigError, match=rf"slurm\.yaml: .*{message}"):
            load_slurm(path)
