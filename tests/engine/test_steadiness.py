"""What the steadiness of a mask chooses: the share of a case's own statistics, and one of several runs."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tesla_med.engine import steadiness


class Made:
    """A method whose mask depends on the share, and under some shares on the size of the slices."""

    def __init__(self, masks):
        self.masks, self.share, self.used = masks, 1.0, []

    @property
    def shares(self):
        return tuple(self.masks)

    def use_share(self, share):
        self.share = share
        self.used.append(share)

    @contextmanager
    def deployed(self, images):
        yield None

    def probabilities(self, network, images):
        steady, mask = self.masks[self.share]
        changed = images.shape[-1] != mask.shape[-1]
        size = images.shape[-2:]
        found = torch.nn.functional.interpolate(mask[:, None].float(), size, mode="nearest")
        if changed and not steady:
            found = torch.zeros_like(found)
        return torch.cat([1 - found, found], dim=1)


def block(rows, columns=slice(8, 24), count=3, size=32):
    mask = torch.zeros(count, size, size)
    mask[:, rows, columns] = 1
    return mask


IMAGES = torch.zeros(3, 1, 32, 32)


@pytest.mark.parametrize("best", [0.25, 1.0])
def test_the_steadiest_is_taken(best):
    method = Made({share: (share == best, block(slice(8, 24))) for share in (0.25, 1.0)})
    found = steadiness.choose_share(method, IMAGES)
    assert method.share == found["statistics_share"] == best
    assert found[f"consistency_at_share_{best:g}"] > 0.9
    assert found[f"consistency_at_share_{1.25 - best:g}"] == 0


def test_equal_ones_leave_the_first(monkeypatch):
    method = Made(dict.fromkeys((0.5, 1.0), (True, block(slice(8, 24)))))
    assert steadiness.choose_share(method, IMAGES)["statistics_share"] == 0.5


def test_a_single_share_is_no_choice():
    method = Made({1.0: (True, block(slice(8, 24)))})
    assert steadiness.choose_share(method, IMAGES) == {}
    assert method.used == []


def test_fill_and_smaller_bodies_do_not_count():
    unsteady = (False, block(slice(8, 24)))
    beside = block(slice(0, 6), slice(0, 6))
    method = Made({0.5: (True, beside + block(slice(8, 24))), 1.0: unsteady})
    fill = torch.zeros(3, 32, 32, dtype=torch.bool)
    fill[:, :7, :7] = True
    plain = steadiness.choose_share(method, IMAGES)
    hidden = steadiness.choose_share(method, IMAGES, fill)
    largest = steadiness.choose_share(method, IMAGES, largest=True)
    assert hidden["consistency_at_share_0.5"] == largest["consistency_at_share_0.5"]
    assert plain["consistency_at_share_0.5"] != hidden["consistency_at_share_0.5"]


# ------------------------------------------------------------ restarts


class Learner:
    """A method whose runs end with masks that are given; its state is what was drawn and learned."""

    def __init__(self, steady):
        self.steady, self.state, self.log = steady, {"drawn": 0, "learned": 0}, []

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)

    def draw_anew(self, number):
        self.state["drawn"] = number

    def learn(self):
        self.log.append(dict(self.state))
        self.state["learned"] = self.state["drawn"] or 1


def runs_of(learner, count, monkeypatch, broken=()):
    monkeypatch.setattr(
        steadiness, "steadiness", lambda method, **about: learner.steady[method.state["learned"] - 1]
    )
    learner.restarts = count
    runs = steadiness.Restarts(learner, IMAGES)
    for number, run in enumerate(runs, 1):
        learner.learn()
        run.finite = number not in broken
    return runs


def test_every_run_starts_where_the_first_did_and_the_steadiest_stays(monkeypatch):
    learner = Learner([0.7, 0.9, 0.8])
    runs = runs_of(learner, 3, monkeypatch)
    assert learner.log == [{"drawn": number, "learned": 0} for number in (0, 2, 3)]
    assert learner.state == {"drawn": 2, "learned": 2}
    assert [runs.found[f"consistency_of_run_{number}"] for number in (1, 2, 3)] == [0.7, 0.9, 0.8]
    assert runs.found["run_taken"] == 2
    assert runs.finite


def test_runs_are_judged_by_their_masks_as_they_will_be_written(monkeypatch):
    seen = []
    monkeypatch.setattr(
        steadiness, "steadiness", lambda method, **about: seen.append(about["largest"]) or 0.5
    )
    for more in ({}, {"largest": True}):
        learner = Learner([])
        learner.restarts = 2
        for _ in steadiness.Restarts(learner, IMAGES, **more):
            learner.learn()
    assert seen == [False, False, True, True]  # whole masks unless it is said


def test_of_equal_runs_the_first_is_kept(monkeypatch):
    assert runs_of(Learner([0.8, 0.8]), 2, monkeypatch).found["run_taken"] == 1


def test_a_run_that_diverges_is_not_taken(monkeypatch):
    learner = Learner([0.7, 0.9, 0.8])
    runs = runs_of(learner, 3, monkeypatch, broken={2})
    assert learner.state["learned"] == 3
    assert "consistency_of_run_2" not in runs.found
    assert runs.finite
    gone = runs_of(learner := Learner([0.7, 0.9]), 2, monkeypatch, broken={1, 2})
    assert not gone.finite
    assert learner.state == {"drawn": 0, "learned": 0}


def test_a_single_run_is_neither_copied_nor_judged(monkeypatch):
    learner = Learner([])
    monkeypatch.setattr(learner, "state_dict", lambda: pytest.fail("no copy is needed"))
    runs = runs_of(learner, 1, monkeypatch)
    assert (runs.found, runs.finite, learner.state["learned"]) == ({}, True, 1)
    assert not runs_of(Learner([]), 1, monkeypatch, broken={1}).finite
