"""The exact source of kernels for one GPU."""

from __future__ import annotations

import pytest

from fusewright.toolkit.ir import Kernel, symbol
from fusewright_triton import target
from fusewright_triton.emit.emitter import emit
from fusewright_triton.emit.schedule import choose
from tests import golden
from tests.backends.triton import kernels

CASES: dict[str, Kernel] = {
    "triton_add_gelu": kernels.add_gelu(symbol("n"), "bf16"),
    "triton_layer_norm": kernels.layer_norm(4096, 768, "bf16"),
    "triton_column_sum": kernels.column_sum(8192, 768, "bf16"),
    "triton_softmax": kernels.softmax(cols=50257),
    "triton_transpose": kernels.transpose(),
    "triton_embedding": kernels.embedding(symbol("n")),
    "triton_scatter_add": kernels.scatter_add(),
    "triton_cumsum": kernels.cumsum(),
    "triton_masked_mean": kernels.masked_mean(),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, goldens: golden.Goldens) -> None:
    kernel = CASES[name]
    goldens.check(name, emit(kernel, choose(kernel, target.NVIDIA["sm_90"])).text)


def test_every_text_has_its_case() -> None:
    assert golden.names("triton") == sorted(CASES)
