"""Copies into and out of a recording's memory: planned when it is made, cheap at every call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from fusewright.interface import CopyingRecorder, Recorder

FEW = 3
"""Tensors that are copied one by one, which takes the host 4 us each; torch's copy of a list takes 12."""


class CopiesIn:
    """Buffers with the shapes and strides of the arguments at `places`; each call fills them, those of one type in one call:
    torch copies lists of mixed types one tensor at a time."""

    def __init__(self, args: Sequence[Any], places: Iterable[int], recorder: Recorder | None = None) -> None:
        self.buffers: dict[int, torch.Tensor] = {}
        self._flat: set[int] = set()
        self._all: list[int] = []
        self._copy_all: Callable[[list[Any]], bool] = lambda _: False
        kinds: dict[Any, tuple[list[int], list[torch.Tensor]]] = {}
        for k in places:
            x = args[k]
            target = buffer = x.clone()  # keeps the strides of a dense tensor
            if buffer.stride() != x.stride():
                target = flat(x).clone()
                buffer = target.as_strided(x.shape, x.stride())
                self._flat.add(k)
            self.buffers[k] = buffer
            copies = kinds.setdefault((target.dtype, target.device), ([], []))
            copies[0].append(k)
            copies[1].append(target)
        self._kinds = list(kinds.values())
        faster = None if self._flat else _copies(recorder, self.buffers.values())
        if faster is not None:
            self._copy_all, self._all = faster.copy_in(list(self.buffers.values())), list(self.buffers)

    def given(self, args: Sequence[Any]) -> list[Any]:
        """The arguments with the buffers substituted."""
        return [self.buffers.get(k, x) for k, x in enumerate(args)]

    def __call__(self, args: Sequence[Any]) -> None:
        if self._copy_all([args[k] for k in self._all]):
            return
        for places, targets in self._kinds:
            sources = [flat(args[k]) if k in self._flat else args[k] for k in places]
            if len(sources) == 1:
                targets[0].copy_(sources[0])
            else:
                torch._foreach_copy_(targets, sources)


def copier_out(tensors: Sequence[torch.Tensor], recorder: Recorder | None = None) -> Callable[[], list[torch.Tensor]]:
    """Return a function that copies these tensors at the time of its call. Copies have the same strides, and share memory where
    the tensors do."""
    storages = {t.untyped_storage().data_ptr() for t in tensors}
    if len(storages) == len(tensors) and all(t.clone().stride() == t.stride() for t in tensors):
        faster = _copies(recorder, tensors)
        by_driver = (lambda: None) if faster is None else faster.copy_out(tensors)
        return lambda: by_driver() or [t.clone() for t in tensors]
    return lambda: copied_out(tensors)


def _copies(recorder: Recorder | None, tensors: Collection[torch.Tensor]) -> Any | None:
    """The recorder's own copies, for few tensors of its device: more are copied by fewer kernels of torch's."""
    if not isinstance(recorder, CopyingRecorder) or not 0 < len(tensors) <= FEW:
        return None
    return recorder.copies() if all(t.device.type == recorder.device_type for t in tensors) else None


def flat(t: torch.Tensor) -> torch.Tensor:
    """The memory from the first to the last element of a tensor (strides are never negative), as one dimension."""
    span = 0 if t.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((span,), (1,), t.storage_offset())


def copied_out(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the same strides, which share memory where the given tensors do. None is a view: autograd forbids in-place
    writes to views that a custom function returned."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for t in tensors:
        by_storage.setdefault(t.untyped_storage().data_ptr(), []).append(t)
    made: dict[int, torch.Tensor] = {}
    for group in by_storage.values():
        if len(group) == 1 or all(t is group[0] for t in group):
            x = group[0]
            made[id(x)] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            flat(made[id(x)]).copy_(flat(x))
            continue
        whole = torch.empty(0, dtype=torch.uint8, device=group[0].device)
        whole.set_(group[0].untyped_storage())
        whole = whole.clone()
        for t in group:
            view = torch.empty(0, dtype=t.dtype, device=t.device)
            made[id(t)] = view.set_(whole.untyped_storage(), t.storage_offset(), t.shape, t.stride())
    return [made[id(t)] for t in tensors]
