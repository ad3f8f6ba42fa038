"""Copies into and out of a recording's memory: planned when it is made, cheap at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from fusewright.interface import CopyingRecorder, DrawingRecorder, Number, NumberRecorder, Recorder, WritingRecorder
from fusewright.plan.vocabulary import LISTED
from fusewright.storage import lazy

MOST = 8
"""Inputs, and results, that a recording copies itself. Each takes the device a microsecond or two, and torch's copy of a list one
kernel, but the host 12 us."""

Call = Callable[[list[Any]], Sequence[torch.Tensor] | None]
"""Run a recording for a list of arguments. Returns copies of its results; None, with nothing done, where it cannot run now."""


class CopiesIn:
    """Buffers with the shapes and strides of the arguments at `places`; each call fills them, those of one type in one call if
    torch can: it copies lists of mixed types one tensor at a time. Buffers for arguments that come from anywhere are `onto` a
    device. `direct`: the memory of each argument is its value, on the buffer's device. `numbers` are positions of arguments that
    kernels take as they are."""

    def __init__(
        self, args: Sequence[Any], places: Iterable[int], onto: Mapping[int, str] = MappingProxyType({}),
        numbers: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self.buffers: dict[int, torch.Tensor] = {}
        self.numbers = {k: Number(args[k]) for k in numbers}
        self.direct = True
        self._flat: set[int] = set()
        kinds: dict[Any, tuple[list[int], list[torch.Tensor]]] = {}
        for k in places:
            x = args[k]
            self.direct = self.direct and not lazy(x) and k not in onto
            target = buffer = x.clone() if k not in onto else x.to(onto[k], copy=True)  # keeps the strides of a dense tensor
            if buffer.stride() != x.stride():
                target = flat(x).clone()
                buffer = target.as_strided(x.shape, x.stride())
                self._flat.add(k)
            self.buffers[k] = buffer
            kind = (target.dtype, target.device) if target.dtype in LISTED else k
            copies = kinds.setdefault(kind, ([], []))
            copies[0].append(k)
            copies[1].append(target)
        self._kinds = list(kinds.values())

    @property
    def inputs(self) -> dict[int, Any]:
        """What a recorder copies or passes on, by position."""
        return {**self.buffers, **self.numbers}

    def given(self, args: Sequence[Any]) -> list[Any]:
        """The arguments with the buffers substituted, and numbers marked."""
        inputs = self.inputs
        return [inputs.get(k, x) for k, x in enumerate(args)]

    def __call__(self, args: Sequence[Any]) -> None:
        for places, targets in self._kinds:
            sources = [flat(args[k]) if k in self._flat else args[k] for k in places]
            if len(sources) == 1:
                targets[0].copy_(sources[0])
            else:
                torch._foreach_copy_(targets, sources)


def record_with_copies(
    recorder: Recorder, run: Callable[[], Sequence[torch.Tensor]], copy_in: CopiesIn,
    returned: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]], *, warm: bool, shared: bool, draws: bool = False,
    generators: Sequence[torch.Generator] = (),
) -> tuple[Sequence[torch.Tensor], Call]:  # fmt: skip
    """Record `run`, which `draws` random numbers, also from `generators`, or does not, with copies of its inputs and of what
    `returned` selects of its results, by the recorder itself where it can. Return the results and the call."""
    simple_inputs = copy_in.direct and _simple(list(copy_in.buffers.values()), recorder)
    if not draws and simple_inputs and isinstance(recorder, CopyingRecorder):
        selected: list[torch.Tensor] = []

        def simple(results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            selected[:] = returned(results)
            return selected if _simple(selected, recorder) else ()

        made = recorder.record_with_copies(run, warm, shared, copy_in.inputs, simple)
        if made is not None:
            results, call = made
            if _simple(selected, recorder):
                return results, call
            copy_out = copier_out(selected)
            return results, lambda args: None if call(args) is None else copy_out()
    if copy_in.numbers:
        assert isinstance(recorder, NumberRecorder)  # `obstacle` sees to it
        results, again = recorder.record_with_numbers(run, warm, shared, copy_in.numbers)
        copy_out = copier_out(returned(results))

        def passing(args: list[Any]) -> list[torch.Tensor] | None:
            copy_in(args)
            return copy_out() if again(args) else None

        return results, passing
    results, replay = recorded(recorder, run, warm, shared, generators)
    return results, around(copy_in, replay, copier_out(returned(results)))


def takes_numbers(recorder: Recorder) -> bool:
    """Whether a recorder's replays pass on numbers that differ from call to call."""
    return isinstance(recorder, NumberRecorder) and recorder.takes_numbers()


def recorded(
    recorder: Recorder, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: Any, generators: Sequence[torch.Generator]
) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
    """Record `run`, which draws from these generators besides the device's own."""
    if generators:
        assert isinstance(recorder, DrawingRecorder)  # `training.retained` sees to it
        return recorder.record_drawing(run, shared, generators)
    return recorder.record(run, warm=warm) if shared is True else recorder.record(run, warm=warm, shared=shared)


def record_written(
    recorder: Recorder, run: Callable[[], Sequence[torch.Tensor]], copy_in: CopiesIn,
    returned: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    written: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]], *, warm: bool, shared: bool,
) -> Call | None:  # fmt: skip
    """Record `run` and then `written`, which makes more results of its results. The call writes those into fresh memory, and
    returns them before the copies of what `returned` selects. None if the recorder cannot do this; then nothing is recorded."""
    if not isinstance(recorder, WritingRecorder) or not copy_in.direct or not _simple(list(copy_in.buffers.values()), recorder):
        return None
    simple = True

    def checked(select: Callable[[Any], Sequence[torch.Tensor]], results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        nonlocal simple
        selected = select(results)
        simple = simple and _simple(selected, recorder)
        return selected if simple else ()

    made = recorder.record_written(
        run, warm, shared, copy_in.inputs, partial(checked, returned), partial(checked, written)
    )
    return made[1] if made is not None and simple else None


def around(copy_in: CopiesIn, replay: Callable[[], None], copy_out: Callable[[], list[torch.Tensor]]) -> Call:
    """A replay between copies of inputs and results."""

    def call(args: list[Any]) -> list[torch.Tensor]:
        copy_in(args)
        replay()
        return copy_out()

    return call


def copier_out(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Return a function that copies these tensors at the time of its call. Copies have the same strides, and share memory where
    the tensors do."""
    if _apart(tensors):
        return lambda: [t.clone() for t in tensors]
    return lambda: copied_out(tensors)


def _apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are dense, lie in memory as they read and share none, so that they are copied one by one."""
    storages = {t.untyped_storage().data_ptr() for t in tensors}
    plain = len(storages) == len(tensors) and not any(map(lazy, tensors))
    return plain and all(torch.empty_like(t, device="meta").stride() == t.stride() for t in tensors)


def _simple(tensors: Sequence[torch.Tensor], recorder: Recorder) -> bool:
    """Whether a recorder may copy these tensors itself."""
    return len(tensors) <= MOST and all(t.device.type == recorder.device_type for t in tensors) and _apart(tensors)


def flat(t: torch.Tensor) -> torch.Tensor:
    """The memory from the first to the last element of a tensor (strides are never negative), as one dimension."""
    span = 0 if t.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((span,), (1,), t.storage_offset())


def copied_out(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the same strides, which share memory and negate or conjugate it lazily where the given tensors do. None is a
    view: autograd forbids in-place writes to views that a custom function returned."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for t in tensors:
        by_storage.setdefault(t.untyped_storage().data_ptr(), []).append(t)
    made: dict[int, torch.Tensor] = {}
    for group in by_storage.values():
        if all(t is group[0] for t in group) and not lazy(group[0]):
            x = group[0]
            made[id(x)] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            flat(made[id(x)]).copy_(flat(x))
            continue
        whole = torch.empty(0, dtype=torch.uint8, device=group[0].device)
        whole.set_(group[0].untyped_storage())
        whole = whole.clone()
        for t in group:
            view = t.data if lazy(t) else torch.empty(0, dtype=t.dtype, device=t.device)
            made[id(t)] = view.set_(whole.untyped_storage(), t.storage_offset(), t.shape, t.stride())
    return [made[id(t)] for t in tensors]
