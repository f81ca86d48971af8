"""The *HParams* tab of TensorBoard: settings of runs beside their headline figures."""

from __future__ import annotations

import time
from typing import Any

from tesla_med.records import TileResult
from tesla_med.reports.base import RunContext

PREFIX = "_hparams_/"
"""How the tags of the tab begin."""
PARAMETERS = ("learning_rate", "updates_per_case", "batch_slices", "epochs")
"""Parameters of methods that the table shows, where the method has them."""
TEXTS = ("site", "pipeline", "method", "protocol", "reset", "guard", "scaling", "weights", "device")
NUMBERS = ("seed", *PARAMETERS)
FIRST = ("method", "protocol", "scaling", "seed", "site")
"""What TensorBoard shows first, before the other columns in the order of their names."""
CASE_FIGURES = {
    "site_mean/dice_source": "mean Dice, source",
    "site_mean/dice_adapted": "mean Dice, adapted",
    "site_mean/predicted_dice": "mean predicted Dice",
}
TILE_FIGURES = {
    "running/accuracy_source": "accuracy, source",
    "running/accuracy_adapted": "accuracy, adapted",
}


def hparams_of(run: RunContext) -> dict[str, str | float]:
    """Return the settings of a run by name; those that it does not have are left out."""
    pipeline, manifest = run.pipeline, run.manifest
    scaling = str(pipeline.preprocessing.intensity)
    if pipeline.scaling.candidates:
        scaling = f"by case, of {1 + len(pipeline.scaling.candidates)} ({scaling} first)"
    found: dict[str, str | float] = {
        "site": run.site.id,
        "pipeline": pipeline.name,
        "method": run.method,
        "protocol": run.protocol,
        "reset": run.reset,
        "guard": "on" if pipeline.guard.enabled else "off",
        "scaling": scaling,
        "seed": float(run.seed),
    }
    if issubclass(run.kind, TileResult):
        del found["guard"], found["scaling"]  # they mean nothing for tiles
    found |= {name: str(manifest[name]) for name in ("weights", "device") if manifest.get(name)}
    method = manifest.get("method")
    parameters = method.get("parameters", {}) if isinstance(method, dict) else {}
    known = {name: parameters.get(name) for name in PARAMETERS}
    return found | {name: float(value) for name, value in known.items() if value is not None}


def started(run: RunContext) -> list[Any]:
    """Return the summaries that are written when a run starts.

    The columns are the same for every run of a task, because TensorBoard takes them from any one. The name of
    a trial begins with the time, so that trials sort by it, and two runs of the same settings stay apart.
    """
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    kinds = dict.fromkeys(TEXTS, "DATA_TYPE_STRING") | dict.fromkeys(NUMBERS, "DATA_TYPE_FLOAT64")
    columns = [
        api_pb2.HParamInfo(name=name, type=api_pb2.DataType.Value(kind), differs=name in FIRST)
        for name, kind in kinds.items()
    ]
    figures = TILE_FIGURES if issubclass(run.kind, TileResult) else CASE_FIGURES
    metrics = [
        api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=title)
        for tag, title in figures.items()
    ]
    now = time.time()
    experiment = api_pb2.Experiment(hparam_infos=columns, metric_infos=metrics, time_created_secs=now)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now))
    trial = f"{stamp} {run.site.id} {run.method} {run.protocol} seed {run.seed}"
    session = plugin_data_pb2.SessionStartInfo(start_time_secs=now, group_name=trial)
    for name, value in hparams_of(run).items():
        if isinstance(value, str):
            session.hparams[name].string_value = value
        else:
            session.hparams[name].number_value = value
    data = plugin_data_pb2.HParamsPluginData
    return [
        _summary(metadata.EXPERIMENT_TAG, data(experiment=experiment)),
        _summary(metadata.SESSION_START_INFO_TAG, data(session_start_info=session)),
    ]


def finished() -> list[Any]:
    """Return the summaries that are written when a run is complete."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.Status.Value("STATUS_SUCCESS")
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    return [_summary(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end))]


def _summary(tag: str, content: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    about = metadata.create_summary_metadata(content)
    return Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)])
