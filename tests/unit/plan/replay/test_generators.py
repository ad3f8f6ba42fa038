"""Plans that draw from generators that they are given, as AOTAutograd gives them to checkpoints on GPUs. Here the host has such
generators, and a fake recorder computes again at each replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import partitioners
from torch._functorch._aot_autograd import utils
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusewright.interface import TensorSpec
from fusewright.ops import states
from fusewright.plan import serial, verify
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.execute.firstrun import MetadataMismatch, checked_first
from fusewright.plan.ir import Call, Instruction, Ref
from fusewright.plan.replay import training
from fusewright.plan.replay.inference import replayed
from fusewright.plan.replay.pieces import Pieces
from fusewright.plan.replay.training import Handover, Retained, retained
from fusewright.report import recording
from tests.generators import Drawing, Generator, installed
from tests.unit.plan.replay.test_training import Forgetful, compiled

TYPES = "_GRAPHSAFE_RNG_DEVICE_TYPES"
SPEC = TensorSpec((8, 4), (4, 1), torch.float32)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> Generator:
    monkeypatch.setattr(training, "FEWEST", 3)
    torch.manual_seed(0)
    return installed(monkeypatch)


def dropping(*more: Instruction, out: int = 5) -> Plan:
    """y = dropout(relu(x) + 1) drawn from the second input; the caller owns the result."""
    calls = [
        Call("aten::relu.default", (Ref(1),), (3,)),
        Call("aten::add.Tensor", (Ref(3), 1.0), (4,)),
        Call("aten::native_dropout.default", (Ref(4), 0.5, True), (5, 6), packed=True, generator=Ref(2)),
        Call("aten::neg.default", (Ref(5),), (7,)),
    ]
    specs = {**dict.fromkeys((1, 3, 4, 5, 7), SPEC), 6: TensorSpec((8, 4), (4, 1), torch.bool)}
    return Plan((1, 2), (Ref(out),), [*calls, *more], [], (), (), specs, trains=True)


def trained(plan: Plan, recorder: Any, said: list[str] | None = None) -> Callable[[list[Any]], Any]:
    run = codegen.load(plan)
    tell = (said if said is not None else []).append
    return retained(plan, {}, run, recorder, tell, Handover(copies=1, fixed=frozenset({0})))


def test_each_replay_draws_from_where_its_generator_is(own: Generator) -> None:
    plan, recorder = dropping(), Drawing()
    run, plain, x = trained(plan, recorder), codegen.load(plan), torch.randn(8, 4)
    ours, theirs, before = Generator.seeded(7), Generator.seeded(7), torch.get_rng_state()
    for k in range(5):
        if k == 3:  # as AOTAutograd does where forwards and backwards come in another order
            for g in (ours, theirs):
                g.set_state(Generator.seeded(3).get_state())
        assert torch.equal(run([x, ours])[0], plain([x, theirs])[0])
        assert torch.equal(ours.get_state(), theirs.get_state())
    assert (recorder.recorded, recorder.replays) == (1, 5)
    assert torch.equal(torch.get_rng_state(), before), "the device's own generator has moved"


def test_another_generator_means_another_recording(own: Generator) -> None:
    plan, recorder = dropping(), Drawing()
    run, plain, x = trained(plan, recorder), codegen.load(plan), torch.randn(8, 4)
    made = [(Generator.seeded(k), Generator.seeded(k)) for k in range(2)]
    for k in (0, 1, 0, 1, 0, 1):
        ours, theirs = made[k]
        assert torch.equal(run([x, ours])[0], plain([x, theirs])[0])
        assert torch.equal(ours.get_state(), theirs.get_state())
    assert [g for g, in recorder.given] == [made[0][0], made[1][0]]
    assert recorder.replays == 5, "arguments that came once are not recorded"


@pytest.mark.parametrize("kind", ["inference", "a recorder that knows no generators", "too short"])
def test_the_plain_plan_runs_where_generators_are_not_safe(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, said = dropping(), list[str]()
    if kind == "inference":
        run = replayed(plan, {}, codegen.load(plan), Drawing(), said.append)
    else:
        monkeypatch.setattr(training, "FEWEST", 4 if kind == "too short" else 3)
        run = trained(plan, Drawing() if kind == "too short" else Forgetful(), said)
    assert not isinstance(run, Retained)
    assert said[0].startswith("not replayed: too few" if kind == "too short" else "not replayed: it draws from a generator")


def test_an_operator_that_raises_leaves_the_devices_own_generator(own: Generator) -> None:
    given, before = Generator.seeded(1), torch.get_rng_state()

    def raises() -> None:
        torch.rand(())
        raise RuntimeError

    with pytest.raises(RuntimeError):
        states.draw(given, raises)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(given.get_state(), Generator.seeded(1).get_state())


def test_a_first_run_that_starts_over_draws_the_same_again(own: Generator) -> None:
    """Otherwise forward's generators would be ahead of backward's from then on."""
    plain = codegen.load(dropping())

    def wrong(args: list[Any]) -> Any:
        plain(args)
        raise MetadataMismatch(5, torch.zeros(()), "differs")

    x, ours, theirs = torch.randn(8, 4), Generator.seeded(2), Generator.seeded(2)
    run = checked_first(wrong, plain, lambda found: plain, lambda: None)
    for _ in range(2):
        assert torch.equal(run([x, ours])[0], plain([x, theirs])[0])
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_pieces_between_collectives_draw_from_their_generators(own: Generator) -> None:
    class Pooling(Drawing):
        def pool(self) -> bool:
            return False

    summed = Call("_c10d_functional::all_reduce.default", (Ref(7), "sum", "0"), (8,))
    recorder, plain = Pooling(), codegen.load(dropping(out=7))
    pieces = Pieces(dropping(summed, out=7), {})
    assert [piece.recorded for piece, _ in pieces._pieces] == [True, False]
    pieces._pieces = pieces._pieces[:1]  # there is no process group
    x, ours, theirs = torch.randn(8, 4), Generator.seeded(5), Generator.seeded(5)
    (kept,), again = pieces.record(recorder, [x, ours], recorder.pool())
    assert torch.equal(ours.get_state(), theirs.get_state()), "recording draws"
    for _ in range(3):
        again()
        assert torch.equal(kept, plain([x, theirs])[0])
    assert recorder.given == [[ours]]


def test_plans_with_generators_are_data() -> None:
    plan = dropping()
    read = serial.from_data(serial.to_data(plan), lambda name: None)
    assert read.instructions == plan.instructions and not list(verify.find_problems(read))


@pytest.mark.parametrize(
    "plan, problem",
    [
        (replace(dropping(), inputs=(2,), attributes={1: ("x", None)}, specs={2: SPEC}), "is no generator"),
        (dropping(Call("aten::neg.default", (Ref(2),), (8,))), "reads the generator"),
    ],
)
def test_generators_are_inputs_that_nothing_else_reads(plan: Plan, problem: str) -> None:
    assert any(problem in line for line in verify.find_problems(plan))


# ---------------------------------------------------------------- checkpoints


class Dropped(nn.Module):
    """Shows in the gradients of its biases what backward drops: the last dropout's mask is where the results are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def body(self, x: Tensor) -> Tensor:
        return F.dropout(self.last(F.dropout(self.first(x).tanh(), 0.3)), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.body, x, use_reentrant=False)
        return result


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make AOTAutograd's partitioner treat the host as it treats GPUs."""
    if not hasattr(utils, TYPES):
        pytest.skip("this torch gives generators to CUDA devices alone; runs with torch 2.13")
    monkeypatch.setattr(utils, TYPES, {"cpu"})
    name, device = "apply_graphsafe_rng_functionalization", torch.device("cpu", 0)
    apply = getattr(partitioners, name)
    monkeypatch.setattr(partitioners, name, lambda *a: apply(*a[:4], device, *a[5:]))


def run_steps(recorder: Any, orders: list[tuple[int, ...]]) -> tuple[list[list[Tensor]], Tensor, list[str]]:
    """Forwards and then the backwards in the given order, again and again: the gradients of each order, the state of the host's
    generator after all, and what is reported."""
    torch.manual_seed(1)
    model, found = Dropped(), list[list[Tensor]]()
    x = torch.randn(8, 16)
    with recording() as reports:
        fast = compiled(model, recorder)
        for order in orders:
            results = [fast(x + k) for k in range(len(order))]
            model.zero_grad(set_to_none=True)
            for k in order:
                before = model.last.bias.grad.clone() if model.last.bias.grad is not None else torch.zeros(16)
                results[k].sum().backward()
                torch.testing.assert_close(model.last.bias.grad - before, (results[k] != 0).sum(0) * 2.0)
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            del results
    return found, torch.get_rng_state(), [r.replay.partition(",")[0] for r in reports]


@pytest.mark.usefixtures("checkpoints")
def test_checkpoints_with_dropout_are_replayed_and_drop_in_backward_what_forward_dropped() -> None:
    orders: list[tuple[int, ...]] = [(0,)] * 5 + [(0, 1), (1, 0), (0,), (0,), (2, 0, 1), (0,), (0,)]
    recorder = Drawing()
    ours, state, told = run_steps(recorder, orders)
    assert told == ["replayed", "replayed"]
    assert recorder.recorded == 2 and recorder.replays > 16
    assert [len(given) for given in recorder.given] == [2, 2]
    plain, plain_state, _ = run_steps(None, orders)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert torch.equal(state, plain_state)
