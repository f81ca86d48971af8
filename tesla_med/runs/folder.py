"""The output folder of a run: who may write there, what is done, what was resolved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tesla_med.config.differences import differences
from tesla_med.config.models import GuardConfig, PipelineConfig, SiteConfig
from tesla_med.errors import OutputError
from tesla_med.io.files import TEMPORARY, atomic_path, write_json
from tesla_med.io.locks import LOCK_NAMES
from tesla_med.records import ItemResult
from tesla_med.runs.state import StateStore

RUN_FILE = "run.json"
DONE_FOLDER = ".cases"
STATE_FOLDER = ".state"
EXPORTS_FOLDER = "export"
PROBE = ".write-check"
"""Written and removed to see whether the folder can be written to."""
PARTS = (
    RUN_FILE,
    DONE_FOLDER,
    STATE_FOLDER,
    "masks",
    "source_masks",
    "probs",
    "uncertainty",
    "report",
    "tensorboard",
    "checkpoints",
    "predictions.csv",
    EXPORTS_FOLDER,
)


def their_form(path: Path) -> Path:
    """Return the folder in which the weights at ``path`` lie in the form of the source model."""
    return path.with_suffix(".model")


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. ``names`` in the methods are case names, sub-folders included."""

    out: Path

    def mask(self, name: str) -> Path:
        """Mask of a case."""
        return self.out / "masks" / f"{name}_mask.nii.gz"

    def source_mask(self, name: str) -> Path:
        """Unadapted mask of a case."""
        return self.out / "source_masks" / f"{name}_mask.nii.gz"

    def probs(self, name: str) -> Path:
        """Class probabilities of a case."""
        return self.out / "probs" / f"{name}_prob.nii.gz"

    def uncertainty(self, name: str) -> Path:
        """Normalised entropy of a case."""
        return self.out / "uncertainty" / f"{name}_entropy.nii.gz"

    def checkpoint(self, name: str) -> Path:
        """Adapted weights, of a case or of the whole site (``adapted``)."""
        return self.out / "checkpoints" / f"{name}.safetensors"

    def done(self, name: str) -> Path:
        """Record of a finished case."""
        return self.out / DONE_FOLDER / f"{name}.json"

    def after(self, name: str) -> Path:
        """Adapted weights after a case, where state carries on from case to case."""
        return self.out / "checkpoints" / "after" / f"{name}.safetensors"

    @property
    def states(self) -> StateStore:
        """State of the run for going on after an interrupt."""
        return StateStore(self.out / STATE_FOLDER)

    # ------------------------------------------------------------ opening

    def check(
        self,
        settings: Mapping[str, Any],
        *,
        resume: bool,
        overwrite: bool,
        inputs: Sequence[Path] = (),
    ) -> None:
        """Check, without writing, that a run with ``settings`` may use the folder.

        Args:
            settings: of the run.
            resume: go on with what is there.
            overwrite: replace what is there.
            inputs: files and folders that the run reads, which overwriting must not remove.

        Raises:
            OutputError: it holds something and neither flag was given, it holds something that is
                not a run, the settings to resume differ, or an input lies in what would be replaced.
        """
        if resume and overwrite:
            raise OutputError("give either --resume or --overwrite, not both")
        if self.out.exists() and not self.out.is_dir():
            raise OutputError(f"{self.out}: is a file, not a folder; choose another --out")
        content = [item for item in self._content() if item.name not in (*LOCK_NAMES, PROBE)]
        content = [item for item in content if not item.name.startswith(TEMPORARY)]
        if content and not self._is_run():
            names = ", ".join(sorted(item.name for item in content)[:5])
            raise OutputError(
                f"{self.out}: holds files that are not a run of tesla-med ({names}); choose another --out"
            )
        if content and not (resume or overwrite):
            raise OutputError(
                f"{self.out}: holds an earlier run; give --resume to continue it, --overwrite to replace "
                "it, or another --out"
            )
        if content and resume:
            self._check_settings(settings)
        elif content:
            for path in inputs:
                if any(path.resolve().is_relative_to((self.out / part).resolve()) for part in PARTS):
                    raise OutputError(
                        f"{self.out}: not replaced, the run would read {path} in it; choose another --out"
                    )

    def prepare(self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Make the folder ready for a run with ``settings``: clear it to overwrite, try to write.

        Raises:
            OutputError: as :meth:`check`, or it cannot be written.
        """
        self.check(settings, resume=resume, overwrite=overwrite)
        if overwrite:
            self._clear()
        self._write_check()
        beside = self.out.glob(f"{TEMPORARY}*")  # of run.json
        below = (path for part in PARTS for path in (self.out / part).rglob(f"{TEMPORARY}*"))
        for path in (*beside, *below):  # what a killed run was writing; nobody else writes here
            with suppress(OSError):
                path.unlink()

    def complete(self) -> bool:
        """Whether run.json says that the run was finished."""
        try:
            return bool(json.loads((self.out / RUN_FILE).read_text(encoding="utf-8"))["complete"])
        except (OSError, ValueError, KeyError):
            return False

    def _is_run(self) -> bool:
        """Whether run.json is there and of this package."""
        try:
            content = json.loads((self.out / RUN_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(content, dict) and isinstance(content.get("settings"), dict)

    def _content(self) -> list[Path]:
        try:
            return list(self.out.iterdir()) if self.out.exists() else []
        except OSError as error:
            raise OutputError(f"{self.out}: cannot be read: {error.strerror}") from None

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        content = json.loads((self.out / RUN_FILE).read_text(encoding="utf-8"))
        if "rolled_back" in content:
            back = content["rolled_back"]
            where = (
                f"to case {back['to_case']}" if "to_case" in back else f"in {', '.join(back['cases'][:10])}"
            )
            raise OutputError(
                f"{self.out}: not resumed, it was rolled back {where}; "
                "use --overwrite to run it again, or another --out"
            )
        if changed := changed_settings(content["settings"], settings):
            raise OutputError(
                f"{self.out}: not resumed, its settings differ ({'; '.join(changed)}); "
                "use the same, or --overwrite, or another --out"
            )

    def _clear(self) -> None:
        try:
            for part in PARTS:
                path = self.out / part
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"{self.out}: the earlier run cannot be removed: {error}") from None

    def _write_check(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            probe = self.out / PROBE
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise OutputError(
                f"{self.out}: the output folder cannot be written: {error.strerror}; choose another --out"
            ) from None

    # ------------------------------------------------------------ records

    def keep(self, name: str, records: Sequence[ItemResult], digest: str = "") -> None:
        """Record a finished unit; written last, so that what it names is complete.

        Args:
            name: of the unit.
            records: one per item. A unit that is its one item has the record itself as its file.
            digest: of the input, kept beside the records of units of several items.
        """
        content = [record.model_dump(mode="json") for record in records]
        own = len(records) == 1 and records[0].case == name
        write_json(self.done(name), content[0] if own else {"input_sha256": digest, "items": content})

    def kept(self, name: str, kind: Any) -> tuple[list[Any], str] | None:
        """Return the records of a unit and the digest of its input, or None where they cannot be read.

        Args:
            name: of the unit.
            kind: class of the records.
        """
        try:
            content = json.loads(self.done(name).read_text(encoding="utf-8"))
            if "items" in content:
                return [kind.model_validate(item) for item in content["items"]], content["input_sha256"]
            record = kind.model_validate(content)
            return [record], str(content.get("input_sha256", ""))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError):
            return None

    def records(self, names: Sequence[str], kind: Any) -> list[Any]:
        """Return the records of these units that can be read, in order."""
        found = (self.kept(name, kind) for name in names)
        return [record for item in found if item is not None for record in item[0]]

    def read(self) -> dict[str, Any]:
        """Return run.json.

        Raises:
            OutputError: it is missing, damaged or of something else.
        """
        try:
            content = json.loads((self.out / RUN_FILE).read_text(encoding="utf-8"))
            content["settings"]["protocol"], content["settings"]["reset"]
        except (OSError, ValueError, KeyError, TypeError):
            raise OutputError(
                f"{self.out}: not a run of tesla-med adapt ({RUN_FILE} is missing or cannot be read)"
            ) from None
        return dict(content)

    def discard(self, name: str) -> None:
        """Remove every file of a unit, so that none of an earlier attempt is mistaken for a new one.

        Raises:
            OutputError: a file cannot be removed.
        """
        files = (self.done, self.mask, self.source_mask, self.probs, self.uncertainty)
        for path in (item(name) for item in files):
            self.remove(path)
        for path in (self.checkpoint(name), self.after(name)):
            self.remove_weights(path)

    def take_source(self, name: str) -> None:
        """Put the source mask of a case in place of its own, and remove what goes with that."""
        with atomic_path(self.mask(name)) as temporary:
            shutil.copyfile(self.source_mask(name), temporary)
        for path in (self.probs(name), self.uncertainty(name)):
            self.remove(path)
        self.remove_weights(self.checkpoint(name))

    def remove(self, path: Path) -> None:
        """Remove a file if it is there.

        Raises:
            OutputError: it cannot be removed.
        """
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"{path}: cannot be removed: {error.strerror or error}") from None

    def remove_weights(self, path: Path) -> None:
        """Remove weights, the card beside them, and their copy in the form of the source model.

        Raises:
            OutputError: a file cannot be removed.
        """
        for item in (path, path.with_suffix(".json")):
            self.remove(item)
        self.remove_copy(path)

    def remove_copy(self, path: Path) -> None:
        """Remove the copy of weights in the form of the source model, if there is one.

        Raises:
            OutputError: a file cannot be removed.
        """
        folder = their_form(path)
        try:
            if folder.is_dir():
                shutil.rmtree(folder)
        except OSError as error:
            raise OutputError(f"{folder}: cannot be removed: {error.strerror or error}") from error

    def write_manifest(
        self, settings: Mapping[str, Any], manifest: Mapping[str, Any], *, complete: bool
    ) -> None:
        """Write run.json."""
        content = {
            **manifest,
            "settings": dict(settings),
            "complete": complete,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "cases": manifest.get("cases", []),
        }
        write_json(self.out / RUN_FILE, content)

    def write_labels(self, pipeline: PipelineConfig) -> None:
        """Write masks/labels.json: value, name and colour of every class."""
        shown = {"value", "name", "color"}
        content = {"labels": [item.model_dump(mode="json", include=shown) for item in pipeline.classes]}
        write_json(self.out / "masks" / "labels.json", content)


ADDED = (("relative_rate", False), ("statistics_share", 1.0))
"""Parameters of methods that earlier versions did not have, with the values that stand for their absence."""


def without_retired(settings: Mapping[str, Any], *, thresholds: bool = True) -> dict[str, Any]:
    """Return settings of any version without the thresholds of the guard that no longer exist, or any."""
    result = dict(settings)
    pipeline = result.get("pipeline", {})
    if "guard" in pipeline:
        names = set(GuardConfig.model_fields) if thresholds else {"enabled"}
        known = {key: value for key, value in pipeline["guard"].items() if key in names}
        result["pipeline"] = {**pipeline, "guard": known}
    return result


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words which settings of a run differ from those of an earlier one, of any version."""
    return differences(_completed(dict(then)), _completed(json.loads(json.dumps(now))))


def _completed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of any version with the defaults of what that version did not have yet.

    How a source model would be trained has no bearing on a run, nor have the parameters of other methods, the
    concepts of the classes in SNOMED CT, nor the thresholds of a guard that was off, and without a guard no
    Dice is predicted. A guard that was on judged by other rules in earlier versions, so such a run cannot be
    gone on with.
    """
    completed, unused = dict(settings), {"reports", "train"}
    if not settings.get("pipeline", {}).get("guard", {}).get("enabled", False):
        completed = without_retired(settings, thresholds=False)
        unused |= {"quality"}
    for key, model in (("site", SiteConfig), ("pipeline", PipelineConfig)):
        with suppress(KeyError, ValidationError):
            kept = model.model_validate(completed[key])
            left_out: Any = dict.fromkeys(unused, True) | {"classes": {"__all__": {"snomed"}}}
            completed[key] = kept.model_dump(mode="json", exclude=left_out)
    pipeline, method = completed.get("pipeline", {}), completed.get("method")
    protocols = pipeline.get("protocols", {}).items()
    own = {
        "methods": _of_method(pipeline.get("methods", {}), method),
        "protocols": {name: some for name, recipes in protocols if (some := _of_method(recipes, method))},
    }
    return completed | {"pipeline": {**pipeline, **own}}


def _of_method(recipes: Mapping[str, Any], method: Any) -> dict[str, Any]:
    """Return the parameters of the run's own method and of ``source``: those of others change nothing."""
    return {name: _known(params) for name, params in recipes.items() if name in (method, "source")}


def _known(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of a method without those that later versions added, where they change nothing."""
    return {name: value for name, value in params.items() if (name, value) not in ADDED}
