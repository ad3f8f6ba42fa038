"""Seeds of attention's dropout are on the host, or on the device in a recording: each reader gets them where it reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.interface import TensorSpec
from fusewright.plan import seeds
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.execute.firstrun import Check, MetadataMismatch
from fusewright.plan.execute.shadow import Eager
from fusewright.plan.ir import Call, Ref
from fusewright.plan.replay.copies import CopiesIn
from fusewright.plan.replay.obstacles import obstacle

NAME = "fusewright_tests::_efficient_attention_backward"


@pytest.fixture(autouse=True)
def attention() -> Iterator[None]:
    """A gradient with a seed, of the schema of torch's, which runs on a CPU."""
    library = torch.library.Library("fusewright_tests", "FRAGMENT")
    library.define("_efficient_attention_backward(Tensor x, Tensor philox_seed, float dropout_p) -> Tensor")
    library.impl("_efficient_attention_backward", lambda x, seed, p: x * seed, "CompositeExplicitAutograd")
    yield
    library._destroy()


def plan(target: str, args: tuple[Any, ...], outs: int = 1, device: str = "cpu") -> Plan:
    given = tuple(a.id for a in args if isinstance(a, Ref))
    made = tuple(range(100, 100 + outs))
    specs = {v: TensorSpec((), (), torch.int64, device) for v in (*given, *made)}
    return Plan(given, tuple(map(Ref, made)), [Call(target, args, made)], [], (), (), specs)


@pytest.mark.parametrize(
    "target, args, outs, found",
    [
        ("aten::_scaled_dot_product_efficient_attention", (*map(Ref, range(4)), True, 0.1), 4, {102, 103}),
        ("aten::_efficient_attention_forward", (*map(Ref, range(4)), None, None, None, None, 0.1, 0), 6, {102, 103}),
        ("aten::_scaled_dot_product_efficient_attention_backward", (*map(Ref, range(9)), 0.1), 4, {7, 8}),
        ("aten::_scaled_dot_product_efficient_attention_backward", (*map(Ref, range(9)), 0.0), 4, set()),
        ("aten::_scaled_dot_product_flash_attention", (*map(Ref, range(3)), 0.1), 9, set()),
    ],
    ids=["forward", "with sequences", "backward", "nothing dropped", "another attention"],
)
def test_what_is_a_seed(target: str, args: tuple[Any, ...], outs: int, found: set[int]) -> None:
    assert seeds.seeds(plan(target, args, outs)) == found


@pytest.mark.parametrize("kind, captured, moved", [("cpu", False, False), ("cuda", False, True), ("cuda", True, False)])
def test_a_seed_goes_to_the_host_unless_its_reader_is_captured(
    kind: str, captured: bool, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seed:
        device = torch.device(kind)

        def to(self, device: str) -> str:
            return f"on {device}"

    monkeypatch.setattr(seeds, "capturing", lambda device: lambda: captured)
    assert (seeds.on_host(Seed()) == "on cpu") == moved  # type: ignore[arg-type]


def test_plans_and_eager_bring_seeds_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (codegen, seeds):
        monkeypatch.setattr(module, "on_host", lambda seed: seed + 1)
    x, seed = torch.tensor(2), torch.tensor(3)
    run = codegen.load(plan(NAME, (Ref(0), Ref(1), 0.5)))
    assert [int(y) for y in run([x, seed])] == [8]
    traced = make_fx(lambda x, seed: torch.ops.fusewright_tests._efficient_attention_backward(x, seed, 0.5))(x, seed)
    assert int(Eager(traced).run([x, seed])) == 8
    assert Eager(traced)._with_copies([x, seed]) == [x, seed + 1], "so they are when eager is measured"


def test_a_first_run_takes_seeds_from_anywhere() -> None:
    check = Check(plan(NAME, (Ref(0), Ref(1), 0.5), device="cuda"))
    check({1: torch.tensor(3)})
    with pytest.raises(MetadataMismatch, match="is on cpu, expected cuda"):
        check({0: torch.tensor(2)})


def test_a_recording_copies_seeds_from_anywhere_to_its_device() -> None:
    x, seed = torch.tensor(2), torch.tensor(3)
    copy_in = CopiesIn([x, seed], [0, 1], {1: "meta"})
    assert [str(t.device) for t in copy_in.given([x, seed])] == ["cpu", "meta"]
    assert not copy_in.direct, "a device's graph takes addresses of its own memory"
    copy_in([torch.tensor(5), seed.to("meta")])
    copy_in([torch.tensor(6), seed])
    assert int(copy_in.buffers[0]) == 6


def test_seeds_are_no_obstacle() -> None:
    args = (*map(Ref, range(9)), 0.1)
    found = plan("aten::_scaled_dot_product_efficient_attention_backward", args, 4, "cuda")
    found.instructions *= 3
    assert obstacle(found, "cuda", training=True) is None
