"""One run by several processes: the same files, tables in order, and what becomes of a lost worker."""

from __future__ import annotations

import csv
import json
import os
import signal

import pytest
import small_site as small

from tesla_med.actions.spread import spread, visible_cards
from tesla_med.adapt import run_plan
from tesla_med.errors import ConfigError
from tesla_med.plan import RunRequest, make_plan

pytestmark = pytest.mark.usefixtures("one_thread")
CASES = 5


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spread") / "nii"
    small.make_volumes(folder, CASES)
    return folder


def plan_of(volumes, out, *, reset="case", method="tesla", more=(), **about):
    weights = small.train_weights(out)
    texts = (*small.SMALL, *small.FEW, "reports=[table,tensorboard]", "guard.enabled=true", *more)
    return make_plan(
        RunRequest(
            small.site(),
            volumes,
            weights=weights,
            method=method,
            out=out / "run",
            device="cpu",
            reset=reset,
            overrides=texts,
            **about,
        )
    )


def left(out):
    """Return what a run left that does not depend on the clock."""
    table = list(csv.DictReader((out / "report/metrics.csv").open(encoding="utf-8")))
    files = sorted((out / "checkpoints").glob("*.safetensors"))
    return small.masks(out), table, {path.name: path.read_bytes() for path in files}


def scalars(out):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for folder in sorted({path.parent for path in (out / "tensorboard").rglob("events*")}):
        events = EventAccumulator(str(folder)).Reload()
        for tag in events.Tags()["scalars"]:
            if tag.startswith("loss"):
                found[tag] = [(item.step, item.value) for item in events.Scalars(tag)]
    return found


@pytest.mark.slow
def test_two_processes_do_what_one_does(volumes, tmp_path, caplog):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = run_plan(plan_of(volumes, tmp_path / "one"))
    told = []
    plan = plan_of(volumes, tmp_path / "two")
    two = run_plan(spread(plan, 2), progress=lambda *about: told.append(about))
    assert left(two.out) == left(one.out)
    assert [item.case for item in two.results] == [item.case for item in one.results]
    assert scalars(two.out) == scalars(one.out) != {}
    done = [item[1:] for item in told if item[0] == "cases"]
    assert list(dict.fromkeys(done)) == [(number, CASES) for number in range(CASES + 1)]
    assert not [item for item in caplog.records if item.name.startswith("tesla_med")]
    content = json.loads((two.out / "run.json").read_text(encoding="utf-8"))
    assert content["complete"]


def test_a_worker_that_ends_in_the_middle_of_a_line_is_lost(volumes, tmp_path, caplog, monkeypatch):
    from tesla_med.actions import spread as module

    monkeypatch.setattr(module, "CODE", """print('{"steps": [[0, {"lo', end="", flush=True)""")
    result = run_plan(spread(plan_of(volumes, tmp_path), 2))
    assert [item.status for item in result.results] == ["ok"] * CASES
    texts = [item.getMessage() for item in caplog.records if "worker" in item.getMessage()]
    assert len(texts) == 2
    assert all("are done in this process" in text for text in texts)


@pytest.mark.slow
def test_a_lost_worker_is_told_of_and_its_cases_are_done(volumes, tmp_path, caplog, monkeypatch):
    from tesla_med.actions import spread as module

    started = []
    start = module.Workers._start

    def killed(self, number, count, refs):
        worker = start(self, number, count, refs)
        started.append(worker)
        if number == 1:
            os.kill(worker._process.pid, signal.SIGKILL)
        return worker

    monkeypatch.setattr(module.Workers, "_start", killed)
    result = run_plan(spread(plan_of(volumes, tmp_path), 2))
    assert [item.status for item in result.results] == ["ok"] * CASES
    assert len(list((result.out / "masks").glob("*.nii.gz"))) == CASES
    (text,) = [item.getMessage() for item in caplog.records if "worker" in item.getMessage()]
    assert text == "worker 2 ended (exit code -9); its 2 cases are done in this process"
    assert all(worker._process.poll() is not None for worker in started), "no process is left"


@pytest.mark.slow
def test_where_cases_depend_on_each_other_one_process_does_them(volumes, tmp_path):
    plan = plan_of(volumes, tmp_path, reset="site")
    assert spread(plan, None) is plan
    assert spread(plan_of(volumes, tmp_path), 2).elsewhere.devices == 1, "on the CPU"
    with pytest.raises(ConfigError, match=r"--jobs 2: every case goes on .*reset site.*leave --jobs out"):
        spread(plan, 2)
    assert spread(plan_of(volumes, tmp_path), 1).elsewhere is None
    assert spread(plan_of(volumes, tmp_path, reset="site", method="source"), 3).elsewhere is not None


def test_cards_are_handed_out_in_turn(volumes, tmp_path, monkeypatch):
    import torch

    from tesla_med.actions import spread as module

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert visible_cards("auto") == ["5", "7"]
    seen = []

    class Silent:
        def __init__(self, number, order, unit, environment):
            seen.append((number, order.names, environment["CUDA_VISIBLE_DEVICES"], order.request.lock))

        def next(self):
            return None

        def end(self):
            seen.append("end")

    monkeypatch.setattr(module, "_Worker", Silent)
    plan = plan_of(volumes, tmp_path)
    workers = module.Workers(plan, 2, visible_cards("auto"))
    assert workers.devices == 2
    assert list(workers(plan.refs)) == []
    names = [f"Case{number:02d}" for number in range(CASES)]
    assert seen == [(0, tuple(names[::2]), "5", False), (1, tuple(names[1::2]), "7", False), "end", "end"]


# ---------------------------------------------------------------- processes that learn together


def passes_of(volumes, out, jobs, *more, method="tesla"):
    """Run several passes over the site by so many processes; return what was told, and the run."""
    out.mkdir()
    told = []
    plan = plan_of(volumes, out, reset="site", method=method, protocol="N-M", more=more)
    plan = spread(plan, jobs) if jobs > 1 else plan
    return told, run_plan(plan, progress=lambda *about: told.append(about))


def load_file(path):
    from safetensors.torch import load_file

    return load_file(path)


def saved(result):
    return load_file(result.out / "checkpoints/adapted.safetensors")


def distance(one, two):
    """Return the Euclidean distance of all weights together."""
    return (
        sum(float((value.double() - two[key].double()).square().sum()) for key, value in one.items()) ** 0.5
    )


@pytest.mark.slow
def test_two_processes_learn_together_what_one_learns(volumes, tmp_path, caplog):
    """TENT draws nothing, and each batch of two is shared by the two."""
    given = ("guard.enabled=false", "protocols.N-M.tent.batch_slices=2")
    _, one = passes_of(volumes, tmp_path / "one", 1, *given, method="tent")
    told, two = passes_of(volumes, tmp_path / "two", 2, *given, method="tent")
    assert not [item for item in caplog.records if item.name.startswith("tesla_med")]
    ours, theirs, source = saved(two), saved(one), load_file(small.train_weights(tmp_path))
    assert ours.keys() == theirs.keys() == source.keys()
    moved = distance(theirs, source)  # batches of one in place of two end 1.5 times as far from each other
    assert distance(ours, theirs) < 0.01 * moved  # Adam lifts rounding, in single weights by far
    assert [item.case for item in two.results] == [item.case for item in one.results]
    for after, before in zip(two.results, one.results, strict=True):
        assert after.mean_dice == pytest.approx(before.mean_dice, abs=0.02)
    names = [json.loads((item.out / "checkpoints/adapted.json").read_text()) for item in (one, two)]
    assert names[0]["extra"]["cases_seen"] == names[1]["extra"]["cases_seen"]
    epochs = [item[1:] for item in told if item[0] == "passes over the site"]
    assert list(dict.fromkeys(epochs)) == [(number, epochs[-1][1]) for number in range(epochs[-1][1] + 1)]
    assert len(scalars(two.out)) == len(scalars(one.out)) > 0
    assert [len(item) for item in scalars(two.out).values()] == [len(i) for i in scalars(one.out).values()]


BREAK = """
import os, time
import tesla_med.actions.spread as spread
import tesla_med.adapt as adapt
from tesla_med.prepare.stream import SiteImages
from tesla_med.tta.tesla import TeSLA

before = spread._do
def do(order, say):
    if order.rank == 1:
        {second}
    {both}
    before(order, say)
spread._do = do
"""
LOST = {
    "before it began": "os._exit(7)",
    "in an update": "TeSLA.adapt = lambda self, images: os._exit(7)",
    "out of memory": "TeSLA.adapt = lambda self, images: (_ for _ in ()).throw(MemoryError())",
    "with an image fewer": "SiteImages.batches = lambda self, size: iter(())",
}


@pytest.mark.slow
@pytest.mark.parametrize("second", LOST.values(), ids=LOST)
def test_without_one_of_them_a_single_model_makes_every_mask(volumes, tmp_path, caplog, monkeypatch, second):
    import tesla_med.actions.spread as module

    _, one = passes_of(volumes, tmp_path / "one", 1)
    monkeypatch.setattr(module, "CODE", f"{BREAK.format(second=second, both='pass')}\n{module.CODE}")
    _, two = passes_of(volumes, tmp_path / "two", 2)
    assert "are done in this process" in caplog.text
    assert small.masks(two.out) == small.masks(one.out)


@pytest.mark.slow
def test_the_weights_are_there_however_long_writing_them_takes(volumes, tmp_path, caplog, monkeypatch):
    import tesla_med.actions.spread as module

    slowly = "save = adapt.Run._weights\n    adapt.Run._weights = lambda *a: (time.sleep(1), save(*a))[1]"
    code = BREAK.format(second="pass", both=slowly)
    monkeypatch.setattr(module, "CODE", f"{code}\n{module.CODE}")
    _, two = passes_of(volumes, tmp_path / "two", 2, "guard.enabled=false")
    assert not [item for item in caplog.records if item.name.startswith("tesla_med")]
    assert saved(two)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("tesla", "methods.tesla.statistics_share=0.5"),
        ("tesla", "methods.tesla.marginal_target=teacher"),
        ("tesla", "methods.tesla.reliability=1"),
        ("tesla", "precision=auto"),
        ("pl", "methods.pl.confidence_threshold=0.9"),
        *((method, None) for method in ("vesta", "shot", "cotta", "adacontrast")),
    ],
)
def test_what_cannot_be_learned_together_is_refused(volumes, tmp_path, method, text):
    more = () if text is None else (text,)
    plan = plan_of(volumes, tmp_path, reset="site", method=method, protocol="N-M", more=more)
    with pytest.raises(ConfigError, match="one process must do them all"):
        spread(plan, 2)


@pytest.mark.parametrize(("cards", "jobs"), [(["0", "1"], 3), ([], 2)])
def test_processes_that_learn_together_need_a_card_each(volumes, tmp_path, monkeypatch, cards, jobs):
    import dataclasses

    import torch

    import tesla_med.actions.spread as module

    plan = plan_of(volumes, tmp_path, reset="site", protocol="N-M")
    plan = dataclasses.replace(plan, device=torch.device("cuda"))
    monkeypatch.setattr(module, "visible_cards", lambda device: cards)
    with pytest.raises(ConfigError, match=f"need a card each, and {len(cards)} of device"):
        spread(plan, jobs)
    if cards:
        assert spread(plan, 2).elsewhere is not None


def test_a_run_that_goes_on_is_not_begun_anew_by_others(volumes, tmp_path):
    plan = plan_of(volumes, tmp_path, reset="site", protocol="N-M")

    def never(refs, progress):
        raise AssertionError("asked")

    ledger = plan.ledger(None, independent=False)
    ledger.passes = 1
    assert list(ledger.taken(never, print)) == []
    assert not ledger.whole
    with pytest.raises(AssertionError, match="asked"):
        list(plan.ledger(None, independent=False).taken(never, print))


@pytest.mark.parametrize(("independent", "taken"), [(True, ["Case00"]), (False, [])])
def test_of_one_models_units_all_records_are_taken_or_none(volumes, tmp_path, independent, taken):
    class Folder:
        def kept(self, name, kind):
            return ([f"record of {name}"], "") if name == "Case00" else None

    plan = plan_of(volumes, tmp_path, reset="site", protocol="N-M")
    ledger = plan.ledger(Folder(), independent=independent)
    done = ledger.taken(lambda refs, progress: iter([(ref, []) for ref in refs]), print)
    assert [ref.name for ref, _ in done] == taken
    assert list(ledger.records) == taken
    assert not ledger.whole
