"""A network that is all head has no parameters to adapt, which is said before anything is written."""

import pytest
import torch
from lines import run, work_there

from tesla_med.models.base import Network
from tesla_med.models.loading import LoadedModel


class AllHead(Network):
    """Brightness decides."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    @classmethod
    def build(cls, params, channels, classes):
        return cls()

    @property
    def head(self):
        return self

    def logits(self, images):
        return torch.cat([-images, images], dim=1) * self.weight


@pytest.mark.usefixtures("one_thread")
def test_the_count_of_parameters_is_said(tmp_path, monkeypatch, capsys):
    work_there(tmp_path, monkeypatch, 1)
    (tmp_path / "known.safetensors").write_bytes(b"known")

    def load(_, pipeline, overrides=()):
        return LoadedModel(AllHead(), pipeline, None, ())

    monkeypatch.setattr("tesla_med.models.loading.load_model", load)
    words = ["--site", "prostate/X", "--volumes", "nii", "--out", "out", "--device", "cpu"]
    assert run(["adapt", *words, "--weights", "known.safetensors"]) == 2
    assert "found 0 parameters to adapt" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
