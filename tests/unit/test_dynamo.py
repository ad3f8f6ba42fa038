"""The door that `torch.compile` comes through."""

from __future__ import annotations

import gc

import pytest

from fusewright import dynamo


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
