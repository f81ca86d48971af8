"""The registry: names, duplicates, unknown names, modules found by themselves."""

from __future__ import annotations

import sys

import pytest

from tesla_med.errors import ConfigError, TeslaMedError
from tesla_med.registry import Registry, unknown_name


@pytest.fixture
def fruits():
    registry: Registry[str] = Registry("fruit")
    registry.register("pear")("green")
    registry.register("apple")("red")
    return registry


def test_names_are_sorted_and_entries_found(fruits):
    assert fruits.names() == ["apple", "pear"]
    assert fruits.get("pear") == "green"
    assert list(fruits.items()) == [("apple", "red"), ("pear", "green")]


def test_register_returns_its_argument(fruits):
    def thing():
        return 1

    assert fruits.register("thing")(thing) is thing
    assert fruits.get("thing") is thing


def test_a_name_is_taken_once(fruits):
    with pytest.raises(ConfigError, match="fruit 'pear' is registered twice"):
        fruits.register("pear")("yellow")
    assert fruits.get("pear") == "green"


def test_unknown_names_get_a_hint(fruits):
    with pytest.raises(ConfigError) as raised:
        fruits.get("paer")
    assert str(raised.value) == "unknown fruit 'paer'. Did you mean 'pear'? Known: apple, pear."
    with pytest.raises(ConfigError) as raised:
        fruits.get("xyz")
    assert str(raised.value) == "unknown fruit 'xyz'. Known: apple, pear."
    assert issubclass(ConfigError, TeslaMedError)


def test_nothing_known():
    assert unknown_name("fruit", "fig", []) == "unknown fruit 'fig'. Known: none."


def test_modules_of_a_package_are_imported_on_first_use(tmp_path, monkeypatch):
    package = tmp_path / "made_up_plugins"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from tesla_med.registry import Registry\nTHINGS = Registry('thing', 'made_up_plugins')\n"
    )
    (package / "one.py").write_text("from made_up_plugins import THINGS\nTHINGS.register('one')(1)\n")
    (package / "_private.py").write_text("raise RuntimeError('not to be imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from made_up_plugins import THINGS

    assert "made_up_plugins.one" not in sys.modules
    assert THINGS.names() == ["one"]
    assert THINGS.get("one") == 1
    for name in ("made_up_plugins", "made_up_plugins.one"):
        sys.modules.pop(name)
