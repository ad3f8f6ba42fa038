"""Every test kernel compiled to machine code for every target, without a GPU."""

from __future__ import annotations

import dataclasses
import re

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

from fusewright.toolkit.ir import Kernel, structural_hash
from fusewright_triton import target
from fusewright_triton.build import binaries, workers
from fusewright_triton.build.binaries import Binary, Built, Variant, Wanted
from fusewright_triton.build.resources import over_limits, resources
from fusewright_triton.emit.schedule import choose
from fusewright_triton.runtime import Library, first_variant
from tests.backends.triton import kernels

TARGETS = {
    **{a: target.NVIDIA[a] for a in ("sm_80", "sm_90")},
    **{a: target.AMD[a] for a in ("gfx90a", "gfx942", "gfx950", "gfx1100")},
}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Use an empty Triton cache, which cannot hide build failures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        workers.pool().close()
        yield
        workers.pool().close()


def build_one(kernel: Kernel, arch: str) -> Built:
    t = TARGETS[arch]
    return binaries.build([Wanted(kernel, choose(kernel, t), first_variant(kernel))], t)[0]


def build(arch: str) -> list[Built]:
    t = TARGETS[arch]
    return binaries.build([Wanted(k, choose(k, t), first_variant(k)) for k in kernels.suite()], t)


@pytest.mark.parametrize("arch", TARGETS)
def test_every_kernel_builds_within_the_limits_of(arch: str) -> None:
    t = TARGETS[arch]
    for built in build(arch):
        for b in built.binaries:
            assert b.code[:4] == b"\x7fELF", b.name
            assert not over_limits(b, t), b.name
            used = resources(b, t)
            assert used.registers and not used.scratch, b.name
            if t.triton == "hip":
                check_amd(b, t)
            else:
                assert f".target {arch}" in b.listing, b.name


def check_amd(b: Binary, t: target.Target) -> None:
    """Check wave size and spills in the code object's metadata."""

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", b.listing)
        assert found is not None, f"{b.name}: no {name}"
        return int(found[1])

    assert field("wavefront_size") == t.lanes
    assert field("vgpr_spill_count") == 0, b.name
    assert field("sgpr_spill_count") == 0, b.name


def test_divisions_have_no_slow_path() -> None:
    """Exponentials of a softmax with ALiBi are tiny: correctly rounded divisions took three times as long as memory."""
    (b,) = build_one(kernels.softmax(), "sm_90").binaries
    assert "div.full.f32" in b.listing and "div.rn" not in b.listing


def test_what_exceeds_a_target_is_named() -> None:
    h100 = TARGETS["sm_90"]
    (b,) = build_one(kernels.softmax(), "sm_90").binaries
    big = dataclasses.replace(b, threads=2048, shared=1 << 20)
    assert over_limits(big, h100)[:2] == [
        "2048 threads in a block, sm_90 has 1024",
        f"{1 << 20} bytes of shared memory, sm_90 has {227 * 1024}",
    ]
    with pytest.raises(ValueError, match="does not say its group_segment_fixed_size"):
        resources(dataclasses.replace(b, listing=""), TARGETS["gfx942"])


def test_equal_kernels_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    real = binaries.build_all
    monkeypatch.setattr(binaries, "build_all", lambda r: built.append(len(r)) or real(r))
    lib = Library(TARGETS["sm_90"])
    for name in ("first", "second"):
        k = kernels.add_gelu(1000)
        lib.get({structural_hash(k): Wanted(k, choose(k, lib.target), Variant())})
        assert name  # the same kernel under two names of the caller
    assert built == [1, 0]


def test_a_worker_answers_what_this_process_would() -> None:
    t = TARGETS["sm_90"]
    wanted = Wanted(kernels.softmax(), choose(kernels.softmax(), t), Variant())
    request = binaries.request(wanted.source(), wanted.variant, t)
    worker = workers.Worker()
    try:
        assert worker.build(request) == workers._here(request)
        broken = {**request, "text": request["text"].replace("tl.program_id(0)", "tl.program_id(7)")}
        with pytest.raises(workers.BuildError, match=r"program_id|axis"):
            worker.build(broken)
    finally:
        worker.close()
