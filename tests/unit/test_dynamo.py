"""The entry point for `torch.compile`."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from fusewright import dynamo, pipeline


@pytest.mark.parametrize("was", [True, False])
def test_the_collector_rests_while_a_graph_is_compiled(was: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was else gc.disable)()
        with pytest.raises(KeyError), dynamo.gc_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is was
    finally:
        (gc.enable if before else gc.disable)()


def test_the_collector_pauses_while_either_graph_of_a_training_step_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    collecting, compile_graph = {}, pipeline.compile_graph

    def spy(*args: Any) -> Any:
        collecting[args[3]] = gc.isenabled()
        return compile_graph(*args)

    monkeypatch.setattr(pipeline, "compile_graph", spy)
    torch.compiler.reset()
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend="fusewright_null")(x).backward()
    assert collecting == {"forward": False, "backward": False} and gc.isenabled()
