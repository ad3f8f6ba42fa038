"""The first run of a plan is checked: traced metadata is sometimes untrue, and kernels believe it.

FakeTensor says, for example, that the statistics of a layer norm of bf16 with fp32 weights are bf16; a CPU gives fp32.
When a value is not what was traced, its metadata is mended, the graph is compiled again, and the call starts over.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from fusewright.errors import without_memory
from fusewright.plan.build import Plan
from fusewright.plan.execute.opaque import mismatch
from fusewright.plan.ir import Call, Run, reads
from fusewright.storage import NO_MEMORY, why_not


class MetadataMismatch(Exception):
    """The value `id` turned out as `actual`, which is not what was traced. `actual` is None where no metadata says that: its
    memory is not its value. `others` were found at the same time."""

    def __init__(self, id: int, actual: torch.Tensor | None, reason: str) -> None:
        super().__init__(f"value {id} {reason}")
        self.id = id
        self.actual = actual
        self.reason = reason
        self.others: tuple[MetadataMismatch, ...] = ()


Check: TypeAlias = Callable[[Mapping[int, Any]], None]
"""`check(values)` for the code of a first run, with all values by id that are there and were not checked: what a graph is given
comes at once, and each abandoned run costs a compilation. Raises `MetadataMismatch`."""


def checker(plan: Plan) -> Check:
    """The check of a plan's values."""
    read = {r for i in (*plan.prepare, *plan.instructions) if not isinstance(i, Call) for r in reads(i)}

    def untrue(id: int, value: Any) -> MetadataMismatch | None:
        spec = plan.specs.get(id)
        if spec is None or not isinstance(value, torch.Tensor):
            return None
        if id in read and (reason := why_not(value)):
            if reason is NO_MEMORY:
                without_memory(value)
            return MetadataMismatch(id, None, reason)
        reason = mismatch(value, spec)
        return MetadataMismatch(id, value, reason) if reason else None

    def check(values: Mapping[int, Any]) -> None:
        if found := [u for id, value in values.items() if (u := untrue(id, value)) is not None]:
            first, *others = found
            first.others = tuple(others)
            raise first

    return check


def generators(devices: Iterable[str]) -> Callable[[], None]:
    """What puts the random number generators of the host and of these devices back to where they are now."""
    states: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(torch.set_rng_state, (torch.get_rng_state(),))]
    for device in sorted(set(devices)):
        module: Any = getattr(torch, torch.device(device).type, None)
        if hasattr(module, "get_rng_state"):
            where = (device,) if inspect.signature(module.get_rng_state).parameters else ()  # there may be one device only
            states.append((module.set_rng_state, (module.get_rng_state(*where), *where)))

    def put_back() -> None:
        for put, state in states:
            put(*state)

    return put_back


def checked_first(
    checked: Run, run: Run, repair: Callable[[Sequence[MetadataMismatch]], Run], passed: Callable[[], None],
    written: Callable[[list[Any]], Sequence[torch.Tensor]] = lambda args: (), devices: Iterable[str] = (),
) -> Run:  # fmt: skip
    """A callable whose first call goes through `checked`, and all later ones through `run`.

    `repair` compiles again with what was found; `passed` is told when all was true. What an abandoned run did is
    undone: random numbers that it drew on `devices` and the host, and writes into `written(args)`, the tensors that the plan
    writes in place.
    """
    final: Run | None = None
    lock = threading.RLock()  # one repair: a second thread waits, and then runs what the first one settled on

    def first(args: list[Any]) -> Any:
        nonlocal final
        kept, put_back = list(args), generators(devices)
        before = [(t, t.detach().clone()) for t in written(args)]
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
