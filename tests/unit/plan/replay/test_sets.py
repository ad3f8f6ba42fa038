"""The sets of arguments that a plan of training knows: the nearest is found by lookups of addresses."""

from __future__ import annotations

import random
import sys
from typing import Any

from fusewright.plan.replay.sets import ArgumentSet, ArgumentSets


def by_comparing(known: list[ArgumentSet], given: ArgumentSet, sizes: list[int]) -> tuple[int, bool]:
    """The bytes that moved from the nearest set, and whether another address identifies the layer."""

    def moved(s: ArgumentSet) -> set[int]:
        return {n for n, (old, new) in enumerate(zip(s.addresses, given.addresses, strict=True)) if old != new}

    costs = {s: sum(sizes[n] for n in moved(s)) for s in known}
    least = min(costs.values())
    return least, any(not moved(s) <= moved(n) for n in known if costs[n] == least for s in known)


def test_the_nearest_set_has_the_fewest_bytes_that_moved() -> None:
    chosen = random.Random(0)
    for _ in range(200):
        places = chosen.randint(1, 5)
        sizes = [2**n for n in range(places)]  # so that no two sets of places are as large
        sets, made = ArgumentSets(), []
        for _ in range(chosen.randint(1, 8)):
            s = ArgumentSet("stream", tuple(chosen.randint(1, 3) for _ in range(places)))
            if sets.get(s.key) is None:
                made.append(s)
            sets.add(s)
        while len(made) > 4:
            sets.drop(made.pop(chosen.randrange(len(made))))
        given = ArgumentSet("stream", tuple(chosen.randint(1, 3) for _ in range(places)))
        found = sets.nearest(given, sizes)
        assert found is not None
        _, moved, identified = found
        assert (sum(sizes[n] for n in moved), identified) == by_comparing(made, given, sizes)
        assert sets.nearest(ArgumentSet("another stream", given.addresses), sizes) is None


def test_addresses_left_out_no_longer_tell_sets_apart() -> None:
    sets = ArgumentSets()
    for last, addresses in enumerate([(1, 5), (1, 6), (2, 5)]):
        sets.add(ArgumentSet("stream", addresses, last))
    sets.leave_out([1])
    assert sorted((s.addresses, s.last) for s in sets) == [((1,), 1), ((2,), 2)]
    assert sets.oldest().addresses == (1,)


def test_a_search_does_not_look_at_every_set() -> None:
    """FSDP2's gathered weights may be elsewhere in each step, and a search was as long as the launches of a layer's backward."""

    def steps(count: int) -> int:
        sets = ArgumentSets()
        for k in range(count):
            sets.add(ArgumentSet("stream", (1, 2, *range(100 * k + 100, 100 * k + 130))))
        given, events = ArgumentSet("stream", (1, 2, *range(10, 40))), [0]

        def count_one(*_: Any) -> None:
            events[0] += 1

        sys.setprofile(count_one)
        try:
            sets.nearest(given, [8] * 32)
        finally:
            sys.setprofile(None)
        return events[0]

    assert steps(64) == steps(4)
