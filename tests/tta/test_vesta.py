"""VeSTA: every pass and the prediction under the chosen share; otherwise TeSLA; what is saved repeats it."""

from __future__ import annotations

import itertools

import pytest
import torch

from tesla_med.engine.driver import Driver
from tesla_med.engine.steadiness import choose_share, steadiness
from tesla_med.models.normalisation import copied, running_statistics

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = {"batch_slices": 3, "weak_views": 2, "policy_size": 2, "predict_statistics": "volume"}
ONCE = {**FEW, "draw": "replacement", "updates_per_case": 2}


def shifted(make_images, count=4):
    """Images whose statistics are not the network's."""
    return (0.2 + 0.6 * make_images(count, 32, 32, seed=9)).clamp(0, 1)


def test_the_whole_share_is_tesla(make_tta, make_images):
    images = shifted(make_images)
    found = []
    for name, more in (("tesla", {}), ("vesta", {"statistics_shares": (1.0,)})):
        method = make_tta(name, **ONCE, **more)
        found.append(Driver(method, "N-O", "case").adapt_and_predict(images))
    assert torch.equal(*found)


def test_passes_and_prediction_use_the_share(make_tta, make_images, same_state):
    images = shifted(make_images)
    fixed = make_tta("tesla", **ONCE, statistics_share=0.5)
    chosen = make_tta("vesta", **ONCE, statistics_shares=(0.5,), statistics_share=0.5)
    assert chosen.share == 0.5
    results = [Driver(item, "N-O", "case").adapt_and_predict(images) for item in (fixed, chosen)]
    assert torch.equal(*results)
    assert same_state(
        {key: value.state_dict() for key, value in fixed.modules().items()},
        {key: value.state_dict() for key, value in chosen.modules().items()},
    )
    other = make_tta("vesta", **ONCE, statistics_shares=(1.0,))
    assert not torch.allclose(Driver(other, "N-O", "case").adapt_and_predict(images), results[0], atol=1e-4)


def test_a_share_is_chosen_for_each_case_and_forgotten(make_tta, make_images, same_state):
    first, second = shifted(make_images), make_images(5, 32, 32, seed=4)
    method = make_tta("vesta", **ONCE)
    start = method.state_dict()
    driver = Driver(method, "N-O", "case")
    driver.adapt_and_predict(first)
    driver.adapt_and_predict(second)
    after = driver.chosen
    alone = Driver(make_tta("vesta", **ONCE), "N-O", "case")
    alone.adapt_and_predict(second)
    assert alone.chosen == after
    assert set(after) == {"consistency_at_share_0.5", "consistency_at_share_1", "statistics_share"}
    assert method.share == after["statistics_share"]
    method.reset()
    assert method.share == 1.0
    assert same_state(method.state_dict(), start)


def test_the_steadiest_of_several_runs_is_kept(make_tta, make_images, same_state):
    images = shifted(make_images)
    rate = {"learning_rate": 0.02, "statistics_shares": (1.0,)}
    several = make_tta("vesta", **ONCE, **rate, restarts=3)
    driver = Driver(several, "N-O", "case")
    probs = driver.adapt_and_predict(images)
    found = [driver.chosen[f"consistency_of_run_{number}"] for number in (1, 2, 3)]
    assert found[int(driver.chosen["run_taken"]) - 1] == max(found)
    assert len(set(found)) > 1
    assert steadiness(several, images) == max(found)
    alone = []
    for number in (1, 2, 3):
        method = make_tta("vesta", **ONCE, **rate)
        if number > 1:
            method.draw_anew(number)
            method._initial["generators"] = method.state_dict()["generators"]
        alone.append((Driver(method, "N-O", "case").adapt_and_predict(images), steadiness(method, images)))
    assert [value for _, value in alone] == found
    assert torch.equal(alone[int(driver.chosen["run_taken"]) - 1][0], probs)
    assert several.learning_passes(4) == 3 * make_tta("vesta", **ONCE).learning_passes(4)
    again = Driver(several, "N-O", "case").adapt_and_predict(images)
    assert torch.equal(again, probs)


def test_choices_cost_the_passes_of_their_masks(make_tta):
    """Each mask is that of the slices as they are, of the reduced and of the enlarged ones."""
    tesla = make_tta("tesla", **ONCE).predicting_passes(10)
    each = 10 * (2.0 + 0.85**2 + 1.2**2)  # of which one is for the statistics
    for shares, restarts, choices in (((0.5, 1.0), 1, 2), ((0.5, 1.0), 3, 5), ((0.25, 0.5, 1.0), 2, 5)):
        method = make_tta("vesta", **ONCE, statistics_shares=shares, restarts=restarts)
        assert method.predicting_passes(10) == pytest.approx(tesla + choices * each)


def test_it_is_asked_of_the_source_model(make_tta, make_images):
    """The choice is made before anything is learned: it does not depend on the seed of the learning."""
    images = shifted(make_images)
    found = []
    for seed in (0, 1):
        driver = Driver(make_tta("vesta", seed=seed, **ONCE), "N-O", "case")
        driver.adapt_and_predict(images)
        found.append(driver.chosen)
    assert found[0] == found[1]
    source = make_tta("source", statistics="volume", statistics_shares=(0.5, 1.0))
    assert choose_share(source, images) == found[0]


@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_what_is_saved_repeats_the_masks(protocol, make_tta, make_images):
    images = shifted(make_images)
    method = make_tta("vesta", **(ONCE if protocol == "N-O" else {**FEW, "epochs": 2}))
    driver = Driver(method, protocol, "case" if protocol == "N-O" else "site")
    if protocol == "N-O":
        probs = driver.adapt_and_predict(images)
        with method.deployed(images) as network:
            found = make_tta("source", network, **method.deployed_params(images)).predict(images)
    else:
        driver.adapt_to_site(Site(images, images.flip(0)))
        probs = driver.adapt_and_predict(images)
        with method.deployed() as network:
            source = make_tta("source", network, **method.deployed_params())
            assert choose_share(source, images) == pytest.approx(driver.chosen)
            found = source.predict(images)
    assert torch.allclose(found, probs, atol=1e-5)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_is_saved_says_a_share_where_there_is_one(share, make_tta):
    found = make_tta("vesta", **FEW, statistics_share=share).deployed_params()
    assert found["statistics_shares"] == (0.5, 1.0)
    assert found.get("statistics_share", 1.0) == share
    assert ("statistics_share" in found) == (share < 1.0)


def test_saving_leaves_the_network_as_it_was(make_tta, make_images):
    method = make_tta("vesta", **FEW)
    method.adapt(shifted(make_images))
    before = copied(running_statistics(method.predictor))
    with method.deployed():
        inside = copied(running_statistics(method.predictor))
    for now, then, source in zip(
        running_statistics(method.predictor), before, method.source_statistics, strict=True
    ):
        assert all(torch.equal(one, two) for one, two in zip(now, then, strict=True))
        assert not torch.equal(then[0], source[0])
    for one, two in zip(inside, method.source_statistics, strict=True):
        assert torch.equal(one[0], two[0])


def test_without_statistics_to_share_there_is_no_choice(make_tta, make_images):
    from tesla_med.models.unet import UNet

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = UNet(1, 2, 4, norm="instance").eval()
    method = make_tta("vesta", network, **ONCE)
    assert method.shares == ()
    driver = Driver(method, "N-O", "case")
    driver.adapt_and_predict(shifted(make_images))
    assert driver.chosen == {}
    assert make_tta("vesta", **{**ONCE, "predict_statistics": "running"}).shares == ()


def test_from_tiles_it_learns_once(make_tta):
    """There is no mask whose steadiness could be compared."""
    from tile_site import make_batch, make_network

    tiles = make_batch(6)
    found = []
    for name, more in (("tesla", {}), ("vesta", {"restarts": 3})):
        few = {"batch_slices": 3, "weak_views": 2, "policy_size": 2, "op_set": "generic"}
        method = make_tta(name, make_network("mobilenet_v2"), **few, **more)
        assert method.restarts == 1
        driver = Driver(method, "N-O", "site")
        found.append(driver.adapt_and_predict(tiles))
        assert driver.chosen == {}
        costs = method.learning_passes(6), method.predicting_passes(6)
        found.append(torch.tensor(costs))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


class Site:
    joined, channels = True, None

    def __init__(self, *cases):
        self.cases = cases

    def batches(self, size):
        yield from torch.split(torch.cat(self.cases), size)


def test_a_run_whose_policy_diverges_is_left_out(make_tta, make_images, monkeypatch):
    """Nothing can be drawn from a policy that is not finite, and what that raises ends one run alone."""
    method = make_tta("vesta", **ONCE, restarts=3)
    adapt, count = method.adapt, itertools.count(1)

    def diverging(batch):
        if next(count) == 3:  # the first update of the second run
            with torch.no_grad():
                next(method.policy.parameters()).fill_(float("nan"))
        return adapt(batch)

    monkeypatch.setattr(method, "adapt", diverging)
    driver = Driver(method, "N-O", "case")
    assert driver.adapt_and_predict(make_images(4)) is not None
    assert "consistency_of_run_2" not in driver.chosen
    assert {"consistency_of_run_1", "consistency_of_run_3"} <= set(driver.chosen)
