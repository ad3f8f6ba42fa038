"""A part of the fixed sample of torch's OpInfo database through `apple_mps`, simulated.

The whole database takes `python ci/opinfo.py --backend apple_mps --simulate`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ops.test_opinfo import SAMPLE, opinfo


@pytest.mark.slow
def test_sample(tmp_path: Path) -> None:
    sample = SAMPLE[::4]
    names = "^(" + "|".join(map(re.escape, sample)) + ")$"
    out = tmp_path / "out.json"
    result = opinfo("--backend", "apple_mps", "--simulate", "--ops", names, "--samples", "1", "--json", str(out))
    assert result.returncode == 0, result.stdout + result.stderr
    found: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    assert {r["entry"] for r in found} == set(sample)
    assert sum(r["lowered"] + r["carried"] for r in found) > 30  # by what fragments hold
