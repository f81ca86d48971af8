"""Every registered report, whatever it is called, copes with every kind of run that it reads."""

from __future__ import annotations

from types import SimpleNamespace

import made_up_runs as made
import pytest
from made_up_runs import drive

from tesla_med.reports.base import REPORTS, Report, make_reports
from tesla_med.tasks.base import TASKS

VOLUMES = SimpleNamespace(context=made.run_context, one=made.case, failed=made.failed, unscored=made.unscored)
TILES = SimpleNamespace(
    context=made.tile_context,
    one=made.tile,
    failed=made.failed_tile,
    unscored=lambda run: made.tile(run, 80, referenced=False),
)
MADE_UP = {"segmentation": VOLUMES, "classification": TILES}
PAIRS = [
    (name, task)
    for name, report in REPORTS.items()
    for task, kind in TASKS.items()
    if report.reads(kind.result)
]
EVERY = pytest.mark.parametrize("name", REPORTS.names())
EVERY_TASK = pytest.mark.parametrize(("name", "task"), PAIRS)


def start(name, run):
    (report,) = make_reports([name], run)
    return report


def check_written(paths, out):
    for path in paths:
        assert path.is_file()
        assert path.stat().st_size > 0
        assert out in path.parents
    hidden = [path for path in out.rglob("*") if path.name.startswith(".")]
    assert hidden == []


def test_there_are_reports():
    assert {"table", "calibration", "tensorboard", "html"} <= set(REPORTS.names())


@pytest.mark.parametrize("task", TASKS.names())
def test_every_task_has_reports_that_read_its_records(task):
    kind = TASKS.get(task)
    for name in (*kind.always, *kind.reports):
        assert REPORTS.get(name).reads(kind.result), name


@EVERY
def test_describes_itself(name):
    kind = dict(REPORTS.items())[name]
    assert issubclass(kind, Report)
    assert kind.name == name
    assert kind.summary
    assert "\n" not in kind.summary
    assert name in {item for item, _ in PAIRS}, "no task can have this report"


@EVERY_TASK
@pytest.mark.parametrize("classes", [2, 4])
def test_with_references(name, task, classes, tmp_path):
    kind = MADE_UP[task]
    run = kind.context(tmp_path, classes)
    paths = drive(start(name, run), [kind.one(run, number, shift=number) for number in range(2)])
    assert paths
    check_written(paths, tmp_path)


@EVERY_TASK
def test_without_references(name, task, tmp_path):
    kind = MADE_UP[task]
    run = kind.context(tmp_path)
    paths = drive(start(name, run), [kind.one(run, number, referenced=False) for number in range(2)])
    assert paths or name == "confusion"  # there is none without labels
    check_written(paths, tmp_path)


@EVERY_TASK
def test_with_failed_empty_unscored_and_resumed_cases(name, task, tmp_path):
    kind = MADE_UP[task]
    run = kind.context(tmp_path)
    resumed, _ = kind.one(run, 4)
    pairs = [kind.one(run, 1), (kind.failed(), None), kind.unscored(run), (resumed, None)]
    if kind is VOLUMES:
        pairs.append(made.case(run, 2, empty=True))
    check_written(drive(start(name, run), pairs), tmp_path)


@EVERY_TASK
def test_only_failed(name, task, tmp_path):
    kind = MADE_UP[task]
    check_written(drive(start(name, kind.context(tmp_path)), [(kind.failed(), None)]), tmp_path)


@EVERY_TASK
def test_with_zero_cases(name, task, tmp_path):
    check_written(drive(start(name, MADE_UP[task].context(tmp_path)), [], steps=0), tmp_path)


@pytest.mark.slow
@EVERY_TASK
def test_writes_over_an_earlier_run(name, task, tmp_path):
    kind = MADE_UP[task]
    run = kind.context(tmp_path)
    drive(start(name, run), [kind.one(run, 1)])
    check_written(drive(start(name, run), [kind.one(run, 1, referenced=False)]), tmp_path)


@EVERY_TASK
def test_does_not_change_the_arrays(name, task, tmp_path):
    kind = MADE_UP[task]
    run = kind.context(tmp_path)
    result, view = kind.one(run, 1)

    def arrays():
        if view is None:
            return [result.probs, result.probs_source]
        return [view.image, view.source_mask, view.mask, view.reference]

    before = [array.copy() for array in arrays()]
    drive(start(name, run), [(result, view)])
    assert all((old == new).all() for old, new in zip(before, arrays(), strict=True))


@pytest.mark.slow
@EVERY_TASK
@pytest.mark.parametrize("case_name", ["p 1/Ä & <b>", "not text \udcff", "a,b;=1+1"])
def test_any_case_name(name, task, case_name, tmp_path):
    kind = MADE_UP[task]
    run = kind.context(tmp_path)
    pairs = [kind.one(run, 1, name=case_name), (kind.failed(case_name + "2"), None)]
    check_written(drive(start(name, run), pairs), tmp_path)
