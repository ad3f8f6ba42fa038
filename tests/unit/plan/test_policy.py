"""The host assumes about a device only what its backend declares; by default nothing."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusewright.cache.key import key_of
from fusewright.config import Options
from fusewright.interface import Device, DevicePolicy, KernelCode, OpView, Splits, TensorSpec, Value
from fusewright.partition.cost import work
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.ir import Launch, Ref
from fusewright.plan.memory import place
from fusewright.reference import Interp
from fusewright.toolkit.backend.fused import FusedBackend
from fusewright.toolkit.fuse.fuser import fuse
from fusewright_cpu import llvm_loader
from fusewright_cpu.onednn.choices import FITTED
from fusewright_cpu.policy import CPU, LOOPS
from tests.fragments import Context, Sketch
from tests.plugin_example.fusewright_example.backend import Example

SPEC = TensorSpec((20,), (1,), torch.float32)


def chain(policy: DevicePolicy) -> Plan:
    """A plan with two kernel results, of which the second is returned."""
    launches = [Launch("k", (Ref(1),), (2,)), Launch("k", (Ref(1), Ref(2)), (3,))]
    return Plan((1,), (Ref(3),), [*launches], [], (), (), dict.fromkeys((1, 2, 3), SPEC), kernels={"k": 0}, policy=policy)


def test_without_an_arena_every_result_is_a_tensor_of_its_own() -> None:
    placement = place(chain(DevicePolicy()))
    assert placement.offset == {} and placement.arena_bytes == 0


@pytest.mark.parametrize("align", [64, 256])
def test_an_arena_is_laid_out_by_the_devices_alignment(align: int) -> None:
    placement = place(chain(DevicePolicy(arena=align)))
    assert placement.offset == {2: 0} and placement.arena_bytes == -(-80 // align) * align
    assert placement.device == "cpu"


@pytest.fixture
def given() -> Iterator[list[int]]:
    """Record the number of workers that a native kernel receives, call by call."""
    yield []


@pytest.mark.parametrize(("policy", "workers"), [(DevicePolicy(), 1), (DevicePolicy(workers=lambda: 7), 7)])
def test_a_native_kernel_is_given_the_devices_workers(policy: DevicePolicy, workers: int, given: list[int]) -> None:
    entry = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(lambda block, n: given.append(n) or 0)
    address = ctypes.cast(entry, ctypes.c_void_p).value
    plan, kernels = chain(policy), {"k": KernelCode(lambda *_: None, address)}
    run, text = codegen.load(plan, kernels), codegen.to_text(plan, kernels)
    run([torch.zeros(20)])
    assert given == [workers, workers]
    assert ("count_workers" in text) == (policy.workers is not None)


def test_launches_that_are_not_native_ask_nobody_for_workers() -> None:
    text = codegen.to_text(chain(DevicePolicy(workers=lambda: 7)), {"k": KernelCode(lambda *_: None)})
    assert "workers" not in text


@pytest.mark.parametrize(("splits", "kernels"), [(Splits(), 2), (Splits(long_row=1 << 20), 1), (Splits(few_points=0), 1)])
def test_the_device_says_which_rows_run_in_parts(splits: Splits, kernels: int) -> None:
    g = Sketch()
    y = g.op("sum", g.input(torch.randn(2, 1 << 16)), [1], False)
    fragment = fuse(g.region([y]), Context({}, Device("cpu", "test")), policy=DevicePolicy(splits=splits))
    assert len(fragment.instructions) == kernels


def test_estimates_are_of_the_device() -> None:
    op = OpView(1, "exp", "aten::exp", ("self",), (Value(0, SPEC),), (Value(1, SPEC),))
    slow = work(op).seconds(DevicePolicy(bytes_per_second=16.0, call_seconds=1.0))
    assert slow == 1 + 160 / 16


def test_kernels_for_the_host_bring_the_hosts_policy() -> None:
    """A backend outside the tree that uses them declares no policy, and keeps its threads and its arena."""

    class Outside(FusedBackend):
        name, device_type, loader = "outside", "cpu", llvm_loader

        @classmethod
        def probe(cls) -> Device:
            return Device("cpu", "any")

    policy = Outside().policy()
    assert policy.arena and policy.count_workers() == torch.get_num_threads() and policy.eager
    assert Example().policy() == DevicePolicy()


@pytest.mark.parametrize("source", [*(row.source for row in CPU.eager), LOOPS.source, FITTED.source])
def test_what_was_fitted_on_one_machine_says_on_which(source: str) -> None:
    machine, day, *_ = source.split(", ")
    assert machine and re.fullmatch(r"20\d\d-\d\d-\d\d", day)
    found = re.findall(r"docs/\S+", source)
    assert found and all((Path(__file__).parents[3] / page).is_file() for page in found)


def test_a_backend_whose_code_has_no_threads_keeps_its_plans_when_they_change() -> None:
    gm = torch.fx.symbolic_trace(torch.nn.ReLU())

    def key(backend: FusedBackend | Interp) -> str:
        return key_of(backend, Options(), gm, "infer", frozenset(), 0).name

    class Threaded(Interp):
        def policy(self) -> DevicePolicy:
            return DevicePolicy(workers=torch.get_num_threads)

    before, one, all_ = torch.get_num_threads(), key(Interp()), key(Threaded())
    try:
        torch.set_num_threads(before + 1)
        assert key(Interp()) == one and key(Threaded()) != all_
    finally:
        torch.set_num_threads(before)
