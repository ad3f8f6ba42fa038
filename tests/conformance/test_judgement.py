"""The references of C2: tensors with their layout, on the host, and eager's results where eager is consistent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.conformance import models, trained
from fusewright.conformance.jobs import levels
from fusewright.conformance.ops import calls, judge, opinfo, opset, variants
from fusewright.conformance.ops.cases import CASES
from fusewright.conformance.settings import Settings
from fusewright.interface import HOST
from tests.hosts import needs_bf16

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BASE = torch.arange(24.0).view(4, 6)
TENSORS = {
    "dense": BASE,
    "transposed": BASE.t(),
    "gapped": variants.gapped(BASE),
    "expanded": variants.expanded(BASE),
    "in the middle": BASE[1:, 2:4],
    "empty": BASE[:0],
    "a number": BASE[2, 3],
    "complex": torch.view_as_complex(BASE.view(4, 3, 2)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_placed_tensor_lies_as_the_first_one(name: str) -> None:
    t = TENSORS[name]
    found = calls.placed(t, HOST)
    assert torch.equal(found, t) and (found.dtype, found.stride()) == (t.dtype, t.stride())
    assert found.storage_offset() == t.storage_offset()
    assert found.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() or not t.untyped_storage().nbytes()


def trial(row: str, *args: Tensor) -> opset._Trial:
    settings = Settings("fusewright_null", dtypes=("int64",))
    variant = next(v for v in variants.VARIANTS if v.name == "expanded")
    return opset._Trial(ops.OPS[row], CASES[row][0], torch.int64, variant, settings, settings.make(), list(args), {})


def test_where_eager_disagrees_with_itself_only_its_exact_result_counts() -> None:
    a = torch.arange(6).view(1, 6).expand(4, 6)
    t, right, wrong = trial("add", a, a), a + a, a + a + 1
    assert opset._trusted(t, t.args, 0, right, right) is right
    assert torch.equal(opset._trusted(t, t.args, 0, wrong, right), right)
    assert opset._trusted(t, t.args, 0, right, wrong) is right, "what eager gives of dense copies too is how it is"


def test_what_a_device_would_assert_is_asked_of_the_host_first() -> None:
    x, mask, short = torch.zeros(4), torch.ones(4, dtype=torch.bool), torch.ones(3)
    scatter = ops.OPS["masked_scatter"]
    assert calls.bad_values(scatter, [x, mask, short], {})
    assert not calls.bad_values(scatter, [x, mask, torch.ones(4)], {})
    lgamma_of_complex = [torch.zeros(2, dtype=torch.complex64)]  # "not implemented for" proves nothing about another device
    assert not calls.bad_values(ops.OPS["lgamma"], lgamma_of_complex, {})


def test_what_a_library_of_the_host_packed_goes_to_no_device() -> None:
    """Eager's host kernels would read GPU memory together with it and crash the process."""
    packed = torch.ones(4, 4).to_mkldnn()
    assert calls.placed(packed, "cpu").layout == packed.layout
    with pytest.raises(RuntimeError, match="of the cpu alone"):
        calls.placed(packed, "meta")


def test_what_a_device_refuses_of_larger_sizes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's layer norm checks a size that the graph holds as a number; the host's does not."""
    settings = Settings("fusewright_null", dtypes=("float32",))
    variant = next(v for v in opset.VARIANTS if v.symbolic)
    case = CASES["relu"][0]
    x = torch.ones(3, 4)
    t = opset._Trial(ops.OPS["relu"], case, torch.float32, variant, settings, settings.make(), [x], {})
    t.device = "meta"
    asked = iter([True, False])
    monkeypatch.setattr(opset.calls, "guards", lambda gm: lambda tensors: True)
    monkeypatch.setattr(opset, "valid", lambda op, args, kwargs: next(asked))
    monkeypatch.setattr(opset.calls, "placed", lambda x, device: x)
    assert opset._again(t, None, None, ()) == "" and next(asked, None) is None


def test_larger_sizes_that_mean_nothing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager runs an attention of mismatched head counts but reads past the end of memory."""
    settings = Settings("fusewright_null", dtypes=("float32",))
    variant, op = next(v for v in opset.VARIANTS if v.symbolic), ops.OPS["sdpa_with_lse"]
    case = next(c for c in CASES[op.name] if c.args[0].shape[1] != c.args[1].shape[1])
    t = opset._Trial(op, case, torch.float32, variant, settings, settings.make(), *calls.arguments(op, case, torch.float32))
    monkeypatch.setattr(opset.calls, "guards", lambda gm: lambda tensors: True)
    assert opset._again(t, lambda tensors: pytest.fail("it was run"), None, ()) == ""


def test_the_product_of_an_expanded_matrix_is_judged_by_the_product() -> None:
    settings = Settings("fusewright_null", dtypes=("float32",))
    found = levels.perform({"part": "opset", "name": "int_mm"}, settings)
    assert any("expanded" in c.name for c in found) and not [c for c in found if c.verdict.bad], found


def test_neighbours_of_a_model_are_a_rounding_step_away() -> None:
    """Eager's error is also measured on them if a result of C4 is too far off."""
    base, near, other = models.build("residual"), *(trained._nudged(models.build("residual"), seed) for seed in (0, 1))
    numbers = [[*m.module.parameters(), *m.inputs] for m in (base, near, other)]
    for p, q, r in zip(*numbers, strict=True):
        assert not p.any() or not (torch.equal(p, q) or torch.equal(q, r))
        assert ((p - q).abs() <= 2 * torch.finfo(p.dtype).eps * p.abs()).all()


class _Known(opinfo.Exact):
    """A given exact result."""

    def __init__(self, exact: Tensor) -> None:
        self._seen, self._pairs = opinfo.Seen([exact], []), [(opinfo.Seen([], []), opinfo.Seen([], []))]


@pytest.mark.parametrize(
    ("got", "exact", "right"),
    [(-7612.0, -7615.6, True), (-7000.0, -7615.6, False), (60000.0, -1e6, False), (-torch.inf, -7615.6, True)],
)
def test_a_half_type_that_overflows_between_eagers_ops_is_judged_by_the_exact_result(
    got: float, exact: float, right: bool
) -> None:
    """An example is the gradient of tan, whose square exceeds fp16."""
    eager, ours = torch.tensor([1.0, -torch.inf]).half(), torch.tensor([1.0, got]).half()
    known = _Known(torch.tensor([1.0, exact], dtype=torch.float64))
    said = opinfo._value_difference(eager, ours, known, lambda seen: seen.outputs[0], 0.0)
    assert (said == "") == right, said
    assert opinfo._value_difference(ours, eager, known, lambda seen: seen.outputs[0], 0.0) or got == -torch.inf


def test_places_of_a_storage_are_eagers_in_every_layout() -> None:
    found = {c.name: c.verdict for c in opset.check("as_strided_scatter", Settings("x86_onednn", dtypes=("int64",)))}
    assert found["as_strided_scatter int64 gapped 0"] is opset.Verdict.LOWERED_OK


def test_where_an_infinity_meets_padding_is_what_eager_gives_in_either_type() -> None:
    """In a weight gradient, eager multiplies an infinity by the padding's zeros in bf16 but skips them in fp32."""
    eager = torch.tensor([torch.nan, torch.nan, 1.0]).bfloat16()
    exact, wide = eager.double(), torch.tensor([torch.nan, 2.0, 1.0])
    said = [judge.difference(wide.bfloat16(), eager, exact, wide=lambda w=w: w) for w in (wide, eager.float(), None)]
    assert not said[0] and "NaN" in said[1] and "NaN" in said[2]
    assert judge.difference(torch.tensor([torch.nan, 2.0, torch.inf]).bfloat16(), eager, exact, wide=lambda: wide)


@needs_bf16
def test_a_weight_gradient_in_bf16_is_judged_so() -> None:
    found = {
        c.name: c.verdict for c in opset.check("conv_backward", Settings("graviton_acl", True, dtypes=("bfloat16",)))
    }
    assert found["conv_backward bfloat16 not finite 0"] is opset.Verdict.LOWERED_OK
