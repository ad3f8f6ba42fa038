"""Train in two processes with DistributedDataParallel: gradients are averaged, and each process compiles its own model.

    python examples/process_group.py

With `torchrun` instead, each rank's `main` calls `worker(int(os.environ["RANK"]), ...)`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PROCESSES = 2


def worker(rank: int, meeting: str) -> None:
    """Run one process on its share of the batch."""
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)  # equal weights everywhere
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)))
    fast = torch.compile(model, backend="fusewright")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(PROCESSES * 8, 16)[rank::PROCESSES]
    for _ in range(3):
        optimizer.zero_grad()
        fast(x).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
    # not by a collective: a thread of gloo's that still holds a tensor of Python's aborts a process that ends
    store.set(f"weights of {rank}", weights)
    assert all(store.get(f"weights of {r}") == weights for r in range(PROCESSES)), "the processes have different weights"
    if rank == 0:
        print(f"{PROCESSES} processes, equal weights after 3 steps")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (str(Path(folder) / "meeting"),), PROCESSES)


if __name__ == "__main__":
    main()
