"""Check the first run of a plan: traced metadata is sometimes wrong, and kernels rely on it.

For example, FakeTensor reports bf16 for the statistics of a bf16 layer norm with fp32 weights; a CPU returns fp32. If a value
differs from the trace, its metadata is mended, the graph is compiled again, and the call starts over.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fusewright.errors import without_memory
from fusewright.interface import Dim
from fusewright.plan.build import Plan
from fusewright.plan.execute.opaque import another_format, mismatch
from fusewright.plan.ir import Call, Ref, Run, reads
from fusewright.plan.seeds import seeds
from fusewright.sizes.expr import Atom
from fusewright.storage import NO_MEMORY, why_not


class MetadataMismatch(Exception):
    """The value `id` turned out to be `actual`, which differs from the trace. `actual` is None if metadata cannot express the
    difference: its memory is not its value. `sizes` has the values of symbols, `others` were found at the same time."""

    def __init__(self, id: int, actual: torch.Tensor | None, reason: str, sizes: Mapping[Atom, int] | None = None) -> None:
        super().__init__(f"value {id} {reason}")
        self.id = id
        self.actual = actual
        self.reason = reason
        self.sizes = dict(sizes or {})
        self.others: tuple[MetadataMismatch, ...] = ()


class Check:
    """`check(values)` for the code of a first run, with all values by id that exist and have not been checked. Inputs are checked
    all at once, because each abandoned run costs a compilation. Raises `MetadataMismatch`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        every = (*plan.prepare, *plan.instructions)
        self._read = {r for i in every if not isinstance(i, Call) for r in reads(i)}
        self._used = {r for i in every for r in reads(i)} | {o.id for o in plan.outputs if isinstance(o, Ref)} | {*plan.inputs}
        self._inputs = {*plan.inputs}
        self._seeds = seeds(plan)
        self._sizes: dict[Atom, int] = {}
        self._compared: set[int] = set()
        self._empty: set[int] = set()

    def __call__(self, values: Mapping[int, Any]) -> None:
        self._sizes.update(pair for id, value in values.items() for pair in self._shown_sizes(id, value))
        if found := [u for id, value in values.items() if (u := self._mismatch(id, value)) is not None]:
            first, *others = found
            first.others = tuple(others)
            raise first

    @property
    def complete(self) -> bool:
        """Whether every value was compared: one without elements, whose size is symbolic, does not show its strides."""
        return self._empty <= self._compared

    def _mismatch(self, id: int, value: Any) -> MetadataMismatch | None:
        spec = self._plan.specs.get(id)
        if spec is None or not isinstance(value, torch.Tensor) or id not in self._used or id in self._seeds:
            return None
        if id in self._read and (reason := why_not(value)):
            if reason is NO_MEMORY:
                without_memory(value)
            return MetadataMismatch(id, None, reason)
        (self._compared if spec.static or value.numel() else self._empty).add(id)
        reason = mismatch(value, spec, self._sizes)
        if not reason and id in self._inputs:
            reason = another_format(value, spec)
        return MetadataMismatch(id, value, reason, self._sizes) if reason else None

    def _shown_sizes(self, id: int, value: Any) -> Iterator[tuple[Atom, int]]:
        """The symbols whose sizes this value shows, with these sizes."""
        if id in self._plan.scalars and isinstance(value, int):
            yield self._plan.scalars[id], value
        spec = self._plan.specs.get(id)
        if spec is not None and isinstance(value, torch.Tensor) and value.dim() == spec.rank:
            dims = zip(spec.shape, value.shape, strict=True)
            yield from ((s.expr.name, n) for s, n in dims if isinstance(s, Dim) and s.expr.name is not None)


def generators(devices: Iterable[str], args: Iterable[Any] = ()) -> Callable[[], None]:
    """Return a function that restores the random number generators of the host, of these devices and among `args` to their current
    state."""
    states: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(torch.set_rng_state, (torch.get_rng_state(),))]
    for device in sorted(set(devices)):
        module: Any = getattr(torch, torch.device(device).type, None)
        if hasattr(module, "get_rng_state"):
            where = (device,) if inspect.signature(module.get_rng_state).parameters else ()  # some modules have a single device
            states.append((module.set_rng_state, (module.get_rng_state(*where), *where)))
    states += [(g.set_state, (g.get_state(),)) for g in args if isinstance(g, torch.Generator)]

    def put_back() -> None:
        for put, state in states:
            put(*state)

    return put_back


def checked_first(
    checked: Run, run: Run, repair: Callable[[Sequence[MetadataMismatch]], Run], passed: Callable[[], None],
    written: Callable[[list[Any]], Sequence[torch.Tensor]] = lambda args: (), devices: Iterable[str] = (),
    complete: Callable[[], bool] = lambda: True,
) -> Run:  # fmt: skip
    """Return a callable whose first calls go through `checked`, until one is `complete`, and all later ones through `run`.

    `repair` compiles again with the mismatches found; `passed` is called if there are none. An abandoned run is undone: random
    numbers drawn on `devices`, the host and from generators among the arguments, and writes into `written(args)`, the tensors that
    the plan writes in place.
    """
    final: Run | None = None
    lock = threading.RLock()  # one repair at a time: a second thread waits, then runs the result

    def first(args: list[Any]) -> Any:
        nonlocal final
        kept, put_back = list(args), generators(devices, args)
        before = [(t, t.detach().clone()) for t in written(args) if why_not(t) != NO_MEMORY]  # freed storage has no content
        try:
            result = checked(args)
        except MetadataMismatch as found:
            put_back()
            with torch.no_grad():
                for t, content in before:
                    t.copy_(content)
            final = repair([found, *found.others])
            args[:] = kept
            return final(args)
        if complete():
            passed()
            final = run
        return result

    def call(args: list[Any]) -> Any:
        if final is None:
            with lock:
                if final is None:
                    return first(args)
        return final(args)

    return call
