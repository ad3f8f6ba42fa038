"""`options={"autotune": True}`: measure a short list of configurations around the formula's and take the fastest.

    tuned = tune(kernels, target, ctx.choose)     # kernels by structural hash
    tuned.configs, tuned.notes                    # by structural hash as well

The host remembers choices under the kernel's hash, the device and Triton's version. Each candidate runs on tensors made
for the trial; several launches are recorded in one device graph, so that launch overhead is not measured.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Protocol

import torch

from fusewright.interface import Decline
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.ir.extent import evaluate
from fusewright.toolkit.ir.index import Coefs, Index
from fusewright.toolkit.ir.ir import Kernel
from fusewright.toolkit.ir.types import is_int, to_torch
from fusewright_triton.build.binaries import Built, Variant, Wanted, build_each
from fusewright_triton.build.workers import BuildError
from fusewright_triton.emit import schedule
from fusewright_triton.emit.emitter import emit
from fusewright_triton.emit.operators import Unsupported
from fusewright_triton.emit.schedule import Config, Tile
from fusewright_triton.target import FORMULA, Target

log = logging.getLogger(__name__)

LAUNCHES = 10
"""Launches that are timed together."""

LONGEST = 65536
"""Longest row (elements) that a candidate holds in registers."""

MOST_PER_LANE = 128
"""Elements of a block per lane: beyond this registers spill."""

MOST = 20
"""The most candidates for a kernel, including the formula's."""

Choose = Callable[[str, Mapping[str, Thunk]], str]


class Stopped(Exception):
    """Tuning of a kernel cannot go on. Not a RuntimeError: for that the host would drop only the candidate that raised it."""


class Trials(Protocol):
    """Builds the measured candidates: `maker(k)` returns a thunk that runs the k-th configuration and waits for it.

    A maker raises `Stopped` where no candidate can be measured, and RuntimeError where only its own cannot.
    """

    def __init__(self, kernel: Kernel, configs: Sequence[Config], target: Target) -> None: ...

    def maker(self, k: int) -> Callable[[], Thunk]: ...


@dataclass
class Tuned:
    """The chosen configurations and notes on the choice, by structural hash."""

    configs: dict[str, Config] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def tune(kernels: Mapping[str, Kernel], target: Target, choose: Choose, trials: type[Trials] | None = None) -> Tuned:
    """Choose the fastest configuration of each kernel. Where measuring is not possible, keep the formula's choice and say why
    in the note; leave out a single candidate that fails, also with a note."""
    tuned = Tuned()
    for key, kernel in kernels.items():
        formula = schedule.choose(kernel, target)
        names = {name_of(c): c for c in candidates(kernel, formula, target)}
        trial = (trials or OnDevice)(kernel, list(names.values()), target)
        failures: list[str] = []
        makers = {
            name: functools.partial(_made, trial.maker(k), name, k == 0, failures) for k, name in enumerate(names)
        }
        try:
            best = choose(_key(key, kernel, target), Lazy(makers))
            tuned.configs[key] = names[best]
            tuned.notes[key] = "; ".join(
                [f"tuned: {best}" if names[best] != formula else "tuned: as the formula", *failures]
            )
        except (Stopped, Decline) as e:
            tuned.configs[key] = formula
            tuned.notes[key] = f"not tuned: {e}"
            log.warning("%s is not tuned: %s", kernel.name, e)
    return tuned


def _made(maker: Callable[[], Thunk], name: str, formula: bool, failures: list[str]) -> Thunk:
    """Return a candidate's thunk, or append the reason why there is none to `failures`. Without the formula's candidate there is
    no baseline, so running out of memory for it (which another call may not) stops the search and nothing is remembered."""
    try:
        return maker()
    except torch.OutOfMemoryError as e:
        if formula:
            raise Stopped("out of memory while the formula's choice was measured, which stays") from e
        failures.append(f"{name} is out: out of memory")
        log.warning("autotune drops %s: out of memory", name)
        raise


def _key(key: str, kernel: Kernel, target: Target) -> str:
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no device"
    sizes = "".join(f" {v}" for v in kernel.hints)  # by position: the hash knows no names
    return f"autotune {key}{sizes} {target.arch} {device} triton {triton.__version__}"


def name_of(c: Config) -> str:
    """A configuration in words, e.g. "block 512, 4 warps" or "block 1, row 1024 held, 8 warps"."""
    parts = [f"block {'x'.join(str(t.block) for t in c.tiles) or 1}"]
    if c.row:
        parts.append(f"row {c.row} {'held' if c.persistent else 'in steps'}")
    parts.append(f"{c.warps} warps")
    return ", ".join([*parts, *([f"{c.split} programs a row"] if c.split > 1 else [])])


def candidates(kernel: Kernel, formula: Config, target: Target) -> list[Config]:
    """List the formula's choice first, then configurations whose block, warps, row or split differ from it by a factor
    of two or four, as far as the emitter can print them."""
    out = [formula]
    for near in _near(kernel, formula):
        c = schedule.combined(kernel, near, target) if near.warps else near
        if len(out) < MOST and c not in out and _sensible(c, target) and _printable(kernel, c):
            out.append(c)
    return out


def _near(kernel: Kernel, c: Config) -> Iterator[Config]:
    """Yield candidates, the most promising first."""
    for block, warps in product((1, 2, 0.5), (1, 2, 0.5, 0.25)):
        yield replace(c, tiles=_scaled(c.tiles, block), warps=int(c.warps * warps))
    if not c.row:
        yield from (replace(c, tiles=_scaled(c.tiles, 4), warps=int(c.warps * w)) for w in (1, 2))
        return
    if kernel.recurs:  # a step needs the one before
        return
    row = _row(kernel)
    if c.persistent:
        steps = [(s, w) for s, w in ((4096, 32), (8192, 16), (4096, 16), (2048, 8)) if s < c.row]
        yield from (replace(c, tiles=_scaled(c.tiles, 0), row=s, persistent=False, warps=w) for s, w in steps)
        return
    yield from (replace(c, row=int(c.row * f), warps=max(1, int(c.warps * f))) for f in (2, 0.5))
    yield from (replace(c, row=int(c.row * f)) for f in (2, 0.5))
    if schedule.splittable(kernel):
        yield from (replace(c, split=max(1, int(c.split * f))) for f in (2, 0.5, 4))
    if row is not None:
        held = replace(c, tiles=_scaled(c.tiles, 0), row=row, persistent=True, split=1)
        yield from (replace(held, warps=w) for w in (8, 16, 32))


def _scaled(tiles: tuple[Tile, ...], by: float) -> tuple[Tile, ...]:
    """Return the tiles with the innermost block scaled; 0 makes every block one point."""
    if by == 0:
        return tuple(Tile(t.axes, 1) for t in tiles)
    return (*tiles[:-1], *(Tile(t.axes, max(1, int(t.block * by))) for t in tiles[-1:]))


def _row(kernel: Kernel) -> int | None:
    """Return the power of 2 that holds a row, if its size is known, not empty and not too long."""
    size = 1
    for s in kernel.r:
        if not isinstance(s, int):
            return None
        size *= s
    length = 1 << max(1, (size - 1).bit_length())
    return length if 0 < size and length <= LONGEST else None


def _sensible(c: Config, target: Target) -> bool:
    elements = max(c.row, 1)
    for t in c.tiles:
        elements *= t.block
    lanes = c.warps * target.lanes
    return 1 <= c.warps and lanes <= 1024 and c.split <= FORMULA.max_split and elements <= MOST_PER_LANE * lanes


def _printable(kernel: Kernel, c: Config) -> bool:
    try:
        emit(kernel, c)
    except Unsupported:
        return False
    return True


# ---------------------------------------------------------------- on the device


class OnDevice:
    """Trials on the current GPU. All candidates of a kernel are built in parallel and share their tensors."""

    def __init__(self, kernel: Kernel, configs: Sequence[Config], target: Target) -> None:
        self.kernel, self.configs, self.target = kernel, configs, target

    def maker(self, k: int) -> Callable[[], Thunk]:
        return functools.partial(self._make, k)

    def _make(self, k: int) -> Thunk:
        from fusewright_triton.run.graphs import Graphs
        from fusewright_triton.run.launch import GpuLauncher

        if torch.cuda.is_current_stream_capturing():
            raise Stopped("the current stream is being captured")
        launch = GpuLauncher(self.kernel, self.target, self._code(k))
        sizes = self.kernel.hints
        scalars = [1] * len(self.kernel.scalars)

        def launches() -> Sequence[torch.Tensor]:
            for _ in range(LAUNCHES):
                launch(self._tensors, sizes, scalars)
            return ()

        _, replay = Graphs().record(launches, warm=True, shared=False)

        def run() -> None:
            replay()
            torch.cuda.synchronize()

        return run

    def _code(self, k: int) -> Callable[[Variant], Built]:
        """Return a function that gives every variant the same binary: it was built for this trial's tensors and sizes."""
        built = self._built[k]
        if isinstance(built, BuildError):
            raise built
        return lambda _: built

    @functools.cached_property
    def _built(self) -> Sequence[Built | BuildError]:
        from fusewright_triton.runtime import first_variant

        variant = first_variant(self.kernel)
        return build_each([Wanted(self.kernel, c, variant) for c in self.configs], self.target)

    @functools.cached_property
    def _tensors(self) -> list[torch.Tensor]:
        try:
            return stand_ins(self.kernel, "cuda")
        except torch.OutOfMemoryError as e:
            raise Stopped("out of memory for tensors to measure with; the formula's choice stays") from e


def stand_ins(kernel: Kernel, device: str) -> list[torch.Tensor]:
    """Return a tensor for each buffer, as long as the kernel's accesses reach at the hinted sizes. Integers are valid
    indices. Raise `Stopped` when the kernel does not check an index, so that its reach is unknown."""
    hints = kernel.hints
    bounds = {n.id: evaluate(n.extent, hints) for n in kernel.nodes() if n.op == "bound" and n.extent is not None}
    lengths = [1] * len(kernel.buffers)
    for n in kernel.nodes():
        if n.buffer is not None and n.index is not None:
            lengths[n.buffer] = max(lengths[n.buffer], _reach(n.index, kernel, hints, bounds) + 1)
    positions = max(1, min(bounds.values(), default=2))
    out = []
    for buffer, length in zip(kernel.buffers, lengths, strict=True):
        dtype = to_torch(buffer.dtype)
        if buffer.dtype == "bool" or is_int(buffer.dtype):
            top = min(positions, 2 if buffer.dtype == "bool" else torch.iinfo(dtype).max)
            out.append(torch.randint(0, top, (length,), device=device, dtype=dtype))
        else:
            out.append(torch.empty(length, dtype=dtype, device=device).uniform_(-1, 1))
    return out


def _reach(index: Index, kernel: Kernel, hints: Sequence[int], bounds: Mapping[int, int]) -> int:
    """Return an element that no access by `index` goes beyond."""
    sizes = [max(evaluate(s, hints) - 1, 0) for s in kernel.sizes]

    def most(coefs: Coefs) -> int:
        return sum(max(evaluate(c, hints), 0) * sizes[a] for a, c in coefs)

    total = evaluate(index.offset, hints) + most(index.coefs)
    for d in index.divmods:
        quotient = max(evaluate(d.offset, hints) + most(d.coefs), 0) // max(1, evaluate(d.div, hints))
        top = quotient if d.mod is None else max(evaluate(d.mod, hints) - 1, 0)
        total += max(evaluate(d.stride, hints), 0) * top
    for i in index.indirect:
        if i.value not in bounds:
            raise Stopped("it reads positions that it does not check")
        total += max(evaluate(i.stride, hints), 0) * max(bounds[i.value] - 1, 0)
    return max(total, 0)
