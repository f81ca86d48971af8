"""Configuration: search path, inheritance, overrides, and errors that name file and key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from tesla_med.config.files import (
    SEARCH_PATH_VARIABLE,
    apply_overrides,
    load_pipeline,
    load_site,
    pipeline_files,
    read_yaml,
    search_roots,
    site_files,
    site_folders,
)
from tesla_med.config.models import Intensity, LabelClass, MaskLayer, Preprocessing, Region, merge
from tesla_med.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = """\
title: Things
sites: things
classes:
  - {value: 0, name: background}
  - {value: 1, name: thing}
methods:
  tesla: {learning_rate: 0.01, policy_size: 2}
protocols:
  N-M:
    tesla: {policy_size: 1, epochs: 3}
"""
SITE = """\
institution: Somewhere
files:
  image: Case*.nii.gz
  masks:
    - {pattern: '*_mask.nii.gz', write: 1}
"""


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with its own pipeline and sites; nothing else but the shipped ones is found."""
    monkeypatch.delenv(SEARCH_PATH_VARIABLE, raising=False)
    work = tmp_path / "work"
    write(work, "pipelines/things.yaml", PIPELINE)
    write(work, "site_configs/things/A.yaml", SITE)
    monkeypatch.chdir(work)
    return work


def error_of(function, *arguments, **options):
    with pytest.raises(ConfigError) as raised:
        function(*arguments, **options)
    return str(raised.value)


# ------------------------------------------------------------ reading


def test_a_pipeline_by_name_and_by_path(folder):
    pipeline = load_pipeline("things")
    assert pipeline.name == "things"
    assert pipeline.values == (0, 1)
    assert [item.name for item in pipeline.foreground] == ["thing"]
    assert pipeline == load_pipeline("pipelines/things.yaml")
    assert pipeline == load_pipeline(str(folder / "pipelines" / "things.yaml"))


def test_a_site_by_id_folder_and_path(folder):
    site = load_site("things/A")
    assert (site.id, site.pipeline, site.institution) == ("A", "things", "Somewhere")
    assert site.files.image == ("Case*.nii.gz",)
    assert site == load_site("A", "things")
    assert site == load_site("site_configs/things/A.yaml")


def test_protocol_over_method_parameters(folder):
    pipeline = load_pipeline("things")
    assert pipeline.method_params("tesla", "N-O") == {"learning_rate": 0.01, "policy_size": 2}
    assert pipeline.method_params("tesla", "N-M") == {"learning_rate": 0.01, "policy_size": 1, "epochs": 3}
    assert pipeline.method_params("bn", "N-M") == {}
    assert pipeline.reset_for("N-O") == "case"
    assert pipeline.reset_for("N-M") == "site"
    assert load_pipeline("things", ["reset.N-O=never"]).reset_for("N-O") == "never"


def test_configurations_are_frozen(folder):
    with pytest.raises(ValidationError):
        load_pipeline("things").title = "Other"


def test_torch_is_not_imported_to_read_configurations():
    code = (
        "import sys; from tesla_med.config.files import load_pipeline, load_site; "
        "load_pipeline('prostate'); load_site('F'); "
        "sys.exit('torch' in sys.modules or 'monai' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)  # noqa: S603


# ------------------------------------------------------------ search path


def test_the_working_folder_comes_first_then_the_variable_then_the_package(folder, tmp_path, monkeypatch):
    extra = tmp_path / "extra"
    write(extra, "pipelines/things.yaml", PIPELINE.replace("Things", "Others"))
    write(extra, "pipelines/prostate.yaml", PIPELINE.replace("Things", "Mine"))
    monkeypatch.setenv(SEARCH_PATH_VARIABLE, str(extra))
    assert search_roots()[:2] == [folder, extra]
    assert load_pipeline("things").title == "Things"
    assert load_pipeline("prostate").title == "Mine"
    assert pipeline_files()["spinal_cord"].parent == search_roots()[-1] / "pipelines"
    (folder / "pipelines" / "things.yaml").unlink()
    assert load_pipeline("things").title == "Others"
    monkeypatch.delenv(SEARCH_PATH_VARIABLE)
    assert "things" not in pipeline_files()
    assert load_pipeline("prostate").title != "Mine"


def test_a_root_is_searched_once(folder, monkeypatch):
    monkeypatch.setenv(SEARCH_PATH_VARIABLE, f"{folder}:{folder}/../work")
    assert search_roots().count(folder) == 1


def test_own_sites_beside_shipped_ones(folder):
    assert {"things", "prostate", "spinal_cord"} <= set(site_folders())
    write(folder, "site_configs/prostate/Z.yaml", SITE)
    assert {"A", "F", "Z"} <= set(site_files("prostate"))
    write(folder, "site_configs/prostate/F.yaml", SITE)
    assert load_site("prostate/F").institution == "Somewhere"


# ------------------------------------------------------------ inheritance


def test_extends_merges_mappings_and_replaces_lists(folder):
    text = """\
extends: things
title: Child
methods:
  tesla: {policy_size: 3}
  bn: {target_share: 0.5}
classes:
  - {value: 0, name: background}
  - {value: 4, name: other}
"""
    write(folder, "pipelines/child.yaml", text)
    child = load_pipeline("child")
    assert child.name == "child"
    assert child.title == "Child"
    assert child.methods == {
        "tesla": {"learning_rate": 0.01, "policy_size": 3},
        "bn": {"target_share": 0.5},
    }
    assert child.values == (0, 4)
    assert child.sites == "things"


def test_merge():
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    assert merge(base, {"a": {"c": [3]}, "e": 2}) == {"a": {"b": 1, "c": [3]}, "d": 1, "e": 2}
    assert merge(base, {"a": None, "d": {"x": 1}}) == {"a": None, "d": {"x": 1}}
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": 1}


def test_circular_extends(folder):
    write(folder, "pipelines/one.yaml", "extends: two\n")
    write(folder, "pipelines/two.yaml", "extends: one\n")
    text = error_of(load_pipeline, "one")
    assert "one.yaml" in text
    assert "circular: one -> two -> one" in text
    write(folder, "pipelines/self.yaml", "extends: self\n")
    assert "circular: self -> self" in error_of(load_pipeline, "self")


def test_extends_something_unknown(folder):
    write(folder, "pipelines/child.yaml", "extends: thinks\n")
    text = error_of(load_pipeline, "child")
    assert "unknown pipeline 'thinks'. Did you mean 'things'?" in text
    write(folder, "pipelines/child.yaml", "extends: [things]\n")
    assert "child.yaml: 'extends' must be the name of a pipeline" in error_of(load_pipeline, "child")


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("titel: x", ["unknown key 'titel'. Did you mean 'title'?"]),
        ("model: {nmae: unet}", ["unknown key 'model.nmae'", "name, params"]),
        ("preprocessing: {intensity: {scalling: minmax}}", ["'preprocessing.intensity.scalling'", "scaling"]),
        ("channels: one", ["key 'channels'", "valid integer", "got 'one'"]),
        ("channels: 0", ["key 'channels'", "greater than or equal to 1", "got 0"]),
        ("protocol: N-X", ["key 'protocol'", "'N-O', 'N-M', 'Y-O' or 'Y-M'", "got 'N-X'"]),
        ("reset: {N-X: case}", ["reset.N-X"]),
        ("reset: {N-O: always}", ["key 'reset.N-O'", "'never', 'site' or 'case'", "got 'always'"]),
        ("protocols: {N-O: 3}", ["key 'protocols.N-O'", "got 3"]),
        ("preprocessing: {size: [256]}", ["preprocessing.size"]),
        ("preprocessing: {size: [4, 256]}", ["preprocessing.size.0", "greater than or equal to 8", "got 4"]),
        ("preprocessing: {orientation: RAX}", ["preprocessing.orientation", "got 'RAX'"]),
        ("preprocessing: {orientation: RLS}", ["preprocessing.orientation", "one letter of each pair"]),
        ("preprocessing: {spacing: [-1, 1, 1]}", ["preprocessing.spacing", "0 (keep) or positive"]),
        ("report: {bins: 1}", ["key 'report.bins'", "got 1"]),
    ],
)
def test_wrong_keys_and_values_of_a_pipeline(line, parts, folder):
    path = write(folder, "pipelines/broken.yaml", f"extends: things\n{line}\n")
    text = error_of(load_pipeline, "broken")
    assert text.startswith(f"{path}: ")
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("title: Things", "{}: 1", ["valid YAML"]),
        ("title: Things\n", "", ["key 'title' is missing"]),
        ("value: 1", "value: 0", ["classes", "class values repeat: [0, 0]"]),
        ("value: 0", "value: 3", ["classes", "first class must be the background"]),
        ("  - {value: 1, name: thing}\n", "", ["classes", "at least 2"]),
        ("name: thing", "name: thing, color: red", ["classes.1.color", "got 'red'"]),
        ("name: thing", "name: thing, colour: '#000000'", ["classes.1.colour", "color"]),
    ],
)
def test_wrong_parts_of_a_pipeline(old, new, parts, folder):
    assert old in PIPELINE
    path = write(folder, "pipelines/broken.yaml", PIPELINE.replace(old, new))
    text = error_of(load_pipeline, "broken")
    assert str(path) in text
    for part in parts:
        assert part in text


def test_every_fault_is_named_at_once(folder):
    write(folder, "pipelines/broken.yaml", PIPELINE + "titel: x\nchannels: 0\n")
    text = error_of(load_pipeline, "broken")
    assert "titel" in text
    assert "channels" in text


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("a: 1\na: 2\n", "key given twice: a"),
        ("a: {b: 1, b: 2}\n", "key given twice: b"),
        ("a: [1, 2\n", "not valid YAML"),
        ("- a\n- b\n", "expected a mapping of keys to values, got list"),
        ("", "got NoneType"),
        ("1: a\n", "expected a mapping"),
        ("on: a\n", "quotes"),
        ("a: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_wrong_yaml(content, part, tmp_path):
    path = write(tmp_path, "file.yaml", content)
    text = error_of(read_yaml, path)
    assert str(path) in text
    assert part in text


def test_unreadable_yaml(tmp_path):
    assert "cannot be read" in error_of(read_yaml, tmp_path / "missing.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff\xfe")
    assert "bytes.yaml" in error_of(read_yaml, tmp_path / "bytes.yaml")


def test_unknown_pipelines(folder):
    assert "unknown pipeline 'protsate'. Did you mean 'prostate'?" in error_of(load_pipeline, "protsate")
    assert "no pipeline file at missing.yaml" in error_of(load_pipeline, "missing.yaml")


# ------------------------------------------------------------ sites


def test_unknown_sites(folder):
    text = error_of(load_site, "B", "things")
    assert "unknown site 'B'" in text
    assert "things/A" in text
    assert "site_configs/<pipeline>/<id>.yaml" in text
    assert "unknown site folder 'thinks'. Did you mean 'things'?" in error_of(load_site, "thinks/A")
    assert "no site file at none.yaml" in error_of(load_site, "none.yaml")


def test_ambiguous_sites(folder):
    text = error_of(load_site, "A")
    assert text == "site 'A' exists in more than one pipeline: give prostate/A or things/A"


def test_a_site_is_matched_whole_not_in_part(folder):
    write(folder, "site_configs/things/site1.yaml", SITE)
    write(folder, "site_configs/things/site10.yaml", SITE.replace("Somewhere", "Elsewhere"))
    assert load_site("site1").institution == "Somewhere"
    assert load_site("site10").institution == "Elsewhere"
    assert "unknown site 'site'" in error_of(load_site, "site", "things")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("insitution: x", ["unknown key 'insitution'. Did you mean 'institution'?"]),
        ("scanner: {field_strength_t: strong}", ["scanner.field_strength_t", "got 'strong'"]),
        ("scanner: {field_strength_t: 0}", ["scanner.field_strength_t", "greater than 0"]),
        ("spacing: guess", ["key 'spacing'", "got 'guess'"]),
        ("region: {kind: square}", ["region kind 'square' needs size_mm"]),
        ("region: {kind: mask}", ["needs size_mm, pattern"]),
        ("region: {kind: whole, slices: mask}", ["slices: mask needs region kind 'mask'"]),
        ("id: B", ["key 'id' is 'B' but the file's path says 'A'"]),
        ("pipeline: other", ["key 'pipeline' is 'other'", "'things'"]),
    ],
)
def test_wrong_keys_and_values_of_a_site(line, parts, folder):
    path = write(folder, "site_configs/things/A.yaml", SITE + line + "\n")
    text = error_of(load_site, "things/A")
    assert text.startswith(f"{path}: ")
    for part in parts:
        assert part in text


def test_a_mask_layer_has_one_rule():
    with pytest.raises(ValidationError, match="either 'write' or 'values'"):
        MaskLayer(pattern="*", write=1, values={1: 1})
    assert MaskLayer(pattern="*").write is None
    with pytest.raises(ValidationError, match="less than or equal to 65535"):
        MaskLayer(pattern="*", write=70000)


def test_regions_and_intensities():
    assert Region(kind="point", size_mm=50, point_mm=(1, 2, 3)).point_mm == (1, 2, 3)
    with pytest.raises(ValidationError, match="lower must be below upper"):
        Intensity(scaling="percentile", lower=50, upper=50)
    assert Preprocessing(orientation="LPI").orientation == "LPI"
    with pytest.raises(ValidationError, match="less than or equal to 65535"):
        LabelClass(value=65536, name="x")


# ------------------------------------------------------------ overrides


def test_overrides_reach_any_depth(folder):
    texts = [
        "methods.tesla.learning_rate=0.5",
        "methods.bn.target_share=0.3",
        "preprocessing.size=[64, 48]",
        "protocols.N-M.tesla.epochs=9",
        "title=a = b",
        "site.spacing=nominal",
    ]
    pipeline = load_pipeline("things", texts)
    assert pipeline.methods["tesla"] == {"learning_rate": 0.5, "policy_size": 2}
    assert pipeline.methods["bn"] == {"target_share": 0.3}
    assert pipeline.preprocessing.size == (64, 48)
    assert pipeline.method_params("tesla", "N-M")["epochs"] == 9
    assert pipeline.title == "a = b"
    site = load_site("things/A", overrides=texts)
    assert site.spacing == "nominal"


@pytest.mark.parametrize("text", ["learning_rate", "=3", "a..b=1", ".a=1", ""])
def test_overrides_that_are_no_assignment(text):
    message = error_of(apply_overrides, {}, [text])
    assert message.startswith(f"--set {text!r}: expected key=value")


def test_overrides_with_a_value_that_is_no_yaml():
    assert "--set 'a=[1': the value is not valid YAML" in error_of(apply_overrides, {}, ["a=[1"])


def test_later_overrides_win_and_the_content_stays():
    content = {"a": {"b": 1}}
    assert apply_overrides(content, ["a.b=2", "a.b=3", "a.c=null"]) == {"a": {"b": 3, "c": None}}
    assert content == {"a": {"b": 1}}


def test_wrong_overrides_name_file_key_and_text(folder):
    text = error_of(load_pipeline, "things", ["preprocesing.size=[64, 64]"])
    assert "things.yaml with --set preprocesing.size=[64, 64]: " in text
    assert "unknown key 'preprocesing'. Did you mean 'preprocessing'?" in text
    text = error_of(load_site, "things/A", None, ["site.spacing=guess"])
    assert "A.yaml with --set spacing=guess: key 'spacing'" in text


# ------------------------------------------------------------ the paper's table

# Tables "hyperparameters_seg" and "hyperparameters_cls": batch size, learning rate, teacher momentum, epochs,
# weak views, neighbours, queue size, ops in a sub-policy, lambda_1, lambda_2.
PAPER = {
    ("spinal_cord_paper", "N-O"): (16, 0.0002, 0.996, 1, 5, 1, 1, 3, 1, 1),
    ("spinal_cord_paper", "N-M"): (16, 0.0002, 0.996, 5, 5, 1, 1, 3, 1, 1),
    ("prostate_paper", "N-O"): (16, 0.0002, 0.996, 1, 5, 1, 1, 3, 1, 1),
    ("prostate_paper", "N-M"): (16, 0.0002, 0.996, 3, 5, 1, 1, 3, 1, 1),
    ("kather_paper", "N-O"): (32, 0.005, 0.9, 1, 5, 8, 32, 2, 1, 1),
    ("kather_paper", "N-M"): (32, 0.005, 0.96, 70, 5, 8, 256, 2, 1, 1),
}
OPTIMIZERS = {"prostate_paper": "adamw", "spinal_cord_paper": "adamw", "kather_paper": "adam"}
KEYS = (
    "batch_slices",
    "learning_rate",
    "teacher_momentum",
    "epochs",
    "weak_views",
    "neighbours",
    "queue_size",
    "policy_size",
    "severity_weight",
    "distillation_weight",
)


def params_of(name, protocol):
    from tesla_med.tta.base import check_params

    return check_params("tesla", load_pipeline(name, roots=[ROOT]).method_params("tesla", protocol))


@pytest.mark.parametrize(("name", "protocol"), PAPER)
def test_recipes_of_the_paper(name, protocol):
    params = params_of(name, protocol)
    for key, value in zip(KEYS, PAPER[name, protocol], strict=True):
        assert getattr(params, key) == value, key
    assert params.optimizer == OPTIMIZERS[name]
    assert params.policy_learning_rate == params.magnitude_learning_rate == 0.1
    assert params.op_set == "generic"
    assert params.policy_sampling == "probability"
    assert params.severity_of == "encoder"
    assert params.draw == "ordered"


@pytest.mark.parametrize("task", ["prostate", "spinal_cord"])
def test_recipes_of_the_release(task):
    one, several = (params_of(f"{task}_released", protocol) for protocol in ("N-O", "N-M"))
    for params in (one, several):
        assert (params.learning_rate, params.weight_decay, params.clip_norm) == (0.0002, 0.0005, 1.0)
        assert (params.policy_learning_rate, params.magnitude_learning_rate) == (0.001, 0.01)
        assert (params.op_set, params.policy_size, params.policy_sampling) == ("released_mri", 3, "uniform")
        assert (params.moving_passes, params.statistics_momentum) == ("all", 0.1)
        assert params.severity_of == "network"
        assert params.freeze_norm_affine
        assert params.teacher_momentum == 0.996
    assert (one.batch_slices, one.draw, one.updates_per_case) == (8, "replacement", 8)
    assert (one.weak_views, one.predict_views) == (1, 1)
    assert (several.batch_slices, several.draw) == (16, "ordered")
    assert several.epochs == {"prostate": 3, "spinal_cord": 5}[task]
    assert (several.weak_views, several.weak_views_first_epoch, several.predict_views) == (5, 1, 5)
    assert several.reset_policy_each_epoch
    assert several.refresh_statistics


@pytest.mark.parametrize("name", ["prostate", "spinal_cord", "nnunet", "bundle", "prostate_paper", "kather"])
@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_comparison_methods_run_as_their_authors_run_them(name, protocol):
    from tesla_med.tta.base import check_params

    pipeline = load_pipeline(name, roots=[ROOT])
    cotta, adacontrast, plugged = (
        check_params(method, pipeline.method_params(method, protocol))
        for method in ("cotta", "adacontrast", "adacontrast+teaa")
    )
    masks = name != "kather"  # tiles have the settings of CIFAR-10-C
    want = ("pixel", 0.69, 0.0001) if masks else ("batch", 0.92, 0.001)
    assert (cotta.confidence_of, cotta.confidence_threshold, cotta.learning_rate) == want
    assert adacontrast.fill_memory == plugged.fill_memory == (protocol == "N-M")


FIXED = [
    *((task, recipe) for task in ("prostate", "spinal_cord") for recipe in ("paper", "released")),
    ("kather", "paper"),
]


@pytest.mark.parametrize(("task", "recipe"), FIXED)
@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_fixed_recipes_take_no_value_from_ours(task, recipe, protocol):
    ours = load_pipeline(task, roots=[ROOT])
    own = read_yaml(ROOT / "pipelines" / f"{task}_{recipe}.yaml")
    given = set(own["methods"]["tesla"]) | set(own["protocols"][protocol]["tesla"])
    assert set(ours.method_params("tesla", protocol)) <= given
    params = load_pipeline(f"{task}_{recipe}", roots=[ROOT]).method_params("tesla", protocol)
    expected = own["methods"]["tesla"] | own["protocols"][protocol]["tesla"]
    assert {key: params[key] for key in given} == expected
    assert set(own["reset"]) == {"N-O", "N-M", "Y-O", "Y-M"}


def papers_table(shared, label):
    """Return the text of one table of the paper, and the cells of its lines but the first."""
    source = (shared / "paper" / "tesla_paper.tex").read_text(encoding="utf-8")
    table = source[: source.index(rf"\label{{tab:{label}}}")]
    table = table[table.rindex(r"\begin{table}") :]
    return table, [line.replace("\\\\", "").split("&")[1:] for line in table.splitlines() if "&" in line]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("label", "width", "tasks", "optimizer"),
    [
        ("hyperparameters_seg", 6, ("Spinal", "Prostate"), "AdamW"),
        ("hyperparameters_cls", 10, ("Kather",), "Adam"),
    ],
)
def test_the_copy_of_the_papers_table(label, width, tasks, optimizer, shared):
    table, every = papers_table(shared, label)
    rows = [[cell.strip() for cell in row] for row in every if len(row) == width]
    numbers = [[float(cell) for cell in row] for row in rows if "." in "".join(row) or row[0].isdigit()]
    columns = list(zip(*numbers, strict=True))
    assert len(numbers) == len(KEYS)
    places = [table.index(task) for task in ("VisDA", *tasks)]
    assert places == sorted(places)
    names = [name for name in PAPER if name[0].startswith(tuple(task.lower() for task in tasks))]
    assert len(names) == 2 * len(tasks)
    for name, column in zip(names, columns[-len(names) :], strict=True):
        assert column == PAPER[name], name
    (named,) = [row for row in rows if "Adam" in row[-1]]
    assert set(named[-len(names) :]) == {optimizer}


def test_a_method_of_the_upper_layer_beats_the_protocols_of_the_lower(tmp_path):
    folder = tmp_path / "pipelines"
    folder.mkdir()
    parent = yaml.safe_load(pipeline_files()["prostate"].read_text(encoding="utf-8"))
    parent["protocols"]["N-M"]["tesla"] |= {"epochs": 5, "teacher_momentum": 0.99}
    (folder / "parent.yaml").write_text(yaml.safe_dump(parent), encoding="utf-8")
    (folder / "child.yaml").write_text(
        "extends: parent\nmethods: {tesla: {teacher_momentum: 0.9}}\n", encoding="utf-8"
    )
    roots = [tmp_path]
    child = load_pipeline("child", roots=roots).method_params("tesla", "N-M")
    assert (child["teacher_momentum"], child["epochs"]) == (0.9, 5)
    texts = ("protocols.N-M.tesla.epochs=2", "methods.tesla.epochs=1", "methods.tesla.teacher_momentum=0.8")
    for order in (texts, texts[::-1]):
        params = load_pipeline("parent", order, roots).method_params("tesla", "N-M")
        assert (params["epochs"], params["teacher_momentum"]) == (2, 0.8)
        assert load_pipeline("parent", order, roots).method_params("tesla", "N-O")["epochs"] == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("preprocessing.size=[64]", "'preprocessing.size': expected two numbers, as in [128,128], got [64]"),
        ("preprocessing.size=[]", "'preprocessing.size': expected two numbers, as in [128,128], got []"),
        ("preprocessing.size=64", "'preprocessing.size': expected two numbers, as in [128,128], got 64"),
        ("preprocessing.size=[1,2,3]", "expected two numbers, as in [128,128], got [1, 2, 3]"),
        ("preprocessing.spacing=[1,2]", "expected three numbers, as in [1.0,1.0,1.0], got [1, 2]"),
        ("preprocessing.model_range=3", "expected two numbers, as in [-1.0,1.0], got 3"),
        ("reports=table", "key 'reports': expected a list in brackets, got 'table'"),
    ],
)
def test_lists_of_a_fixed_length_are_described(override, words):
    with pytest.raises(ConfigError) as caught:
        load_pipeline("prostate", [override])
    assert str(caught.value).endswith(words)
