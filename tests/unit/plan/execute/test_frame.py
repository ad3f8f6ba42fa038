"""Memory owned by running calls of a plan."""

from __future__ import annotations

from fusewright.plan.execute.frame import KEPT, Frame, Frames


def test_calls_at_once_get_a_frame_each_and_few_wait_for_the_next() -> None:
    made: list[Frame] = []

    def make() -> Frame:
        made.append(Frame(64, "", {}, {}))
        return made[-1]

    frames = Frames(make)
    taken = [frames.take() for _ in range(3 * KEPT)]
    assert len(set(map(id, taken))) == 3 * KEPT
    for frame in taken:
        frames.give_back(frame)
    again = [frames.take() for _ in range(KEPT)]
    assert len(made) == 3 * KEPT and set(map(id, again)) <= set(map(id, taken))
    frames.take()
    assert len(made) == 3 * KEPT + 1  # the others were freed
