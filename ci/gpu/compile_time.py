"""Show where the CPU time of a first call with `nvidia_triton` goes, without a GPU: torch, each of our stages, Triton's compiler.

    python -m ci.gpu.compile_time large:dinov2:train large:mobilevit:infer [--size small] [--no-kernels] [--json times.json]

Each case (as `ci.gpu.profiles` names it) compiles in a process of its own for an H100 that is not there: devices are pinned as in
`ci.replay`, and graphs are traced on CPU tensors and return unwritten memory, so that full geometry costs nothing. The kernels that
would be loaded are then built for real by Triton and ptxas in one process with an empty cache. Times are CPU seconds of the process
and its children, which a busy machine stretches, but does not multiply. What needs a GPU is missing: libraries that start, measured
choices, recordings. "torch" is Dynamo, AOTAutograd, their imports, and all of ours outside of the stages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
BACKEND = "nvidia_triton"
STAGES = ("make_ttir", "make_ttgir", "make_llir", "make_ptx", "make_cubin")
"""Methods of Triton's NVIDIA compiler, in order; the last one runs ptxas."""

Times = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    given = _arguments(argv)
    if given.child:
        print(json.dumps(measure(given.cases[0], given.size, not given.no_kernels)))
        return 0
    found = {case: _in_process(case, given) for case in given.cases}
    print("\n".join(table(found)))
    if given.json:
        given.json.write_text(json.dumps({"size": given.size, "cases": found}, indent=1) + "\n")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="MODEL:MODE", help="a model as `fusewright bench` names it, and train or infer")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--no-kernels", action="store_true", help="do not build them")
    parser.add_argument("--json", type=Path, help="where the times go")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _in_process(case: str, given: argparse.Namespace) -> Times:
    command = [sys.executable, "-m", "ci.gpu.compile_time", case, "--size", given.size, "--child"]
    command += ["--no-kernels"] * given.no_kernels
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache}
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    times: Times = json.loads(done.stdout.splitlines()[-1])
    return times


def table(found: Mapping[str, Times]) -> list[str]:
    """Return a table with one row for each figure and one column for each case."""
    rows = dict.fromkeys(name for times in found.values() for name in times)
    lines = [f"| | {' | '.join(found)} |", f"|---{'|---' * len(found)}|"]
    return lines + [f"| {name} | {' | '.join(f'{t.get(name, 0):.4g}' for t in found.values())} |" for name in rows]


# ---------------------------------------------------------------- one case


def measure(case: str, size: Any, kernels: bool) -> Times:
    """Return the figures of a case: CPU seconds, and numbers of kernels."""
    import torch

    torch.set_num_threads(1)
    times: Times = {}
    with _compiling(times) as requests:
        call = _call(case, size)
        start = time.process_time()
        call()
        whole = time.process_time() - start
    ours = sum(times.values())
    distinct = {_unnamed(r): r for r in requests}
    found = {"process": whole, "torch": whole - ours, "ours": ours, **times}
    found |= {"kernels": len(requests), "distinct kernels": len(distinct)}
    return found | (build(list(distinct.values())) if kernels else {})


def _unnamed(request: Mapping[str, Any]) -> str:
    from fusewright_triton.build.binaries import unnamed

    return unnamed(request) if "text" in request else json.dumps(request)


def _call(case: str, size: Any) -> Callable[[], Any]:
    import torch

    from fusewright.bench.cases import resolve, resolve_step

    model, _, mode = case.rpartition(":")
    options: dict[str, Any] = {"cache": False, "fallback": "allow", "never_slower": False}
    if mode == "train":
        step = resolve_step(model, size, "amp", "cpu")

        def train() -> None:
            step.compiled = torch.compile(step.module, backend=BACKEND, options=options)
            step.backward()

        return train
    built = resolve(model, size, "bf16", "cpu")

    def infer() -> None:
        with torch.no_grad():
            built.run(torch.compile(built.fn, backend=BACKEND, options=options))

    return infer


@contextmanager
def _compiling(times: Times) -> Iterator[list[dict[str, Any]]]:
    """In this context graphs compile for the pinned device and do not run. Collect the times of stages, and yield a list of the
    requests for kernels."""
    from ci import replay
    from fusewright import pipeline, registry
    from fusewright.interface import KernelCode
    from fusewright.stages import rounds
    from fusewright_triton import runtime
    from fusewright_triton.backend import NvidiaTriton
    from fusewright_triton.build import binaries
    from fusewright_triton.run.precompile import orders

    device, _ = replay.BACKENDS[BACKEND]
    requests: list[dict[str, Any]] = []
    choices: list[str] = []

    class Choices(replay.Last):
        made = choices

    def create(_: str, options: Any) -> NvidiaTriton:
        return NvidiaTriton(device(), options.backend)

    def precompile(self: NvidiaTriton, region: Any) -> None:
        requests.extend(o.request(self.target(self.running_on())) for o in orders(region))

    def load(self: NvidiaTriton, wanted: Mapping[str, Any]) -> Mapping[str, KernelCode]:
        target = self.target(self.running_on())
        for key, kernel in wanted.items():
            order = binaries.Wanted(kernel, runtime.library(target).config(key, kernel), runtime.first_variant(kernel))
            requests.append(binaries.request(order.source(), order.variant, target))
        return {key: KernelCode(_never, kernel=kernel) for key, kernel in wanted.items()}

    def timed(c: Any, name: str, stage: Any) -> Any:
        start = time.process_time()
        try:
            return staged(c, name, stage)
        finally:
            times[name] = times.get(name, 0.0) + time.process_time() - start

    staged = rounds.timed
    with (
        mock.patch.object(registry, "create", create),
        mock.patch.object(pipeline, "Tuner", Choices),
        mock.patch.object(pipeline, "timed", timed),
        mock.patch.object(rounds, "timed", timed),
        mock.patch.object(pipeline, "compile_graph", _not_run(pipeline.compile_graph)),
        mock.patch.object(NvidiaTriton, "_precompile", precompile),
        mock.patch.object(NvidiaTriton, "load", load),
    ):
        yield requests


def _never(*_: Any) -> None:
    raise AssertionError("nothing is run")


def _not_run(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Return what compiles a graph, and returns a callable that returns unwritten memory of the traced types."""
    import torch

    def compiled(backend: Any, options: Any, gm: Any, *more: Any) -> Callable[[list[Any]], list[Any]]:
        (output,) = gm.graph.find_nodes(op="output")
        inputs = {n: k for k, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
        results = [(inputs.get(n), n.meta["val"] if isinstance(n, torch.fx.Node) else n) for n in output.args[0]]
        compile_graph(backend, options, gm, *more)

        def run(args: list[Any]) -> list[Any]:
            given = list(args)
            args.clear()
            return [given[k] if k is not None else _unwritten(val) for k, val in results]

        return run

    def _unwritten(val: Any) -> Any:
        return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype) if isinstance(val, torch.Tensor) else val

    return compiled


def build(requests: Sequence[Mapping[str, Any]]) -> Times:
    """Build kernels one after the other as a worker does; return the compiler's CPU seconds by stage."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler.compiler import ASTSource

    from fusewright_triton.build import compiler
    from fusewright_triton.build.workers import FIRST

    times: Times = {}
    if requests:
        compiler.build({**FIRST, "target": requests[0]["target"]})
    patches = [_spent(CUDABackend, name, times, name in STAGES[:2]) for name in STAGES]
    start = _cpu()
    with mock.patch.multiple(CUDABackend, **dict(zip(STAGES, patches, strict=True))), mock.patch.object(
        ASTSource, "make_ir", _spent(ASTSource, "make_ir", times, False)
    ):  # fmt: skip
        for r in requests:
            compiler.build(r)
    return {"compiler": _cpu() - start, **{name: times.get(name, 0.0) for name in ("make_ir", *STAGES)}}


def _spent(cls: type, name: str, times: Times, static: bool) -> Any:
    """Return a method that adds its CPU time to `times`."""
    method = getattr(cls, name)

    def spent(*args: Any) -> Any:
        start = _cpu()
        try:
            return method(*args)
        finally:
            times[name] = times.get(name, 0.0) + _cpu() - start

    return staticmethod(spent) if static else spent


def _cpu() -> float:
    return sum(os.times()[:4])


if __name__ == "__main__":
    sys.exit(main())
