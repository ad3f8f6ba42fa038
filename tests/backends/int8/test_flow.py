"""From a model to int8: `fusewright.quantize` with each recipe, quantized graphs of other tools, and unsupported input."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchao", reason="torchao is an optional dependency of fusewright-int8 (extra `quantize`)")

import fusewright
from fusewright import report
from fusewright.errors import QuantizationError
from fusewright.quantization import listed, quantization_of
from fusewright.quantization import report as accuracy
from fusewright_int8.engines import FLOATS
from fusewright_int8.flow import fx
from fusewright_int8.flow.recipes import RECIPES
from tests.backends.int8.common import ENGINES, needs_core, needs_onednn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return (
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 10)).eval().to(dtype)
    )


class Block(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(c, c, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.nb(self.b(torch.relu(self.na(self.a(x))))) + x)


def cnn() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    net = nn.Sequential(
        first, nn.MaxPool2d(2), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    ).eval()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
    return net


def compiled(model: nn.Module, engine: str = ENGINES[0]) -> Any:
    return torch.compile(model, backend="x86_int8", options={"strict": True, "engine": engine})


def judge(ours: Tensor, quantized: Tensor, exact: Tensor) -> None:
    """Check that results are within a level or two of the q/dq graph's in eager, relative to the range."""
    assert ours.shape == quantized.shape and ours.dtype == quantized.dtype
    assert float((ours.float() - quantized.float()).abs().max()) <= 0.02 * float(exact.detach().float().abs().max())


@needs_core
@pytest.mark.parametrize(
    ("recipe", "calls"),
    [("static", ["linear"] * 3), ("dynamic", ["dynamic_linear"] * 3), ("weight_only", ["weight_linear"] * 3)],
)
def test_each_recipe_becomes_its_own_calls(recipe: str, calls: list[str], plans: Any) -> None:
    model, x = mlp(), torch.randn(8, 64)
    quantized = fusewright.quantize(model, [x, x[:3]], recipe)
    ours = compiled(quantized)(x)
    assert plans.calls() == calls
    judge(ours, quantized(x), model(x))


@needs_core
def test_a_batch_of_another_size_runs_in_int8_too(plans: Any) -> None:
    model, x = mlp(), torch.randn(8, 64)
    f = compiled(quantized := fusewright.quantize(model, [x]))
    for rows in (8, 5, 1):
        judge(f(x[:rows]), quantized(x[:rows]), model(x[:rows]))
        assert plans.calls() == ["linear"] * 3


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_a_bf16_model_keeps_its_type_and_is_int8(rows: int, plans: Any) -> None:
    """Also where products of bf16 are computed in fp32, for want of instructions."""
    model, x = mlp(torch.bfloat16), torch.randn(rows, 64).bfloat16()
    for recipe in RECIPES:
        torch.compiler.reset()
        quantized = fusewright.quantize(model, [x], recipe, dynamic_batch=False)
        judge(compiled(quantized)(x), quantized(x), model(x))
        assert len(plans.calls()) == 3


def test_a_bf16_convolution_with_a_residual_is_int8() -> None:
    model, x = cnn().bfloat16(), torch.randn(2, 3, 16, 16).bfloat16()
    quantized = fusewright.quantize(model, [x], dynamic_batch=False)
    with report.recording() as reports, torch.no_grad():
        judge(compiled(quantized)(x), quantized(x), model(x))
    assert "not int8" not in str(reports[-1].texts)


@needs_core
def test_a_residual_network_stores_no_float_image_between_blocks(plans: Any) -> None:
    model, x = cnn(), torch.randn(4, 3, 16, 16)
    quantized = fusewright.quantize(model, [x])
    ours = compiled(quantized)(x)
    assert plans.calls() == ["conv"] * 3 + ["linear"]
    judge(ours, quantized(x), model(x))


def test_a_layer_can_stay_in_floats() -> None:
    model, x = mlp(), torch.randn(8, 64)
    quantized = fusewright.quantize(model, [x], keep=["2"])
    found = accuracy(model, quantized, [x])
    assert list(found.stayed) == ["2"] and "kept in floats" in found.stayed["2"]
    assert len(found.layers) == 3
    torch.testing.assert_close(compiled(quantized)(x), quantized(x), rtol=1e-4, atol=1e-4)


def test_weight_only_is_more_accurate_than_8_bit_activations() -> None:
    model, x = mlp(), torch.randn(32, 64)
    db = {r: accuracy(model, fusewright.quantize(model, [x], r), [x]).sqnr for r in RECIPES}
    assert db["weight_only"] > db["dynamic"] > 25 and db["static"] > 25


def test_the_report_finds_the_layer_that_loses_most() -> None:
    model, x = mlp(), torch.randn(64, 64)
    with torch.no_grad():
        model[2].weight[:, 0] = 1e4  # one input far beyond the others: its rows' scales leave the rest nothing
    found = accuracy(model, fusewright.quantize(model, [x], "weight_only"), [x])
    assert min(found.layers, key=lambda layer: layer.sqnr).name in ("2", "4")
    assert {layer.name for layer in found.layers} == {"0", "2", "4"}
    assert all(layer.work > 0 for layer in found.layers)


# -- graphs of others


class Blocks(nn.Module):
    """Two residual blocks; `reads`: another convolution reads what goes into them, after them."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(7))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.convs[0](x).relu()
        for k in (1, 3):
            x = (self.convs[k + 1](self.convs[k](x).relu()) + x).relu()
        y = self.convs[5](x)
        return self.convs[6](first) * y.mean() if self.reads else y


@needs_onednn
@pytest.mark.parametrize("reads", [True, False])
def test_a_residual_is_copied_only_if_it_is_read_later(reads: bool, plans: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 12, 12)
    model = fusewright.quantize(Blocks(reads).eval(), [x], dynamic_batch=False)
    fast = torch.compile(model, backend="x86_int8", options={"strict": True, "engine": "onednn", "cache": False})
    with torch.no_grad():
        for _ in range(3):
            ours, eager = fast(x), model(x)
            assert float((ours - eager).abs().max()) <= 0.02 * float(eager.abs().max())
    assert plans.calls().count("conv_sum_onednn") == 2
    assert plans.text().count("aten_clone_default(") == reads


@needs_core
def test_torchaos_own_quantizer_is_lowered(plans: Any) -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as xiq

    x = torch.randn(8, 64)
    for dynamic, calls in ((False, ["linear"] * 3), (True, ["linear_tensor"] * 3)):
        torch.compiler.reset()
        model = mlp()
        quantizer = xiq.X86InductorQuantizer()
        quantizer.set_global(xiq.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
        prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
        prepared(x)
        quantized = convert_pt2e(prepared)
        with torch.no_grad():
            judge(compiled(quantized)(x), quantized(x), model(x))
        assert plans.calls() == calls


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], 4, 16).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return torch.matmul((torch.matmul(q, k.transpose(-1, -2)) / 4).softmax(-1), v)


@needs_core
def test_attention_whose_products_torchaos_quantizer_marks_is_lowered(plans: Any) -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as xiq

    model, x = Attention().eval(), torch.randn(2, 32, 64)
    quantizer, config = xiq.X86InductorQuantizer(), xiq.get_default_x86_inductor_quantization_config()
    quantizer.set_global(config).set_function_type_qconfig(torch.matmul, config)
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    quantized = convert_pt2e(prepared)
    with torch.no_grad():
        judge(torch.compile(quantized, backend="x86_int8", options={"engine": "core"})(x), quantized(x), model(x))
    assert plans.calls() == ["linear"] + ["matmul"] * 2


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchaos_tensors_are_lowered(dtype: torch.dtype, plans: Any) -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    x = torch.randn(2, 5, 64, dtype=dtype)
    for config, call in (
        (Int8DynamicActivationInt8WeightConfig(), "dynamic_linear"),
        (Int8WeightOnlyConfig(), "weight_linear"),
    ):
        torch.compiler.reset()
        quantize_(model := mlp(dtype), config)
        with torch.no_grad():
            ours, eager = compiled(model)(x), model(x)
        assert plans.calls() == [call] * 3
        judge(ours, eager, eager)


@needs_core
@pytest.mark.parametrize("how", ["tensor", "zero points", "fp16", "static"])
def test_torchaos_integer_products_are_int8_however_their_rows_are_quantized(how: str, plans: Any) -> None:
    from torchao import quantization as ao

    by_tensor = ao.PerTensor()
    config = {
        "tensor": lambda: ao.Int8DynamicActivationInt8WeightConfig(granularity=by_tensor),
        "zero points": lambda: ao.Int8DynamicActivationInt8WeightConfig(act_mapping_type=ao.MappingType.ASYMMETRIC),
        "fp16": lambda: ao.Int8DynamicActivationInt8WeightConfig(),
        "static": lambda: ao.Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor([[0.05]]), granularity=by_tensor),
    }[how]()
    dtype = torch.float16 if how == "fp16" else torch.float32
    model, x = nn.Sequential(nn.Linear(67, 33)).eval().to(dtype), torch.randn(5, 67, dtype=dtype)
    ao.quantize_(model, config)
    with torch.no_grad():
        ours, eager = compiled(model, "core")(x), model(x)
    assert plans.calls() == ["linear"]
    off = 0.01 if how == "fp16" else 1e-5  # eager rounds each step of the quantization to fp16
    torch.testing.assert_close(ours, eager, rtol=0, atol=off)


@needs_core
@pytest.mark.parametrize("dynamic", [False, True])
def test_integer_sums_become_floats_as_a_cast_rounds_them(dynamic: bool, plans: Any) -> None:
    """Sums of 2**24 and more are no floats."""

    class Sums(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.register_buffer("weight", weight)

        def forward(self, x: Tensor) -> Tensor:
            return torch._int_mm(x, self.weight.t()).float() * 0.5

    w = torch.randint(-128, 128, (33, 12_000), dtype=torch.int8)
    x = torch.where(torch.rand(7, 12_000) < 0.5, w[0].expand(7, -1), torch.tensor(127, dtype=torch.int8))
    options = {"strict": True, "engine": "core"}
    f = torch.compile(Sums(w), backend="x86_int8", dynamic=dynamic, options=options)
    exact = (x.double() @ w.double().t()).float() * 0.5
    assert torch.equal(f(x), exact) and float(exact.max()) > 2**23
    assert plans.calls() == ["linear"]


@needs_onednn
def test_a_quantized_graph_runs_without_our_core(plans: Any) -> None:
    model, x = mlp(), torch.randn(8, 64)
    for recipe, call in (("static", "linear_onednn"), ("dynamic", "dynamic_linear_onednn")):
        torch.compiler.reset()
        quantized = fusewright.quantize(model, [x], recipe)
        judge(compiled(quantized, "onednn")(x), quantized(x), model(x))
        assert plans.calls() == [call] * 3


# -- the FX calls of old PyTorch


def test_the_fx_calls_quantize_and_say_what_to_write_instead() -> None:
    model, x = mlp(), torch.randn(8, 64)
    with pytest.warns(FutureWarning, match="fusewright.quantize"):
        prepared = fx.prepare_fx(model, fx.get_default_qconfig_mapping("x86"), (x,))
        prepared(x)
        quantized = fx.convert_fx(prepared)
    judge(compiled(quantized)(x), model(x), model(x))


def test_a_model_that_saw_no_input_is_not_converted() -> None:
    with pytest.warns(FutureWarning):
        prepared = fx.prepare_fx(mlp(), fx.get_default_qconfig_mapping(), (torch.randn(8, 64),))
        with pytest.raises(QuantizationError, match="not calibrated: nothing has reached 0"):
            fx.convert_fx(prepared)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_other_fx_configurations_are_refused_with_the_way_on() -> None:
    with pytest.raises(QuantizationError, match="recipes are static"):
        fx.prepare_fx(mlp(), {"": None}, (torch.randn(8, 64),))
    with pytest.raises(QuantizationError, match="did you mean 'x86'"):
        fx.get_default_qconfig_mapping("x68")
    with pytest.raises(QuantizationError, match="what prepare_fx gave"):
        fx.convert_fx(torch.fx.symbolic_trace(nn.ReLU()))


# -- bad input


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_in_calibration_are_named(bad: float) -> None:
    x = torch.randn(8, 64)
    x[3, 5] = bad
    with pytest.raises(QuantizationError, match="calibration input 1 holds NaN or Inf"):
        fusewright.quantize(mlp(), [torch.randn(8, 64), x])


def test_nan_that_a_layer_makes_is_named_with_its_reader() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].bias[0] = math.inf
    with pytest.raises(QuantizationError, match="what reaches 2 during calibration"):
        fusewright.quantize(model, [torch.randn(8, 64)])


def test_a_weight_that_is_not_finite_is_named_without_blaming_the_inputs() -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    with pytest.raises(QuantizationError) as e:
        fusewright.quantize(model, [torch.randn(8, 64)])
    assert str(e.value) == "the weight of 2 holds NaN or Inf; quantize a model with finite weights"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_quantized_model_is_not_quantized_again(recipe: str) -> None:
    quantized = fusewright.quantize(mlp(), [torch.randn(8, 64)], recipe)
    with pytest.raises(QuantizationError, match="quantized already"):
        fusewright.quantize(quantized, [torch.randn(8, 64)], recipe)


@pytest.mark.parametrize(
    ("recipe", "of_weights", "of_inputs"),
    [("static", 2e-4, 1.0), ("static", 1.0, 1e-4), ("dynamic", 2e-4, 1.0), ("weight_only", 2e-4, 1e-4)],
)
def test_small_weights_and_inputs_use_all_levels(recipe: str, of_weights: float, of_inputs: float) -> None:
    """For example, an input in metres of a model of micrometres, or a layer that layer norm scales up again."""
    model, x = nn.Sequential(nn.Linear(64, 32, bias=False)).eval(), torch.randn(32, 64) * of_inputs
    with torch.no_grad():
        model[0].weight.mul_(of_weights)
    assert accuracy(model, fusewright.quantize(model, [x], recipe), [x]).sqnr > 35


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"calibration_inputs": []}, "no calibration inputs"),
        ({"recipe": "statc"}, "did you mean 'static'"),
        ({"calibration_inputs": [torch.randn(8, 63)]}, "torch.export cannot trace"),
        ({"model": mlp().train()}, r"call model.eval\(\)"),
        ({"model": nn.Sequential(nn.ReLU()).eval()}, "nothing to quantize"),
        ({"model": lambda x: x}, "a torch.nn.Module can be quantized"),
        ({"calibration_inputs": {"x": torch.ones(2)}}, "are a list"),
        ({"calibration_inputs": None}, "a list of typical inputs, not NoneType"),
        ({"calibration_inputs": "inputs.pt"}, "a list of typical inputs, not str"),
        ({"calibration_inputs": [torch.randn(8, 64), torch.randn(8, 3)]}, "does not take a calibration input"),
        ({"backend": "x86_onednn"}, "does not quantize; these do: x86_int8"),
        ({"keep": ["*"]}, "kept in floats by"),
    ],
)
def test_what_cannot_be_quantized_says_what_to_do(change: dict[str, Any], says: str) -> None:
    given = {"model": mlp(), "calibration_inputs": [torch.randn(8, 64)], **change}
    with pytest.raises(QuantizationError, match=says):
        fusewright.quantize(**given)


def test_an_endless_loader_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    import itertools

    monkeypatch.setattr("fusewright.quantization.MOST_INPUTS", 3)
    assert len(listed(torch.zeros(1) for _ in itertools.count())) == 3


def test_the_model_itself_stays_as_it_is() -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    fusewright.quantize(model, [torch.randn(8, 64)])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_keyword_arguments_calibrate_as_well() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.fc(a + b)

    model, given = Named().eval(), {"a": torch.randn(3, 8), "b": torch.randn(3, 8)}
    quantized = fusewright.quantize(model, [given])
    assert float((compiled(quantized)(**given) - model(**given)).abs().max()) < 0.1


def test_every_recipe_is_told_to_people() -> None:
    assert quantization_of("x86_int8").recipes.keys() == RECIPES.keys()
    assert quantization_of().recipes.keys() == RECIPES.keys()  # the only backend here that quantizes


@pytest.mark.parametrize("floats", [True, False])
def test_the_weight_of_a_layer_left_to_floats_is_converted_once(
    monkeypatch: pytest.MonkeyPatch, plans: Any, floats: bool
) -> None:
    """Not at every call, and not at all for an int8 layer."""
    monkeypatch.setattr("fusewright_int8.lowerings.fastest", lambda *_, **__: FLOATS if floats else "onednn")
    model, x = nn.Sequential(nn.Linear(640, 1024), nn.ReLU(), nn.Linear(1024, 640)).eval(), torch.randn(48, 640)
    quantized = quantization_of("x86_int8").quantize(model, [(x,)], "static")
    wanted = quantized(x)
    with torch.no_grad():
        found = torch.compile(quantized, backend="x86_int8")(x)
    assert (found - wanted).abs().max() < 0.1
    plan = plans.whole()
    assert len(plans.calls()) == (0 if floats else 2)
    assert ("dequantize_per_channel" in plan, "dequantize_per_channel" in plans.text()) == (floats, False), plan
