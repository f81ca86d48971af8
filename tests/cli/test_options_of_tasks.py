"""Every option of every command, over every task: it does what it says, or it is refused by name.

The options come from the command line itself: a new one without an entry here fails.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import typer.main
import yaml
from places import Place, make_places

from tesla_med.cli.app import app, run
from tesla_med.tasks.base import TASKS

pytestmark = pytest.mark.usefixtures("one_thread")
OF_NO_TASK = {"tensorboard", "list", "sites list", "sites show", "doctor"}


@pytest.fixture(scope="module")
def places(one_thread, tmp_path_factory):
    return make_places(tmp_path_factory.mktemp("places"))


# ------------------------------------------------------------ what each option does


def record(out):
    return json.loads(Path(out, "run.json").read_text(encoding="utf-8"))


def setting(*keys):
    def value(case):
        found = record(case.out)["settings"]
        for key in keys:
            found = found[key]
        return found

    return value


def trained(*keys):
    def value(case):
        found = json.loads(Path(case.out, "train.json").read_text(encoding="utf-8"))
        for key in keys:
            found = found[key]
        return found

    return value


def is_(get, wanted):
    return lambda case: get(case) == wanted


def exists(name):
    return lambda case: bool(list(Path(case.out).glob(name)))


@dataclass
class Case:
    """What one line gave."""

    out: str
    code: int
    said: str
    errors: str
    place: Place


def prints_json(case):
    return isinstance(json.loads(case.said), dict)


def says_nothing(case):
    return case.said == "" and case.errors == ""


def keyed(case):
    return Path(f"{case.out}-key.csv").is_file()


def works(case):
    return case.code == 0


REFUSED = "refused"
ONLY_VOLUMES = {"classification": REFUSED}
COMMON = {
    "--quiet": ([], says_nothing),
    "--verbose": ([], works),
    "--json": ([], prints_json),
}
ADAPT = {
    **COMMON,
    "--site": ([], is_(setting("site", "id"), "X")),
    "--volumes": ([], works),
    "--pipeline": (["{pipeline}"], lambda case: setting("pipeline", "name")(case) == case.place.pipeline),
    "--weights": (["w/source.safetensors"], lambda case: record(case.out)["weights"] == "source.safetensors"),
    "--trust-code": ([], works),  # what it does to bundles: tests/models/test_bundle.py
    "--statistics": (
        ["w/source.statistics.safetensors", "--method", "ttt_pp", "--protocol", "Y-O"],
        lambda case: record(case.out)["statistics"]["file"] == "source.statistics.safetensors",
    ),
    "--method": (["bn"], is_(setting("method"), "bn")),
    "--protocol": (["N-M", "--method", "bn"], is_(setting("protocol"), "N-M")),
    "--out": ([], exists("run.json")),
    "--seed": (["3"], is_(setting("seed"), 3)),
    "--device": (["cpu"], is_(setting("device"), "cpu")),
    "--reset": (["never"], is_(setting("reset"), "never")),
    "--guard": ([], is_(setting("pipeline", "guard", "enabled"), True), ONLY_VOLUMES),
    "--no-guard": ([], is_(setting("pipeline", "guard", "enabled"), False)),
    "--save-probs": ([], exists("probs/*.nii.gz"), ONLY_VOLUMES),
    "--save-uncertainty": ([], exists("uncertainty/*.nii.gz"), ONLY_VOLUMES),
    "--corrections": (
        ["fixed", "--method", "tent", "--set", "corrections.first_updates=1"],
        lambda case: list(record(case.out)["corrections"]) == ["Case00"],
        ONLY_VOLUMES,
    ),
    "--anonymise": (["--key", "{out}-key.csv"], exists("masks/case-0001_mask.nii.gz"), ONLY_VOLUMES),
    "--key": (
        ["{out}-key.csv", "--anonymise"],
        keyed,
        ONLY_VOLUMES,
    ),
    "--resume": ([], exists("run.json")),
    "--overwrite": ([], exists("run.json")),
    "--no-lock": ([], lambda case: case.code == 0 and not Path(case.out, ".tesla-med.lock").exists()),
    "--jobs": (["1"], exists("run.json")),  # several: tests/actions/test_spread.py
    "--effort": (["low", "--method", "tesla"], is_(setting("pipeline", "precision"), "auto")),
    "--dry-run": ([], lambda case: case.code == 0 and not Path(case.out).exists()),
    "--set": (["predict_batch=5"], is_(setting("pipeline", "predict_batch"), 5)),
}


def of_run(check):
    """Return a check of the run on the first case of a watched folder."""
    return lambda case: check(replace(case, out=str(Path(case.out, "cases", "Case00"))))


def on_page(text):
    return lambda case: text in Path(case.out, "watch.html").read_text(encoding="utf-8")


AS_ADAPT = (
    *("--site", "--pipeline", "--weights", "--method", "--protocol", "--statistics", "--seed", "--device"),
    *("--guard", "--no-guard", "--save-probs", "--save-uncertainty", "--set"),
)
WATCH = {
    **COMMON,
    **{option: (ADAPT[option][0], of_run(ADAPT[option][1])) for option in AS_ADAPT},
    "--trust-code": ([], works),
    "--out": ([], exists("watch.html")),
    "--no-lock": ([], lambda case: not Path(case.out, ".tesla-med.lock").exists()),
    "--once": ([], exists("cases/Case00/run.json")),
    "--poll": (["0.1"], works),
    "--settle": (["0.1"], exists("cases/Case00/run.json")),
    "--reference": (["11"], on_page("the first 11")),
    "--window": (["12"], on_page("the last 12")),
}
TABLE = {
    "adapt": ADAPT,
    "predict": {
        key: ADAPT[key]
        for key in (
            *COMMON,
            *("--site", "--volumes", "--pipeline", "--weights", "--trust-code", "--out", "--device"),
            *("--anonymise", "--key", "--overwrite", "--set"),
        )
    },
    "train": {
        **COMMON,
        "--pipeline": (["{pipeline}"], exists("source.safetensors")),
        "--sites": (["X"], exists("source.safetensors")),
        "--volumes": ([], exists("train.json")),
        "--out": ([], exists("source.json")),
        "--width": (
            ["{width}"],
            lambda case: (
                json.loads(Path(case.out, "source.json").read_text())["model"]["params"]["width"]
                == (4 if case.place.task == "segmentation" else 1)
            ),
        ),
        "--steps": (["1"], is_(trained("steps"), 1)),
        "--seed": (["5"], is_(trained("settings", "seed"), 5)),
        "--device": (["cpu"], is_(trained("device"), "cpu")),
        "--resume": ([], exists("last.pt")),
        "--overwrite": ([], exists("source.safetensors")),
        "--set": (["train.batch_size=3"], is_(trained("settings", "pipeline", "train", "batch_size"), 3)),
    },
    "statistics": {
        **COMMON,
        **{
            key: (words, lambda case: Path(f"{case.out}.statistics.safetensors").is_file())
            for key, words in {
                "--weights": [],
                "--sites": ["X"],
                "--volumes": [],
                "--pipeline": ["{pipeline}"],
                "--out": [],
                "--device": ["cpu"],
                "--set": ["predict_batch=5"],
            }.items()
        },
    },
    "evaluate": {
        **COMMON,
        "--predictions": ([], works),
        "--references": (["nii"], works),
        "--out": (["{out}"], exists("summary.json")),
        "--strict": ([], works),
        "--empty": (["one"], works, ONLY_VOLUMES),
        "--ignore": (["255"], works, ONLY_VOLUMES),
        "--values": (["255=1"], works, ONLY_VOLUMES),
        "--anonymise": (
            ["--key", "{out}-key.csv"],
            lambda case: "case-0001" in case.said and "Case0" not in case.said,
            ONLY_VOLUMES,
        ),
        "--key": (
            ["{out}-key.csv", "--anonymise"],
            keyed,
            ONLY_VOLUMES,
        ),
    },
    "compare": {
        **COMMON,
        "--volumes": ([], exists("comparison.csv")),
        "--pipeline": (["{pipeline}"], exists("comparison.csv")),
        "--sites": (["X"], exists("cells/X/*")),
        "--methods": (["bn"], exists("cells/X/bn-N-O")),
        "--protocols": (["N-M", "--methods", "bn"], exists("cells/X/bn-N-M")),
        "--seeds": (["1"], exists("cells/X/source-N-O/seed-0")),
        "--first-seed": (["2"], exists("cells/X/source-N-O/seed-2")),
        "--table": (["{table}"], exists("comparison.csv")),
        "--baseline": (["source"], exists("comparison.csv")),
        "--weights": (["w/source.safetensors"], exists("comparison.csv")),
        "--statistics": (
            ["w/source.statistics.safetensors", "--methods", "ttt_pp", "--protocols", "Y-O"],
            exists("cells/X/ttt_pp-Y-O"),
        ),
        "--out": ([], exists("cells.json")),
        "--device": (["cpu"], exists("comparison.csv")),
        "--reset": (["never"], exists("comparison.csv")),
        "--guard": ([], exists("comparison.csv"), ONLY_VOLUMES),
        "--resume": ([], exists("comparison.csv")),
        "--set": (["predict_batch=5"], exists("comparison.csv")),
    },
    "rollback": {
        "--quiet": ([], says_nothing),
        "--json": ([], prints_json),
        "--case": (
            ["Case00"],
            lambda case: record(case.out)["rolled_back"]["cases"] == ["Case00"],
            ONLY_VOLUMES,
        ),
        "--to-case": (["source"], lambda case: record(case.out)["rolled_back"]["to_case"] == 0),
    },
    "sites check": {
        "--json": ([], prints_json),
        "--volumes": ([], works),
        "--weights": (["w/source.safetensors"], works),
        "--trust-code": ([], works),  # as of adapt
        "--set": (["site.terms=mine"], works),
    },
    "study": {
        **COMMON,
        "--volumes": ([], exists("cells/X/source-*/run.json")),
        "--set": (["predict_batch=5"], exists("cells/X/source-*/run.json")),
        "--out": ([], exists("study.csv")),
        "--scheduler": (["none"], exists("cells/X/source-*/run.json")),
        "--jobs": (["1", "--scheduler", "local"], exists("cells/X/source-*/run.json")),
        "--device": (["cpu"], exists("study.csv")),
        "--trust-code": ([], works),  # as of adapt
        "--dry-run": ([], lambda case: "0 of 1 cell" in case.said and not Path(case.out).exists()),
    },
    "watch": WATCH,
    "export": None,  # tiles are refused altogether; its options: tests/exports/test_exports.py
    "review": None,  # as export, and it serves until it is stopped: tests/review/test_page.py
    "demo": None,  # it takes no data of a user's; its options: tests/demo/test_demo.py
}


def commands():
    found = {}

    def walk(command, words):
        for name, item in getattr(command, "commands", {}).items():
            walk(item, (*words, name))
        if not hasattr(command, "commands"):
            found[" ".join(words)] = command

    walk(typer.main.get_command(app), ())
    return found


def options(command):
    """Yield the long names of a command's options, both of a pair."""
    for parameter in command.params:
        if parameter.param_type_name == "option":
            names = [*parameter.opts, *parameter.secondary_opts]
            yield from (name for name in names if name.startswith("--") and name != "--help")


WHOLLY_REFUSED = {("watch", "classification")}
"""Commands that a task refuses, whatever the options."""
EVERY = [
    (name, option, task)
    for name, command in commands().items()
    if name not in OF_NO_TASK and TABLE.get(name, {}) is not None
    for option in options(command)
    for task in TASKS.names()
    if (name, task) not in WHOLLY_REFUSED
]


def test_every_command_has_its_options_here():
    for name, command in commands().items():
        if name not in OF_NO_TASK and TABLE[name] is not None:
            assert set(TABLE[name]) == set(options(command)), name


def without(words, option):
    """Return a line without an option and its value, as it is given anew."""
    if option not in words:
        return words
    place = words.index(option)
    return [*words[:place], *words[place + 2 :]]


def drop_empty_sets(words):
    """Return a line without ``--set`` that has lost its value."""
    return [
        word
        for place, word in enumerate(words)
        if word != "--set" or (place + 1 < len(words) and "=" in words[place + 1])
    ]


LONG = {"compare", "rollback", "study", "watch"}
"""Commands that need whole runs for each of their options."""


@pytest.mark.parametrize(
    ("command", "option", "task"),
    [pytest.param(*item, marks=[pytest.mark.slow] if item[0] in LONG else []) for item in EVERY],
)
def test_an_option_is_honoured_or_refused(places, tmp_path, monkeypatch, capsys, command, option, task):
    place = places[task]
    monkeypatch.chdir(place.folder)
    given, check, *refused = TABLE[command][option]
    out = str(tmp_path / "out")
    table = tmp_path / "table.yaml"
    rows = [{"label": "source", "method": "source"}]
    content = {"title": "One row", "pipeline": place.pipeline, "sites": ["X"], "rows": rows, "seeds": 1}
    table.write_text(yaml.safe_dump(content), encoding="utf-8")
    width = "4" if task == "segmentation" else "1"
    fill = {"pipeline": place.pipeline, "out": out, "table": str(table), "width": width}
    base = place.base(command, out)
    if command == "rollback":
        shutil.copytree("done", out)
    if option in ("--resume", "--overwrite"):
        assert run(base) == 0
    capsys.readouterr()
    words = [word.format(**fill) for word in given]
    repeated = {word for word in words if word.startswith("--")} | ({option} if words else set())
    for name in repeated - {"--set"}:
        base = without(base, name)
    if option == "--case":
        base = without(base, "--to-case")
    if option == "--table":
        for name in ("--pipeline", "--sites", "--methods", "--seeds"):
            base = without(base, name)
    own = {"--width": "model.params.width=", "--steps": "train.steps="}.get(option)
    if own:  # --set has the last word
        base = drop_empty_sets([word for word in base if not word.startswith(own)])
    line = [*base, option, *words] if words or option not in base else base
    code = run(line)
    said = capsys.readouterr()
    case = Case(out, code, said.out, said.err, place)
    if refused and refused[0].get(task) == REFUSED:
        assert code == 2
        assert option in said.err
        assert command == "rollback" or not Path(out).exists()
        return
    assert code == 0, said.err
    assert check(case), said.out + said.err


@pytest.mark.parametrize(("command", "task"), sorted(WHOLLY_REFUSED))
def test_a_command_is_refused_by_name(places, tmp_path, monkeypatch, capsys, command, task):
    place = places[task]
    monkeypatch.chdir(place.folder)
    assert run(place.base(command, str(tmp_path / "out"))) == 2
    assert f"{command}: not for {TASKS.get(task).item}s; " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
