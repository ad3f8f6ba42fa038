"""A device includes its index: specs, texts, allocations, claims and generators distinguish `cuda:1` from `cuda:0`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright import _torch_compat as compat
from fusewright.graph.parser import parse
from fusewright.graph.printer import to_text
from fusewright.graph.spec import device_text, tensor_spec
from fusewright.graph.view import GraphIndex
from fusewright.interface import YES, Backend, KernelCode, OpView, TensorSpec, Unavailable, Verdict, Why
from fusewright.partition.partition import partition
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.execute.firstrun import MetadataMismatch, checked_first
from fusewright.plan.execute.opaque import mismatch
from fusewright.plan.ir import Launch, Ref

TEXT = """\
%0: f32[4]@cuda = input('x')
%1: f32[4]@cuda:1 = input('y')
%2: f32[4]@cuda:1 = exp(%1)
%3: f32[4]@cuda:1 = sin(%2)
%4: f32[4]@cuda = exp(%0)
return [%3, %4]
"""


two_devices = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="torch asks the driver for the second GPU; runs with none or two"
)


def spec(device: str) -> TensorSpec:
    return TensorSpec((4,), (1,), torch.float32, device)


@two_devices
def test_specs_keep_the_index() -> None:
    fakes = [compat.fake_tensor(compat.fake_mode(), (4,), (1,), torch.float32, d) for d in ("cpu", "cuda:0", "cuda:1")]
    assert [tensor_spec(f).device for f in fakes] == ["cpu", "cuda:0", "cuda:1"]
    assert device_text(torch.device("cpu:0")) == "cpu"


@two_devices
def test_the_text_of_a_graph_tells_devices_apart() -> None:
    graph = parse(TEXT)
    assert to_text(graph) == TEXT
    assert to_text(parse(TEXT.replace("cuda:1", "cuda"))) != TEXT


class Other:
    """Stands for a tensor on a GPU that this machine lacks."""

    def __new__(cls, device: str) -> Any:
        return compat.fake_tensor(compat.fake_mode(), (4,), (1,), torch.float32, device)


@two_devices
def test_a_tensor_on_another_gpu_is_not_what_was_traced() -> None:
    assert mismatch(Other("cuda:0"), spec("cuda:1")) == "is on cuda:0, expected cuda:1"
    assert not mismatch(Other("cuda:1"), spec("cuda:1")) and not mismatch(Other("cuda:1"), spec("cuda"))


def test_kernels_write_to_memory_of_their_device() -> None:
    launch = Launch("k", (Ref(0),), (1,))
    plan = Plan((0,), (Ref(1),), [launch], [], (), (), {0: spec("cuda:1"), 1: spec("cuda:1")}, kernels={"k": None})
    text = codegen.to_text(plan, {"k": KernelCode(lambda *_: None)})
    assert "empty_strided((4, ), (1, ), dtype=torch.float32, device='cuda:1')" in text


class Everything(Backend):
    name = "everything"
    device_type = "cuda"

    @classmethod
    def probe(cls) -> Unavailable:
        return Unavailable("stands for a GPU")

    def supports(self, op: OpView) -> Verdict:
        return YES


@two_devices
def test_kernels_are_made_for_one_device_of_a_graph_on_several() -> None:
    index = GraphIndex(parse(TEXT), frozenset(), "infer")
    found = partition(Everything(), index, {})
    assert [[op.op for op in r.ops] for r in found.regions] == [["exp", "sin"]]
    (refused,) = [v for v in found.verdicts.values() if not v]
    assert refused.why is Why.DEVICE and "cuda:1" in refused.detail


def test_an_abandoned_first_run_puts_back_the_generators_of_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {"cuda:0": 0, "cuda:1": 0}  # the offset of each generator
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: drawn[device])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: drawn.update({device: state}))

    def untrue(args: list[Any]) -> Any:
        drawn["cuda:1"] += 5
        torch.rand(3)
        raise MetadataMismatch(1, torch.zeros(2), "has another dtype")

    def again(args: list[Any]) -> Any:
        drawn["cuda:1"] += 5
        return torch.rand(3)

    torch.manual_seed(0)
    got = checked_first(untrue, again, lambda u: again, lambda: None, devices={"cpu", "cuda:0", "cuda:1", "meta"})([])
    torch.manual_seed(0)
    assert torch.equal(got, torch.rand(3)) and drawn == {"cuda:0": 0, "cuda:1": 5}
