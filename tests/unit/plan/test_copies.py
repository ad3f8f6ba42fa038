"""Copies made for a recording preserve strides and aliasing for any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from fusewright.plan.replay.copies import MOST, CopiesIn, copier_out, record_with_copies

LAYOUTS = {
    "dense": torch.randn(4, 6),
    "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "gaps": torch.randn(4, 9)[:, 1:7],
    "overlap": torch.randn(6).expand(4, 6),
    "windows": torch.randn(9).as_strided((4, 3), (2, 1)),
    "empty": torch.randn(0, 3),
    "number": torch.tensor(2.0),
    "integers": torch.arange(12).view(3, 4).t(),
}


@pytest.mark.parametrize("x", LAYOUTS.values(), ids=LAYOUTS)
def test_one_input(x: torch.Tensor) -> None:
    copy_in = CopiesIn(["other", x], [1])
    other, buffer = copy_in.given(["other", x])
    assert other == "other" and buffer.stride() == x.stride()
    assert x.numel() == 0 or buffer.data_ptr() != x.data_ptr()
    again = torch.arange(5, 205).to(x.dtype).as_strided(x.shape, x.stride())
    copy_in(["other", again])
    assert torch.equal(buffer, again)


def test_several_inputs_of_mixed_types() -> None:
    first = list(LAYOUTS.values())
    copy_in = CopiesIn(first, range(len(first)))
    given = [torch.arange(5, 205).to(t.dtype).as_strided(t.shape, t.stride()) for t in first]
    copy_in(given)
    for buffer, wanted in zip(copy_in.given(first), given, strict=True):
        assert torch.equal(buffer, wanted)


def test_each_type_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch copies a list of mixed types one tensor at a time."""
    asked: list[set[torch.dtype]] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda targets, _: asked.append({t.dtype for t in targets}))
    args = [torch.ones(3, dtype=kind) for kind in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)]
    CopiesIn(args, range(4))(args)
    assert asked == [{torch.float32}, {torch.bfloat16}]


def test_types_that_torch_lists_on_no_gpu_are_copied_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds of attention are of type uint64, for which `_foreach_copy_` is not implemented there."""
    monkeypatch.setattr(torch, "_foreach_copy_", lambda targets, _: pytest.fail("copied as a list"))
    seeds = [torch.tensor(k, dtype=torch.uint64) for k in (3, 5)]
    copy_in = CopiesIn(seeds, range(2))
    copy_in(seeds[::-1])
    assert [int(x) for x in copy_in.given(seeds)] == [5, 3]


def test_results_keep_strides_and_what_they_share() -> None:
    alone, base = torch.randn(3, 4).t(), torch.randn(5, 5)
    for group in ([alone], [alone, base], [base, base.t(), base[1:3]], [alone, torch.randn(9)[::2]], []):
        copies = copier_out(group)()
        for made, t in zip(copies, group, strict=True):
            assert torch.equal(made, t) and made.stride() == t.stride() and made.data_ptr() != t.data_ptr()
    whole, turned, part = copier_out([base, base.t(), base[1:3]])()
    whole.zero_()
    assert not turned.any() and not part.any() and base.any()


def test_results_that_are_negated_or_conjugated_lazily_still_are() -> None:
    y = torch.randn(3, 4, dtype=torch.complex64)
    for group in ([y.conj()], [y, y.conj()], [y.conj().imag], [y, y.real, y.conj().imag, y.conj()[1:]]):
        for made, t in zip(copier_out(group)(), group, strict=True):
            assert torch.equal(made, t) and (made.is_conj(), made.is_neg()) == (t.is_conj(), t.is_neg())
            assert not made._is_view()


def test_results_are_copied_as_they_are_when_asked() -> None:
    t = torch.zeros(3)
    copy = copier_out([t])
    t.fill_(1)
    (first,) = copy()
    t.fill_(2)
    assert first.tolist() == [1, 1, 1] and copy()[0].tolist() == [2, 2, 2]


class Copying:
    """A recorder of a function that runs at each replay; `asked` are the numbers of inputs and results that it copied itself."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def stream(self, device: str) -> int:
        return 0

    def seconds(self, run: Callable[[], Any]) -> float:
        return 1.0

    def record(self, run: Callable[[], Any], warm: bool, shared: bool = True) -> tuple[Any, Callable[[], None]]:
        results = run()

        def again() -> None:
            for old, new in zip(results, run(), strict=True):
                old.copy_(new)

        return results, again

    def record_with_copies(
        self, run: Callable[[], Any], warm: bool, shared: bool, inputs: Mapping[int, torch.Tensor],
        returned: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> tuple[Any, Callable[[list[Any]], Any]]:  # fmt: skip
        results, again = self.record(run, warm)
        out = returned(results)
        self.asked.append((len(inputs), len(out)))

        def call(args: list[Any]) -> list[torch.Tensor]:
            for k, buffer in inputs.items():
                buffer.copy_(args[k])
            again()
            return [t.clone() for t in out]

        return results, call


@pytest.mark.parametrize(
    "x, selected, draws, asked",
    [
        (torch.ones(3, 4), lambda a, b: [a, b], False, [(1, 2)]),
        (torch.ones(3, 4), lambda a, b: [a, a[1:]], False, [(1, 0)]),  # they share memory, so torch copies them
        (torch.ones(3, 4), lambda a, b: [a, b], True, []),  # torch sets the state of random numbers
        (torch.ones(4).expand(3, 4), lambda a, b: [a], False, []),  # not dense
    ],
    ids=["itself", "aliases", "random", "gaps"],
)
def test_a_recorder_copies_what_is_dense_and_apart(x: torch.Tensor, selected: Any, draws: bool, asked: list[Any]) -> None:
    recorder, copy_in = Copying(), CopiesIn([x], [0])
    (given,) = copy_in.given([x])
    _, call = record_with_copies(
        recorder, lambda: (given + 1, given * 2), copy_in, lambda r: selected(*r), warm=True, shared=True, draws=draws
    )
    for value in (1.0, 5.0):
        results = call([torch.full_like(x, value) if x.is_contiguous() else torch.full((4,), value).expand(3, 4)])
        assert results is not None
        for made, wanted in zip(results, selected(torch.full((3, 4), value + 1), torch.full((3, 4), value * 2)), strict=True):
            assert torch.equal(made, wanted)
    assert recorder.asked == asked


def test_what_does_not_lie_in_memory_as_it_reads_is_left_to_torch() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    for given, returned, asked in ((x.conj(), lambda r: r, []), (x, lambda r: [t.conj() for t in r], [(1, 0)])):
        recorder, copy_in = Copying(), CopiesIn([given], [0])
        (buffer,) = copy_in.given([given])
        _, call = record_with_copies(recorder, lambda: [buffer * 2j], copy_in, returned, warm=True, shared=True)  # noqa: B023
        (made,) = call([given + 1]) or ()
        assert torch.equal(made, returned([(given + 1) * 2j])[0]) and recorder.asked == asked


def test_many_inputs_are_left_to_torch() -> None:
    recorder, args = Copying(), [torch.ones(2) for _ in range(MOST + 1)]
    copy_in = CopiesIn(args, range(len(args)))
    given = copy_in.given(args)
    _, call = record_with_copies(recorder, lambda: [sum(given)], copy_in, lambda r: r, warm=True, shared=True)
    results = call([t * 2 for t in args])
    assert results is not None and results[0].tolist() == [2 * len(args)] * 2 and not recorder.asked
