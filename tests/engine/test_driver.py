"""How slices reach a method, and what happens when a method diverges."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tesla_med.config.files import load_pipeline
from tesla_med.engine.driver import Driver
from tesla_med.models.base import build_model, norm_layers
from tesla_med.prepare.stream import SiteImages

NAN = float("nan")


class Recorder:
    """A method that writes down what is done to it."""

    adapts = True
    shares, restarts, patch = (), 1, None
    model = SimpleNamespace(task="segmentation")

    def __init__(self, *, epochs=1, size=2, draw="ordered", losses=(), fail=None):
        self.params = SimpleNamespace(epochs=epochs, draw=draw, batch_slices=size)
        self.log = []
        self.losses = list(losses)
        self.fail = fail
        self.layer = torch.nn.Linear(1, 1)

    def to_device(self, images):
        return images

    def at_most(self, count):
        return count

    def use_less_memory(self, limit, *, stitch_on_cpu=False):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def updates(self, count):
        return -(-count // (self.params.batch_slices or count))

    def batches(self, images):
        size = self.params.batch_slices or len(images)
        return (images[start : start + size] for start in range(0, len(images), size))

    def start_epoch(self, epoch, batches):
        self.log.append(f"epoch {epoch} of {sum(len(batch) for batch in batches)}")

    def adapt(self, images):
        if self.fail is not None:
            raise self.fail
        self.log.append(images.flatten().tolist())
        return {"loss": torch.tensor(self.losses.pop(0) if self.losses else 1.0), "other": 2.0}

    def predict(self, images):
        self.log.append("predict")
        return torch.full((len(images), 2, 1, 1), 0.5)

    def record(self):
        return {"slow": 3.0}

    def reset(self):
        self.log.append("reset")

    def modules(self):
        return {"layer": self.layer}


class Slices:
    """Two cases of three slices."""

    joined = True
    channels = None

    def __iter__(self):
        return iter((torch.arange(3.0).view(-1, 1, 1, 1), torch.arange(3.0, 6.0).view(-1, 1, 1, 1)))

    def batches(self, size):
        return iter(torch.cat(list(self)).split(size))


def images(count=3):
    return torch.arange(float(count)).view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("protocol", "reset", "by_case"),
    [("N-O", "case", True), ("N-O", "never", True), ("N-M", "site", False), ("N-M", "case", True)],
)
def test_case_by_case(protocol, reset, by_case):
    assert Driver(Recorder(), protocol, reset).case_by_case is by_case


def test_a_case():
    method, steps = Recorder(epochs=2), []
    driver = Driver(method, "N-O", "case", lambda step, scalars: steps.append((step, scalars)))
    assert driver.adapt_and_predict(images()).shape == (3, 2, 1, 1)
    once = [[0.0, 1.0], [2.0]]
    assert method.log == ["reset", "epoch 0 of 3", *once, "epoch 1 of 3", *once, "predict"]
    assert driver.adapt_and_predict(images(1)) is not None
    assert [step for step, _ in steps] == list(range(6))
    assert [scalars.get("slow") for _, scalars in steps] == [None, 3.0, None, 3.0, 3.0, 3.0]
    assert steps[0][1] == {"loss": 1.0, "other": 2.0}


def test_state_goes_on_without_reset():
    method = Recorder()
    driver = Driver(method, "N-O", "site")
    driver.adapt_and_predict(images(1))
    driver.adapt_and_predict(images(1))
    assert "reset" not in method.log


def test_a_site_in_batches_across_cases():
    method, told = Recorder(epochs=2, size=4), []
    Driver(method, "N-M", "site").adapt_to_site(Slices(), lambda *item: told.append(item))
    once = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]
    assert method.log == ["epoch 0 of 6", *once, "epoch 1 of 6", *once]
    assert [item[1:] for item in told if "updates" not in item[0]] == [(0, 2), (1, 2), (2, 2)]
    assert [item[1:] for item in told if item[0] == "updates of pass 2"] == [(0, 0), (1, 2), (2, 2)]


@pytest.mark.parametrize("options", [{"draw": "replacement", "size": 2}, {"size": None}])
def test_a_site_case_by_case(options):
    method = Recorder(**options)
    Driver(method, "N-M", "site").adapt_to_site(Slices())
    batches = [item for item in method.log if isinstance(item, list)]
    whole = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert batches == (whole if options["size"] is None else [[0.0, 1.0], [2.0], [3.0, 4.0], [5.0]])


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_loss_that_is_not_finite(value):
    method = Recorder(losses=[1.0, value, 1.0, 1.0])
    driver = Driver(method, "N-O", "site")
    assert driver.adapt_and_predict(images()) is None
    assert method.log[-1] == "reset"
    assert driver.adapt_and_predict(images()) is not None


def test_site_passes_that_are_not_finite_end():
    method = Recorder(epochs=3, size=6, losses=[1.0, NAN])
    driver = Driver(method, "N-M", "site")
    driver.adapt_to_site(Slices())
    assert [item for item in method.log if isinstance(item, str)] == ["epoch 0 of 6", "epoch 1 of 6", "reset"]
    assert driver.adapt_and_predict(images()) is None


def test_one_prediction_that_is_not_finite_keeps_the_site_adapted(monkeypatch):
    method = Recorder()
    driver = Driver(method, "N-M", "site")
    driver.adapt_to_site(Slices())
    monkeypatch.setattr(method, "predict", lambda images: torch.full((1, 2, 1, 1), NAN), raising=False)
    assert driver.adapt_and_predict(images()) is None
    monkeypatch.undo()
    assert driver.adapt_and_predict(images()) is not None
    assert "reset" not in method.log


@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
@pytest.mark.parametrize("diverged", [False, True])
def test_an_exception_from_a_diverged_method_is_divergence(protocol, diverged):
    method = Recorder(fail=RuntimeError("cannot draw"))
    if diverged:
        torch.nn.init.constant_(method.layer.weight, NAN)
    driver = Driver(method, protocol, "site")

    def work():
        if not driver.case_by_case:
            driver.adapt_to_site(Slices())
        return driver.adapt_and_predict(images())

    if diverged:
        assert work() is None
        assert method.log.count("reset") == 1
    else:
        with pytest.raises(RuntimeError, match="cannot draw"):
            work()
        assert method.log.count("reset") == (protocol == "N-O")


def test_methods_that_do_not_adapt():
    method = Recorder()
    method.adapts = False
    driver = Driver(method, "N-M", "site")
    assert driver.case_by_case
    assert driver.adapt_to_case(images())
    assert method.log == []


# ------------------------------------------------------------ small batches


def monai_unet():
    arguments = "{channels: [4, 8, 16], strides: [2, 2], norm: batch}"
    params = f"model.params={{class_name: UNet, arguments: {arguments}, divisor: 4}}"
    return build_model(load_pipeline("prostate", ("model.name=monai", params)))


def smallest_batch(network):
    """Watch how few values a channel the batch norms get; return the growing list."""
    seen = []
    for layer in norm_layers(network):
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][:, 0].numel()))
    return seen


@pytest.mark.parametrize("name", ["tesla", "bn"])
@pytest.mark.parametrize("make", ["unet", "monai"])
def test_no_norm_gets_a_single_value_of_one_4x4_patch(make_tta, make_network, name, make):
    network = make_network() if make == "unet" else monai_unet()
    method = make_tta(name, network, batch_slices=1)
    seen = smallest_batch(method.predictor)
    images = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    method.adapt(images)
    probs = method.predict(images)
    assert probs.shape == (1, 2, 4, 4)
    assert torch.isfinite(probs).all()
    assert min(seen) == 4


def test_a_last_batch_of_one_slice_is_adapted_to(make_tta, make_images):
    class Slices(SiteImages):
        def __iter__(self):
            yield from (make_images(2), make_images(1, seed=1))

    sizes = []
    method = make_tta("tesla", batch_slices=2, epochs=1)
    adapt = method.adapt
    method.adapt = lambda images: sizes.append(len(images)) or adapt(images)
    driver = Driver(method, "N-M", "site")
    driver.adapt_to_site(Slices((), lambda _: None))
    assert sizes == [2, 1]
    assert driver.finite


def test_updates_that_are_done_again_are_told_of_once():
    told, failing = [], [5]
    method = Recorder(epochs=3, losses=[1.0] * 20)
    adapt = method.adapt

    def once(images):
        failing[0] -= 1
        if failing[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return adapt(images)

    method.adapt = once
    driver = Driver(method, "N-O", "case", lambda number, _: told.append(number))
    images = torch.zeros(4, 1, 8, 8)
    with pytest.raises(torch.OutOfMemoryError):
        driver.adapt_to_case(images)
    assert told == []
    assert driver.adapt_to_case(images)
    assert told == list(range(6))


def test_networks_of_patches_learn_from_patches_over_a_site_too():
    method = Recorder(size=2)
    method.patch = (2, 2)
    Driver(method, "N-M", "site").adapt_to_site(Slices())
    apart = [item for item in method.log if isinstance(item, list)]
    assert apart == [[0.0, 1.0], [2.0], [3.0, 4.0], [5.0]]  # as the method cuts each case
