"""Loop kernels on a GPU at sizes beyond its L2: bytes per second of ours and of Inductor's beside a device copy.

    python -m ci.gpu.kernels [--kernels layer_norm,softmax] [--sizes 65536x1024] [--dtypes bf16,fp32] [--tuned] [--json out.json]

A kernel's bytes are its inputs read once and its results written once. Calls are queued back to back behind other
work, so that the times are the device's and not the host's; contenders take turns, and each one's best round counts.
The copy moves as many bytes as the kernel. `--tuned` adds ours with `options={"autotune": True}`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from fusewright.bench.kernels import KERNELS, Kernel

SIZES = ("65536x1024", "16384x4096", "8192x8192", "4096x30522")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CALLS = 10
"""Calls that are timed together."""
ROUNDS = 5
COPY_BAR, INDUCTOR_BAR = 0.85, 0.95
"""Least share of the copy's bandwidth and of Inductor's."""


def _silu_mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * y


CASES: Mapping[str, Kernel] = {**KERNELS, "silu_mul": Kernel(_silu_mul, ("full", "full"))}
CONTENDERS: Mapping[str, Any] = {
    "inductor": {},
    "ours": {"backend": "nvidia_triton", "options": {"cache": False, "graphs": False}},
    "tuned": {"backend": "nvidia_triton", "options": {"cache": False, "graphs": False, "autotune": True}},
}

Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """GB/s by contender, "copy" among them; `wrong` names contenders that differ from eager."""

    kernel: str
    size: str
    dtype: str
    speeds: Mapping[str, float]
    wrong: Sequence[str]

    def share(self, of: str, name: str = "ours") -> float:
        """The bandwidth of a contender over another's."""
        return self.speeds[name] / self.speeds[of]


class Clock:
    """Times calls on the device. `busy` is work that the device does while the host queues what is timed."""

    def __init__(self) -> None:
        self._source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").zero_()
        self._target = torch.empty_like(self._source)

    def seconds(self, call: Call) -> float:
        """Seconds of one call among several."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        for _ in range(4):
            self._target.copy_(self._source)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / CALLS

    def best(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """Each call's best round; the median of rounds would keep what disturbed most of them."""
        for call in calls.values():
            call()
        rounds = [{name: self.seconds(call) for name, call in calls.items()} for _ in range(ROUNDS)]
        return {name: min(r[name] for r in rounds) for name in calls}


@torch.no_grad()
def measure(clock: Clock, name: str, size: str, dtype: str, contenders: Sequence[str]) -> Row:
    """One kernel at one size."""
    rows, columns = map(int, size.split("x"))
    kernel = CASES[name]
    generator = torch.Generator("cuda").manual_seed(0)
    args = [
        torch.randn(
            (rows, columns) if kind == "full" else columns, generator=generator, device="cuda", dtype=DTYPES[dtype]
        )
        for kind in kernel.inputs
    ]
    moved = sum(a.nbytes for a in args) + args[0].nbytes
    source = torch.zeros(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    calls: dict[str, Call] = {"copy": lambda: target.copy_(source)}
    expected = kernel.fn(*(a.double() for a in args)) if rows * columns < 1 << 27 else None
    near = (kernel.fn(*args).double() - expected).abs().max().item() if expected is not None else 0.0
    wrong = []
    for contender in contenders:
        torch.compiler.reset()
        compiled = torch.compile(kernel.fn, dynamic=False, **CONTENDERS[contender])
        calls[contender] = lambda compiled=compiled: compiled(*args)  # type: ignore[misc]
        got = calls[contender]()
        if expected is not None and (got.double() - expected).abs().max().item() > 2 * near + 1e-5:
            wrong.append(contender)
    del expected
    times = clock.best(calls)
    return Row(name, size, dtype, {n: moved / t / 1e9 for n, t in times.items()}, wrong)


def line(row: Row) -> str:
    """A row of the table; `!` marks what misses a bar."""
    text = f"{row.kernel:20}{row.size:>12} {row.dtype}" + "".join(f"{v:9.0f}" for v in row.speeds.values())
    copy, inductor = row.share("copy"), row.share("inductor") if "inductor" in row.speeds else 1.0
    text += f"   {copy:5.2f}{' !'[copy < COPY_BAR]}  {inductor:5.2f}{' !'[inductor < INDUCTOR_BAR]}"
    return text + (f"  wrong: {', '.join(row.wrong)}" if row.wrong else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join(CASES))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--against", default="inductor", help='"" for ours alone')
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    contenders = [*filter(None, given.against.split(",")), "ours", *(["tuned"] if given.tuned else [])]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; GB/s; ours over copy and over Inductor")
    print(f"{'kernel':20}{'size':>12} type" + "".join(f"{n:>9}" for n in ("copy", *contenders)))
    clock, rows = Clock(), []
    for name in given.kernels.split(","):
        for size in given.sizes.split(","):
            for dtype in given.dtypes.split(","):
                rows.append(measure(clock, name, size, dtype, contenders))
                print(line(rows[-1]), flush=True)
    for other in ("copy", "inductor"):
        shares = [r.share(other) for r in rows if other in r.speeds]
        if shares:
            print(f"over {other}: geomean {statistics.geometric_mean(shares):.2f}, least {min(shares):.2f}")
    if given.json:
        document = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "rows": [{"kernel": r.kernel, "size": r.size, "dtype": r.dtype, "gb_s": dict(r.speeds)} for r in rows],
        }  # fmt: skip
        given.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
