"""The source of three kernels, word for word. To renew: delete the file and run the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusewright.toolkit.ir import Kernel, symbol
from fusewright_triton import target
from fusewright_triton.emit.emitter import emit
from fusewright_triton.emit.schedule import choose
from tests.backends.triton import kernels

FOLDER = Path(__file__).parents[2] / "golden"
CASES = {
    "triton_add_gelu": kernels.add_gelu(symbol("n"), "bf16"),
    "triton_layer_norm": kernels.layer_norm(4096, 768, "bf16"),
    "triton_column_sum": kernels.column_sum(8192, 768, "bf16"),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    kernel: Kernel = CASES[name]
    text = emit(kernel, choose(kernel, target.NVIDIA["sm_90"])).text
    path = FOLDER / f"{name}.txt"
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"wrote {path.name}: read it, then run again")
    assert text == path.read_text()
