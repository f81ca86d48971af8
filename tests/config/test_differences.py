"""Settings that differ are named by their path."""

import pytest

from tesla_med.config.differences import MOST, differences


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"seed": 0}, {"seed": 1}, ["seed: 0 then, 1 now"]),
        (
            {"pipeline": {"keep_largest": True, "size": [1, 2]}},
            {"pipeline": {"keep_largest": False, "size": [1, 3]}},
            ["pipeline.keep_largest: true then, false now", "pipeline.size: [1, 2] then, [1, 3] now"],
        ),
        ({"a": {"b": {"c": None}}}, {"a": {"b": {}}}, ["a.b.c: null then, not set now"]),
        ({"a": None}, {}, []),
        ({"site": {"id": "x"}}, {"site": None}, ['site: {"id": "x"} then, null now']),
        (
            {"classes": [{"name": "a"}, {"name": "b"}]},
            {"classes": [{"name": "a"}, {"name": "c"}]},
            ['classes.1.name: "b" then, "c" now'],
        ),
        ({"classes": [{"name": "a"}]}, {"classes": []}, ['classes: [{"name": "a"}] then, [] now']),
        ({"a": {}}, {"a": {"b": {}}}, ["a.b: not set then, {} now"]),
        ({"a": "x" * 99}, {"a": ""}, [f'a: "{"x" * 56}... then, "" now']),
    ],
)
def test_paths_and_values(before, now, words):
    assert differences(before, now) == words


def test_many_are_counted():
    before, now = ({"a": {str(index): value for index in range(9)}} for value in (0, 1))
    found = differences(before, now)
    assert len(found) == MOST + 1
    assert found[-1] == f"and {9 - MOST} more"
