"""Prepacked constants: results of `once` instructions, kept for as long as the weights that they came from stay the
same.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

SAMPLES = 4
"""Elements of each weight that are compared at every call: `weight.data.mul_(2)` moves no version counter."""

_WORDS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}

LIMIT = 64
"""Sets of weights remembered by one plan; a plan shared by the layers of a model sees one set per layer."""


_VERSION = attrgetter("_version")
_VALUE = attrgetter("value")
_POINTER = torch.Tensor.data_ptr


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """`values`, made of one set of weights. `alive` is empty when one of these or its memory has died: another tensor may
    have its id, or other memory its address."""

    values: tuple[Any, ...]
    ids: tuple[int, ...]
    addresses: list[int]
    versions: list[int]
    sampled: list[Any]
    content: list[int]
    alive: list[bool]
    watchers: list[weakref.ref[Any]]

    def holds(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether these weights are those of `values`, lie where they lay, and are unchanged."""
        return (
            bool(self.alive)
            and self.ids == tuple(map(id, weights))
            and self.versions == list(map(_VERSION, weights))
            and self.addresses == list(map(_POINTER, weights))  # only then may the sampled elements be read
            and self.content == list(map(_VALUE, self.sampled))
        )


class OnceCache:
    """Calls `prepare(*weights)` when these weights are first seen, and again after one of them changed.

    A change is seen by the tensor's identity, its version counter (in-place ops, `load_state_dict`), its address
    (`weight.data = other`) and, for writes through `.data`, by a few of its elements: such a write is seen when it
    changes one of those, as a scaling or a copy of the whole does. Entries die with their weights, and with the memory that
    these lay in, so that a weight which is moved away and back (`weight.data = other`, twice) is seen even where the second
    allocation gets the address of the first.
    """

    def __init__(self, prepare: Callable[..., tuple[Any, ...]]) -> None:
        self._prepare = prepare
        self._entries: dict[tuple[int, ...], Prepared] = {}
        self._lock = threading.Lock()
        self.runs = 0

    def __call__(self, *weights: torch.Tensor) -> tuple[Any, ...]:
        key = tuple(map(id, weights))
        found = self._entries.get(key)
        # addresses first: only then may the sampled elements be read
        if found is not None and found.addresses == [w.data_ptr() for w in weights]:
            if found.versions == list(map(_VERSION, weights)) and found.content == list(map(_VALUE, found.sampled)):
                return found.values
        return self._run(key, weights).values

    def prepared(self, weights: Sequence[torch.Tensor]) -> Prepared:
        """What was made of these weights; of two calls the same object exactly if nothing has changed."""
        self(*weights)
        key = tuple(map(id, weights))
        return self._entries.get(key) or self._run(key, weights)  # another thread may have dropped it

    def _run(self, key: tuple[int, ...], weights: Sequence[torch.Tensor]) -> Prepared:
        with self._lock, torch.no_grad():
            self.runs += 1
            self._entries.pop(key, None)  # frees the stale copies before new ones are made
            addresses, versions = [w.data_ptr() for w in weights], [w._version for w in weights]
            # From `.data`, because a view keeps what it is a view of alive: no weight could ever be freed.
            values = self._prepare(*(w.data for w in weights))
            alive = [True]

            def forget(_: object, entries: dict[tuple[int, ...], Prepared] = self._entries) -> None:
                mine = entries.get(key)
                if mine is not None and mine.alive is alive:
                    entries.pop(key, None)
                alive.clear()

            while len(self._entries) >= LIMIT:
                self._entries.pop(next(iter(self._entries)))
            sampled = [word for w in weights for word in _samples(w)]
            content = [word.value for word in sampled]
            watchers = [weakref.ref(x, forget) for w in weights for x in (w, w.untyped_storage())]
            found = Prepared(values, key, addresses, versions, sampled, content, alive, watchers)
            self._entries[key] = found
            return found


def _samples(w: torch.Tensor) -> list[Any]:
    """A few elements of a dense CPU tensor, first and last among them, as objects that read memory when asked."""
    word = _WORDS.get(w.element_size())
    if word is None or w.device.type != "cpu" or not w.numel() or not w.data_ptr() or not _dense(w):
        return []
    last, start, step = w.numel() - 1, w.data_ptr(), w.element_size()
    places = {last * k // (SAMPLES - 1) for k in range(SAMPLES)}
    return [word.from_address(start + place * step) for place in sorted(places)]


def _dense(w: torch.Tensor) -> bool:
    """Whether the elements fill the memory behind `data_ptr` without gaps."""
    span = 1 + sum((n - 1) * s for n, s in zip(w.shape, w.stride(), strict=True))
    return span == w.numel()
