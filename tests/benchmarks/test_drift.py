from __future__ import annotations

import importlib.util
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "drift.py"


def load():
    spec = importlib.util.spec_from_file_location("drift", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_false_alarms_and_delays_are_counted():
    module = load()
    quiet = module.false_alarms(module.DRAWS["normal"], 3, 120, 0)
    assert (quiet["streams"], quiet["share_of_streams_with_an_alarm"]) == (3, 0.0)
    rising = module.false_alarms(lambda generator, count: module.np.arange(float(count)), 2, 120, 0)
    assert rising["share_of_streams_with_an_alarm"] == 1.0
    assert rising["alarms_per_1000_cases"] > 100
    assert module.delays(3.0, 2, 0)["share_noticed_within_20_cases"] == 1.0
    assert module.delays(0.0, 2, 0)["median_delay_cases"] is None
