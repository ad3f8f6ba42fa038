"""A separate cache and key for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusewright.cache import seal


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEWRIGHT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(seal, "_keys", {})
