"""A separate cache and key for every test, with no message logged yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusewright.cache import place, seal


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEWRIGHT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(place, "_said", set())
    monkeypatch.setattr(seal, "_keys", {})
