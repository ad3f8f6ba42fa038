"""A sample of ONNX's node tests; `ci/operators/onnx_nodes.py` runs all of them."""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest

from ci.operators.onnx_nodes import checked, nodes
from fusewright.conformance.ops.opinfo import Compiler

missing = [name for name in ("onnx", "onnx2torch") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}, of the extra `onnx`"),
    pytest.mark.filterwarnings("ignore"),  # numpy's warnings in tests of division by zero
]


@pytest.mark.slow
def test_nodes_do_what_they_do_in_eager() -> None:
    skipped: Counter[str] = Counter()
    found = {node.name: checked(node, Compiler("x86_onednn")) for node in nodes(skipped, every=45)}
    assert sum(outcome.lowered for outcome in found.values()) > 5, skipped
    assert not {name: outcome.problems for name, outcome in found.items() if outcome.problems}


def test_a_node_that_cannot_be_converted_is_counted_with_its_reason() -> None:
    skipped: Counter[str] = Counter()
    assert not list(nodes(skipped, only="test_adagrad"))
    assert skipped == {"not converted: a node or a form of it that onnx2torch does not know": 2}
