"""`ci/gpu/generate.py` without a GPU: what counts as right, and what the table says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ci.gpu import generate


@pytest.mark.parametrize(
    ("tokens", "verdict"),
    [([2, 0, 1], "right"), ([1, 2, 2], "right"), ([2, 1, 1], "wrong: token 1")],
    ids=["eager's", "a tie, and what follows from it", "another"],
)
def test_the_first_token_that_differs_must_be_as_good(tokens: list[int], verdict: str, tmp_path: Path) -> None:
    logits = torch.tensor([[0.0, 3.9, 4.0], [4.0, 1.0, 0.0], [0.0, 4.0, 0.0]])
    torch.save({"tokens": logits.argmax(-1), "logits": logits}, tmp_path / "llama.eager.pt")
    torch.save({"tokens": torch.tensor(tokens)}, tmp_path / "llama.ours.pt")
    assert generate._agreed("llama", "ours", tmp_path).startswith(verdict)


def test_a_row_says_what_was_not_timed_and_why() -> None:
    line = generate._line(
        {"family": "gpt_oss", "eager_ms": 31.0, "ours_ms": 5.0, "over_eager": 6.2, "outcome": "right", "plans": "2 of 3",
         "words": {"reduce-overhead": "hung"}}
    )  # fmt: skip
    assert line.split() == ["gpt_oss", "31.00", "-", "5.00", "-,", "6.20x", "right;", "2", "of", "3;", "reduce-overhead:", "hung"]


def test_a_family_that_is_unknown_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        generate.main(["--families", "llama,nosuch"])
    assert "no family: nosuch; known are llama" in capsys.readouterr().err
