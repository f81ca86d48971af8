"""Shared fixtures: small configurations, small volumes, the development data if present."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of the development data and reference weights; skips where it is absent."""
    if not (SHARED / "reference").is_dir():
        pytest.skip(f"needs the development data at {SHARED}")
    return SHARED
