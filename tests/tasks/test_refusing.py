"""An option that means nothing to a task is refused by name."""

import pytest
import tile_site

from tesla_med.errors import ConfigError
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
