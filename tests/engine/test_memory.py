"""What is tried where memory runs out: ever fewer slices at once, then stitched on the CPU."""

import gc
import weakref

import numpy as np
import pytest
import small_site as small
import tile_site
import torch

from tesla_med import plan
from tesla_med.engine.memory import attempts, free_device_memory, is_out_of_memory
from tesla_med.engine.predictor import Predictor
from tesla_med.errors import AdaptationError
from tesla_med.models.base import MODELS as REGISTRY
from tesla_med.models.unet import UNet

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("volumes")
    small.make_volumes(folder, 3)
    return folder


def short_of_memory(monkeypatch, *, largest=None, at=None):
    """Let forwards of more than ``largest`` slices, or the ``at``-th one, run out of memory."""
    original, count, failed = UNet.logits, [0], [0]

    def logits(self, images):
        count[0] += 1
        too_large = largest is not None and len(images) > largest
        if too_large or count[0] == at:
            failed[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        return original(self, images)

    monkeypatch.setattr(UNet, "logits", logits)
    return failed


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"reset": "case"}, {"reset": "site"}, {"protocol": "N-M"}])
@pytest.mark.parametrize("at", [1, 7, 13])
def test_a_forward_that_fails_once_costs_nothing_but_time(
    volumes, weights, tmp_path, monkeypatch, options, at
):
    with monkeypatch.context() as patch:
        failed = short_of_memory(patch, at=at)
        result = small.run(volumes, weights, tmp_path / "out", **options)
    assert failed == [1]
    assert {item.status for item in result.results} <= {"ok", "empty"}
    assert {item.used for item in result.results} == {"adapted"}
    done = [item for item in result.results if "memory ran out; done with 2 slices at once" in item.reason]
    assert len(done) == (0 if options.get("protocol") == "N-M" else 1)  # its passes have no case to name


def test_weights_and_temperatures_are_made_within_the_memory_that_sufficed(
    volumes, weights, tmp_path, monkeypatch
):
    more = ("recalibrate=true", "methods.tesla.predict_statistics=volume")
    with monkeypatch.context() as patch:
        short_of_memory(patch, largest=2)
        result = small.run(volumes, weights, tmp_path / "out", overrides=more, reset="case")
    assert {item.status for item in result.results} <= {"ok", "empty"}
    assert {item.used for item in result.results} == {"adapted"}
    assert all("done with 2 slices at once" in item.reason for item in result.results)
    assert len(list((result.out / "checkpoints").glob("*.safetensors"))) == len(result.results)
    assert all("temperature" in item.signals for item in result.results)


@pytest.mark.parametrize("largest", [1, 2])
def test_less_slices_at_once_where_memory_is_short(volumes, weights, tmp_path, monkeypatch, largest):
    short_of_memory(monkeypatch, largest=largest)
    result = small.run(volumes, weights, tmp_path / "out", method="source")
    assert {item.status for item in result.results} <= {"ok", "empty"}
    word = "1 slice" if largest == 1 else "2 slices"
    assert all(item.reason == f"memory ran out; done with {word} at once" for item in result.results)
    monkeypatch.undo()
    plain = small.run(volumes, weights, tmp_path / "plain", method="source")
    for item in plain.results:
        assert np.array_equal(small.labels(result.out, item.case), small.labels(plain.out, item.case))


def test_no_memory_at_all_fails_that_case_only(volumes, weights, tmp_path, monkeypatch):
    slices = []
    plain = small.run(volumes, weights, tmp_path / "plain", reset="site", method="bn")
    attempt, calls = Predictor._attempt, [0]

    def fail_second(self, *given):
        if len(slices) == 1:
            calls[0] += 1
            attempt(self, *given)  # moves the state, which must be put back
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return attempt(self, *given)

    def counted(self, *given):
        try:
            return judged(self, *given)
        finally:
            slices.append(None)

    judged = Predictor._judged
    monkeypatch.setattr(Predictor, "_attempt", fail_second)
    monkeypatch.setattr(Predictor, "_judged", counted)
    result = small.run(volumes, weights, tmp_path / "out", reset="site", method="bn")
    assert [item.status == "failed" for item in result.results] == [False, True, False]
    tried = "4 slices at once, 2 slices at once, 1 slice at once, 1 slice at once, stitched on the CPU"
    assert f"out of memory; tried {tried}" in result.results[1].reason
    assert calls == [4]
    names = {f"{part}/Case00_mask.nii.gz" for part in ("masks", "source_masks")}
    assert {name: small.masks(result.out)[name] for name in names} == {
        name: small.masks(plain.out)[name] for name in names
    }
    assert not list(result.out.rglob("*Case01*mask*"))


@pytest.fixture(scope="module")
def tile_weights(one_thread, tmp_path_factory):
    return tile_site.train_weights(tmp_path_factory.mktemp("tiles"))


def classify(weights, folder, out, largest, monkeypatch, protocol="N-O", method="tent"):
    """Adapt to 40 tiles in batches of 32 where forwards of more than ``largest`` run out of memory."""
    network = REGISTRY.get("mobilenet_v2")
    original, sizes = network.logits, []

    def logits(self, images):
        if len(images) > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        sizes.append(len(images))
        return original(self, images)

    if not folder.exists():
        tile_site.make_tiles(folder, 10, seed=2, shift=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(network, "logits", logits)
        result = tile_site.adapt_tiles(
            tile_site.site(),
            folder,
            weights=weights,
            method=method,
            protocol=protocol,
            out=out,
            device="cpu",
            overrides=(*tile_site.SMALL, "protocols={}"),
        )
    return result, sizes


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_tiles_are_learned_from_in_smaller_batches(tile_weights, tmp_path, monkeypatch, protocol):
    result, sizes = classify(tile_weights, tmp_path / "in", tmp_path / "out", 8, monkeypatch, protocol)
    assert tile_site.read(result) == 40
    assert max(sizes) == 8
    reasons = {item.reason for item in result.results}
    # The batch that ran out of memory says so; under N-O a later batch begins with as many.
    assert reasons == {"memory ran out; done with 8 tiles at once"} | ({""} if protocol == "N-O" else set())


@pytest.mark.slow
def test_too_few_tiles_are_not_learned_from(tile_weights, tmp_path, monkeypatch):
    result, _ = classify(tile_weights, tmp_path / "in", tmp_path / "out", 4, monkeypatch)
    assert {item.status for item in result.results} == {"failed"}
    tried = "32 tiles at once, 16 tiles at once, 8 tiles at once; use"
    assert any(tried in item.reason for item in result.results)
    assert not result.complete
    result, sizes = classify(
        tile_weights, tmp_path / "in", tmp_path / "plain", 4, monkeypatch, method="source"
    )
    assert (tile_site.read(result), max(sizes)) == (40, 4)  # predictions do not depend on the batch


class Counter:
    """A method that writes down its limits."""

    def __init__(self):
        self.limits = []

    def use_less_memory(self, limit, *, stitch_on_cpu=False):
        self.limits.append((limit, stitch_on_cpu))


def attempt_all(work, methods, most, **options):
    for attempt in attempts(methods, lambda: restored.append(1), most, **options):
        with attempt:
            return work(), attempt.note
    return None


restored: list[int] = []


def test_the_order_of_what_is_tried():
    method = Counter()
    restored.clear()

    def work():
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(AdaptationError, match="tried 5 slices at once, 2 slices"):
        attempt_all(work, (method,), 5)
    assert [item for item in method.limits if item != (None, False)] == [(2, False), (1, False), (1, True)]
    assert method.limits[-1] == (None, False)
    assert len(restored) == 4


def test_other_errors_are_not_tried_again():
    calls, method = [], Counter()

    def work():
        calls.append(1)
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape"):
        attempt_all(work, (method,), 8, first=4)
    assert len(calls) == 1
    assert method.limits == [(4, False), (None, False)]
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("could not create a primitive"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_networks_of_the_last_run_are_freed_before_the_next(volumes, weights, tmp_path, monkeypatch):
    networks = []
    build = plan.Plan.make_method

    def make(self, name, *more):
        method = build(self, name, *more)
        networks.append(weakref.ref(method.model))
        return method

    def free():
        with monkeypatch.context() as patch:  # a device that there is not
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "empty_cache", lambda: freed.append("cuda"))
            free_device_memory()

    freed = []
    monkeypatch.setattr(plan.Plan, "make_method", make)
    monkeypatch.setattr("tesla_med.adapt.free_device_memory", free)
    gc.disable()  # a collection of its own would hide one that is missing
    try:
        small.run(volumes, weights, tmp_path / "one")
        first = list(networks)
        small.run(volumes, weights, tmp_path / "two")
    finally:
        gc.enable()
    assert freed == ["cuda", "cuda"]
    assert first
    assert all(reference() is None for reference in first)
