"""Every test kernel compiled to machine code for every target, without a GPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright import registry
from fusewright.interface import Device, KernelCode
from fusewright.toolkit.backend import fused
from fusewright.toolkit.ir import Kernel, structural_hash
from fusewright_cpu import llvm_loader
from fusewright_triton import runtime, target
from fusewright_triton.backend import NvidiaTriton
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
    assert b.listing.count("div.rn.f32") == 1, "the reciprocal of a row's sum, which is never tiny"


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
    real = workers.submitted
    monkeypatch.setattr(workers, "submitted", lambda r: built.append(len(r)) or real(r))
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
    parent = workers.Parent(t.compiler)
    worker = parent.worker()
    try:
        assert worker.build(request) == workers._here(request).result()
        broken = {**request, "text": request["text"].replace("tl.program_id(0)", "tl.program_id(7)")}
        with pytest.raises(workers.BuildError, match=r"program_id|axis"):
            worker.build(broken)
        parent.close()
        assert worker.alive() and worker.build(request), "it does not end with its parent"
        late = parent.worker()
        with pytest.raises(workers.Ended):
            late.build(request)
    finally:
        worker.close()


def test_a_kernel_that_was_asked_for_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it cannot be built: then the next request builds it again."""
    lib, k = Library(TARGETS["sm_90"]), kernels.add_gelu(1000)
    orders = {structural_hash(k): Wanted(k, choose(k, lib.target), Variant())}
    asked: list[Future[workers.Answer]] = []
    monkeypatch.setattr(workers, "submitted", lambda r: [asked.append(Future()) or asked[-1] for _ in r])
    for _ in range(2):
        lib.ask(orders)
    assert len(asked) == 1
    asked[0].set_exception(workers.BuildError("no memory"))
    with pytest.raises(workers.BuildError, match="no memory"):
        lib.get(orders)
    lib.ask(orders)
    (order,) = orders.values()
    asked[1].set_result(workers._here(binaries.request(order.source(), order.variant, lib.target)).result())
    monkeypatch.setattr(workers, "_here", pytest.fail)
    lib.get(orders)
    lib.ask(orders)
    assert len(asked) == 2 and [b.binaries[0].code[:4] for b in lib.built.values()] == [b"\x7fELF"]


@pytest.mark.parametrize("failing", [False, True])
def test_equal_texts_are_built_once(failing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size is a kernel with a name and a grid of its own, but without masks the texts are equal."""
    t, texts = TARGETS["sm_90"], []

    def submitted(requests: Any) -> list[Future[workers.Answer]]:
        texts.extend(r["text"] for r in requests)
        answers = [Future[workers.Answer]() for _ in requests]
        for answer, r in zip(answers, requests, strict=True):
            if failing:
                answer.set_exception(workers.BuildError("no memory"))
            else:
                answer.set_result([{"name": n, "code": "", "shared": 0, "threads": 128} for n in r["functions"]])
        return answers

    monkeypatch.setattr(workers, "submitted", submitted)
    ks = [kernels.add_gelu(n) for n in (1 << 20, 1 << 21, 1000)]
    wanted = [Wanted(k, choose(k, t), first_variant(k)) for k in ks]
    first, second, third = (w.source() for w in wanted)
    assert first.functions[0].programs(()) * 2 == second.functions[0].programs(()), "the grid is not in the text"
    code: dict[str, Any] = {}
    if failing:
        for n in (2, 4):
            found = binaries.ask(wanted, t, code)
            assert all(f.exception() for f in found) and len(texts) == n, "what failed is tried again"
        return
    built = [f.result() for f in binaries.ask(wanted, t, code)]
    assert texts == [first.text, third.text]
    assert built[1].binaries is built[0].binaries and built[2].binaries is not built[0].binaries
    assert [b.source.functions[0].name for b in built] == [s.functions[0].name for s in (first, second, third)]
    binaries.ask(wanted[1:], t, code)
    assert len(texts) == 2


def test_kernels_of_long_text_are_started_first(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def submit(request: Any) -> Future[Any]:
        started.append(request["text"])
        answer: Future[Any] = Future()
        answer.set_result([request["text"]])
        return answer

    monkeypatch.setattr(workers, "pool", lambda: SimpleNamespace(submit=submit, parent=object()))
    monkeypatch.setattr(workers, "processors", lambda: 4)
    answers = workers.submitted([{"text": "a"}, {"text": "abc"}, {"text": "ab"}])
    assert [answer.result() for answer in answers] == [["a"], ["abc"], ["ab"]]
    assert started == ["abc", "ab", "a"]


@torch.no_grad()
@pytest.mark.parametrize("simulated", [False, True])
def test_kernels_are_asked_for_before_the_plan_is_made(simulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, set[str]]] = []

    def load(self: NvidiaTriton, wanted: Mapping[str, Kernel]) -> Mapping[str, KernelCode]:
        events.append(("load", set(wanted)))
        return llvm_loader(wanted)

    monkeypatch.setattr(registry, "create", lambda name, _: NvidiaTriton(Device("cuda", "sm_90", simulated=simulated)))
    monkeypatch.setattr(fused, "elsewhere", lambda spec, device: None)  # the tensors are on the CPU
    monkeypatch.setattr(NvidiaTriton, "load", load)
    monkeypatch.setattr(NvidiaTriton, "recorder", lambda self: None)
    monkeypatch.setattr(workers, "processors", lambda: 4)
    monkeypatch.setattr(runtime, "ask_for_kernels", lambda wanted, target: events.append(("ask", set(wanted))))
    torch.compiler.reset()
    x = torch.randn(5, 64)
    fast = torch.compile(lambda x: torch.softmax(x.exp() + 1, -1), backend="nvidia_triton", options={"cache": False})
    torch.testing.assert_close(fast(x), torch.softmax(x.exp() + 1, -1))
    *asked, loaded = events
    assert loaded[0] == "load" and loaded[1] and asked == ([] if simulated else [("ask", loaded[1])])
