"""Copies made for a recording preserve strides and aliasing for any layout."""

from __future__ import annotations

import pytest
import torch

from fusewright.plan.replay.copies import CopiesIn, copier_out

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


def test_results_keep_strides_and_what_they_share() -> None:
    alone, base = torch.randn(3, 4).t(), torch.randn(5, 5)
    for group in ([alone], [alone, base], [base, base.t(), base[1:3]], [alone, torch.randn(9)[::2]], []):
        copies = copier_out(group)()
        for made, t in zip(copies, group, strict=True):
            assert torch.equal(made, t) and made.stride() == t.stride() and made.data_ptr() != t.data_ptr()
    whole, turned, part = copier_out([base, base.t(), base[1:3]])()
    whole.zero_()
    assert not turned.any() and not part.any() and base.any()


def test_results_are_copied_as_they_are_when_asked() -> None:
    t = torch.zeros(3)
    copy = copier_out([t])
    t.fill_(1)
    (first,) = copy()
    t.fill_(2)
    assert first.tolist() == [1, 1, 1] and copy()[0].tolist() == [2, 2, 2]
