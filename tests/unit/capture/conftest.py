"""Backends for tests of capture."""

from __future__ import annotations

import pytest

from fusewright import registry

BACKENDS = ["fusewright_null", "fusewright_interp", "x86_onednn"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name == "x86_onednn" and not registry.info(name).available:
        pytest.skip(f"{name}: {registry.info(name).device}")
    return name
