"""Two communicating processes: both finish, even if only one of them has to plan again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing

pytestmark = [
    pytest.mark.hardware("x86_onednn"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed processes"),
]

SECONDS = 480
"""The time limit for a pair of processes; a hang would last hours."""


class Block(torch.nn.Module):
    """A part of a transformer: a norm, and an MLP sharded over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(32), torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return result


def divided(model: torch.nn.Module) -> torch.nn.Module:
    """Make the model tensor parallel, by columns and then by rows: one all-reduce per block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {f"{k}.{name}": how() for k in range(2) for name, how in (("up", ColwiseParallel), ("down", RowwiseParallel))}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)  # type: ignore[arg-type]


def calls(rank: int, number: int = 5) -> Iterator[int]:
    """Yield call numbers; the ranks sleep before alternating calls, never before the same one."""
    for k in range(number):
        time.sleep(0.1 * ((k + rank) % 2))
        yield k


def inference(rank: int, options: dict[str, Any]) -> None:
    """Each call returns the result of a single process."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Block(), Block()).eval(), torch.randn(4, 32)
    with torch.no_grad():
        expected = model(x)
        fast = torch.compile(divided(model), backend="x86_onednn", options=options)
        for _ in calls(rank):
            torch.testing.assert_close(fast(x), expected)


def losses(
    rank: int, share: Callable[[torch.nn.Module], torch.nn.Module], options: dict[str, Any] | None, inside: bool = False,
    steps: int = 3,
) -> list[float]:  # fmt: skip
    """Losses of some steps, each process on its half of a batch. `inside`: compile the module inside the wrapper."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Block(), Block()), torch.randn(8, 32)[4 * rank : 4 * rank + 4]

    def compiled(m: torch.nn.Module) -> Any:
        return m if options is None else torch.compile(m, backend="x86_onednn", options=options)

    fn = share(compiled(model)) if inside else compiled(share(model))
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in calls(rank, steps):
        loss = fn(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def as_in_eager(
    rank: int, share: Callable[[torch.nn.Module], torch.nn.Module], options: dict[str, Any], inside: bool = False,
    steps: int = 3,
) -> None:  # fmt: skip
    """Losses decrease as in eager."""
    eager = losses(rank, share, None, inside, steps)
    torch.testing.assert_close(losses(rank, share, options, inside, steps), eager, rtol=1e-4, atol=1e-5)
    assert eager[0] > eager[-1]


def tensor_parallel(rank: int, options: dict[str, Any]) -> None:
    as_in_eager(rank, divided, options)


def data_parallel(rank: int, options: dict[str, Any]) -> None:
    """Buckets are so small that Dynamo splits the graph: gradients are reduced while the backward pass continues."""
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1000
    as_in_eager(rank, lambda m: DistributedDataParallel(m, bucket_cap_mb=0.01), options)
    as_in_eager(rank, DistributedDataParallel, options, inside=True)


def fully_sharded(rank: int, options: dict[str, Any]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def share(m: torch.nn.Module) -> torch.nn.Module:
        mesh = init_device_mesh("cpu", (2,))
        for part in m:  # type: ignore[attr-defined]
            fully_shard(part, mesh=mesh)
        return fully_shard(m, mesh=mesh)

    as_in_eager(rank, share, options)


def recorders(rank: int) -> list[Any]:
    """Give the backend recorders of pieces, of which the second rank's fail at some point, and return them as they are made."""
    from fusewright.plan.replay import obstacles, pieces, training
    from fusewright_onednn.backend import X86OneDnn
    from tests.unit.plan.replay.test_collectives import Device

    pieces.FEWEST = obstacles.FEWEST = training.FEWEST = 1
    made: list[Device] = []

    def recorder(self: X86OneDnn) -> Device:
        made.append(Device(failing=1 if rank else -1))
        return made[-1]

    X86OneDnn.recorder = recorder  # type: ignore[method-assign, assignment]
    return made


def reduced_between_pieces(rank: int, options: dict[str, Any]) -> None:
    """Each rank records or gives up by itself, and both make the same calls."""
    made = recorders(rank)
    inference(rank, options)
    assert (sum(d.replays for d in made) > 0) == (rank == 0)
    as_in_eager(rank, divided, options, steps=6)


def gathered_between_pieces(rank: int, options: dict[str, Any]) -> None:
    """The results of these collectives are not their operands."""
    made = recorders(rank)
    as_in_eager(rank, sequence_parallel, options, steps=6)
    assert (sum(d.replays for d in made) > 0) == (rank == 0)


def sequence_parallel(model: torch.nn.Module) -> torch.nn.Module:
    """Shard rows too: results are gathered before the product by columns, and scattered after the one by rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {"0": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0))}
    for k in range(2):
        plan[f"{k}.norm"] = SequenceParallel(sequence_dim=0)
        plan[f"{k}.up"] = ColwiseParallel(input_layouts=Shard(0))
        plan[f"{k}.down"] = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def repair_of_one(rank: int, options: dict[str, Any]) -> None:
    """Only the first rank traced a wrong dtype, which it detects in its first run."""
    from torch.distributed import _functional_collectives as collectives

    library = torch.library.Library("fusewright_processes", "DEF")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CPU")
    told = torch.bfloat16 if rank == 0 else torch.float32
    library.impl("doubled", lambda x: torch.empty_like(x, dtype=told), "Meta")

    def summed(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x, "sum", torch.distributed.group.WORLD)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.fusewright_processes.doubled(summed(x.exp() + 1))
        return summed((y.float() * 0.5).exp() * (rank + 1)).float() - 1

    x = torch.linspace(-1, 0, 12)
    with torch.no_grad():
        fast = torch.compile(f, backend="x86_onednn", options=options)
        for k in calls(rank):
            torch.testing.assert_close(fast(x * k), torch.exp((x * k).exp() * 2 + 2) * 3 - 1)
    library._destroy()


Work = Callable[[int, dict[str, Any]], None]


def _process(rank: int, works: Sequence[Work], folder: Path, errors: Queue[str]) -> None:
    torch.set_num_threads(1)
    for work in works:
        store = f"file://{folder}/{work.__name__}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        try:
            work(rank, {"cache": False, "fallback": "allow", "strict": True})
        except BaseException as e:
            errors.put(f"{work.__name__}, rank {rank}: {type(e).__name__}: {e}")
            raise
        torch.distributed.destroy_process_group()
        torch.compiler.reset()


GROUPS = {
    "one computation": [inference, repair_of_one],
    "replayed pieces": [reduced_between_pieces],
    "pieces that gather": [gathered_between_pieces],
    "wrappers of torch": [tensor_parallel, fully_sharded, data_parallel],
}
"""What a pair of processes does, one after the other: starting a pair takes longer than most of it."""
SLOW = "pieces that gather", "wrappers of torch"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in GROUPS])
def test_both_come_to_the_end(name: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    errors: Queue[str] = context.Queue()
    processes = [context.Process(target=_process, args=(k, GROUPS[name], tmp_path, errors), daemon=True) for k in range(2)]
    until = time.monotonic() + SECONDS
    try:
        for p in processes:
            p.start()
        while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes):
            assert time.monotonic() < until, "one waits for the other"
            time.sleep(0.05)
        assert [p.exitcode or 0 for p in processes] == [0, 0], errors.get(timeout=10)
    finally:
        for p in processes:
            p.kill()
