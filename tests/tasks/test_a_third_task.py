"""A task of one's own takes about 30 lines: arrays in memory are adapted to, scored, reported, evaluated."""

import csv
import json

import numpy as np
import pytest
import small_site as small
import torch

import tesla_med
from tesla_med.config.files import load_pipeline
from tesla_med.config.models import SiteConfig
from tesla_med.models.base import build_model
from tesla_med.models.checkpoint import make_card, save_checkpoint
from tesla_med.records import CaseResult
from tesla_med.scoring.metrics import dice, score_case
from tesla_med.tasks.base import TASKS, Task, task_of
from tesla_med.types import Items, Unit

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = 32


def images(number):
    generator = torch.Generator().manual_seed(number)
    disc = ((torch.arange(SIZE)[:, None] - 16) ** 2 + (torch.arange(SIZE) - 16) ** 2 < 60).float()
    return (0.6 * disc + 0.3 * torch.rand(3, 1, SIZE, SIZE, generator=generator)).clamp(0, 1), disc.numpy()


# ------------------------------------------------------------ the task


class Arrays(Task):
    """Stacks of slices that live in memory, masks as .npy files."""

    def find(self, volumes, others):
        return Items(volumes, ("a", "b"), (), None)

    def load(self, ref):
        return Unit(ref, images(ord(ref.name))[0], None)

    def finish(self, folder, unit, outcome):
        mask = outcome.probs.argmax(1).numpy().astype(np.uint8)
        (folder.out / "masks").mkdir(exist_ok=True)
        np.save(folder.out / "masks" / f"{unit.ref.name}.npy", mask)
        return mask, outcome.source.argmax(1).numpy(), outcome.verdict

    def score(self, unit, finished):
        mask, source, verdict = finished
        truth = np.broadcast_to(images(ord(unit.ref.name))[1].astype(np.uint8), mask.shape)
        scores = score_case(mask, source, truth, self.pipeline.classes, (1, 1, 1), nominal=True)
        own = {"status": "ok", "used": verdict.used, "share": verdict.share, "scores": scores}
        return [CaseResult(case=unit.ref.name, site=self.site.id, **own)]

    @classmethod
    def recognises(cls, predictions):
        return any((predictions / "masks").glob("*.npy"))

    @classmethod
    def evaluate(cls, predictions, references, **options):
        masks = {path.stem: np.load(path) for path in (predictions / "masks").glob("*.npy")}
        return {name: dice(np.broadcast_to(images(ord(name))[1], m.shape), m) for name, m in masks.items()}


# ------------------------------------------------------------ what it can do


@pytest.fixture
def registered():
    TASKS.register("arrays")(Arrays)
    yield
    del TASKS._entries["arrays"]


@pytest.fixture
def run(registered, tmp_path):
    pipeline = load_pipeline("prostate", (*small.SMALL, *small.FEW)).model_copy(update={"task": "arrays"})
    path = tmp_path / "weights.safetensors"
    torch.manual_seed(0)
    save_checkpoint(path, build_model(pipeline), make_card(pipeline))
    site = SiteConfig(id="memory", pipeline="prostate", institution="Nowhere")

    def start(out="out", **options):
        return tesla_med.adapt_site(
            site, tmp_path, pipeline=pipeline, weights=path, out=tmp_path / out, device="cpu", **options
        )

    return start


@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_it_is_adapted_scored_reported_and_evaluated(run, protocol):
    result = run(protocol=protocol)
    assert [item.status for item in result.results] == ["ok", "ok"]
    assert {item.used for item in result.results} == {"adapted"}
    assert {path.name for path in result.files} >= {"metrics.csv", "calibration.json", "report.html"}
    with (result.out / "report/metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["case"] for row in rows] == ["a", "b"]
    assert [row["method"] for row in rows] == ["tesla"] * 2
    scored = tesla_med.evaluate(result.out)
    known = {item.case: item.mean_dice for item in result.results if item.mean_dice is not None}
    assert scored == pytest.approx(known)
    record = json.loads((result.out / "run.json").read_text(encoding="utf-8"))
    assert [item["case"] for item in record["cases"]] == ["a", "b"]


def test_a_finished_run_is_taken_up_again(run, monkeypatch):
    first = run()
    monkeypatch.setattr(Arrays, "load", lambda *_: pytest.fail("was done again"))
    assert run(resume=True).mean_dice == first.mean_dice


def test_what_it_does_not_honour_is_refused_by_name(run):
    with pytest.raises(tesla_med.TeslaMedError, match="--save-probs: not for cases"):
        run(save_probs=True)
    with pytest.raises(tesla_med.TeslaMedError, match=r"--guard.*: not for cases"):
        run(guard=True)


def test_an_unknown_task_is_refused_with_those_that_exist(run):
    pipeline = load_pipeline("prostate").model_copy(update={"task": "detection"})
    known = r"pipeline prostate: unknown task 'detection'.* Known: arrays, classification, segmentation"
    with pytest.raises(tesla_med.TeslaMedError, match=known):
        task_of(pipeline)
