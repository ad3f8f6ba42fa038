"""Dependency graphs: topological order and transitive closure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


def topological(waits: Sequence[Iterable[int]]) -> list[int]:
    """Topologically sort the indices of `waits`, where `waits[k]` names what `k` waits for (once each); otherwise keep their
    order. ValueError if there is a cycle."""
    releases: list[list[int]] = [[] for _ in waits]
    left = [0] * len(waits)
    for k, needs in enumerate(waits):
        for j in needs:
            releases[j].append(k)
            left[k] += 1
    ready = [k for k, n in enumerate(left) if n == 0]  # ascending, so already a heap
    ordered: list[int] = []
    while ready:
        k = heapq.heappop(ready)
        ordered.append(k)
        for j in releases[k]:
            left[j] -= 1
            if left[j] == 0:
                heapq.heappush(ready, j)
    if len(ordered) != len(waits):
        raise ValueError(f"{len(waits) - len(ordered)} of {len(waits)} wait for each other")
    return ordered


def closure(mask: int, needs: Sequence[int]) -> int:
    """Everything that the members of the bit set `mask` wait for, themselves included; `needs[k]` is what `k` waits for
    directly."""
    done = 0
    while todo := mask & ~done:
        low = (todo & -todo).bit_length() - 1
        done |= 1 << low
        mask |= needs[low]
    return done
