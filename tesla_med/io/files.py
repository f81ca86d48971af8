"""Write files whole or not at all, and hash them."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tesla_med.errors import DataError, OutputError
from tesla_med.io.fetched import check_fetched
from tesla_med.io.space import unwritten

TEMPORARY = ".tmp-"
"""How the names of half-written files begin."""


@contextmanager
def atomic_path(path: Path, needed: int | None = None) -> Iterator[Path]:
    """Yield a hidden temporary path beside ``path`` that replaces it when the block succeeds.

    The temporary file has the same extension, lies in the same folder (so that the rename
    is atomic) and is removed whatever goes wrong, so ``path`` never holds half a file.

    Args:
        path: the final file; missing parent folders are created.
        needed: bytes about to be written, if known, for the message when space runs out.

    Raises:
        OutputError: the file cannot be written; space needed and free are named.
    """
    path = Path(path)
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(6)}{''.join(path.suffixes[-2:])}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        needed = temporary.stat().st_size if needed is None else needed
        _flush(temporary)
        temporary.replace(path)
        _flush_folder(path.parent)
    except OSError as error:
        raise OutputError(unwritten(path, error, needed)) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_together(files: Sequence[tuple[Path, Callable[[], bytes]]]) -> None:
    """Write several files, all of them or none: every one is complete before the first gets its name.

    Args:
        files: path and what makes the content, one content in memory at a time; named in this order.

    Raises:
        OutputError: one of them cannot be written; then every path holds what it held before.
    """
    for path, _ in files:
        if path.is_dir():
            raise OutputError(f"{path}: expected a file to be replaced, found a folder")
    with ExitStack() as stack:
        for path, content in files[::-1]:  # a stack ends with what it began with
            data = content()
            temporary = stack.enter_context(atomic_path(path, needed=len(data)))
            try:
                temporary.write_bytes(data)
                _flush(temporary)
            except OSError as error:
                raise OutputError(unwritten(path, error, len(data))) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` atomically.

    Raises:
        OutputError: the file cannot be written.
    """
    with atomic_path(path, needed=len(data)) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` atomically as UTF-8 with the line ends it has.

    Parts of file names that are no valid text are written as backslash escapes.

    Raises:
        OutputError: the file cannot be written.
    """
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_json(path: Path, obj: Any) -> None:
    """Write ``obj`` atomically as JSON: keys in their order, indent 2, no NaN or infinity.

    Raises:
        OutputError: the file cannot be written, or ``obj`` holds what JSON cannot.
    """
    try:
        text = json.dumps(obj, indent=2, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise OutputError(f"{path}: the content cannot be written as JSON: {error}") from error
    write_text(path, text + "\n")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, or of the files in a folder by name, as 64 hexadecimal digits.

    Raises:
        DataError: a file cannot be read, or its content was not fetched.
    """
    digest = hashlib.sha256()
    check_fetched(path)
    if Path(path).is_dir():
        for item in sorted(Path(path).iterdir()):
            if item.is_file():
                digest.update(f"{item.name} {sha256(item)}\n".encode())
        return digest.hexdigest()
    try:
        with Path(path).open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def digest_of(paths: Sequence[Path]) -> str:
    """Return one hash of several files; one that cannot be read counts as such."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            digest.update(sha256(path).encode())
        except DataError:
            digest.update(b"unreadable")
    return digest.hexdigest()


def sha256_of(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of one file, or of the hashes of several in their order.

    Raises:
        DataError: a file cannot be read.
    """
    hashes = [sha256(path) for path in paths]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def _flush(path: Path) -> None:
    with path.open("r+b") as stream:
        os.fsync(stream.fileno())


def _flush_folder(folder: Path) -> None:
    # Makes the rename itself durable where the system can; Windows cannot open folders.
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
