"""What records keep of their content."""

import tracemalloc

import pytest

from tesla_med.records import CaseResult, TileResult
from tesla_med.types import Packed
from tesla_med.watch.history import Seen

COUNTS = {"cases": 1, "bins": 15, "source": {"all": {"confidence": [0.1 * n for n in range(400)]}}}


def record(**changes):
    return CaseResult(case="a", site="b", status="ok", used="source", calibration=COUNTS, **changes)


def test_counts_come_back_as_they_were():
    result = record()
    assert dict(result.calibration) == COUNTS
    assert result.model_dump()["calibration"] == COUNTS
    again = CaseResult.model_validate_json(result.model_dump_json())
    assert again == result
    assert dict(again.of_run("tesla", "N-O", 1, 2.0).calibration) == COUNTS


def test_counts_set_in_a_copy_are_written_too():
    assert record().model_copy(update={"calibration": {"cases": 2}}).model_dump()["calibration"] == {
        "cases": 2
    }


def test_none_stays_none():
    result = CaseResult(case="a", site="b", status="ok", used="source")
    assert result.calibration is None
    assert result.model_dump()["calibration"] is None


def test_they_take_less_memory():
    tracemalloc.start()
    try:
        plain = [[0.1 * n for n in range(400)] for _ in range(20)]
        lists = tracemalloc.get_traced_memory()[0]
        packed = [Packed({"values": item}) for item in plain]
        both = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert [item["values"] for item in packed] == plain
    assert both - lists < lists / 2


@pytest.mark.parametrize("values", [{}, {"trusted": True, "share": 0.0}])
def test_no_model_made_the_mask_of_a_failed_case(values):
    old = {"case": "a", "site": "b", "status": "failed", "used": "source", "reason": "cut off"} | values
    result = CaseResult.model_validate(old)
    assert (result.used, result.share, result.trusted) == (None, None, None)
    assert {result.brief()[name] for name in ("used", "share", "trusted")} == {None}
    assert CaseResult.model_validate_json(result.model_dump_json()) == result
    assert CaseResult.model_validate(old | {"status": "ok"} | values).used == "source"


def test_the_same_of_tiles_and_of_cases_that_were_watched():
    assert TileResult("a", "failed", "source").used is None
    assert TileResult("a", "blank", "source").used == "source"
    texts = dict.fromkeys(("case", "done", "state", "input_sha256"), "x")
    seen = Seen(number=0, status="failed", used="source", **texts)
    assert (seen.used, seen.trusted, seen.verdict) == (None, None, "failed")
