"""The kit as a pytest plugin: a test that takes `conformance_job` runs once for each job of each backend.

    pytest --pyargs fusewright.conformance.suite --fusewright-backend demo --fusewright-level C0..C3

A separate package imports the test, `from fusewright.conformance.suite import *`, and names its backend in its configuration
(`fusewright_backends = ["demo"]`). Without a name, all installed vendors are tested. Nothing of torch is imported before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fusewright.conformance.settings import Settings


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusewright", "conformance of Fusewright backends")
    group.addoption(
        "--fusewright-backend", action="append", metavar="NAME", help="a backend to check; may be given again"
    )
    group.addoption("--fusewright-simulate", action="store_true", help="on simulated devices")
    group.addoption("--fusewright-level", default="C0..C1", metavar="LEVEL", help="C2, or a range; default: C0..C1")
    group.addoption(
        "--fusewright-part", type=int, default=1, metavar="N", help="every n-th row, entry, model and fault"
    )
    parser.addini(
        "fusewright_backends", "backends that the conformance kit checks; default: all that are installed", type="args"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "conformance_job" not in metafunc.fixturenames:
        return
    from fusewright.conformance.jobs import levels

    config = metafunc.config
    wanted = levels.between(config.getoption("--fusewright-level"))
    found = [(s, job) for s in _settings(config) for job in levels.jobs(wanted, s)]
    ids = [f"{s.backend}-{levels.PARTS[job['part']].level}-{job['name']}".replace(" ", "_") for s, job in found]
    metafunc.parametrize("conformance_job", found, ids=ids)


def _settings(config: pytest.Config) -> list[Settings]:
    from fusewright import registry
    from fusewright.conformance.settings import Settings

    vendors = [n for n, p in registry.plugins().items() if not p.reference]
    names = config.getoption("--fusewright-backend") or config.getini("fusewright_backends") or vendors
    simulate, part = config.getoption("--fusewright-simulate"), config.getoption("--fusewright-part")
    return [Settings(name, simulate, part=part) for name in names]
