"""Check and count kernels for 64-bit Arm under QEMU, on a Debian or Ubuntu machine of another architecture; nothing is timed.

    python -m ci.aarch64.kernels random [--count 500]  # random kernels and int8 convolutions on each core, against references
    python -m ci.aarch64.kernels count                 # instructions of kernels and of eager, as a table
    python -m ci.aarch64.kernels count --cores neoverse-n1 --cases gelu,softmax    # only these cores and cases

Both use what `ci/aarch64.sh fetch` unpacks, eager of that torch included. Counting needs a C compiler and an emulator with plugin
support, which is unpacked into the same folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ci.aarch64.emulator import Emulator, counted, fetch_counter, missing
from fusewright.toolkit.ir import Builder, Kernel, Val
from fusewright.toolkit.ir.types import DType, to_torch
from fusewright_cpu.kernels.by_hand import Gemv, Int8Conv, form_of
from fusewright_cpu.run.sources import Source, hash_of
from fusewright_cpu.target import aarch64_target

HERE = Path(__file__).resolve().parent
CORES = ("neoverse-n1", "neoverse-v1", "neoverse-v2")
ROWS, COLUMNS, WIDE = 64, 768, 4096


def random(count: int) -> int:
    """Return how many random kernels differ bitwise from the interpreter."""
    from fusewright.toolkit.ir import interpret, to_text
    from tests.backends.cpu.test_aarch64_emulated import random_cases
    from tests.backends.cpu.test_random_kernels import same_bits

    drawn, wrong = random_cases(count), 0
    for core in CORES:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, Emulator(aarch64_target(core), Path(folder)) as emulator:
            for case in drawn:
                library = emulator.build([case.kernel])[hash_of(case.kernel)]
                wanted, got = ([t.clone() for t in case.tensors] for _ in range(2))
                interpret(case.kernel, wanted, case.sizes)
                code = emulator.run(case.kernel, library, got, case.sizes, threads=3)
                if code or not all(map(same_bits, got, wanted)):
                    wrong += 1
                    print(f"{core}: error {code}\n{to_text(case.kernel)}\n{case.sizes}")
            convolutions, failed = _convolutions(emulator, count // 5)
        wrong += failed
        what = f"{len(drawn)} kernels and {convolutions} int8 convolutions"
        print(f"{core}: {what} in {time.monotonic() - start:.0f} s, {wrong} wrong so far")
    return wrong


def _convolutions(emulator: Emulator, count: int) -> tuple[int, int]:
    """Return (random int8 convolutions that ran, how many of them were not exact)."""
    from tests.backends.cpu.test_aarch64_int8_conv import exact, random_geometries

    form, wrong = form_of(emulator.target), 0
    kinds = [Int8Conv(x, "f32", form, bias, not bias) for x in ("u8", "i8") for bias in (True, False)]
    libraries, drawn = emulator.build(kinds), random_geometries(count)
    for k, geometry in enumerate(drawn):
        kernel = kinds[k % len(kinds)]
        if not exact(emulator, kernel, libraries[hash_of(kernel)], geometry):
            wrong += 1
            print(f"{kernel.name}: {geometry}")
    return len(drawn), wrong


# -- counting

Formula = Callable[[Builder, Mapping[str, Val]], Val]


def _gelu(b: Builder, v: Mapping[str, Val]) -> Val:
    x = v["x"] + v["b"] if "b" in v else v["x"]
    return x * 0.5 * (b.op("erf", x * 0.7071067811865476) + 1)


def _layer_norm(b: Builder, v: Mapping[str, Val]) -> Val:
    x = v["x"] + v["y"] if "y" in v else v["x"]
    centered = x - b.reduce("mean", x)
    return centered * b.op("rsqrt", b.reduce("m2", x) * (1 / COLUMNS) + 1e-5) * v["w"] + v["b"]


def _rms_norm(b: Builder, v: Mapping[str, Val]) -> Val:
    return v["x"] * b.op("rsqrt", b.reduce("sum", v["x"] * v["x"]) * (1 / COLUMNS) + 1e-6) * v["w"]


def _softmax(b: Builder, v: Mapping[str, Val]) -> Val:
    x = v["x"] * 0.125 + v["y"] if "y" in v else v["x"]
    e = b.op("exp", x - b.reduce("max", x))
    return e / b.reduce("sum", e)


FORMULAS: dict[str, tuple[str, bool, Formula]] = {
    "gelu": ("x", False, _gelu),
    "bias, gelu": ("xb", False, _gelu),
    "layer norm": ("xwb", True, _layer_norm),
    "residual, layer norm": ("xywb", True, _layer_norm),
    "rms norm": ("xw", True, _rms_norm),
    "softmax": ("x", True, _softmax),
    "scale, mask, softmax": ("xy", True, _softmax),
}
"""Case names of `eager.py` -> inputs (x, y [rows, columns]; w, b [columns]), whether rows are reduced, the formula."""


def kernel(name: str, dtype: DType) -> Kernel:
    """Return the loop kernel that a model gets for a formula."""
    inputs, reduces, formula = FORMULAS[name]
    b = Builder(name, p=[ROWS] if reduces else [ROWS, COLUMNS], r=[COLUMNS] if reduces else [])
    i, j = b.axes
    buffers = {n: b.input(n, dtype) for n in inputs}
    out = b.output("out", dtype)
    values = {n: b.load(at, j if n in "wb" else i * COLUMNS + j).to("f32") for n, at in buffers.items()}
    b.store(out, i * COLUMNS + j, formula(b, values).to(dtype))
    return b.build()


def sources(dtype: DType) -> dict[str, tuple[Source, list[torch.Tensor], list[int]]]:
    """Return what is counted: kernels with their tensors and sizes."""
    t, found = to_torch(dtype), dict[str, tuple[Source, list[torch.Tensor], list[int]]]()
    for name, (inputs, _, _) in FORMULAS.items():
        tensors = [torch.randn(COLUMNS if n in "wb" else ROWS * COLUMNS).to(t) for n in inputs]
        found[name] = kernel(name, dtype), [*tensors, torch.empty(ROWS * COLUMNS, dtype=t)], []
    row, out = torch.randn(1, WIDE).to(t), torch.empty(1, WIDE, dtype=t)
    found["decode"] = Gemv(1, dtype, dtype), [row, torch.randn(WIDE, WIDE).to(t), out], [WIDE, WIDE]
    if dtype == "bf16":
        weight = torch.randint(-127, 127, (WIDE, WIDE), dtype=torch.int8)
        scale, zero = torch.rand(2, WIDE)
        found["decode, int8 weights"] = Gemv(1, dtype, "i8"), [row, weight, scale, out], [WIDE, WIDE]
        shifted = Gemv(1, dtype, "i8", zeros=True)
        found["decode, int8 weights with zero points"] = shifted, [row, weight, scale, zero, out], [WIDE, WIDE]
    return found


def eager(core: str, cases: Sequence[str]) -> dict[str, int]:
    """Return eager's instructions by "case|dtype"."""
    with tempfile.TemporaryDirectory() as folder:
        script = HERE / "eager.py"
        said, found = counted(aarch64_target(core), Path(folder) / "marks", script, *cases)
    return dict(zip([line for line in said.splitlines() if "|" in line], found, strict=True))


def count(cores: Sequence[str], cases: Sequence[str]) -> None:
    """Print a Markdown row for each kernel (default: all) and dtype, with the instructions on each core and their ratio to
    eager's."""
    found: dict[str, list[str]] = {}
    for core in cores:
        theirs = eager(core, cases)
        with tempfile.TemporaryDirectory() as folder, Emulator(aarch64_target(core), Path(folder)) as emulator:
            for dtype in ("f32", "bf16"):
                for name, (source, tensors, sizes) in sources(dtype).items():
                    if cases and name not in cases:
                        continue
                    ours = emulator.count(source, emulator.build([source])[hash_of(source)], tensors, sizes)
                    other = theirs.get(f"{name}|{to_torch(dtype)}")
                    row = found.setdefault(f"{name}, {dtype}", [])
                    row.append(f"{ours:,} ({ours / other:.2f} of {other:,})" if other else f"{ours:,}")
    print(f"| | {' | '.join(cores)} |\n|---|{'---|' * len(cores)}")
    for name, row in found.items():
        print(f"| {name} | {' | '.join(row)} |")


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 1 if something is wrong, 2 if the emulator is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["random", "count"])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--cores", default=",".join(CORES), help="names, comma-separated")
    parser.add_argument("--cases", default="", help="names as the table has them, with `+` for a comma; all by default")
    given = parser.parse_args(arguments)
    if why := missing():
        print(why, file=sys.stderr)
        return 2
    if given.what == "count":
        fetch_counter()
        count(given.cores.split(","), [c.replace("+", ",") for c in given.cases.split(",") if c])
        return 0
    return 1 if random(given.count) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
