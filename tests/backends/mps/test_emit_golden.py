"""The Metal text of representative kernels, word for word, and what was looked for in it."""

from __future__ import annotations

import re

import pytest

from fusewright_mps.emitter import PRELUDE, emit
from tests import golden
from tests.backends.mps.representative import BY_HAND, KERNELS


@pytest.mark.parametrize("name", KERNELS)
def test_golden(name: str, goldens: golden.Goldens) -> None:
    goldens.check(f"metal_{name}", emit(KERNELS[name]).text)


@pytest.mark.parametrize("name", BY_HAND)
def test_golden_by_hand(name: str, goldens: golden.Goldens) -> None:
    goldens.check(f"metal_{name}", BY_HAND[name].text())


def test_every_text_has_its_case() -> None:
    assert golden.names("metal") == sorted(f"metal_{name}" for name in (*KERNELS, *BY_HAND))


@pytest.mark.parametrize("name", KERNELS)
def test_no_element_takes_a_division_to_find_its_place(name: str) -> None:
    """All axes of these kernels are directions of the dispatch, or loops."""
    body = emit(KERNELS[name]).text.partition("kernel void")[2]
    assert not re.search(r"\[[^\]]*[/%][^\]]*\]|\+ \([^)]*[/%]", body)


def test_torch_gives_metals_compiler_ascii() -> None:
    assert PRELUDE.isascii()
    assert all(emit(k).text.isascii() for k in KERNELS.values())
