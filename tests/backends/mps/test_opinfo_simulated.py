"""A part of the fixed sample of torch's OpInfo database through `apple_mps`, simulated.

The whole database takes `python -m ci.operators.opinfo --backend apple_mps --simulate`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from ci.operators import opinfo
from tests.ops.test_opinfo import ONE_EACH, SAMPLE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "entries"), [("float32", SAMPLE[::4]), ("float16", SAMPLE[1::8]), ("bfloat16", SAMPLE[5::8])]
)
def test_sample(tmp_path: Path, dtype: str, entries: list[str]) -> None:
    names = "^(" + "|".join(map(re.escape, entries)) + ")$"
    out = tmp_path / "out.json"
    of_one_dtype = [*ONE_EACH, "--ops", names, "--dtypes", dtype, "--json", str(out)]
    assert opinfo.main(["--backend", "apple_mps", "--simulate", *of_one_dtype]) == 0
    found: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    known = {op.full_name for op in op_db if getattr(torch, dtype) in op.supported_dtypes("cpu")}
    assert {r["entry"] for r in found} == set(entries) & known and len(found) >= len(entries) - 1
    assert sum(r["lowered"] + r["carried"] for r in found) > len(entries) // 2  # judged by the content of fragments
