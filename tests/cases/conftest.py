"""Networks whose masks are known beforehand, and quickly trained weights."""

from __future__ import annotations

import pytest
import small_site as small
import tile_site
import torch

from tesla_med.models.base import Network
from tesla_med.models.loading import LoadedModel


class Known(Network):
    """Brightness decides: the scaled image, in [-1, 1], is cut into one band of brightness for each class.

    With ``empty``, everything is background.
    """

    def __init__(self, classes, empty=False):
        super().__init__()
        self.classes = classes
        self.empty = empty
        self.weight = torch.nn.Parameter(torch.ones(1))

    @classmethod
    def build(cls, params, channels, classes):
        return cls(classes)

    @property
    def head(self):
        return self

    def logits(self, images):
        centres = torch.linspace(-1, 1, self.classes).view(1, -1, 1, 1)
        brightness = torch.full_like(images, -1) if self.empty else images
        return -100 * (brightness - centres).abs() * self.weight


@pytest.fixture
def known_weights(one_thread, monkeypatch, tmp_path):
    """Make weights of a :class:`Known` network; with two classes: foreground above half of the range."""

    def make(*, empty=False):
        path = tmp_path / "known.safetensors"
        path.write_bytes(b"known")

        def load(_, pipeline, overrides=()):
            return LoadedModel(Known(len(pipeline.classes), empty), pipeline, None, ())

        monkeypatch.setattr("tesla_med.models.loading.load_model", load)
        return path

    return make


@pytest.fixture(scope="session")
def small_weights(one_thread, tmp_path_factory):
    """Weights of a width-4 U-Net, trained once a session, with source statistics beside them."""
    return small.weights_with_statistics(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def tile_weights(one_thread, tmp_path_factory):
    """Weights of a small classifier of tiles, trained once a session."""
    return tile_site.train_weights(tmp_path_factory.mktemp("tile_weights"))
