"""An option that means nothing to a task is refused by name."""

import pytest
import tile_site

from tesla_med.config.files import load_pipeline
from tesla_med.errors import AdaptationError, ConfigError
from tesla_med.models.base import build_model
from tesla_med.models.checkpoint import make_card, save_checkpoint
from tesla_med.tasks.base import OPTIONS, TASKS


@pytest.mark.parametrize("task", TASKS.names())
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_means_nothing_is_named(task, option):
    kind = TASKS.get(task)
    if option in kind.honours:
        kind.refuse({option})
        return
    with pytest.raises(ConfigError, match="not for") as error:
        kind.refuse({option})
    assert str(error.value).startswith(OPTIONS[option])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"guard": True}, "--guard"),
        ({"reset": "case"}, "--reset case"),
        ({"overrides": ("reports=[unknown]",)}, "unknown report 'unknown'"),
    ],
)
def test_a_run_on_tiles_is_refused_before_anything_is_read(tmp_path, options, named):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match=named):
        tile_site.adapt_tiles(
            tile_site.site(),
            tmp_path / "nothing",
            weights=tmp_path / "none.safetensors",
            out=tmp_path / "out",
            pipeline="kather",
            **options,
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["tesla", "vesta", "source"])
def test_neighbouring_slices_are_refused_for_tiles(method, tmp_path):
    """Tiles that follow each other have nothing to do with each other."""
    tile_site.make_tiles(tmp_path / "tiles", 1)
    pipeline = load_pipeline("kather", tile_site.SMALL)
    weights = tmp_path / "source.safetensors"
    save_checkpoint(weights, build_model(pipeline).eval(), make_card(pipeline, ("X0",)))
    text = f"methods.{method}.neighbour_share=0.25"
    with pytest.raises(AdaptationError, match=rf"neighbour_share is 0.25, .* set methods.{method}.* to 0"):
        tile_site.adapt_tiles(
            tile_site.site(),
            tmp_path / "tiles",
            weights=weights,
            out=tmp_path / "out",
            method=method,
            overrides=(*tile_site.SMALL, text),
        )
    assert not (tmp_path / "out").exists()
