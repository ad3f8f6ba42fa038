"""The arena: buffers that live at the same time never overlap, and memory is reused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusewright.plan.arena import Buffer, layout

ALIGN = 64


@st.composite
def buffers(draw: st.DrawFn) -> list[Buffer]:
    n = draw(st.integers(0, 20))
    found = []
    for i in range(n):
        start = draw(st.integers(0, 12))
        size = draw(st.one_of(st.integers(0, 300), st.just(64)))
        found.append(Buffer(i, size, start, start + draw(st.integers(0, 6))))
    return found


def _live_at_once(a: Buffer, b: Buffer) -> bool:
    return a.start <= b.end and b.start <= a.end


@given(buffers())
def test_live_buffers_do_not_overlap(made: list[Buffer]) -> None:
    offsets, total = layout(made, ALIGN)
    assert set(offsets) == {b.id for b in made}
    for b in made:
        assert offsets[b.id] % ALIGN == 0
        assert 0 <= offsets[b.id] and offsets[b.id] + b.bytes <= total
        for c in made:
            if b.id < c.id and _live_at_once(b, c):
                apart = offsets[b.id] + b.bytes <= offsets[c.id] or offsets[c.id] + c.bytes <= offsets[b.id]
                assert apart, (b, c)


@given(buffers())
def test_the_arena_is_between_the_peak_and_the_sum(made: list[Buffer]) -> None:
    _, total = layout(made, ALIGN)
    aligned = {b.id: -(-b.bytes // ALIGN) * ALIGN for b in made}
    peak = max((sum(aligned[b.id] for b in made if b.start <= t <= b.end) for t in range(20)), default=0)
    assert peak <= total <= sum(aligned.values())


def test_a_chain_needs_two_buffers() -> None:
    _, total = layout([Buffer(i, 1000, i, i + 1) for i in range(10)], ALIGN)
    assert total == 2 * 1024


def test_nothing_needs_nothing() -> None:
    assert layout([], ALIGN) == ({}, 0)
