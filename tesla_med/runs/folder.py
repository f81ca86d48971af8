"""The output folder of a run: who may write there, what is done, what was resolved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tesla_med.config.models import PipelineConfig
from tesla_med.errors import OutputError, TeslaMedError
from tesla_med.io.files import LOCK_NAME, TEMPORARY, sha256, write_json
from tesla_med.io.volumes import read_mask
from tesla_med.runs.state import StateStore
from tesla_med.types import Case, CaseResult

RUN_FILE = "run.json"
DONE_FOLDER = ".cases"
STATE_FOLDER = ".state"
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
)


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
        content = [item for item in self._content() if item.name != LOCK_NAME]
        if content and not self._is_run():
            names = ", ".join(sorted(item.name for item in content)[:5])
            raise OutputError(
                f"{self.out}: holds files that are not a run of tesla-med ({names}); choose another --out"
            )
        if content and not (resume or overwrite):
            raise OutputError(
                f"{self.out}: holds an earlier run; give --resume to go on with it, --overwrite to replace "
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
            raise OutputError(
                f"{self.out}: not resumed, it was rolled back to case {content['rolled_back']['to_case']}; "
                "use --overwrite to run it again, or another --out"
            )
        before = content["settings"]
        now = json.loads(json.dumps(settings))
        changed = [
            f"{key}: {_short(before.get(key))} then, {_short(now.get(key))} now"
            for key in sorted(set(before) | set(now))
            if before.get(key) != now.get(key)
        ]
        if changed:
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
            probe = self.out / ".write-check"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise OutputError(
                f"{self.out}: the output folder cannot be written: {error.strerror}; choose another --out"
            ) from None

    # ------------------------------------------------------------ records

    def keep(self, result: CaseResult) -> None:
        """Record a finished case; written last, so that what it names is complete."""
        write_json(self.done(result.case), result.model_dump(mode="json"))

    def record(self, name: str) -> CaseResult | None:
        """Return the record of a case, or None where there is none that can be read."""
        try:
            content = json.loads(self.done(name).read_text(encoding="utf-8"))
            return CaseResult.model_validate(content)
        except (OSError, ValueError, ValidationError):
            return None

    def finished(self, case: Case, extras: Sequence[Path] = ()) -> CaseResult | None:
        """Return the record of a case that need not be done again, else None.

        It must have been scored if it has a reference, its image must be unchanged, both masks must
        be readable, and ``extras`` must exist.
        """
        result = self.record(case.name)
        if result is None or result.status in ("failed", "unscored"):
            return None
        return result if self.unchanged(case, result, extras) else None

    def unchanged(self, case: Case, result: CaseResult, extras: Sequence[Path] = ()) -> bool:
        """Whether the image is still the one of the record, and the case's files can be read."""
        try:
            if result.input_sha256 != sha256(case.image):
                return False
            read_mask(self.mask(case.name))
            read_mask(self.source_mask(case.name))
        except (OSError, ValueError, TeslaMedError):
            return False
        return all(path.is_file() for path in extras)

    def discard(self, name: str) -> None:
        """Remove every file of a case, so that none of an earlier attempt is taken for a new one.

        Raises:
            OutputError: a file cannot be removed.
        """
        weights, after = self.checkpoint(name), self.after(name)
        kept = (weights, weights.with_suffix(".json"), after, after.with_suffix(".json"))
        maps = (self.probs(name), self.uncertainty(name), *kept)
        for path in (self.done(name), self.mask(name), self.source_mask(name), *maps):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise OutputError(f"{path}: cannot be removed: {error.strerror or error}") from None

    def write_manifest(
        self,
        settings: Mapping[str, Any],
        manifest: Mapping[str, Any],
        results: Sequence[CaseResult],
        *,
        complete: bool,
    ) -> None:
        """Write run.json."""
        cases = [
            {
                "case": item.case,
                "status": item.status,
                "used": item.used,
                "share": item.share,
                "reason": item.reason,
                "seconds": round(item.seconds, 3),
                "slices": item.slices,
                "input_sha256": item.input_sha256,
                "signals": {name: round(value, 6) for name, value in item.signals.items()},
                "notes": list(item.notes),
            }
            for item in results
        ]
        content = {
            **manifest,
            "settings": dict(settings),
            "complete": complete,
            "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "cases": cases,
        }
        write_json(self.out / RUN_FILE, content)

    def write_labels(self, pipeline: PipelineConfig) -> None:
        """Write masks/labels.json: value, name and colour of every class."""
        content = {"labels": [item.model_dump(mode="json") for item in pipeline.classes]}
        write_json(self.out / "masks" / "labels.json", content)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
