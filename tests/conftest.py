"""Shared by all tests: a private cache, a fair share of the cores, and skips that name what is missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from fusewright import machine, registry, report
from fusewright.interface import Unavailable
from tests.golden import Goldens

hypothesis.settings.register_profile("fusewright", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("fusewright")

ACCEPTED = "accepted"
"""The report property for goldens rewritten by `--accept`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="rewrite the expected texts in tests/golden that differ")


def pytest_configure(config: pytest.Config) -> None:
    # Workers that each use all cores block one another in OpenMP's spin loops.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = max(1, machine.cores() // workers)
    torch.set_num_threads(min(share, int(os.environ.get("OMP_NUM_THREADS", str(share)).partition(",")[0])))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for kind in terminalreporter.stats.values() for r in kind if getattr(r, "when", "") == "call"]
    for path in (value for r in reports for name, value in r.user_properties if name == ACCEPTED):
        terminalreporter.write_line(f"accepted: {path}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Results are independent of which tests ran before. `torch.manual_seed` also stores the stack for GPUs that are not there.
    (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(0)
    if guards := sys.modules.get("torch._dynamo.guards"):
        # Dynamo times the guards of each graph for its log, and first evicts the CPU's caches: 24 ms, longer than many tests.
        guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
    for mark in item.iter_markers("hardware"):
        device = registry.info(mark.args[0]).device
        if isinstance(device, Unavailable):
            pytest.skip(f"{mark.args[0]}: {device.reason}; runs where: {device.fix}")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep tests from reading or writing the user's cache and key."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("FUSEWRIGHT_")]:
            patch.delenv(name)
        patch.setenv("FUSEWRIGHT_CACHE_DIR", str(folder))
        patch.setenv("FUSEWRIGHT_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield folder


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset messages that are logged once per process, so that each test sees them."""
    monkeypatch.setattr(report, "SAID", set())


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Forget shapes recorded by earlier tests, which would keep products away from oneDNN."""
    left_behind = sys.modules.get("fusewright_cpu.onednn.left_behind")
    if left_behind is not None:
        left_behind.SHAPES.clear()


@pytest.fixture(autouse=True)
def _no_bugs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail on reported backend bugs: since eager takes over, a test that checks only results would not notice them."""
    from fusewright.stages import account

    seen: list[report.GraphReport] = []

    def publish(r: report.GraphReport) -> None:
        seen.append(r)
        report.publish(r)

    monkeypatch.setattr(account, "publish", publish)
    yield
    bugs = [b for r in seen for b in r.bugs]
    assert bool(bugs) <= bool(list(request.node.iter_markers("faulty"))), bugs


@pytest.fixture
def goldens(request: pytest.FixtureRequest) -> Goldens:
    """Expected texts; `--accept` rewrites those that differ."""
    said: list[tuple[str, object]] = request.node.user_properties
    return Goldens(request.config.getoption("--accept"), lambda path: said.append((ACCEPTED, str(path))))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """No compiled code from earlier tests, and none left for later ones."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
