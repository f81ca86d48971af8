"""An adaptation whose loss falls while the mask becomes empty: the guard undoes it."""

import pytest
import small_site as small
import torch

from tesla_med import losses
from tesla_med.models.base import norm_layers
from tesla_med.models.normalisation import batch_statistics
from tesla_med.tta.tesla import TeSLA

UPDATES = 120
GUARDED = ("guard.enabled=true", f"protocols.N-O.tesla.updates_per_case={UPDATES}")


@pytest.fixture(scope="module")
def small_weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.fixture
def entropy_minimised(monkeypatch):
    """Let the method minimise entropy, over norm parameters, with large steps; return the entropies.

    A little weight on the background decides which of the certain answers it ends in.
    """
    found, optimizers = [], {}

    def adapt(self, images):
        parameters = [item for layer in norm_layers(self.teacher) for item in layer.parameters()]
        if self not in optimizers:
            optimizers[self] = torch.optim.Adam(parameters, lr=0.2)
        for item in parameters:
            item.requires_grad_(True)
        with batch_statistics(self.teacher, momentum=0.1):
            probs = self.logits(self.teacher, images).softmax(1)
        entropy = -losses.negative_entropy(probs).mean()
        optimizers[self].zero_grad()
        (entropy - 0.1 * probs[:, 0].log().mean()).backward()
        optimizers[self].step()
        found.append(float(entropy.detach()))
        return {"loss/entropy": entropy.detach()}

    monkeypatch.setattr(TeSLA, "adapt", adapt)
    return found


def test_a_collapse_is_undone(small_weights, tmp_path, entropy_minimised):
    small.make_volumes(tmp_path / "nii", 1)
    (case,) = small.run(tmp_path / "nii", small_weights, tmp_path / "out", overrides=GUARDED).results
    assert len(entropy_minimised) == UPDATES
    assert entropy_minimised[-1] < 0.05 * entropy_minimised[0]  # the loss looks like a success
    assert (case.status, case.share) == ("collapsed", 0.0)
    assert "empty" in case.reason
    assert case.signals["foreground_adapted"] == 0.0
    assert case.signals["foreground_source"] > 0.0
    assert case.signals["agreement_source_adapted"] == 0.0
    assert small.labels(tmp_path / "out", "Case00").any()
    assert ",collapsed," in (tmp_path / "out/report/metrics.csv").read_text()
    if case.used == "source":
        files = small.masks(tmp_path / "out")
        assert files["masks/Case00_mask.nii.gz"] == files["source_masks/Case00_mask.nii.gz"]
        assert not list((tmp_path / "out/checkpoints").rglob("*.safetensors"))


def test_without_the_guard_the_mask_would_be_empty(small_weights, tmp_path, entropy_minimised):
    small.make_volumes(tmp_path / "nii", 1)
    overrides = (*GUARDED, "guard.enabled=false")
    small.run(tmp_path / "nii", small_weights, tmp_path / "out", overrides=overrides)
    assert not small.labels(tmp_path / "out", "Case00").any()
