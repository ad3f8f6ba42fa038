"""The exact Metal text of representative kernels, and properties of it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ci.mps import kernels
from fusewright_mps.emitter import PRELUDE, Variant, emit
from tests import golden
from tests.backends.mps.representative import BY_HAND, KERNELS


@pytest.mark.parametrize("name", KERNELS)
def test_golden(name: str, goldens: golden.Goldens) -> None:
    goldens.check(f"metal_{name}", emit(KERNELS[name]).text)


@pytest.mark.parametrize("name", BY_HAND)
def test_golden_by_hand(name: str, goldens: golden.Goldens) -> None:
    goldens.check(f"metal_{name}", BY_HAND[name].source(Variant()).text)


def test_every_text_has_its_case() -> None:
    assert golden.names("metal") == sorted(f"metal_{name}" for name in (*KERNELS, *BY_HAND))


@pytest.mark.parametrize("name", KERNELS)
def test_no_element_takes_a_division_to_find_its_place(name: str) -> None:
    """All axes of these kernels are dispatch dimensions or loops."""
    body = emit(KERNELS[name]).text.partition("kernel void")[2]
    assert not re.search(r"\[[^\]]*[/%][^\]]*\]|\+ \([^)]*[/%]", body)


def test_no_step_of_a_kernel_by_hand_finds_its_place_by_division() -> None:
    """Strides and parts are computed before the loop; only the group of a step remains."""
    loops = {"gemv_int4": "for (int k = ", "decode": "for (int j = first"}
    inner = {name: BY_HAND[name].text().partition(start)[2] for name, start in loops.items()}
    assert all(inner.values())
    found = {name: re.findall(r"\w+ [/%] \w+", text) for name, text in inner.items()}
    assert found == {"gemv_int4": ["k / group"], "decode": []}


def test_torch_gives_metals_compiler_ascii() -> None:
    assert PRELUDE.isascii()
    assert all(emit(k).text.isascii() for k in KERNELS.values())


# ---------------------------------------------------------------- `ci.mps.kernels`, which compiles all of them


def test_a_warning_is_told_with_its_function() -> None:
    right, wrong = emit(KERNELS["add_gelu"]), emit(KERNELS["transpose"])
    wrong = replace(wrong, text=wrong.text.replace("{\n", "{\n    const int idle = 0;\n", 1))
    ((name, said),) = kernels.warned([right, wrong])
    assert name == wrong.dispatches[0].entry and "unused variable" in said and "idle" in said


def test_each_variant_of_a_kernel_is_compiled() -> None:
    found = {s.variant for s in kernels.sources(KERNELS["add_gelu"])}
    assert {(v.aligned, v.wide) for v in found} == {(True, False), (False, False), (True, True), (False, True)}
    assert {s.variant.aligned for s in kernels.sources(BY_HAND["gemv_int4"])} == {True, False}
