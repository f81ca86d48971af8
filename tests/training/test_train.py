from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import pytest
import torch
import yaml

from tesla_med.adapt import adapt_site
from tesla_med.augment.families import MILD
from tesla_med.augment.randomise import randomise
from tesla_med.config.files import load_pipeline
from tesla_med.config.models import Files, MaskLayer, PipelineConfig, SiteConfig, TrainConfig
from tesla_med.demo.demo import run_demo
from tesla_med.demo.volumes import make_site, preset
from tesla_med.engine.building import predictor_of
from tesla_med.engine.prior import prior_of
from tesla_med.errors import CheckpointError, ConfigError, DataError, OutputError, TeslaMedError
from tesla_med.io.locks import output_lock
from tesla_med.models.base import build_model
from tesla_med.models.checkpoint import read_card, steadiness_of
from tesla_med.models.loading import load_model
from tesla_med.models.statistics import load_statistics
from tesla_med.plan import RunRequest, make_plan
from tesla_med.tasks.labelled_slices import LabelledCase, Slices, load_labelled, split
from tesla_med.tasks.labelled_tiles import LabelledTiles
from tesla_med.training.loop import TrainingRun
from tesla_med.training.measure import compute_statistics, steadiness
from tesla_med.training.train import joined_after, train_source

SITE = SiteConfig(
    id="P",
    pipeline="prostate",
    institution="Phantom",
    files=Files(image=("Case*.nii.gz",), masks=(MaskLayer(pattern="*_segmentation.nii.gz", write=1),)),
)


def small(*overrides: str) -> PipelineConfig:
    base = [
        "model.params.width=4",
        "preprocessing.size=[32,32]",
        "train.steps=6",
        "train.validate_every=3",
        "train.batch_size=4",
        "train.validation_fraction=0.3",
    ]
    return load_pipeline("prostate", [*base, *overrides])


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("volumes")
    settings = preset("prostate").model_copy(update={"matrix": 32, "slices": 5})
    make_site(folder / "Phantom", "prostate", settings, 3, seed=1)
    return folder


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(str(path))


def assert_same(one: Path, other: Path) -> None:
    left, right = weights_of(one), weights_of(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=0, msg=name)


def test_training_writes_everything(volumes: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    state = torch.get_rng_state()
    result = train_source(
        small(),
        [SITE],
        volumes,
        tmp_path / "out",
        device="cpu",
        progress=lambda *a: seen.append(a),
        extra={"why": "test"},
    )
    assert torch.equal(state, torch.get_rng_state())
    assert 0 <= result.validation_dice <= 1
    assert len(result.training_cases) == 3
    assert result.validation_cases == ()
    assert result.best_step == result.steps
    record = json.loads((tmp_path / "out" / "train.json").read_text())
    assert record["validation_dice"] == result.validation_dice
    assert record["settings"]["pipeline"]["train"]["steps"] == 6
    assert record["extra"] == {"why": "test"}
    assert list((tmp_path / "out" / "tensorboard").glob("events.*"))
    loaded = load_model(result.weights, small())
    assert loaded.warnings == ()
    assert loaded.card is not None
    assert loaded.card.training_sites == ("P",)
    statistics, card = load_statistics(result.statistics)
    assert card.cases == 3
    assert statistics.mean.shape == (4,)
    assert ("train", 6, 6) in seen
    assert {stage for stage, _, _ in seen} == {"load", "train", "statistics"}


def test_scalars_are_logged(volumes: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_source(small(), [SITE], volumes, tmp_path / "out", device="cpu")
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    assert [item.step for item in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [item.step for item in events.Scalars("validation/dice")] == [6]
    rates = [item.value for item in events.Scalars("train/learning_rate")]
    assert rates[0] == pytest.approx(1e-3)
    assert rates == sorted(rates, reverse=True)


def test_same_seed_same_weights_other_seed_other(volumes: Path, tmp_path: Path) -> None:
    results = [
        train_source(small(), [SITE], volumes, tmp_path / str(i), seed=seed, device="cpu").weights
        for i, seed in enumerate((3, 3, 4))
    ]
    assert_same(results[0], results[1])
    one, other = weights_of(results[0]), weights_of(results[2])
    assert not torch.equal(one["inc.double_conv.0.weight"], other["inc.double_conv.0.weight"])


class StopError(Exception):
    pass


def test_resume_gives_the_weights_of_an_unbroken_training(volumes: Path, tmp_path: Path) -> None:
    whole = train_source(small(), [SITE], volumes, tmp_path / "whole", seed=2, device="cpu")

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "train" and done == 4:
            raise StopError

    with pytest.raises(StopError):
        train_source(small(), [SITE], volumes, tmp_path / "cut", seed=2, device="cpu", progress=stop)
    steps: list[int] = []
    resumed = train_source(
        small(),
        [SITE],
        volumes,
        tmp_path / "cut",
        seed=2,
        device="cpu",
        resume=True,
        progress=lambda stage, done, total: steps.append(done) if stage == "train" else None,
    )
    assert steps == [4, 5, 6]
    assert_same(whole.weights, resumed.weights)
    before, after = (
        torch.load(folder / "last.pt", weights_only=True) for folder in (tmp_path / "whole", tmp_path / "cut")
    )
    for name, value in before["model"].items():
        torch.testing.assert_close(value, after["model"][name], rtol=0, atol=0, msg=name)
    assert torch.equal(before["generator"], after["generator"])
    assert resumed.validation_dice == whole.validation_dice


def test_resume_refuses_other_settings_and_damage(volumes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train_source(small(), [SITE], volumes, out, device="cpu")
    with pytest.raises(CheckpointError, match=r"learning_rate: 0\.001 then, 0\.002 now"):
        train_source(small("train.learning_rate=0.002"), [SITE], volumes, out, device="cpu", resume=True)
    with pytest.raises(CheckpointError, match="seed: 0 then, 1 now"):
        train_source(small(), [SITE], volumes, out, device="cpu", seed=1, resume=True)
    (out / "last.pt").write_bytes(b"not a state")
    with pytest.raises(CheckpointError, match=r"last\.pt"):
        train_source(small(), [SITE], volumes, out, device="cpu", resume=True)


def test_pipeline_and_sites_by_name(volumes: Path, tmp_path: Path) -> None:
    site, pipeline = tmp_path / "P.yaml", tmp_path / "tiny.yaml"
    site.write_text(yaml.safe_dump(SITE.model_dump(mode="json", exclude_defaults=True)))
    pipeline.write_text(yaml.safe_dump(small().model_dump(mode="json")))
    loaded, named = tmp_path / "loaded", tmp_path / "named"
    one = train_source(small(), [SITE], volumes, loaded, device="cpu")
    other = train_source(str(pipeline), str(site), str(volumes), str(named), device="cpu")
    assert_same(one.weights, other.weights)
    path = compute_statistics(str(other.weights), str(pipeline), [str(site)], str(volumes), device="cpu")
    assert_same(one.statistics, path)
    with pytest.raises(ConfigError, match="unknown site 'nowhere'"):
        train_source("prostate", ["nowhere"], volumes, tmp_path / "out")
    with pytest.raises(ConfigError, match="sites is empty"):
        train_source("prostate", [], volumes, tmp_path / "out")
    with pytest.raises(ConfigError, match="sites: expected ids"):
        train_source("prostate", [1], volumes, tmp_path / "out")


@pytest.mark.parametrize("seed", [-1, 1.5, "1", None, True, 2**63])
def test_a_seed_is_a_whole_number(volumes: Path, tmp_path: Path, seed: Any) -> None:
    out = tmp_path / "out"
    calls = [
        lambda: train_source(small(), [SITE], volumes, out, seed=seed),
        lambda: compute_statistics(out / "a.safetensors", small(), [SITE], volumes, seed=seed),
        lambda: adapt_site(None, volumes, pipeline="prostate", weights=out / "a.safetensors", seed=seed),
        lambda: run_demo(out=out, seed=seed),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="seed: expected a whole number from 0 to"):
            call()
    assert not out.exists()


def test_output_folder_is_guarded(volumes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = train_source(small("train.steps=1"), [SITE], volumes, out, device="cpu")
    with pytest.raises(OutputError, match="--overwrite"):
        train_source(small(), [SITE], volumes, out, device="cpu")
    with pytest.raises(OutputError, match="not both"):
        train_source(small(), [SITE], volumes, out, device="cpu", resume=True, overwrite=True)
    before = weights_of(first.weights)
    train_source(small("train.steps=2"), [SITE], volumes, out, device="cpu", seed=9, overwrite=True)
    assert not torch.equal(before["outc.conv.weight"], weights_of(first.weights)["outc.conv.weight"])
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    for flags in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(OutputError, match="other files"):
            train_source(small(), [SITE], volumes, foreign, device="cpu", **flags)
    assert (foreign / "thesis.txt").read_text() == "mine"
    with output_lock(out), pytest.raises(OutputError, match="another run"):
        train_source(small(), [SITE], volumes, out, device="cpu", overwrite=True)


def test_no_labelled_case(volumes: Path, tmp_path: Path) -> None:
    (tmp_path / "Phantom").mkdir()
    (tmp_path / "Phantom" / "Case00.nii.gz").write_bytes((volumes / "Phantom" / "Case00.nii.gz").read_bytes())
    with pytest.raises(DataError, match="no reference"):
        train_source(small(), [SITE], tmp_path, tmp_path / "out", device="cpu")


def test_divergence_is_an_error(volumes: Path, tmp_path: Path) -> None:
    pipeline = small("train.learning_rate=1e30", "train.steps=20")
    with pytest.raises(TeslaMedError, match=r"lower train\.learning_rate"):
        train_source(pipeline, [SITE], volumes, tmp_path / "out", device="cpu")


def test_training_learns(tmp_path: Path) -> None:
    settings = preset("prostate").model_copy(update={"matrix": 32, "slices": 6})
    make_site(tmp_path / "Phantom", "prostate", settings, 5, seed=1)
    pipeline = small(
        "train.steps=60", "train.validate_every=20", "train.learning_rate=0.01", "train.augment=false"
    )
    result = train_source(pipeline, [SITE], tmp_path, tmp_path / "out", device="cpu")
    assert result.validation_dice > 0.6
    assert len(result.training_cases) == 3
    assert len(result.validation_cases) == 2
    assert not set(result.training_cases) & set(result.validation_cases)
    assert (result.validation_step, result.best_step) == (30, 60)
    record = json.loads((tmp_path / "out" / "train.json").read_text())
    assert record["validated_on"] == "held-out cases, before they were trained on too"
    assert record["validation_step"] == 30


@pytest.mark.parametrize(
    ("held", "share", "expected"),
    [(0, None, 40), (1, None, 20), (2, None, 20), (3, None, 40), (3, 0.25, 10), (1, 1.0, 40), (0, 0.5, 40)],
)
def test_few_held_out_cases_are_trained_on_too_after_a_while(
    held: int, share: float | None, expected: int
) -> None:
    config = TrainConfig(steps=40, held_out_for=share)
    assert joined_after(config, SimpleNamespace(names=("case",) * held)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_held_out_cases_are_drawn_from_only_when_they_join(tmp_path: Path, share: float) -> None:
    """Changing the pixels of a held-out case changes nothing of a training that never joins it."""
    settings = preset("prostate").model_copy(update={"matrix": 32, "slices": 4})
    make_site(tmp_path / "Phantom", "prostate", settings, 5, seed=1)
    pipeline = small("train.steps=8", f"train.held_out_for={share}", "train.validation_fraction=0.2")
    first = train_source(pipeline, [SITE], tmp_path, tmp_path / "one", device="cpu")
    (held,) = first.validation_cases
    (image,) = (tmp_path / "Phantom").rglob(f"{held.split('/')[-1]}.nii*")
    volume = nib.load(image)
    nib.save(nib.Nifti1Image(volume.get_fdata()[::-1].copy(), volume.affine), image)
    second = train_source(pipeline, [SITE], tmp_path, tmp_path / "two", device="cpu")
    one, two = weights_of(first.weights), weights_of(second.weights)
    assert all(torch.equal(one[key], two[key]) for key in one) == (share == 1.0)


def test_the_averaged_network_is_validated_and_kept(volumes: Path) -> None:
    pipeline = small("train.augment=mild")
    run = TrainingRun(pipeline, load_labelled(pipeline, [SITE], volumes), torch.device("cpu"), 0)
    part = run.data.every()
    for _ in range(8):
        run.advance(part)
    own, averaged = (
        torch.cat([p.detach().flatten() for p in n.parameters()]) for n in (run.model, run.averaged)
    )
    assert not torch.equal(own, averaged)
    assert run.validate(part, varied=True) == run.validate(part, varied=True)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    assert run.validate(part) == run.validate(part)
    assert torch.equal(averaged, torch.cat([p.detach().flatten() for p in run.averaged.parameters()]))


def test_the_scaling_of_training_is_kept_in_the_card(volumes: Path, tmp_path: Path) -> None:
    result = train_source(small(), [SITE], volumes, tmp_path / "a", device="cpu")
    loaded = load_model(result.weights, small())
    assert loaded.pipeline.preprocessing.intensity.scaling == "percentile"
    result = train_source(small("train.intensity=null"), [SITE], volumes, tmp_path / "b", device="cpu")
    assert load_model(result.weights, small()).pipeline.preprocessing.intensity.scaling == "minmax"


# ------------------------------------------------------------------ data


def case(name: str, holds: tuple[bool, ...], site: str = "P") -> LabelledCase:
    labels = torch.zeros(len(holds), 8, 8, dtype=torch.uint8)
    for index, value in enumerate(holds):
        labels[index, 2:5, 3:6] = int(value)
    images = torch.arange(len(holds)).float()[:, None, None, None].expand(-1, 1, 8, 8) / 10
    return LabelledCase(site, name, images, labels, tuple(i for i, value in enumerate(holds) if value))


def test_the_card_says_how_steady_the_network_is(volumes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train_source(small(), [SITE], volumes, out, seed=1, device="cpu")
    card = read_card(out / "source.safetensors")
    assert card is not None
    smaller, larger = steadiness_of(card)
    assert card.extra["steadiness"] == [smaller, larger]
    assert 0 <= smaller <= 1
    assert 0 <= larger <= 1
    assert card.extra["seed"] == 1
    record = json.loads((out / "train.json").read_text())
    assert card.extra["source_dice"] == record["validation_dice"]
    known = load_model(out / "source.safetensors", small()).pipeline.quality.source_dice
    assert known == (record["validation_dice"] or None)
    named = small("quality.source_dice=0.7")
    assert load_model(out / "source.safetensors", named).pipeline.quality.source_dice == 0.7


def test_the_card_says_where_the_organ_lies_and_the_guard_of_a_run_knows(
    volumes: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = train_source(small(), [SITE], volumes, out, seed=1, device="cpu")
    known = prior_of(read_card(out / "source.safetensors"))
    assert known is not None
    assert known.cases == len(result.training_cases) + len(result.validation_cases)
    assert all(0.2 < value < 0.8 for value in known.mean[:2])  # phantoms have it in the middle
    request = RunRequest(SITE, volumes, weights=out / "source.safetensors", device="cpu", guard=True)
    predictor = predictor_of(make_plan(request), lambda *_: None)
    assert predictor.guard is not None
    assert predictor.guard.prior == known


def test_steadiness_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all images of a part: the Dice of each class over all of them, averaged over the classes."""
    pipeline = load_pipeline("prostate", ("model.params.width=4", "predict_batch=2"))
    network = build_model(pipeline)
    images = torch.rand(3, 1, 32, 32)
    case = LabelledCase("X", "a", images, torch.zeros(3, 32, 32, dtype=torch.long), ())
    first, moved = torch.zeros(3, 32, 32), torch.zeros(3, 32, 32)
    first[0, :8], moved[0, :4] = 1, 1
    found = {0.85: moved, 1.2: first}

    def probabilities(self: Any, model: Any, batch: torch.Tensor) -> torch.Tensor:
        mask = first[: len(batch)] if float(batch[0, 0, 0, 0]) == float(images[0, 0, 0, 0]) else first[2:]
        return torch.stack([1 - mask, mask], dim=1)

    def zoomed(method: Any, model: Any, batch: torch.Tensor, zoom: float) -> torch.Tensor:
        start = 0 if float(batch[0, 0, 0, 0]) == float(images[0, 0, 0, 0]) else 2
        return found[zoom][start : start + len(batch)].long()

    monkeypatch.setattr("tesla_med.tta.source.Source.probabilities", probabilities)
    monkeypatch.setattr("tesla_med.training.measure.zoomed_mask", zoomed)
    assert steadiness(network, Slices([case], 0.5), pipeline) == (pytest.approx(2 / 3), 1.0)


@pytest.mark.parametrize(
    ("subjects", "fraction", "held"),
    [("a", 0.15, 0), ("ab", 0.8, 1), ("abc", 0.0, 0), ("abc", 0.15, 1), ("abcd", 0.5, 2)],
)
def test_tiles_that_are_trained_on_are_not_held_out(subjects: str, fraction: float, held: int) -> None:
    of = tuple(subject for subject in subjects for _ in range(3))
    names = tuple(f"s/{number}" for number in range(len(of)))
    images, labels = torch.zeros(len(of), 3, 4, 4, dtype=torch.uint8), torch.zeros(len(of), dtype=torch.long)
    tiles = LabelledTiles(images, labels, names, ("s",) * len(of), of)
    training, validation = tiles.split(fraction, torch.Generator().manual_seed(0))
    assert (len(validation.names), len(training.names)) == (3 * held, len(of) - 3 * held)
    assert not set(training.names) & set(validation.names)


def test_split_keeps_subjects_together() -> None:
    subjects = ("a1", "b2", "c3", "d4", "e5", "f6")
    names = [f"sub-{s}/anat/sub-{s}_acq-{k}_T2starw" for s in subjects for k in (1, 2)]
    cases = [case(name, (True,)) for name in names]
    for seed in range(5):
        training, held = split(cases, 0.34, torch.Generator().manual_seed(seed))
        assert len(training) == 8
        assert len(held) == 4
        assert not {item.subject for item in training} & {item.subject for item in held}


@pytest.mark.parametrize(
    ("count", "fraction", "held_out"),
    [(1, 0.5, 0), (2, 0.5, 0), (4, 0.99, 0), (5, 0.01, 1), (5, 0.99, 4), (10, 0.0, 0), (10, 0.2, 2)],
)
def test_split_sizes(count: int, fraction: float, held_out: int) -> None:
    cases = [case(f"Case{i}", (True,)) for i in range(count)]
    training, held = split(cases, fraction, torch.Generator().manual_seed(0))
    assert (len(training), len(held)) == (count - held_out, held_out)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_sampler_share_of_foreground(fraction: float) -> None:
    sampler = Slices([case("a", (True, False, False, False)), case("b", (False, False))], fraction)
    _, labels = sampler.draw(2000, torch.Generator().manual_seed(0))
    share = labels.flatten(1).any(dim=1).float().mean().item()
    assert share == pytest.approx(fraction, abs=0.04)


def test_sampler_without_foreground_takes_what_there_is() -> None:
    images, labels = Slices([case("a", (False, False))], 0.7).draw(8, torch.Generator().manual_seed(0))
    assert images.shape == (8, 1, 8, 8)
    assert not labels.any()


def test_augmentation_moves_image_and_label_alike() -> None:
    labels = torch.zeros(64, 48, 40, dtype=torch.int64)
    labels[:, 10:24, 12:30] = 1
    images = labels[:, None].float() * 0.8 + 0.1
    moved, targets = randomise(images, labels, MILD, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    assert targets.dtype == torch.int64
    assert moved.min() >= 0
    assert moved.max() <= 1
    bright = moved[:, 0] > moved.flatten(1).mean(dim=1)[:, None, None]
    agree = (bright == targets.bool()).float().mean(dim=(1, 2))
    assert agree.min() > 0.93
    assert not torch.equal(targets, labels)
    again = randomise(images, labels, MILD, torch.Generator().manual_seed(0))
    assert torch.equal(again[1], targets)
    area = targets.sum(dim=(1, 2)) / labels.sum(dim=(1, 2))
    assert area.min() > 0.75
    assert area.max() < 1.3


def test_augmentation_flips_left_right_only() -> None:
    labels = torch.zeros(64, 32, 32, dtype=torch.int64)
    labels[:, 2:8, 24:30] = 1  # far from the middle in both axes
    _, targets = randomise(labels[:, None].float(), labels, MILD, torch.Generator().manual_seed(1))
    places = targets.float()
    first = (places * torch.arange(32)[None, :, None]).sum((1, 2)) / places.sum((1, 2))
    second = (places * torch.arange(32)[None, None, :]).sum((1, 2)) / places.sum((1, 2))
    assert 0.25 < (first > 16).float().mean() < 0.75
    assert (second > 16).all()


def test_slices_past_the_limit_are_mapped_from_disk(volumes: Path) -> None:
    memory = load_labelled(small(), [SITE], volumes)
    disk = load_labelled(small(), [SITE], volumes, memory_limit_mib=0.05)
    assert disk._spill
    assert not memory._spill
    for one, other in zip(memory.cases, disk.cases, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


def test_unlabelled_cases_are_left_out_and_named(volumes: Path, tmp_path: Path) -> None:
    for path in (volumes / "Phantom").iterdir():
        if path.name != "Case01_segmentation.nii.gz":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    data: Any = load_labelled(small(), [SITE], tmp_path)
    assert [item.name for item in data.cases] == ["Case00", "Case02"]
    assert data.left_out == ["P/Case01: no reference"]


def test_of_equally_good_weights_the_later_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = preset("prostate").model_copy(update={"matrix": 32, "slices": 2})
    make_site(tmp_path / "Phantom", "prostate", settings, 5, seed=1)
    scores = iter([0.2, 0.2, 0.7, 0.7, 0.7, 0.7, 0.1, 0.1])
    monkeypatch.setattr("tesla_med.training.loop.TrainingRun.validate", lambda *_, **__: next(scores))
    pipeline = small("train.steps=4", "train.validate_every=1", "train.augment=false", "train.held_out_for=1")
    result = train_source(pipeline, [SITE], tmp_path, tmp_path / "out", device="cpu")
    assert result.best_step == 3
