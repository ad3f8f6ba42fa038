"""The sample of the zoo on aarch64, in inference, and tokens of a Llama: prefill, then a step with the cache for each. It takes
long under emulation: `ci/aarch64.sh -m slow`."""

from __future__ import annotations

import pytest

from tests.zoo.check import check
from tests.zoo.test_zoo import SAMPLE

pytestmark = [pytest.mark.slow, pytest.mark.hardware("graviton_acl"), pytest.mark.usefixtures("fresh_dynamo")]

INFERENCE = [(model, "bf16" if mode == "bf16" else "inference") for model, mode in SAMPLE]


@pytest.mark.parametrize(("model", "mode"), [*INFERENCE, ("transformers/llama", "inference"), ("transformers/llama", "generate")])
def test_a_sample_is_right(model: str, mode: str) -> None:
    found = check(model, mode, "graviton_acl")
    assert (found.status, found.bugs) == ("right", []), found.reason
