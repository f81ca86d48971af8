"""Tell a file from a name without content: a link that leads nowhere, a pointer of git-lfs or git-annex."""

from __future__ import annotations

from pathlib import Path

from tesla_med.errors import DataError, TeslaMedError


def unfetched(path: Path) -> str:
    """Return why a file is a name without its content and how to get it, or ``""`` where it is there.

    Such are links that lead nowhere, and the pointer files of git-lfs and git-annex.
    """
    try:
        if path.is_symlink() and not path.exists():
            target = path.readlink()
            if "annex" in target.parts:
                return f"its content is not here (git-annex); get it with 'git annex get {path}' or datalad"
            return f"a link to {target}, which is not there; fetch or mount the data, or correct the link"
        with path.open("rb") as stream:
            start = stream.read(64)
    except OSError:
        return ""
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of git-lfs and not the data; get them with 'git lfs pull'"
    if start.startswith((b"/annex/objects/", b"\\annex\\objects\\")):
        return f"a pointer of git-annex and not the data; get them with 'git annex get {path}' or datalad"
    return ""


def check_fetched(path: Path, error: type[TeslaMedError] = DataError) -> None:
    """Check that the content of a file is there; a missing file is not looked into.

    Raises:
        DataError: it is a pointer or a link that leads nowhere; or ``error`` in its place.
    """
    if reason := unfetched(Path(path)):
        raise error(f"{path}: {reason}")
