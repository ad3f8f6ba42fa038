"""The fixed sample of torch's OpInfo database on both GPU backends, simulated: one half each.

To run the whole database: `python -m ci.operators.opinfo --backend rocm_triton --simulate`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

from ci.operators import opinfo
from tests.ops.test_opinfo import ONE_EACH, SAMPLE


@pytest.mark.parametrize(("backend", "sample"), [("nvidia_triton", SAMPLE[::2]), ("rocm_triton", SAMPLE[1::2])])
def test_sample(backend: str, sample: list[str], tmp_path: Path) -> None:
    names = "^(" + "|".join(map(re.escape, sample)) + ")$"
    out = tmp_path / "out.json"
    assert opinfo.main([*ONE_EACH, "--backend", backend, "--simulate", "--ops", names, "--json", str(out)]) == 0
    found: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    assert {r["entry"] for r in found} == set(sample)
    assert sum(r["lowered"] + r["carried"] for r in found) > 70  # counted in fragments, not in claims
