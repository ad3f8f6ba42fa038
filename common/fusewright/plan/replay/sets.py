"""The sets of arguments that a plan of training has seen, found by all addresses or by some of them.

FSDP2 may give every layer other addresses in each step, and then each call is a miss: a search costs a lookup for each address,
and does not compare the sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, gt
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright.plan.replay.copies import Call


@dataclass(eq=False)
class Recording:
    """`give` makes the results that are handed out. `storages` hold memory that nobody else uses while each has as many references
    as `counts` tells."""

    call: Call
    give: Sequence[Callable[[], torch.Tensor]]
    storages: Sequence[Any]
    counts: Sequence[int]
    patience: int
    uses: int = 0

    def __post_init__(self) -> None:
        self._ids = [s._cdata for s in self.storages]

    def held(self) -> bool:
        """Whether somebody still holds results of the last replay."""
        return any(map(gt, map(compat.storage_uses, self._ids), self.counts))


@dataclass(eq=False)
class ArgumentSet:
    """Arguments that come together: a stream and the addresses of arguments read in place. They came `times` times, last in the
    call of number `last`; `moves` is the number of earlier sets of the same layer."""

    stream: Hashable
    addresses: tuple[int, ...]
    last: int = 0
    times: int = 0
    recording: Recording | None = None
    moves: int = 0

    @property
    def key(self) -> tuple[Hashable, ...]:
        return self.stream, *self.addresses

    def each(self) -> Iterator[tuple[Hashable, int, int]]:
        """Each address with its place."""
        return zip(repeat(self.stream), range(len(self.addresses)), self.addresses, strict=False)


class ArgumentSets:
    """Every address of every set is in an index."""

    def __init__(self) -> None:
        self._sets: dict[tuple[Hashable, ...], ArgumentSet] = {}
        self._sharing: dict[tuple[Hashable, int, int], list[ArgumentSet]] = {}
        self._streams: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._sets)

    def __iter__(self) -> Iterator[ArgumentSet]:
        return iter(self._sets.values())

    def get(self, key: tuple[Hashable, ...]) -> ArgumentSet | None:
        return self._sets.get(key)

    def add(self, s: ArgumentSet) -> None:
        """Add a set, unless it is known."""
        if s.key not in self._sets:
            self._sets[s.key] = s
            self._streams[s.stream] += 1
            for each in s.each():
                self._sharing.setdefault(each, []).append(s)

    def drop(self, s: ArgumentSet) -> None:
        del self._sets[s.key]
        self._streams[s.stream] -= 1
        for each in s.each():
            sharing = self._sharing[each]
            sharing.remove(s)
            if not sharing:
                del self._sharing[each]

    def oldest(self) -> ArgumentSet:
        return min(self, key=attrgetter("last"))

    def nearest(self, given: ArgumentSet, sizes: Sequence[int]) -> tuple[ArgumentSet, list[int], bool] | None:
        """The set of the same stream from which the arguments that moved have the fewest bytes, the places of these, and whether
        another address is not shared by all sets, so that it identifies the layer."""
        known = self._streams[given.stream]
        if not known:
            return None
        found = [self._sharing.get(each, ()) for each in given.each()]
        same: dict[ArgumentSet, int] = {}
        for size, sharing in zip(sizes, found, strict=True):
            if len(sharing) < known:  # what all share tells nothing
                for s in sharing:
                    same[s] = same.get(s, 0) + size
        nearest = max(same, key=same.__getitem__) if same else next(s for s in self if s.stream == given.stream)
        moved = [n for n, (old, new) in enumerate(zip(nearest.addresses, given.addresses, strict=True)) if old != new]
        return nearest, moved, bool(same)

    def leave_out(self, places: Sequence[int]) -> None:
        """Forget these addresses of every set, and all recordings."""
        sets = list(self)
        self.clear()
        for s in sets:
            s.addresses, s.recording = tuple(a for n, a in enumerate(s.addresses) if n not in places), None
        for s in {s.key: s for s in sets}.values():
            self.add(s)

    def clear(self) -> None:
        for held in (self._sets, self._sharing, self._streams):
            held.clear()
