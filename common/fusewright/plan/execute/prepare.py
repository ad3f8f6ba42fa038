"""Prepacked constants: results of `prepare`, kept as long as the weights that they were computed from do not change."""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import numpy
import torch

from fusewright import _torch_compat as compat
from fusewright import machine
from fusewright.errors import without_memory
from fusewright.interface import HOST
from fusewright.plan import native
from fusewright.storage import lazy

log = logging.getLogger("fusewright")

SAMPLES = 4
"""Elements of each weight that are compared at every call, because `weight.data.mul_(2)` does not bump the version counter."""

EVERY = 16
"""Calls between two closer checks. Each checks another weight, at PLACES of its words."""

PLACES = 1024

_WORDS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}

LIMIT = 64
"""Sets of weights remembered per plan; a plan shared by the layers of a model sees one set per layer."""


_VERSION = attrgetter("_version")
_VALUE = attrgetter("value")
_POINTER = torch.Tensor.data_ptr


class Samples:
    """Words of dense CPU tensors as first seen: a few of each tensor are compared at every call, and more of one tensor at
    every EVERY-th call.

    For the closer check a tensor is divided into PLACES pieces, and one word of each is compared. After EVERY calls per tensor,
    any write that covers two consecutive pieces has been detected; one to 1% of the elements is missed once in 30,000.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._words: list[Any] = []
        self._looks: list[tuple[Any, Any, bytes]] = []
        for w in filter(_readable, weights):
            word = _WORDS[min(w.element_size(), 8)]
            n = w.numel() * w.element_size() // ctypes.sizeof(word)
            memory = (word * n).from_address(w.data_ptr())
            step = ctypes.sizeof(word)
            few = {(n - 1) * k // (SAMPLES - 1) for k in range(SAMPLES)}
            self._words += [word.from_address(w.data_ptr() + place * step) for place in sorted(few)]
            array, places = numpy.frombuffer(memory, dtype=f"u{step}"), _places(n)  # type: ignore[call-overload]
            self._looks.append((array, places, array.take(places).tobytes()))
        self._same = _words(self._words)
        self._calls = itertools.count(1)  # atomic, for concurrent calls

    def unchanged(self) -> bool:
        """Whether the words checked by this call are unchanged. The memory must still be allocated."""
        if not self._same():
            return False
        look, rest = divmod(next(self._calls), EVERY)
        if rest or not self._looks:
            return True
        array, places, content = self._looks[look % len(self._looks)]
        return bool(array.take(places).tobytes() == content)


def _words(words: Sequence[Any]) -> Callable[[], bool]:
    """Return a function that tells whether ctypes integers still have their current values."""
    core = native.extension()
    if core is not None:
        unchanged: Callable[[], bool] = core.words([(ctypes.addressof(w), ctypes.sizeof(w)) for w in words])
        return unchanged
    content = list(map(_VALUE, words))
    return lambda: content == list(map(_VALUE, words))


def watch(
    arguments: Sequence[Any], places: Iterable[int] | None = None, moving: Iterable[int] = ()
) -> Callable[[Sequence[Any]], bool]:
    """Return a function that tells whether a later list or tuple of arguments has the same tensors at `places` (default: all),
    with the same addresses and versions, and tensors with the same addresses at `moving`. It keeps no reference to them."""
    held = list(range(len(arguments)) if places is None else places)
    core = native.extension()
    if core is not None:
        same: Callable[[Sequence[Any]], bool] = core.watch(arguments, held, list(moving))
        return same
    weights, others = picker(held), picker(list(moving))

    def seen(given: Sequence[Any]) -> tuple[Any, ...]:
        found = weights(given)
        addresses = map(_POINTER, (*found, *others(given)))
        return len(given), tuple(map(id, found)), list(map(_VERSION, found)), list(addresses)

    before = seen(arguments)
    return lambda given: len(given) == before[0] and seen(given) == before


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """`lambda args: tuple(args[k] for k in places)`, without a Python loop where possible."""
    return itemgetter(*places) if len(places) > 1 else lambda args: tuple(args[k] for k in places)


@functools.lru_cache(64)
def _places(n: int) -> Any:
    """A position in each of PLACES pieces of n words, irregularly spaced; all positions if there are fewer."""
    if n <= PLACES:
        return numpy.arange(n)
    pieces = numpy.arange(PLACES)
    return numpy.minimum(n - 1, ((pieces + (pieces * 0.6180339887498949) % 1.0) * (n / PLACES)).astype(numpy.int64))


def _readable(w: torch.Tensor) -> bool:
    """Whether a tensor's elements fill CPU memory behind `data_ptr` without gaps."""
    if w.device.type != HOST or w.layout is not torch.strided or lazy(w) or not w.data_ptr() or not w.numel():
        return False
    return 1 + sum((n - 1) * s for n, s in zip(w.shape, w.stride(), strict=True)) == w.numel()


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """`values`, computed from one set of weights. `alive` is emptied when memory of these weights is freed, whose address may
    then be reused, or `refresh` was called. `whole` holds copies of all bytes if these are checked."""

    values: tuple[Any, ...]
    addresses: list[int]
    same: Callable[[Sequence[torch.Tensor]], bool]
    samples: Samples
    alive: list[bool]
    watchers: list[weakref.ref[Any]]
    whole: list[torch.Tensor] | None = None

    def holds(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether these are the weights that `values` were computed from, at the same addresses and unchanged."""
        return bool(self.alive) and self.same(weights) and self.same_content(weights)

    def same_content(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether the weights, which are `same`, hold what they held, as far as that is checked."""
        return self.samples.unchanged() and (self.whole is None or self._same_bytes(weights))

    def _same_bytes(self, weights: Sequence[torch.Tensor]) -> bool:
        assert self.whole is not None
        changed = [w for w, was in zip(weights, self.whole, strict=True) if not torch.equal(_bytes(w), was)]
        for w in changed:
            log.warning(
                "fusewright: a weight of shape %s was written in a way that torch does not count (through .data or memory that it "
                "shares); without check='weights' call fusewright.refresh(model) after such writes", tuple(w.shape),
            )  # fmt: skip
        return not changed


def _bytes(w: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's content, to be compared bit by bit."""
    return w.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


_CACHES: weakref.WeakSet[PreparedCache] = weakref.WeakSet()


class PreparedCache:
    """Call `prepare(*weights)` when these weights are first seen, and again after one of them changed.

    A change is detected from the tensor's identity, its version counter (in-place ops, `load_state_dict`), its address
    (`weight.data = other`, `swap_tensors`) and, for writes that bump no counter (through `.data` or shared memory), by samples
    of its elements on CPUs (`Samples`). `whole` compares all bytes at every call.

    Entries die with the memory of their weights, so moving a weight away and back (`weight.data = other`, twice) is detected
    even if the second allocation reuses the first address. Nothing references the tensors themselves, not even weakly, because
    `torch.utils.swap_tensors` refuses tensors with weak references. So the id of a dead weight may be reused. If the new tensor
    lies elsewhere, its address differs. If it lies in the same memory, it holds the same values, unless somebody wrote there
    uncounted in between; to make that rare, each `prepare` drops entries for the same memory under other ids.
    """

    def __init__(self, prepare: Callable[..., tuple[Any, ...]]) -> None:
        self._prepare = prepare
        self.whole = False
        self._entries: dict[tuple[int, ...], Prepared] = {}
        self._last: list[Prepared] = []  # at most one
        self._captures: Callable[[], bool] | None = None
        self._lock = threading.Lock()
        self.runs = self.changes = 0
        _CACHES.add(self)

    def made_by(self, prepare: Callable[..., tuple[Any, ...]]) -> None:
        """Use another `prepare` of the same plan from now on: that of a first run checks the metadata of its results."""
        self._prepare = prepare

    def __call__(self, *weights: torch.Tensor) -> tuple[Any, ...]:
        return self.prepared(weights).values

    def prepared(self, weights: Sequence[torch.Tensor]) -> Prepared:
        """The results for these weights; two calls return the same object if and only if nothing has changed.

        While somebody else captures the device's work, they are made anew and not kept: nothing is computed until the capture is
        replayed, and it then follows its weights, as eager's does.
        """
        if self._captures is not None and self._captures():
            return self._once(weights)
        last = next(iter(self._last), None)
        if last is not None and last.holds(weights):
            return last
        key = tuple(map(id, weights))
        found = self._entries.get(key)
        if found is None or found is last or not found.holds(weights):
            found = self._run(key, weights)
        self._last[:] = [found] if self._entries.get(key) is found else []
        return found

    def forget(self, ids: frozenset[int] | None = None) -> None:
        """Drop the entries of tensors with these ids; all entries for None."""
        with self._lock:
            for key in [k for k in self._entries if ids is None or not ids.isdisjoint(k)]:
                self._drop(key)

    def _drop(self, key: tuple[int, ...]) -> None:
        dropped = self._entries.pop(key)
        dropped.alive.clear()
        _remove(dropped.alive, self._last)

    def _run(self, key: tuple[int, ...], weights: Sequence[torch.Tensor]) -> Prepared:
        self._captures = _capturing(weights)
        told = all(w.layout is torch.strided and not w.is_inference() for w in weights)  # nothing tells when others change
        if not told or (self._captures is not None and self._captures()):
            return self._once(weights)
        with self._lock, torch.no_grad():
            self.runs += 1
            addresses, same = [w.data_ptr() or without_memory(w) for w in weights], watch(weights)
            # free stale copies before making new ones
            stale = [k for k, e in self._entries.items() if k == key or e.addresses == addresses]
            for other in stale:
                self._drop(other)
            self.changes += bool(stale)
            # A view keeps its base's memory alive: results that are views of the weights would never let them be freed.
            values = self._prepare(*map(_unowned, weights))
            _wait_for(values)
            alive = [True]

            def forget(
                _: object, entries: dict[tuple[int, ...], Prepared] = self._entries, last: list[Prepared] = self._last
            ) -> None:
                mine = entries.get(key)
                if mine is not None and mine.alive is alive:
                    entries.pop(key, None)
                _remove(alive, last)
                alive.clear()

            while len(self._entries) >= LIMIT:
                self._drop(next(iter(self._entries)))
            watchers = [weakref.ref(w.untyped_storage(), forget) for w in weights]
            whole = [_bytes(w) for w in weights] if self.whole else None
            found = Prepared(values, addresses, same, Samples(weights), alive, watchers, whole)
            self._entries[key] = found
            return found


    def _once(self, weights: Sequence[torch.Tensor]) -> Prepared:
        """The results for one call, which are not kept."""
        with self._lock, torch.no_grad():
            self.runs += 1
            return Prepared(self._prepare(*weights), [], lambda _: False, Samples(()), [], [])


def _capturing(weights: Sequence[torch.Tensor]) -> Callable[[], bool] | None:
    """What tells whether work of the weights' device is being captured; None on the host."""
    device = next((w.device.type for w in weights if w.device.type != HOST), None)
    return machine.capturing(device) if device is not None else None


def _wait_for(values: Sequence[Any]) -> None:
    """Wait until values are computed: calls on other streams will read them at once."""
    for device in {v.device for v in values if isinstance(v, torch.Tensor) and v.device.type != HOST}:
        stream_of = getattr(getattr(torch, device.type, None), "current_stream", None)
        if stream_of is not None:
            stream_of(device).synchronize()


def _remove(alive: list[bool], last: list[Prepared]) -> None:
    """Empty `last` if it is the entry that `alive` belongs to, to free its constants."""
    if any(p.alive is alive for p in last):
        last.clear()


def _unowned(w: torch.Tensor) -> torch.Tensor:
    plain = w.device.type in ("cpu", "cuda") and not lazy(w) and type(w.data) is torch.Tensor
    return compat.unowned(w) if plain else w.data


def refresh(model: torch.nn.Module | None = None) -> None:
    """Discard everything that compiled code derived from the weights of `model` (None: of all models); the next call computes
    it again.

    Needed after writes that torch does not count: through `weight.data`, `weight.detach().numpy()`, or memory shared with
    others.
    """
    held = None if model is None else frozenset(map(id, itertools.chain(model.parameters(), model.buffers())))
    for cache in list(_CACHES):
        cache.forget(held)
