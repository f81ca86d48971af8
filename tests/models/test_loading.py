"""From a pipeline and weights to a network: the card's word over the pipeline's."""

from __future__ import annotations

import pytest
import torch

from tesla_med.config.models import Intensity, LabelClass, ModelConfig, PipelineConfig, Preprocessing
from tesla_med.errors import CheckpointError, ConfigError
from tesla_med.models.checkpoint import make_card, save_checkpoint
from tesla_med.models.loading import load_model

pytestmark = pytest.mark.usefixtures("one_thread")


def pipeline(name="made_up", width=4, size=(48, 48), classes=("background", "thing"), **more):
    return PipelineConfig(
        name=name,
        title="made up",
        sites="made_up",
        classes=tuple(LabelClass(value=value, name=text) for value, text in enumerate(classes)),
        preprocessing=Preprocessing(size=size, **more.pop("preprocessing", {})),
        model=ModelConfig(name="unet", params={"width": width}),
        **more,
    )


@pytest.fixture
def weights(tmp_path, make_network):
    path = tmp_path / "weights.safetensors"
    save_checkpoint(path, make_network(), make_card(pipeline()))
    return path


def test_same_pipeline(weights, make_network):
    loaded = load_model(weights, pipeline())
    assert loaded.warnings == ()
    assert loaded.pipeline == pipeline()
    assert loaded.card == make_card(pipeline())
    want = make_network().state_dict()
    assert all(torch.equal(value, want[key]) for key, value in loaded.model.state_dict().items())


def test_the_card_decides_network_and_preprocessing(weights):
    intensity = {"intensity": Intensity(scaling="percentile")}
    given = pipeline(width=64, size=(96, 96), preprocessing=intensity)
    loaded = load_model(weights, given)
    assert loaded.pipeline.preprocessing == pipeline().preprocessing
    assert loaded.pipeline.model == pipeline().model
    assert loaded.model.inc.double_conv[0].out_channels == 4
    text = " ".join(loaded.notes)
    assert len(loaded.notes) == 2
    assert loaded.warnings == ()
    assert "preprocessing.size=[48, 48] (pipeline: [96, 96])" in text
    assert "preprocessing.intensity" in text
    assert "model.params={width: 4} (pipeline: {width: 64})" in text
    assert "model_range" not in text
    assert loaded.pipeline.methods == given.methods
    assert given.preprocessing.size == (96, 96)


def test_overrides_stay_with_a_warning(weights):
    given = pipeline(size=(64, 64))
    loaded = load_model(weights, given, ("preprocessing.size=[64, 64]",))
    assert loaded.pipeline.preprocessing.size == (64, 64)
    assert len(loaded.warnings) == 1
    assert loaded.warnings[0].startswith("--set departs from what the weights were trained with")
    assert "preprocessing.size=[48, 48] (pipeline: [64, 64])" in loaded.warnings[0]


def test_an_override_of_something_else_does_not_stop_the_card(weights):
    loaded = load_model(weights, pipeline(size=(64, 64)), ("methods.tesla.epochs=2",))
    assert loaded.pipeline.preprocessing.size == (48, 48)


def test_an_overridden_network_that_does_not_fit(weights):
    with pytest.raises(CheckpointError, match="another architecture"):
        load_model(weights, pipeline(width=8), ("model.params.width=8",))


def test_without_a_card_the_pipeline_decides(weights):
    weights.with_suffix(".json").unlink()
    loaded = load_model(weights, pipeline(size=(96, 96)))
    assert loaded.card is None
    assert loaded.pipeline == pipeline(size=(96, 96))
    assert len(loaded.warnings) == 1
    assert "weights.safetensors has no card" in loaded.warnings[0]
    assert "'made_up'" in loaded.warnings[0]


@pytest.mark.parametrize(
    "given",
    [
        pipeline(name="other", classes=("background", "thing", "more")),
        pipeline(name="other", channels=3),
        PipelineConfig(
            name="other",
            title="other",
            sites="made_up",
            classes=(LabelClass(value=0, name="background"), LabelClass(value=2, name="thing")),
        ),
    ],
    ids=["classes", "channels", "values"],
)
def test_a_card_of_other_classes(given, weights):
    with pytest.raises(CheckpointError) as raised:
        load_model(weights, given)
    text = str(raised.value)
    assert str(weights) in text
    assert "trained for 1 channel(s), classes 0=background, 1=thing" in text
    assert "'other'" in text
    assert "--pipeline made_up" in text


def test_other_names_and_colours_of_classes_are_no_fault(weights):
    assert load_model(weights, pipeline(classes=("nothing", "prostate"))).warnings == ()


def test_a_card_with_an_unknown_network(weights):
    card = weights.with_suffix(".json")
    card.write_text(card.read_text().replace('"unet"', '"unett"'))
    with pytest.raises(ConfigError, match="unknown model 'unett'"):
        load_model(weights, pipeline())


def test_weights_that_do_not_fit_their_card(tmp_path, make_network):
    path = tmp_path / "weights.safetensors"
    save_checkpoint(path, make_network(classes=3), make_card(pipeline()))
    with pytest.raises(CheckpointError, match=r"other shape: outc\.conv\.weight \(3, 4, 1, 1\)"):
        load_model(path, pipeline())


def test_missing_weights(tmp_path):
    with pytest.raises(CheckpointError, match="no weights at"):
        load_model(tmp_path / "none.safetensors", pipeline())
