"""Whether a model is still what a saved program was loaded for: asked at every call, so answered from the identity of what its
modules hold, and only after a change by comparing the model with what was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import eq, methodcaller
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright import machine, storage
from fusewright.aot.identity import Model
from fusewright.plan import native
from fusewright.plan.execute.prepare import watch

MOST = 4096
"""Entries of a container, or bytes of an array, that are compared at every call. Of larger containers only their number is."""
_VALUES: Callable[[Any], Any] = methodcaller("values")


def settings() -> tuple[Any, ...]:
    """Switches of torch that change what eager computes, or whether it does, as of now; cheap."""
    return (
        torch.get_default_dtype(),
        machine.matmul_precisions(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        compat.modes(),
    )


class Watch:
    """A snapshot of what a model's modules, classes, attributes and hooks hold. `holds` tells whether each is the same object
    as then. Weights may be replaced by others (ids suffice to see that the same ones are shared), and are not kept alive."""

    def __init__(self, model: Model) -> None:
        own = [d for m in model.modules for d in (vars(m), m._modules, m._forward_pre_hooks, m._forward_hooks)]
        held = [*own, *compat.hooks_of_all(), *model.seen.containers]
        containers = [c for c in {id(c): c for c in held}.values() if isinstance(c, dict | list)]
        self._same_entries = same_entries([*(c for c in containers if len(c) <= MOST), *model.kinds])
        weights = [d for m in model.modules for d in (m._parameters, m._buffers) if isinstance(d, dict)]
        self._same_weights = same_entries(weights, held=False)
        self._modules, self._types = model.modules, list(map(type, model.modules))
        self._large = [c for c in containers if len(c) > MOST]
        self._lengths = list(map(len, self._large))
        self._sets, self._members = model.seen.sets, list(map(frozenset, model.seen.sets))
        self._tensors = [t for t in model.seen.tensors if not (t.is_inference() or storage.why_not(t))]
        self._same_tensors = watch(self._tensors)
        self._arrays = [(a, a.tobytes()) for a in model.seen.arrays if a.nbytes <= MOST]
        self._slots = [(x, name, getattr(x, name)) for x, name in model.seen.slots]

    def holds(self) -> bool:
        return bool(
            self._same_entries()
            and self._same_weights()
            and list(map(type, self._modules)) == self._types
            and list(map(len, self._large)) == self._lengths
            and all(map(eq, self._sets, self._members))
            and self._same_tensors(self._tensors)
            and all(a.tobytes() == content for a, content in self._arrays)
            and all(getattr(x, name, None) is value for x, name, value in self._slots)
        )


def same_entries(containers: Iterable[Any], held: bool = True) -> Callable[[], bool]:
    """Return a function that tells whether dicts, lists and classes have the entries that they have now, by identity. Without
    `held` values are not kept alive, and one that took the place of a dead one in memory is taken for it."""
    given = tuple(containers)
    core = native.extension()
    if core is not None and hasattr(core, "same_entries"):
        entries = chain.from_iterable(map(_pairs if held else _values, given))
        now, compare = tuple(entries if held else map(id, entries)), core.same_entries if held else core.same_ids
        return lambda: bool(compare(given, now))
    # The same in Python, but for the names of entries. Most dicts of a module are empty.
    full, empty = [c for c in given if _length(c)], [c for c in given if not _length(c)]
    dicts = [vars(c) if isinstance(c, type) else c for c in full if not isinstance(c, list)]
    lists = [c for c in full if isinstance(c, list)]

    def found() -> list[Any]:
        return [*chain.from_iterable(map(_VALUES, dicts)), *chain.from_iterable(lists)]

    values = found()
    ids = list(map(id, values))

    def same(kept: list[Any] | None = values if held else None) -> bool:
        return not any(empty) and list(map(id, found())) == ids

    del values
    return same


def _length(container: Any) -> int:
    return len(vars(container) if isinstance(container, type) else container)


def _values(container: Any) -> Iterable[Any]:
    if isinstance(container, list):
        return container
    return vars(container).values() if isinstance(container, type) else dict.values(container)


def _pairs(container: Any) -> Iterable[Any]:
    if isinstance(container, list):
        return container
    return chain.from_iterable(vars(container).items() if isinstance(container, type) else dict.items(container))
