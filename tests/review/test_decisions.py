"""Decisions on masks: nothing is lost, nobody overwrites anybody, and a new mask needs a new decision."""

from __future__ import annotations

import csv
from concurrent.futures import ThreadPoolExecutor

import pytest

from tesla_med.errors import DataError
from tesla_med.runs.decisions import (
    COLUMNS,
    REVIEW,
    decided,
    outcome,
    read_decisions,
    save_decision,
    standing,
)


def say(out, case, choice, who, digest="1", comment=""):
    save_decision(out, decided(case, choice, comment, who, digest))


def of(out, case, digest="1"):
    return outcome(list(standing(read_decisions(out), case, digest).values()))


def test_the_last_word_of_each_reviewer_counts_and_every_row_stays(tmp_path):
    assert of(tmp_path, "a") == (None, "not reviewed")
    say(tmp_path, "a", "reject", "ann", comment='too large, "see" slice 3\nand 4')
    say(tmp_path, "a", "accept", "ann")
    assert of(tmp_path, "a") == ("accept", "accepted by ann")
    say(tmp_path, "a", "accept", "bob")
    assert of(tmp_path, "a") == ("accept", "accepted by ann, bob")
    say(tmp_path, "a", "source", "bob")
    assert of(tmp_path, "a") == (
        None,
        "reviewers disagree (ann: accepted; bob: the source's mask to be taken instead)",
    )
    assert [item.decision for item in read_decisions(tmp_path)] == ["reject", "accept", "accept", "source"]
    assert read_decisions(tmp_path)[0].comment == 'too large, "see" slice 3\nand 4'
    with (tmp_path / REVIEW).open(newline="", encoding="utf-8") as stream:
        assert tuple(next(csv.reader(stream))) == COLUMNS


def test_a_decision_is_on_one_mask(tmp_path):
    say(tmp_path, "a", "accept", "ann", digest="1")
    assert of(tmp_path, "a", digest="2") == (None, "not reviewed")
    assert of(tmp_path, "b") == (None, "not reviewed")


def test_many_reviewers_at_once_lose_nothing(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: say(tmp_path, f"c{n % 5}", "accept", f"r{n}"), range(40)))
    assert sorted(item.reviewer for item in read_decisions(tmp_path)) == sorted(f"r{n}" for n in range(40))


def test_decisions_are_saved_where_the_file_system_has_no_locks(tmp_path, monkeypatch):
    def none(*_, **__):
        raise NotImplementedError("no locks here")

    monkeypatch.setattr("filelock.FileLock.acquire", none)
    say(tmp_path, "a", "accept", "ann")
    say(tmp_path, "a", "reject", "bob")
    assert [item.reviewer for item in read_decisions(tmp_path)] == ["ann", "bob"]
    assert [path.name for path in tmp_path.iterdir() if "lock-file" in path.name] == []


@pytest.mark.parametrize("content", ["case,who\na,b\n", "\0", ",".join(COLUMNS) + "\na,maybe,,ann,now,1\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    (tmp_path / REVIEW).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"review\.csv"):
        say(tmp_path, "a", "accept", "ann")
    assert (tmp_path / REVIEW).read_text(encoding="utf-8") == content
