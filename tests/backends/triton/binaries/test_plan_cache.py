"""Plans with Triton kernels on disk: a loaded plan is right, builds nothing and needs no Triton; invalid entries are rebuilt."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.cache import place, seal, store
from fusewright.interface import Device
from fusewright.plan.replay import training
from fusewright.stages import rounds
from fusewright.toolkit.ir import structural_hash
from fusewright_triton import backend, target
from fusewright_triton.backend import NvidiaTriton, RocmTriton, TritonLoader
from fusewright_triton.build import workers
from fusewright_triton.build.binaries import Variant
from fusewright_triton.run import archive
from fusewright_triton.runtime import library
from tests.backends.triton.kernels import add_gelu, column_sum, softmax
from tests.backends.triton.run.test_launch import Recorder, recorder  # noqa: F401 (a fixture)
from tests.unit.plan.replay.test_training import Forgetful

H100 = target.NVIDIA["sm_90"]
KERNELS = {structural_hash(k): k for k in (add_gelu(), softmax(), column_sum(4096, 70))}
SIMULATED: dict[str, Any] = {"simulate": True, "fallback": "allow"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return kernels as machine code for an H100, in their form on disk."""
    library.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        loader = TritonLoader(H100)
        loader(KERNELS)
        data = loader.pack(KERNELS)
    workers.pool().close()
    assert data is not None
    return data


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "plans"))


# ---------------------------------------------------------------- machine code

OTHER_PROCESS = """
import sys
import torch
from fusewright.interface import Device
from fusewright_triton.run import launch
from fusewright_triton import target
from fusewright_triton.build import workers
from fusewright_triton.backend import NvidiaTriton, TritonLoader
from tests.backends.triton.run.test_launch import Recorder
from types import SimpleNamespace

def no_build(*_):
    raise AssertionError("something is built")

workers.Parent.__init__ = workers._here = no_build
driver = Recorder()
driver.load = lambda code, name, shared: print(name, code[:4], len(code)) or 1
launch.driver = lambda kind: driver
launch.errors = lambda: SimpleNamespace(address=0, check=lambda: None)
torch.cuda.current_device = lambda: -1
torch.cuda.current_stream = lambda *_: SimpleNamespace(cuda_stream=7)
codes = TritonLoader(target.NVIDIA["sm_90"]).unpack(open(sys.argv[1], "rb").read())
for h, code in sorted(codes.items()):
    if sys.argv[2] == h:
        code.call([torch.zeros(8, 1000), torch.empty(8, 1000)])
print(len(codes), "kernels,", len(driver.launches), "launches")
assert "triton" not in sys.modules
print(NvidiaTriton(Device("cuda", "sm_90", target.NVIDIA["sm_90"].all_features, "13.0")).fingerprint())
"""


def test_another_process_launches_what_is_stored_without_triton(packed: bytes, tmp_path: Path) -> None:
    (tmp_path / "code").write_bytes(packed)
    wanted = next(h for h, k in KERNELS.items() if k.name == softmax().name)
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "code"), wanted],
        capture_output=True, text=True, cwd=Path(__file__).parents[4], env={**os.environ, "PYTHONHASHSEED": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"softmax_{wanted[:8]} b'\\x7fELF'" in done.stdout
    assert "3 kernels, 1 launches" in done.stdout
    device = Device("cuda", "sm_90", H100.all_features, "13.0")
    assert NvidiaTriton(device).fingerprint() in done.stdout, "sets have another order there"


def test_a_variant_that_is_not_stored_is_built_when_it_is_needed(
    packed: bytes, recorder: Recorder, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    library.cache_clear()
    built: list[Variant] = []
    from fusewright_triton import runtime

    def ask(orders: Any, t: target.Target, code: Any) -> Any:
        built.extend(o.variant for o in orders)
        stored = archive.unpack(packed, t)
        found = [stored.built[key, how, Variant()] for key, how, _ in stored.built if stored.kernels[key].name == "add_gelu"]
        return [SimpleNamespace(result=lambda b=b: b) for b in found]

    monkeypatch.setattr(runtime, "ask", ask)
    monkeypatch.setattr(Recorder, "load", lambda self, code, name, shared: 1)
    codes = TritonLoader(H100).unpack(packed)
    run = next(codes[h].call for h, k in KERNELS.items() if k.name == "add_gelu")
    data = [torch.zeros(2**16, dtype=torch.bfloat16) for _ in range(3)]
    run(data)
    assert built == []
    run([data[0][1:], *data[1:]])
    assert built == [Variant(aligned=False)]


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data.replace(b'"version":4', b'"version":3'),
        lambda data: data.replace(b'"sm_90"', b'"sm_80"'),
        lambda data: data.replace(b'"configs":{', b'"confixs":{'),
    ],
)
def test_damaged_and_foreign_bytes_are_refused(packed: bytes, harm: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        TritonLoader(H100).unpack(harm(packed))


def test_code_of_another_emitter_is_refused(packed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusewright_triton.emit import emitter

    monkeypatch.setattr(emitter, "HEADER", emitter.HEADER + "# another version\n")
    with pytest.raises(ValueError, match="writes another source for"):
        TritonLoader(H100).unpack(packed)


def test_a_kernel_without_its_code_is_refused(packed: bytes) -> None:
    stored = archive.unpack(packed, H100)
    first, *others = stored.built
    fewer = archive.Stored(stored.kernels, stored.configs, {k: stored.built[k] for k in others})
    with pytest.raises(ValueError, match=f"no code for {stored.kernels[first[0]].name}"):
        TritonLoader(H100).unpack(archive.pack(H100, fewer))


def test_what_is_packed_comes_back(packed: bytes) -> None:
    again = archive.unpack(packed, H100)
    assert archive.pack(H100, again) == packed
    assert {h: k.name for h, k in again.kernels.items()} == {h: k.name for h, k in KERNELS.items()}


def test_the_fingerprint_tells_devices_and_versions_apart() -> None:
    import triton

    real, simulated = (NvidiaTriton(Device("cuda", "sm_90", simulated=s)).fingerprint() for s in (False, True))
    assert real != simulated and f"triton {triton.__version__}" in real
    assert RocmTriton(Device("cuda", "gfx942")).fingerprint() != RocmTriton(Device("cuda", "gfx950")).fingerprint()


# ---------------------------------------------------------------- whole plans, simulated


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.nn.functional.gelu(self.layer(x)) + x)


def compiled(model: Any, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend="rocm_triton", options={**SIMULATED, **options})


@pytest.fixture
def model() -> Small:
    return Small().eval()


@pytest.fixture
def no_stages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function; after it is called, lowering anything fails the test."""
    return lambda: monkeypatch.setattr(rounds, "STAGES", (("lower", lambda c: pytest.fail("it is lowered anew")),))


@torch.no_grad()
def test_a_stored_plan_gives_what_it_gave(model: Small, no_stages: Any) -> None:
    x = torch.randn(4, 16)
    first = compiled(model)(x)
    assert len(store.entries()) == 1
    no_stages()
    again = compiled(model)
    assert torch.equal(again(x), first)
    y = torch.randn(4, 16)
    torch.testing.assert_close(again(y), model(y))


@torch.no_grad()
def test_another_target_or_option_is_another_plan(model: Small) -> None:
    x = torch.randn(4, 16)
    for options in ({}, {"target": "gfx1100"}, {"graphs": False}):
        compiled(model, **options)(x)
    assert len(store.entries()) == 3


@torch.no_grad()
@pytest.mark.parametrize("what", ["code", "file"])
def test_a_damaged_entry_is_compiled_anew(model: Small, what: str, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 16)
    first = compiled(model)(x)
    (entry,) = store.entries()
    folder, file = place.cache(), entry.name + store.SUFFIX
    assert folder is not None
    if what == "file":
        folder.write(file, folder.read(file)[:-3])
    else:
        found = store.open_entry(folder, entry.name)
        at = len(found.code)
        body = bytes(seal.unseal(entry.name, folder.read(file)))
        folder.write(file, seal.seal(entry.name, body[:-at] + b"\x02" + found.code[1:]))
    with caplog.at_level(logging.WARNING, "fusewright"):
        assert torch.equal(compiled(model)(x), first)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "fusewright"]
    assert "cannot be used" in said and ("it was changed" in said) == (what == "file")
    (entry,) = store.entries()
    assert archive.unpack(store.open_entry(folder, entry.name).code, target.AMD["gfx942"]).kernels


def test_training_from_disk_is_right_and_replayed(no_stages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call is not recorded, since recordings of training do not warm up; the next one is."""
    device = Forgetful()
    device.device_type = "cpu"
    monkeypatch.setattr(backend.TritonBackend, "recorder", lambda self: device)
    monkeypatch.setattr(training, "FEWEST", 3)
    x, model = torch.randn(8, 16), torch.nn.Sequential(Small(), Small())

    def steps(fn: Any) -> list[torch.Tensor]:
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            fn(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = steps(model)
    torch.testing.assert_close(steps(compiled(model)), wanted)
    assert len(store.entries()) == 2 and device.recorded == 2
    no_stages()
    torch.testing.assert_close(steps(compiled(model)), wanted)
    assert device.recorded == 4
