"""Discovery of backends: plugins are laid out as a package manager would install them, each broken in one way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusewright import registry
from fusewright.errors import BackendUnavailableError, UnknownBackendError
from fusewright.interface import INTERFACE, OPSET, Device, Unavailable

GOOD = """
from fusewright.interface import Backend, Device, YES
class Plug(Backend):
    name = "toy"
    device_type = "cpu"
    priority = 7
    @classmethod
    def probe(cls): return Device("cpu", "toy")
    def supports(self, op): return YES
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution with one module and one entry point on the path, and nothing else of the group."""
    made: list[str] = []

    def make(source: str, name: str = "toy", dist: str = "toy-dist", module: str = "toy_module") -> None:
        folder = tmp_path / dist
        info = folder / f"{dist.replace('-', '_')}-1.5.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{name} = {module}:Plug\n")
        monkeypatch.syspath_prepend(str(folder))
        registry.refresh()
        made.append(module)

    yield make
    for module in made:
        sys.modules.pop(module, None)
    monkeypatch.undo()
    registry.refresh()


def test_a_plugin_is_found_without_being_imported(install: Install) -> None:
    install(GOOD)
    assert registry.plugins()["toy"].dist == "toy-dist"
    assert registry.plugins()["toy"].version == "1.5"
    assert "toy_module" not in sys.modules
    assert registry.get("toy").device_type == "cpu"
    assert registry.info("toy").device == Device("cpu", "toy")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("x = ", "SyntaxError"),
        ("", "AttributeError"),
        ("class Plug: pass", "not a subclass"),
        ("from fusewright.interface import Backend\nclass Plug(Backend): name = 'toy'", "lacks probe"),
        (GOOD.replace('"toy"\n', '"tot"\n', 1), "is called 'tot' but registered as 'toy'"),
        (GOOD + f"    interface = ({INTERFACE[0] + 1}, 0)", "written for interface"),
        (GOOD + f"    interface = ({INTERFACE[0]}, {INTERFACE[1] + 1})", "written for interface"),
        (GOOD + f"    opset = {OPSET + 1}", "written for opset"),
        (GOOD.replace('return Device("cpu", "toy")', "raise OSError('no driver')"), "OSError: no driver"),
        (GOOD.replace('return Device("cpu", "toy")', "import sys; sys.exit(1)"), "probe raised SystemExit"),
    ],
)
def test_a_broken_plugin_is_unavailable_with_a_reason_and_a_fix(
    install: Install, source: str, reason: str
) -> None:
    install(source)
    device = registry.info("toy").device
    assert isinstance(device, Unavailable) and reason in device.reason and device.fix
    with pytest.raises(BackendUnavailableError, match="Fix: "):
        registry.get("toy")
    others = [i for i in registry.backends() if i.plugin.dist != "toy-dist"]
    assert others and all(i.cls is not None for i in others)


def test_an_older_minor_of_the_interface_is_welcome(install: Install) -> None:
    install(GOOD + f"    interface = ({INTERFACE[0]}, 0)")
    assert registry.info("toy").available


def test_two_distributions_with_one_name_are_reported(install: Install) -> None:
    install(GOOD, dist="first", module="first_module")
    install(GOOD, dist="second", module="second_module")
    plugin = registry.plugins()["toy"]
    assert (plugin.dist, plugin.clashes) == ("second", ("first",))  # the later one is earlier on the path


def test_a_typing_error_gets_the_nearest_name() -> None:
    with pytest.raises(UnknownBackendError, match="did you mean 'x86_onednn'"):
        registry.get("x86_onedn")


def test_best_is_the_highest_priority_of_the_device_type(install: Install) -> None:
    install(GOOD.replace("7", "1000"))
    gpu = GOOD.replace('"toy"', '"gpu"').replace('"cpu"', '"cuda"')
    install(gpu, name="gpu", dist="gpu", module="gpu_module")
    assert registry.best("cpu") == "toy"
    assert registry.best("cuda") == "gpu"
    assert registry.best("tpu") is None


@pytest.mark.parametrize(
    "source",
    [
        GOOD.replace("priority = 7", "priority = 0"),
        GOOD.replace("def supports(self, op): return YES", ""),  # lowers nothing
        GOOD.replace("Backend, Device", "Backend, Unavailable as Device"),
    ],
)
def test_best_leaves_out_what_does_nothing(install: Install, source: str) -> None:
    install(source.replace('device_type = "cpu"', 'device_type = "xpu"'))
    assert registry.info("toy").cls is not None
    assert registry.best("xpu") is None
