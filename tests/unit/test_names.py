"""The host knows no vendor and no device: their names appear only where torch's own interface requires them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

HOST = Path(__file__).parents[2] / "common" / "fusewright"

VENDORS = (
    r"cuda|hip|hip[a-z]*blas\w*|rocm|mps|metal|xpu|hpu|npu|tpu|nvidia|amd64|amd|intel|apple|xeon|graviton|hopper|h100|h200"
    r"|mi300x?|sm_?\d+|gfx\w+|onednn|mkldnn|mkl|acl|cudnn|cublas\w*|cutlass|triton|llvm\w*|gomp|openmp|omp"
    r"|x86|aarch64|arm64|avx\w*|sse\w*|neon|sve\d?|amx\w*|vnni"
)
"""Forbidden anywhere: in code, comments and messages."""
DEVICES = r"cpus?|gpus?|num_threads"
"""Forbidden in code and messages. Comments may speak of CPUs or GPUs in general."""

ALLOWED: dict[str, tuple[str, str]] = {
    "_torch_compat.py": ("cpu cublas cuda hipblas", "torch's own names"),
    "bench/contenders.py": ("num_threads", "torch's setting, which another runtime is given"),
    "bench/child.py": ("num_threads openmp", "torch's setting, on which a figure depends"),
    "bench/load.py": ("cpu", "lines of the kernel's account of who runs"),
    "bench/measure.py": ("triton", "the environment that another compiler's cache is found by"),
    "bench/report.py": ("cpu num_threads triton", "the machine and the versions of a figure, and torch's setting"),
    "bench/tables.py": ("x86", "torch's engine of that name"),
    "bench/worker.py": ("omp mkl num_threads", "the environment that torch reads"),
    "cli/bench.py": ("cpu num_threads", "the machine of a figure, and torch's setting"),
    "cli/checks.py": ("cpu cuda hip mkldnn triton num_threads omp", "torch's builds and settings, for `doctor`"),
    "cli/doctor.py": ("cpu cuda hip gpu triton", "the same, printed"),
    "cli/smoke.py": ("cpu", "Tensor.cpu()"),
    "conformance/isolated.py": ("nvidia triton", "what builds of torch require, which no backend may count on"),
    "conformance/jobs/run.py": ("omp mkl num_threads", "the environment that torch reads"),
    "conformance/jobs/worker.py": ("num_threads", "torch's setting, of a child"),
    "conformance/ops/samples.py": ("cpu onednn", "names of operators of torch"),
    "config.py": ("cpu", "what `simulate` does, in words"),
    "graph/spec.py": ("mkldnn", "a layout of torch"),
    "interface.py": ("cpu", "torch's name of the host, once: `HOST`"),
    "machine.py": ("cpu cuda cudnn mkldnn x86 aarch64 arm64 amd64 avx neon sse sve", "the system, torch.cpu, torch.backends"),
    "ops/dtype_rules.py": ("cpu", "what eager gives there"),
    "ops/namespaces.py": ("cudnn mkl mkldnn onednn", "torch's namespaces of operators"),
    "ops/semantics/composite.py": ("cpu", "what eager gives there"),
    "ops/semantics/norm.py": ("cpu", "what eager gives there"),
    "ops/strides.py": ("cpu cuda mps", "what eager gives there"),
    "ops/table/backward.py": ("cpu", "the name of an operator of torch"),
    "ops/table/composite.py": ("cpu", "what eager gives there, and the name of an operator of torch"),
    "ops/table/quantized.py": ("onednn x86", "a namespace of torch's operators"),
    "plan/build.py": ("mkldnn mkl", "namespaces of torch's operators"),
    "plan/execute/codegen.py": ("cuda", "torch's name of devices on which it allocates without its dispatcher"),
    "plan/execute/prepare.py": ("cpu cuda", "torch's names of devices on which it can wrap memory"),
    "plan/ir.py": ("mkldnn", "a namespace of torch's operators"),
    "quantization/bench.py": ("onednn", "torch's name of an engine"),
    "report_page/chart.py": ("cpu", "the machine of a figure"),
    "report_page/peers.py": ("cpu", "the name of a field of torch's profiler"),
    "rewrite/rules.py": ("cudnn gpus", "names of operators of torch"),
    "storage.py": ("mkldnn", "a layout of torch"),
}
"""File -> the names that appear in it, and why."""


def names(source: str) -> Iterator[str]:
    """Yield vendor and device names in a module: words of identifiers and strings, for vendors also of comments."""
    yield from _words(source, VENDORS)
    yield from _words(_code(source), DEVICES)


def _words(text: str, which: str) -> Iterator[str]:
    for found in re.finditer(rf"(?<![A-Za-z])({which})(?![a-z])", text.replace("Hip", "hip"), re.IGNORECASE):
        yield re.sub(r"(?<=avx|sse|sve|amx)\w*$", "", found[1].lower())


def _code(source: str) -> str:
    """Strip comments and docstrings from a module."""
    lines = source.splitlines()
    for t in tokenize.generate_tokens(io.StringIO(source).readline):
        if t.type == tokenize.COMMENT:
            lines[t.start[0] - 1] = lines[t.start[0] - 1][: t.start[1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            end = node.end_lineno or node.lineno
            lines[node.lineno - 1 : end] = [""] * (end - node.lineno + 1)
    return "\n".join(lines)


@pytest.mark.parametrize("path", sorted(str(p.relative_to(HOST)) for p in HOST.rglob("*.py")))
def test_a_module_of_the_host_names_no_vendor_and_no_device(path: str) -> None:
    allowed, _ = ALLOWED.get(path, ("", ""))
    assert set(names((HOST / path).read_text())) <= set(allowed.split())


def test_every_place_that_is_listed_is_one() -> None:
    for path, (allowed, why) in ALLOWED.items():
        assert why and set(allowed.split()) == set(names((HOST / path).read_text())), path


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('x.device.type == "cuda"', ["cuda"]), ("if is_cpu: pass", ["cpu"]), ("# as cuDNN does", ["cudnn"]),
        ('"""On GPUs."""', []), ("def on_gpu(): ...", ["gpu"]), ("torch.get_num_threads()", ["num_threads"]),
        ("# a CPU", []), ("note = 'not on the GPU'", ["gpu"]), ("HAS_AVX512 = 1", ["avx"]), ("_OF_GPUS = 1", ["gpus"]),
        ("chip = ship = damp = 1", []), ("import llvmlite", ["llvmlite"]), ('"""Measured on an H100."""', ["h100"]),
    ],
)  # fmt: skip
def test_a_name_is_found_wherever_it_assumes_something(source: str, found: list[str]) -> None:
    assert list(names(source)) == found
