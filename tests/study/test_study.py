"""Studies in one process: which cells there are, what their names say, what is written and set aside."""

import json
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import small_site as small
import study_site
import tile_site

from tesla_med.adapt import adapt_site
from tesla_med.cli.app import run
from tesla_med.config.study import load_study
from tesla_med.errors import ConfigError, OutputError, TeslaMedError
from tesla_med.study import schedulers, work
from tesla_med.study.run import run_study, survey_study

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.weights_with_statistics(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def done(weights, tmp_path_factory):
    """A study of 8 cells that was done in this process."""
    return study_site.do_study(tmp_path_factory.mktemp("study"), weights)


@pytest.fixture
def place(done, tmp_path, monkeypatch):
    """A copy of its inputs, to be changed."""
    for name in ("nii", "site_configs"):
        shutil.copytree(done / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(path, out="out", device="cpu"):
    grid, _ = survey_study(load_study(path), out, device=device)
    return [cell.name for cell in grid.cells]


# ------------------------------------------------------------ which cells, and their names


def test_the_cells_of_the_study(done, weights, monkeypatch):
    monkeypatch.chdir(done)
    found = names(study_site.write_study(done, weights, "again.yaml"))
    assert len(set(found)) == 8
    assert [name.rpartition("-small-")[0] for name in found[:4]] == [
        "alpha/bn-N-O-seed-0",
        "alpha/bn-N-M-seed-0",
        "alpha/tesla-N-O-seed-0",
        "alpha/tesla-N-M-seed-0",
    ]


def test_a_method_runs_where_it_can_and_as_often_as_it_is_random(place, weights):
    path = study_site.write_study(
        place, weights, methods=["source", "bn", "tesla", "ttt_pp"], seeds=2, protocols=["N-O", "Y-O"]
    )
    found = [name.rpartition("-small-")[0] for name in names(path) if name.startswith("alpha/")]
    assert found == [
        "alpha/source-N-O-seed-0",
        "alpha/bn-N-O-seed-0",
        *(f"alpha/{run}-seed-{seed}" for run in ("tesla-N-O", "ttt_pp-Y-O") for seed in (0, 1)),
    ]
    only = study_site.write_study(place, weights, methods=["bn"], protocols=["Y-O"])
    with pytest.raises(ConfigError, match=r"none of the methods \(bn\) has any of Y-O"):
        names(only)


def test_names_follow_content_and_nothing_else(place, done, weights, monkeypatch):
    before = names(study_site.write_study(place, weights))
    monkeypatch.chdir(done)
    assert names("study.yaml") == before  # the same files elsewhere
    monkeypatch.chdir(place)
    settings = [*study_site.SETTINGS, "reports=[html]"]
    assert names(study_site.write_study(place, weights, set=settings)) == before
    other = weights.with_name("other")
    other.mkdir(exist_ok=True)
    for suffix in (".safetensors", ".json"):
        shutil.copy(weights.with_suffix(suffix), other)
    assert names(study_site.write_study(place, other / weights.name)) == before


def test_whatever_decides_the_result_changes_the_name(place, weights):
    def hashes(path, device="cpu"):
        return [name.rpartition("-")[2] for name in names(path, device=device)]

    before = hashes(study_site.write_study(place, weights))

    def changed(path, device="cpu"):
        return [one != other for one, other in zip(hashes(path, device), before, strict=True)]

    alpha, tesla = [True] * 4 + [False] * 4, [False, False, True, True] * 2
    rate = [*study_site.SETTINGS, "methods.tesla.learning_rate=0.01"]
    assert changed(study_site.write_study(place, weights, set=rate)) == tesla
    own = [*study_site.SETTINGS, "methods.source.statistics=volume"]  # it makes the source's masks
    assert all(changed(study_site.write_study(place, weights, set=own)))
    assert all(changed(study_site.write_study(place, weights, threads=2)))
    assert all(changed(study_site.write_study(place, weights, seeds=[1])))
    assert all(changed(study_site.write_study(place, weights), device="cuda"))
    copy = place / "w" / weights.name
    copy.parent.mkdir()
    shutil.copy(weights, copy)  # without the card
    assert all(changed(study_site.write_study(place, copy)))
    study_site.write_study(place, weights)
    reference = place / "nii" / "alpha" / "Case00_segmentation.nii.gz"
    image = nib.load(reference)
    array = np.asarray(image.dataobj).copy()
    array[0, 0, 0] = 1
    nib.save(nib.Nifti1Image(array, image.affine), reference)
    assert changed("study.yaml") == alpha


def test_weights_of_one_name_have_lines_of_their_own(place, weights):
    for name in ("a", "b"):
        (place / name).mkdir()
        for suffix in (".safetensors", ".json"):
            shutil.copy(weights.with_suffix(suffix), place / name)
    path = study_site.write_study(place, weights, weights=[f"{name}/{weights.name}" for name in "ab"])
    grid, _ = survey_study(load_study(path), "out", device="cpu")
    assert {cell.key["weights"] for cell in grid.cells} == {f"{name}/{weights.name}" for name in "ab"}
    assert {cell.key["site"] for cell in grid.cells} == {"alpha", "beta"}
    alone, _ = survey_study(load_study(study_site.write_study(place, weights)), "out", device="cpu")
    assert {cell.key["weights"] for cell in alone.cells} == {weights.name}


def test_weights_of_one_content_are_done_once_and_have_lines_of_their_own(
    place, weights, monkeypatch, capsys
):
    twins = [f"{name}/{weights.name}" for name in "ab"]
    for path in map(Path, twins):
        path.parent.mkdir()
        for suffix in (".safetensors", ".json"):
            shutil.copy(weights.with_suffix(suffix), path.parent)
    study_site.write_study(place, weights, weights=twins, methods=["source"], sites=["prostate/alpha"])
    tried = []
    given = work._do
    monkeypatch.setattr(work, "_do", lambda cell, *rest: (tried.append(cell.name), given(cell, *rest))[1])
    line = ["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", "out"]
    assert run(line) == 0
    assert "2 cells done now, 0 before, of 2" in capsys.readouterr().out
    assert len(tried) == 1
    content = study_site.record(place / "out")
    assert content["complete"]
    assert [item["weights"] for item in content["summary"]] == twins
    assert [item["cells"] for item in content["summary"]] == [1, 1]
    assert [row["weights"] for row in study_site.rows(place / "out")] == twins
    assert "2 of 2 cells done" in (place / "out" / "study.html").read_text(encoding="utf-8")
    assert run([*line, "--dry-run"]) == 0
    assert "2 of 2 cells done in out" in capsys.readouterr().out


def test_images_are_hashed_once(place, weights, monkeypatch):
    study_site.write_study(place, weights, methods=["source"])
    assert run(["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", "out"]) == 0
    before = names("study.yaml")
    monkeypatch.setattr("tesla_med.io.inputs.sha256", lambda path: pytest.fail(f"{path}: read again"))
    assert names("study.yaml") == before


# ------------------------------------------------------------ what is written


def test_tables_say_what_the_runs_say(done):
    out = done / "one"
    content, rows = study_site.record(out), study_site.rows(out)
    assert content["complete"]
    assert [cell["cell"] for cell in content["cells"]] == [row["cell"] for row in rows]
    for row in rows:
        folder = out / "cells" / row["cell"]
        kept = json.loads((folder / ".cases" / "Case00.json").read_text(encoding="utf-8"))
        assert (row["case"], row["status"], row["used"]) == ("Case00", kept["status"], kept["used"])
        assert float(row["adapted"]) == pytest.approx(kept["scores"][0]["dice"], rel=1e-5)
        assert float(row["source"]) == pytest.approx(kept["scores"][0]["dice_source"], rel=1e-5)
    line = content["summary"][2]
    assert (line["site"], line["method"], line["protocol"], line["cases"]) == ("alpha", "tesla", "N-O", 1)
    assert line["adapted"] == pytest.approx(float(rows[2]["adapted"]), rel=1e-5)
    assert not list(out.rglob(".tmp-*"))


def test_a_cell_is_a_run_of_adapt(done, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(done)
    adapt_site(
        "prostate/beta",
        "nii",
        weights=weights,
        method="tesla",
        protocol="N-M",
        out=tmp_path / "alone",
        device="cpu",
        overrides=study_site.SETTINGS,
    )
    (cell,) = (done / "one" / "cells" / "beta").glob("tesla-N-M-*")
    assert small.masks(cell) == small.masks(tmp_path / "alone")
    metrics = "report/metrics.csv"
    assert (cell / metrics).read_bytes() == (tmp_path / "alone" / metrics).read_bytes()


def test_weights_go_where_they_are_not_to_be_kept(done, place, weights):
    study_site.write_study(place, weights, methods=["tesla"], sites=["prostate/alpha"], keep_weights=False)
    assert run(["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", "out"]) == 0
    cells = names("study.yaml")
    assert len(cells) == 2
    for cell in cells:
        made, before = place / "out" / "cells" / cell, done / "one" / "cells" / cell
        assert small.masks(made) == small.masks(before)
        assert list(before.rglob("*.safetensors"))
        assert not list(made.rglob("*.safetensors"))


def test_a_dry_run_lists_and_writes_nothing(done, place, weights, capsys):
    study_site.write_study(place, weights)
    cell = names("study.yaml")[3]
    shutil.copytree(done / "one" / "cells" / cell, place / "out" / "cells" / cell)
    before = small.files_below(place)
    words = ["study", "study.yaml", "--device", "cpu", "--out", "out", "--dry-run"]
    assert run([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [item["done"] for item in content["cells"]] == [False] * 3 + [True] + [False] * 4
    assert run(words) == 0
    said = capsys.readouterr().out
    assert "1 of 8 cells done in out" in said
    assert said.count("to do") == 7
    assert small.files_below(place) == before


def test_what_is_done_is_not_done_again(done, monkeypatch, capsys):
    monkeypatch.chdir(done)
    monkeypatch.setattr(work, "run_plan", lambda *_, **__: pytest.fail("was done again"))
    before = study_site.rows(done / "one")
    assert run(["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", "one"]) == 0
    assert "0 cells done now, 8 before, of 8" in capsys.readouterr().out
    assert study_site.rows(done / "one") == before


# ------------------------------------------------------------ what goes wrong


def test_a_failing_cell_is_tried_twice_and_named_and_the_rest_is_done(place, weights, monkeypatch, capsys):
    broken = place / "broken.safetensors"
    broken.write_bytes(weights.read_bytes()[:1000])
    study_site.write_study(
        place, weights, weights=[str(broken), str(weights)], methods=["bn"], protocols=["N-O"]
    )
    tried = []
    given = work._do
    monkeypatch.setattr(work, "_do", lambda cell, *rest: (tried.append(cell.name), given(cell, *rest))[1])
    line = ["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", "out"]
    assert run(line) == 1
    failed = [name for name in names("study.yaml") if "broken" in name]
    assert [tried.count(name) for name in failed] == [2, 2]
    assert len(tried) == 6
    said = capsys.readouterr().err
    assert all(f"Set aside: {name}: CheckpointError: " in said for name in failed)
    content = study_site.record(place / "out")
    assert not content["complete"]
    assert [cell["done"] for cell in content["cells"]] == [False, True, False, True]
    assert "broken.safetensors" in content["cells"][0]["error"]
    assert len(study_site.rows(place / "out")) == 2
    assert not list((place / "out").rglob(".tmp-*"))
    shutil.copy(weights, broken)
    assert run(line) == 0
    assert study_site.record(place / "out")["complete"]


def test_a_site_without_images_is_named_and_the_rest_is_done(place, weights, capsys):
    (place / "elsewhere").mkdir()
    sites = [{"site": "prostate/alpha", "volumes": "elsewhere"}, "prostate/beta"]
    study_site.write_study(place, weights, sites=sites, methods=["source"])
    line = ["study", "study.yaml", "--device", "cpu", "--out", "out"]
    assert run([*line, "--dry-run"]) == 1
    assert "Site alpha: " in capsys.readouterr().err
    assert run([*line, "--scheduler", "none"]) == 1
    assert "Set aside: alpha: " in capsys.readouterr().err
    content = study_site.record(place / "out")
    assert [item["site"] for item in content["sites_without_cells"]] == ["alpha"]
    assert [row["site"] for row in study_site.rows(place / "out")] == ["beta"]


def test_a_cell_is_done_if_one_case_fails_and_fails_if_all_do(place, weights, capsys):
    small.make_volumes(place / "nii" / "beta", 1, seed=8, names=["Case01"])
    for path in (place / "nii" / "alpha" / "Case00.nii.gz", place / "nii" / "beta" / "Case01.nii.gz"):
        small.truncate(path)
    study_site.write_study(place, weights, methods=["bn"], protocols=["N-O"])
    assert run(["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", "out"]) == 1
    said = capsys.readouterr()
    alpha, beta = names("study.yaml")
    assert f"Set aside: {alpha}: AdaptationError: all of 1 failed, the first: Case00" in said.err
    assert f"{beta}: Case01 failed: " in said.err
    rows = study_site.rows(place / "out")
    assert [(row["case"], row["status"]) for row in rows] == [("Case00", "ok"), ("Case01", "failed")]
    assert rows[1]["adapted"] == ""


def test_the_slower_of_two_workers_leaves_no_trace(done, place, weights):
    study = load_study(study_site.write_study(place, weights))
    out = place / "out"
    grid, _ = survey_study(study, out, device="cpu")
    cell = grid.cells[2]
    final = cell.folder(out)
    ready = []

    def meanwhile(stage, count, total):
        if not ready:  # the other worker finishes while this one works
            shutil.copytree(done / "one" / "cells" / cell.name, final)
            ready.append((final / "cell.json").stat().st_ino)

    work.run_cell(cell, out, meanwhile)
    assert [(final / "cell.json").stat().st_ino] == ready
    assert [path.name for path in final.parent.iterdir()] == [final.name]
    assert small.masks(final) == small.masks(done / "one" / "cells" / cell.name)


def test_what_a_lost_worker_left_goes_once_the_cell_is_done(place, weights):
    study_site.write_study(place, weights, methods=["source"])
    alpha, beta = names("study.yaml")
    for name in (alpha, beta):
        site, _, own = name.partition("/")
        left = place / "out" / "cells" / site / f".tmp-{own}-0123456789ab" / "masks"
        left.mkdir(parents=True)
    small.truncate(place / "nii" / "beta" / "Case00.nii.gz")
    assert run(["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", "out"]) == 1
    assert not list((place / "out" / "cells" / "alpha").glob(".tmp-*"))


def test_something_else_under_the_name_of_a_cell_is_refused(place, weights, capsys):
    study_site.write_study(place, weights, methods=["source"], sites=["prostate/alpha"])
    (name,) = names("study.yaml")
    other = place / "out" / "cells" / name / "mine.txt"
    other.parent.mkdir(parents=True)
    other.touch()
    assert run(["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", "out"]) == 1
    assert "it is no finished cell, remove it" in capsys.readouterr().err
    assert [path.name for path in other.parent.iterdir()] == ["mine.txt"]


def test_another_machine_must_find_the_same_items_and_have_the_same_version(place, weights):
    study_site.write_study(place, weights, methods=["source"])
    grid, _ = survey_study(load_study("study.yaml"), "out", device="cpu")
    with pytest.raises(ConfigError, match=r"has tesla-med .*, the study was started with 0\.0"):
        work.run_cell_of(grid.cells[0], place / "out", "0.0", "")
    small.make_volumes(place / "nii" / "alpha", 2, seed=9, names=["Case01", "Case02"])
    with pytest.raises(TeslaMedError, match=r"finds 3 cases in .*, not the 1 that the study started with"):
        work.run_cell(grid.cells[0], place / "out")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--scheduler", "slurm"], "expected local, none, tcp://HOST:PORT or a YAML file"),
        (["--scheduler", "none", "--jobs", "2"], "--jobs is for --scheduler local"),
        (["--scheduler", "nothing.yaml"], "no cluster file at nothing.yaml"),
        (["--out", "nii"], "holds files that are not of a study (alpha, beta)"),
        (["--out", "study.yaml"], "is a file, not a folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(
    place, weights, monkeypatch, capsys, more, message
):
    study_site.write_study(place, weights)
    monkeypatch.setattr("tesla_med.study.run.grid_of", lambda *_, **__: pytest.fail("read"))
    assert run(["study", "study.yaml", "--device", "cpu", *more]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("studies").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sites": ["prostate/gamma"]}, "gamma"),
        ({"sites": ["prostate/alpha", "alpha"]}, "prostate/alpha is given twice"),
        ({"methods": ["teslo"]}, "teslo"),
        ({"set": ["nothing=1"]}, "nothing"),
        ({"set": ["methods.tesla.nothing=1"]}, "nothing"),
        ({"set": ["reports=[nothing]"]}, "nothing"),
        ({"volumes": "nowhere"}, "nowhere: no such file or folder"),
        ({"weights": ["missing.safetensors"]}, "missing.safetensors"),
        ({"weights": None}, "no weights"),
    ],
)
def test_a_study_that_cannot_be_resolved_is_refused(place, weights, capsys, change, message):
    study_site.write_study(place, weights, **change)
    assert run(["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", "out"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_where_dask_is_missing_the_extra_is_named(place, weights, monkeypatch, capsys):
    study_site.write_study(place, weights, methods=["source"])

    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", missing)
    assert run(["study", "study.yaml", "--device", "cpu", "--out", "out"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "distributed is not installed: pip install 'tesla-med[study]'" in said


def test_no_scheduler_at_the_address(place, weights, monkeypatch, capsys):
    monkeypatch.setattr(schedulers, "WAITING_SECONDS", 1)
    study_site.write_study(place, weights, methods=["source"])
    words = ["study", "study.yaml", "--device", "cpu", "--out", "out", "--scheduler", "tcp://127.0.0.1:9"]
    assert run(words) == 2
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in capsys.readouterr().err


def test_a_cell_that_is_not_seen_here_is_named(done, place, weights, monkeypatch):
    study = load_study(study_site.write_study(place, weights, methods=["source"]))
    monkeypatch.setattr("tesla_med.study.tables.PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(
        "tesla_med.study.run.do_cells", lambda cells, *rest: [rest[4](cell, None) for cell in cells]
    )
    result = run_study(study, "out", scheduler="none", device="cpu")
    assert len(result.failed) == 2
    assert "must be on storage that all machines share" in result.failed[0][1]
    with pytest.raises(OutputError, match="not of a study"):
        run_study(study, "nii", scheduler="none", device="cpu")


def test_a_site_in_a_bids_root_of_its_own(done, place, weights):
    bids = place / "elsewhere" / "bids"
    for ending, folder, name in (
        ("", bids / "sub-01/anat", "sub-01_T2w.nii.gz"),
        ("_segmentation", bids / "derivatives/labels/sub-01/anat", "sub-01_T2w_seg.nii.gz"),
    ):
        folder.mkdir(parents=True)
        shutil.move(place / "nii" / "alpha" / f"Case00{ending}.nii.gz", folder / name)
    (place / "site_configs/prostate/alpha.yaml").write_text(
        "institution: alpha\nfiles:\n  image: '*_T2w.nii.gz'\n  masks:\n"
        "    - {root: derivatives/labels, pattern: '*_T2w_seg.nii.gz', write: 1}\n",
        encoding="utf-8",
    )
    sites = [{"site": "prostate/alpha", "volumes": str(bids)}, "prostate/beta"]
    study_site.write_study(place, weights, sites=sites, methods=["bn"], protocols=["N-O"])
    assert run(["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", "out"]) == 0
    found, before = study_site.rows(place / "out"), study_site.rows(done / "one")
    assert [row["case"] for row in found] == ["sub-01/anat/sub-01_T2w", "Case00"]
    assert [row["adapted"] for row in found] == [before[0]["adapted"], before[4]["adapted"]]


def test_an_interrupt_says_how_to_go_on(place, weights, monkeypatch, capsys):
    study_site.write_study(place, weights, methods=["source"])

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "run_plan", interrupted)
    words = ["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", "out"]
    assert run(words) == 130
    assert capsys.readouterr().err.endswith("finished results are complete; the same call goes on\n")
    assert not list((place / "out").rglob(".tmp-*"))


@pytest.mark.slow
def test_tiles_have_a_row_for_each_cell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tile_site.make_tiles(tmp_path / "nii", 3, seed=3, shift=0.6)
    weights = tile_site.train_weights(tmp_path)
    path = tmp_path / "site_configs" / "kather" / "X.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("institution: Nowhere\ntiles: {TUM: 0, STR: 1, LYM: 2, NORM: 3}\n", encoding="utf-8")
    study_site.write_study(
        tmp_path, weights, sites=["kather/X"], methods=["bn"], protocols=["N-O"], set=list(tile_site.SMALL)
    )
    assert run(["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", "all"]) == 0
    (row,) = study_site.rows(tmp_path / "all")
    assert (row["case"], row["metric"], row["status"]) == ("", "accuracy", "ok")
    assert 0 <= float(row["source"]) <= 1
    assert study_site.record(tmp_path / "all")["summary"][0]["cases"] == 1
