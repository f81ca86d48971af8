"""The documentation says what the code does: tables, commands, options, fields and links."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
TASKS = ("prostate", "spinal_cord")
RECIPES = ("", "_paper", "_released")
SWITCHES = {"no": False, "yes": True, "false": False, "true": True}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table(columns, rows) -> str:
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def marked(page: str, name: str) -> str:
    """Return what stands between ``<!-- NAME -->`` and ``<!-- /NAME -->`` of a page."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", read(page), re.DOTALL)
    assert found, f"{page} has no part marked {name}"
    return found[1].strip()


def section(text: str, heading: str) -> str:
    """Return the text under the heading with exactly this title, up to the next of its level or above."""
    found = re.search(rf"^(#+) `?{re.escape(heading)}`?$", text, re.MULTILINE)
    assert found, f"no heading {heading!r}"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


# ------------------------------------------------------------ tables from the code


def show(value) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def recipe_table() -> str:
    """Return every parameter of TeSLA by recipe and protocol; where the cord differs, it says so."""
    from tesla_med.config.files import load_pipeline
    from tesla_med.tta.tesla import TeSLAParams

    columns, values = ["parameter"], []
    for recipe, title in zip(RECIPES, ("default", "paper", "released"), strict=True):
        for protocol in ("N-O", "N-M"):
            columns.append(f"{title} {protocol}")
            pair = []
            for task in TASKS:
                pipeline = load_pipeline(f"{task}{recipe}", roots=[ROOT])
                params = TeSLAParams.model_validate(pipeline.method_params("tesla", protocol))
                pair.append({**params.model_dump(), "reset": pipeline.reset_for(protocol)})
            values.append(pair)
    rows = []
    for name in values[0][0]:
        cells = []
        for prostate, cord in values:
            one, other = show(prostate[name]), show(cord[name])
            cells.append(one if one == other else f"{one}; cord {other}")
        rows.append([f"`{name}`", *cells])
    return table(columns, rows)


def tile_recipe_table() -> str:
    """Return the parameters of TeSLA for tiles that any recipe sets to other than their defaults."""
    from tesla_med.config.files import load_pipeline
    from tesla_med.tta.tesla import TeSLAParams

    columns, values = ["parameter"], []
    for name, title in (("kather", "default"), ("kather_paper", "paper")):
        for protocol in ("N-O", "N-M"):
            columns.append(f"{title} {protocol}")
            pipeline = load_pipeline(name, roots=[ROOT])
            params = TeSLAParams.model_validate(pipeline.method_params("tesla", protocol))
            values.append(params.model_dump())
    defaults = TeSLAParams().model_dump()
    rows = [
        [f"`{key}`", *(show(column[key]) for column in values)]
        for key, value in defaults.items()
        if any(column[key] != value for column in values)
    ]
    return table(columns, rows)


def op_table() -> str:
    """Return every op with its range, identity, gradient, randomness, start and sets."""
    from tesla_med.augment.ops import OP_SETS, OPS

    rows = []
    for name, op in sorted(OPS.items(), key=lambda item: (item[1].kind != "geometric", item[0])):
        random = "sign" if op.signed else "noise" if op.noise is not None else "none"
        sets = [f"`{key}`" for key, members in OP_SETS.items() if name in members]
        identity = "none" if op.identity is None else show(op.identity)
        rows.append([name, op.kind, op.unit, identity, op.gradient, random, show(op.start), ", ".join(sets)])
    columns = ("op", "kind", "magnitude 0 to 1 becomes", "identity at", "gradient", "drawn", "start", "sets")
    return table(columns, rows)


def method_table() -> str:
    """Return every method with what it does, its protocols and its citation."""
    from tesla_med.tta import METHODS

    rows = [
        [f"`{name}`", method.summary, ", ".join(method.protocols), method.citation]
        for name, method in METHODS.items()
    ]
    return table(("method", "what it does", "protocols", "citation"), rows)


def metric_table() -> str:
    """Return every metric with its columns, unit, direction and rules."""
    from tesla_med.scoring.metrics import METRICS

    rows = []
    for metric in METRICS.in_order():
        names = ", ".join(f"`{name}`" for name in metric.columns)
        blank = "blank" if metric.physical else ""
        rows.append([names, metric.what, metric.unit, metric.better or "", metric.empty, blank])
    return table(("column", "what", "unit", "better", "empty masks", "nominal voxel size"), rows)


RATES = {  # where it runs; seconds a volume; weights; cores or GPUs of a worker; USD an hour of a worker
    "U-Net of width 64, GPU": (0.0143 * 24 + 0.72, 17_266_306, "1 GPU", 3.0),
    "nnU-Net, GPU": (43.7, 30_375_818, "1 GPU", 3.0),
    "U-Net of width 16, CPU": (1.549 * 24 + 0.72, 1_081_762, "2 cores", 2 * 0.05),
}
"""From the measured rates of docs/reference/performance.md."""


def study_table() -> str:
    """Return what a study of 100,000 volumes would take, from measured seconds per volume."""
    columns = ["", "worker", "s per volume", "worker-hours", "hours, 8 workers", "hours, 64 workers"]
    columns += ["USD", "adapted weights, TB", "their storage, USD a month", "other outputs, TB"]
    volumes, rows = 100_000, []
    for name, (seconds, weights, worker, price) in RATES.items():
        hours, stored = volumes * seconds / 3600, volumes * weights * 4 / 1e12
        figures = [f"{seconds:.2f}", f"{hours:.0f}", f"{hours / 8:.1f}", f"{hours / 64:.1f}"]
        figures += [f"{hours * price:.0f}", f"{stored:.1f}", f"{25 * stored:.0f}", f"{volumes * 0.13e-6:.3f}"]
        rows.append([name, worker, *figures])
    return table(columns, rows)


def test_the_plan_rests_on_the_measured_rates():
    text = read("docs/reference/performance.md")
    for measured in ("| 14.3 |", "43.7 s", "| 1549 |", "| 100 | 12 | 76.8 | 0.77 |", "| 1 | 12 | 5.2 |"):
        assert measured in text, measured
    assert round((76.8 - 5.2) / 99, 2) == 0.72
    from tesla_med.models.unet import UNet

    for name, width in (("U-Net of width 64, GPU", 64), ("U-Net of width 16, CPU", 16)):
        assert sum(item.numel() for item in UNet(1, 2, width).parameters()) == RATES[name][1]


def drift_table(number: int) -> str:
    """Return one of the tables of a run of benchmarks/drift.py that was kept."""
    spec = importlib.util.spec_from_file_location("drift", ROOT / "benchmarks" / "drift.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tables(json.loads(read("docs/reference/results/drift.json"))).split("\n\n")[number]


WATCH = "docs/how-to/watch-a-folder.md"
TABLES = {
    "drift-false-alarms": (WATCH, lambda: drift_table(0)),
    "drift-delays": (WATCH, lambda: drift_table(1)),
    "drift-images": (WATCH, lambda: drift_table(2)),
    "study-plan": ("docs/reference/performance.md", study_table),
    "metrics": ("docs/reference/outputs.md", metric_table),
    "methods": ("docs/method/other-methods.md", method_table),
    "recipes": ("docs/method/tesla.md", recipe_table),
    "tile-recipes": ("docs/method/tesla.md", tile_recipe_table),
    "ops": ("docs/method/augmentation.md", op_table),
}


@pytest.mark.parametrize("name", TABLES)
def test_generated_tables_are_up_to_date(name):
    page, make = TABLES[name]
    expected = make()
    assert marked(page, name) == expected, f"run python tests/test_docs.py; it should be\n\n{expected}\n"


def write_tables() -> None:
    """Write the generated tables into their pages."""
    for name, (page, make) in TABLES.items():
        text = read(page)
        (ROOT / page).write_text(text.replace(marked(page, name), make()), encoding="utf-8")


@pytest.mark.shared
def test_released_operations_agree_as_the_page_says(shared):
    import numpy as np
    import torch

    from tesla_med.augment.ops import OP_SETS, OPS

    stored = np.load(shared / "reference" / "policy_ops.npz")
    image = torch.from_numpy(stored["image"]).float().reshape(1, 1, *stored["image"].shape[-2:])
    for name in OP_SETS["released_mri"]:
        for magnitude in (0.0, 0.25, 0.75, 1.0):
            ours, theta = OPS.get(name)(image, torch.tensor([magnitude]))
            key = f"{name}_{magnitude}"
            theirs = torch.from_numpy(stored[f"{key}_image"]).float().reshape(ours.shape)
            assert (ours - theirs).abs().max() < 1e-5, key
            assert (
                theta - torch.from_numpy(stored[f"{key}_theta"]).float().reshape(1, 2, 3)
            ).abs().max() < 1e-5


# ------------------------------------------------------------ commands


def commands():
    """Return every command line of the Typer application, by its words."""
    import typer.main

    from tesla_med.cli.app import app

    found = {}

    def walk(command, words):
        for name, item in getattr(command, "commands", {}).items():
            walk(item, (*words, name))
        if not hasattr(command, "commands"):
            found[" ".join(words)] = command

    walk(typer.main.get_command(app), ())
    return found


def test_every_command_and_option_is_described():
    text = read("docs/reference/commands.md")
    for name, command in commands().items():
        part = section(text, f"tesla-med {name}")
        for parameter in command.params:
            if parameter.param_type_name == "option":
                names = [
                    option for option in parameter.opts if option.startswith("--") and option != "--help"
                ]
            else:
                names = [parameter.name.upper()]
            for option in names:
                assert f"`{option}" in part, f"commands.md does not describe {option} of {name}"


def test_no_option_is_described_that_does_not_exist():
    text = read("docs/reference/commands.md")
    for name, command in commands().items():
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        rows = re.findall(r"^\| `(--[a-z-]+)", section(text, f"tesla-med {name}"), re.MULTILINE)
        assert set(rows) <= known, f"{name} has no {set(rows) - known}"


def command_lines():
    """Return (page, words) of every ``tesla-med`` command line in a code block."""
    lines = []
    for page in PAGES:
        for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.match(r"\s*(?:\$ )?tesla-med (.*)", line)
                if found:
                    lines.append((page, found[1].split("  #")[0].split(" | ")[0]))
    return lines


def test_command_lines_of_the_pages_use_existing_options():
    found, lines = commands(), command_lines()
    assert lines
    for page, line in lines:
        name = max((item for item in found if f"{line} ".startswith(f"{item} ")), key=len, default=None)
        assert name or line in ("--help", "--version"), f"{page.name}: no such command: tesla-med {line}"
        if name:
            known = {option for parameter in found[name].params for option in parameter.opts} | {"--help"}
            used = set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", f" {line}"))
            assert used <= known, f"{page.name}: {name} has no {used - known}"


# ------------------------------------------------------------ configuration and outputs


def sections_with_fields():
    from tesla_med.config import models as config
    from tesla_med.config import nnunet, study
    from tesla_med.models import MODELS
    from tesla_med.tta import METHODS

    models = [
        item
        for item in (vars(config) | vars(nnunet) | vars(study)).values()
        if isinstance(item, type) and issubclass(item, config.Section) and item is not config.Section
    ]
    params = [method.Params for _, method in METHODS.items()]
    networks = dict.fromkeys(network.Params for _, network in MODELS.items())
    return [*models, *networks, *params]


@pytest.mark.parametrize("model", sections_with_fields(), ids=lambda model: model.__name__)
def test_every_configuration_field_is_described(model):
    part = section(read("docs/reference/configuration.md"), model.__name__)
    first_cells = re.findall(r"^\| (`[^|]+) \|", part, re.MULTILINE)
    rows = {name for cell in first_cells for name in re.findall(r"`([a-zA-Z_]+)`", cell)}
    inherited = {name for base in model.__bases__ for name in getattr(base, "model_fields", {})}
    assert rows <= set(model.model_fields), f"{model.__name__} has no {rows - set(model.model_fields)}"
    missing = set(model.model_fields) - inherited - rows
    assert not missing, f"configuration.md does not describe {missing} of {model.__name__}"


@pytest.mark.parametrize("model", sections_with_fields(), ids=lambda model: model.__name__)
def test_defaults_that_are_numbers_or_switches_are_those_of_the_code(model):
    """Of the keys of a row in the order of its defaults; what is written in words is left out."""
    part = section(read("docs/reference/configuration.md"), model.__name__)
    for names, given in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", part, re.MULTILINE):
        keys = re.findall(r"`([a-zA-Z_]+)`", names)
        values = given.split(", ")
        for key, value in zip(keys, values, strict=False):
            if len(keys) == len(values) and re.fullmatch(r"-?[\d.]+(e-?\d+)?", value):
                assert model.model_fields[key].default == float(value), f"{model.__name__}.{key}"
            elif len(keys) == len(values) and value in SWITCHES:
                assert model.model_fields[key].default is SWITCHES[value], f"{model.__name__}.{key}"


def test_columns_and_files_are_described():
    from tesla_med.reports.table import columns
    from tesla_med.runs.folder import PARTS, RunFolder
    from tesla_med.scoring.masks import columns as evaluate_columns
    from tesla_med.scoring.tables import TILE_COLUMNS
    from tesla_med.study.run import OWN
    from tesla_med.study.tables import COLUMNS
    from tesla_med.training.train import OWN_FILES
    from tesla_med.watch import history
    from tesla_med.watch.statistics import NAMES

    text = read("docs/reference/outputs.md")
    folder = RunFolder(Path())
    makers = (folder.mask, folder.source_mask, folder.probs, folder.uncertainty)
    files = [str(make("<case>").as_posix()) for make in makers]
    watched = (*history.OWN, *history.COLUMNS, *NAMES)
    for name in (
        *columns(),
        *evaluate_columns(),
        *TILE_COLUMNS,
        *COLUMNS,
        *PARTS,
        *OWN_FILES,
        *OWN,
        *files,
        *watched,
    ):
        assert re.search(rf"`{re.escape(name)}/?`", text), f"outputs.md does not describe {name}"


def test_statuses_are_described():
    from typing import get_args

    from tesla_med.types import Status

    part = section(read("docs/reference/outputs.md"), "Status of a case")
    for status in get_args(Status):
        assert f"| `{status}` |" in part


def test_registered_names_are_in_the_readme():
    from tesla_med.config.files import pipeline_files
    from tesla_med.tta import METHODS

    text = read("README.md")
    for name in (*METHODS.names(), *pipeline_files([ROOT])):
        assert f"`{name}`" in text


def test_python_functions_are_described_with_all_their_parameters():
    import tesla_med

    page = read("docs/how-to/use-from-python.md")
    described = dict(re.findall(r"`(\w+)\(([^)`]*)\)`", page))
    functions = [name for name in tesla_med.__all__ if inspect.isfunction(getattr(tesla_med, name))]
    assert functions
    for name in functions:
        words = re.findall(r"\w+", described[name])
        assert words == list(inspect.signature(getattr(tesla_med, name)).parameters), name


def test_keys_of_a_summary_are_described(tmp_path):
    from tesla_med.actions.evaluate import evaluate
    from tesla_med.io.volumes import save_image

    folders = [tmp_path / name for name in ("predictions", "references")]
    for folder in folders:
        folder.mkdir()
        save_image(folder / "a.nii.gz", np.eye(4)[:, :, None], np.eye(4))
    evaluate(*folders, out=tmp_path / "out")
    text = read("docs/reference/outputs.md")
    text = text[text.index("`summary.json` has `coverage` in words") :].partition("\n## ")[0]
    for key in json.loads((tmp_path / "out/summary.json").read_text(encoding="utf-8")):
        assert f"`{key}`" in text, key


def test_public_names_are_described():
    import tesla_med

    text = read("docs/how-to/use-from-python.md")
    for name in tesla_med.__all__:
        assert f"`{name}" in text, f"use-from-python.md does not describe {name}"


# ------------------------------------------------------------ links


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{page.name}: {target} does not exist"
        if anchor:
            assert anchor in anchors(goal), f"{page.name}: {target} has no such heading"


def test_every_page_is_reached_from_the_map():
    linked = set(re.findall(r"\]\(([^)#\s]+\.md)", read("docs/README.md")))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"README.md"}
    assert pages <= linked, f"docs/README.md does not link {pages - linked}"


if __name__ == "__main__":
    write_tables()
