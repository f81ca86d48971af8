"""Every registered report, whatever it is called, copes with every kind of run."""

from __future__ import annotations

import pytest
from made_up_runs import case, drive, failed, run_context, unscored

from tesla_med.reports.base import REPORTS, Report, make_reports

EVERY = pytest.mark.parametrize("name", REPORTS.names())


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


@EVERY
def test_describes_itself(name):
    kind = dict(REPORTS.items())[name]
    assert issubclass(kind, Report)
    assert kind.name == name
    assert kind.summary
    assert "\n" not in kind.summary


@EVERY
@pytest.mark.parametrize("classes", [2, 4])
def test_with_references(name, classes, tmp_path):
    run = run_context(tmp_path, classes)
    paths = drive(start(name, run), [case(run, number, shift=number) for number in range(2)])
    assert paths
    check_written(paths, tmp_path)


@EVERY
def test_without_references(name, tmp_path):
    run = run_context(tmp_path)
    paths = drive(start(name, run), [case(run, number, referenced=False) for number in range(2)])
    assert paths
    check_written(paths, tmp_path)


@EVERY
def test_with_failed_empty_unscored_and_resumed_cases(name, tmp_path):
    run = run_context(tmp_path)
    resumed, _ = case(run, 4)
    pairs = [case(run, 1), (failed(), None), case(run, 2, empty=True), unscored(run), (resumed, None)]
    check_written(drive(start(name, run), pairs), tmp_path)


@EVERY
def test_only_failed(name, tmp_path):
    check_written(drive(start(name, run_context(tmp_path)), [(failed(), None)]), tmp_path)


@EVERY
def test_with_zero_cases(name, tmp_path):
    check_written(drive(start(name, run_context(tmp_path)), [], steps=0), tmp_path)


@EVERY
def test_writes_over_an_earlier_run(name, tmp_path):
    run = run_context(tmp_path)
    drive(start(name, run), [case(run, 1)])
    check_written(drive(start(name, run), [case(run, 1, referenced=False)]), tmp_path)


@EVERY
def test_does_not_change_the_arrays(name, tmp_path):
    run = run_context(tmp_path)
    result, view = case(run, 1)
    before = [array.copy() for array in (view.image, view.source_mask, view.mask, view.reference)]
    drive(start(name, run), [(result, view)])
    after = [view.image, view.source_mask, view.mask, view.reference]
    assert all((old == new).all() for old, new in zip(before, after, strict=True))


@EVERY
@pytest.mark.parametrize("case_name", ["p 1/Ä & <b>", "not text \udcff", "a,b;=1+1"])
def test_any_case_name(name, case_name, tmp_path):
    run = run_context(tmp_path)
    pairs = [case(run, 1, name=case_name), (failed(case_name + "2"), None)]
    check_written(drive(start(name, run), pairs), tmp_path)
