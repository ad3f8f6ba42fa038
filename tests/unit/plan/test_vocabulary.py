"""The text of a plan, and a plan from disk, contain only words of a closed vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusewright.interface import Dim, KernelCode, TensorSpec
from fusewright.plan import serial, vocabulary
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.ir import Call, Launch, Ref, reads
from fusewright.plan.vocabulary import Foreign, Words
from fusewright.sizes.expr import NumberOf, OffsetOf, SizeOf, apply, evaluate, symbol

F32 = TensorSpec((4,), (1,), torch.float32)
GOOD = Plan((1,), (Ref(2),), [Call("aten::relu.default", (Ref(1),), (2,))], [], (), (), {1: F32, 2: F32})
WORDS = Words(frozenset({"mine::op.default"}), ("vendor",))


def with_call(target: str, *args: Any, **kwargs: Any) -> Plan:
    return replace(GOOD, instructions=[Call(target, args, (2,), tuple(kwargs.items()))])


def with_launch(**fields: Any) -> Plan:
    launch = Launch("a" * 64, (Ref(1),), (2,))
    return replace(GOOD, instructions=[replace(launch, **fields)], kernels={"a" * 64: None})


def with_size(size: Any) -> Plan:
    return replace(GOOD, specs={**GOOD.specs, 2: replace(F32, shape=(Dim(size, 4),))})


def problems(plan: Plan) -> list[str]:
    return list(vocabulary.find_problems(plan, WORDS))


# ---------------------------------------------------------------- functions


@pytest.mark.parametrize(
    "target",
    [
        "py::builtins.exec", "py::builtins.eval", "py::builtins.getattr", "py::builtins.__import__", "py::builtins.open",
        "py::builtins.compile", "py::operator.attrgetter", "py::operator.methodcaller", "py::operator.call",
        "py::operator.setitem", "py::math.__loader__", "py::os.system", "py::builtins.max.__class__", "py::", "py::operator",
        "aten::add.__class__", "aten::relu.overloads", "aten::no_such_op.default", "aten::relu", "aten", "::", "",
        "load_library::__func__.__globals__", "aten::relu.default\nimport os", "aten::relu.default ", "os::system.default",
    ],
)  # fmt: skip
def test_a_call_names_an_operator_or_a_helper_of_the_list(target: str) -> None:
    if target == "aten::relu":  # the same as with ".default"
        assert problems(with_call(target, Ref(1))) == []
        return
    assert problems(with_call(target, "print('here')"))
    with pytest.raises((Foreign, AttributeError, RuntimeError)):  # the last two are torch's own errors
        codegen.load(with_call(target, "print('here')"))


@pytest.mark.parametrize("target", ["py::operator.floordiv", "py::builtins.max", "py::math.ceil"])
def test_arithmetic_on_sizes_is_in_the_list(target: str) -> None:
    assert problems(with_call(target, Ref(1))) == [] and callable(vocabulary.function_of(target))


def test_a_convolution_is_called_without_boxing_its_lists() -> None:
    args = (torch.randn(1, 4, 16), torch.randn(4, 2, 3), None, [1], [2], [1], False, [0], 2)
    found = vocabulary.function_of("aten::convolution.default")
    assert found is torch.convolution
    torch.testing.assert_close(found(*args), torch.ops.aten.convolution.default(*args), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("target", "words", "fine"),
    [
        ("aten::add.Tensor", Words(), True),  # a row of the opset
        ("aten::add.Scalar", Words(), True),  # another overload of one
        ("aten::from_file.default", Words(), False),  # reads any file
        ("aten::from_file.default", Words(frozenset({"aten::from_file.default"})), True),  # the user's graph calls it
        ("mkldnn::_linear_pointwise.default", Words(), False),
        ("mkldnn::_linear_pointwise.default", Words(namespaces=("mkldnn",)), True),
    ],
)
def test_operators_are_the_opsets_the_graphs_and_the_backends(target: str, words: Words, fine: bool) -> None:
    found = [p for p in vocabulary.find_problems(with_call(target), words) if "neither in the opset" in p]
    assert (not found) == fine


def test_two_operators_whose_names_differ_in_punctuation_stay_apart() -> None:
    """Regression: `fw_a::b_c` was bound to `fw_a_b::c`."""
    library = [torch.library.Library(n, "FRAGMENT") for n in ("fwtest_a", "fwtest_a_b")]
    library[0].define("b_c(Tensor x) -> Tensor")
    library[0].impl("b_c", lambda x: x + 1, "CPU")
    library[1].define("c(Tensor x) -> Tensor")
    library[1].impl("c", lambda x: x + 2, "CPU")
    calls = [Call("fwtest_a::b_c.default", (Ref(1),), (2,)), Call("fwtest_a_b::c.default", (Ref(2),), (3,))]
    run = codegen.load(Plan((1,), (Ref(3),), [*calls], [], (), (), {}))
    assert run([torch.zeros(1)])[0].item() == 3


# ---------------------------------------------------------------- text


S0, S1 = symbol("s0"), symbol("s77")
FORMULAS: dict[str, Any] = {
    "s0": S0,
    "2*s0 + 1": S0 * 2 + 1,
    "Max(1, s0)": apply("Max", 1, S0),
    "s0**2": S0 * S0,
    "(s0//2)": apply("FloorDiv", S0, 2),
    "4*s0*((s0//2))": apply("FloorDiv", S0, 2) * S0 * 4,
    "((s0 + 1)//(-2))": apply("FloorDiv", S0 + 1, -2),
    "-s77 - 3": -3 - S1,
    "3 - s0": 3 - S0,
    "Mod(s0*s77, 8)": apply("Mod", S0 * S1, 8),
    "Where(Gt(s0, 1), s0, 1)": apply("Where", apply("Gt", S0, 1), S0, 1),
    "FloorToInt(Product(1.5, ToFloat(s0)))": apply("FloorToInt", apply("Product", 1.5, apply("ToFloat", S0))),
}


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_of_sizes(text: str) -> None:
    size = FORMULAS[text]
    assert vocabulary.text_of_size(size) == text
    given = {"s0": 9, "s77": 5}
    assert eval(text, dict(vocabulary.SIZES), given) == evaluate(size, given)


def test_a_launch_reads_sizes_off_its_tensors() -> None:
    """The number of blocks of a given tensor, `-(-n // 32)`, in either spelling."""
    size = symbol(SizeOf(1, 0))
    assert vocabulary.text_of_size(apply("FloorDiv", size + 31, 32)) == "((v1.shape[0] + 31)//32)"  # type: ignore[arg-type]
    spelled = Launch("a" * 64, (), (), (("size", Ref(1), 0), ("offset", Ref(2)), Ref(3), Dim("s0", 4), 5))
    assert spelled.sizes == (size, symbol(OffsetOf(2)), symbol(NumberOf(3)), S0, 5)
    assert reads(spelled) == [1, 2, 3] and spelled.located == {2}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "s0.__class__", "s0[0]", "lambda: 1", "(s0 for s0 in s0)", "'a'", "b'a'", "f'{s0}'", "s0\nimport os",
        "s0  # a comment", "exec(s0)", "max(s0)", "torch", "frame", "v1", "__builtins__", "s0 := 1", "Max(*s0)", "Max(x=1)",
        "9**9**9", "9**99999", "2**s0", "1" * 30, "", "s0; s1", "\u017f0", "s0\r", "-" * 3000 + "s0", "(" * 300 + "s0" + ")" * 300,
        3, None, "1j", "2*s0 + 1", "Max", "s" * 3000, "sized", "without_memory", "workers",
    ],
)  # fmt: skip
def test_what_is_no_name_of_a_size_is_refused(text: Any) -> None:
    size = Dim(text, 4).expr
    with pytest.raises(Foreign):
        vocabulary.text_of_size(size)
    assert problems(with_size(text)) and problems(replace(GOOD, scalars={1: text}))
    if isinstance(text, str):
        inside = apply("FloorDiv", symbol(text) * 3 + S0, 2)
        assert problems(with_size(inside)) and problems(with_launch(sizes=(inside,)))
        with pytest.raises(Foreign):
            codegen.load(replace(with_launch(sizes=(inside,)), kernels={}), {"a" * 64: KernelCode(print)})


@pytest.mark.parametrize(
    "atom",
    [
        0, SizeOf(1, 64), SizeOf(1, -1), SizeOf(-1, 0), SizeOf("1]; import os; [", 0), SizeOf(1, "0"),  # type: ignore[arg-type]
        NumberOf(1 << 40), OffsetOf(True),
    ],
)  # fmt: skip
def test_what_is_no_reading_of_a_value_is_refused(atom: Any) -> None:
    """A kernel's symbol position is meaningless in a plan, and True is not an id, although a cache equates it with 1."""
    vocabulary.text_of_size(symbol(OffsetOf(1)))
    assert problems(with_launch(sizes=(symbol(atom),))) and problems(with_launch(sizes=(symbol(atom) * 2 + 1,)))
    with pytest.raises(Foreign):
        vocabulary.text_of_size(symbol(atom))


def test_powers_and_shifts_do_not_fill_the_memory() -> None:
    for size in (apply("LShift", 1, S0), apply("PowByNatural", 9, S0), apply("PowByNatural", 9, 1 << 40)):
        with pytest.raises(OverflowError):
            eval(vocabulary.text_of_size(size), dict(vocabulary.SIZES), {"s0": 1 << 40})  # type: ignore[arg-type]


def test_comments_stay_comments() -> None:
    plan = replace(GOOD, comments={7: "a.py:3\nraise SystemExit"}, instructions=[replace(GOOD.instructions[0], op_id=7)])
    run, text = codegen.load(plan), codegen.to_text(plan)
    assert "raise SystemExit" in text and torch.equal(run([torch.ones(2)])[0], torch.ones(2))
    strange = replace(GOOD, specs={1: F32, 2: replace(F32, shape=(Dim("s0\nraise SystemExit", 4),))})
    assert torch.equal(codegen.load(strange)([torch.ones(2)])[0], torch.ones(2))


def test_generated_code_knows_nothing_else() -> None:
    space = codegen.load(GOOD).__globals__
    assert set(space["__builtins__"]) == {"__import__"}
    assert not hasattr(space["torch"], "load") and not hasattr(space["torch"], "ops")
    modules = {type(torch)}
    assert [k for k, v in space.items() if type(v) in modules] == ["torch"]


# ---------------------------------------------------------------- plans from the disk


def test_a_plain_plan_has_no_problems() -> None:
    assert problems(GOOD) == []
    assert problems(with_launch(sizes=(3, ("size", Ref(1), 0), ("offset", Ref(1)), Ref(1)), scalars=(1.5, True))) == []


HOSTILE: dict[str, Plan] = {
    "an id that is text": replace(GOOD, inputs=("1, x = __import__('os')",)),  # type: ignore[arg-type]
    "an id that is a bool": replace(GOOD, inputs=(True,)),
    "an id that is negative": replace(GOOD, outputs=(Ref(-1),)),
    "a reference to text": replace(GOOD, outputs=(Ref("2]; import os; ["),)),  # type: ignore[arg-type]
    "a result that is text": replace(GOOD, instructions=[Call("aten::relu.default", (Ref(1),), ("os",))]),  # type: ignore[arg-type]
    "an argument that is text": with_call("aten::add.Tensor", Ref(1), **{"alpha=1); import os; (": 1}),
    "an argument that the operator has not": with_call("aten::relu.default", Ref(1), out=Ref(1)),
    "arguments twice": replace(GOOD, instructions=[Call("aten::relu.default", (), (2,), (("self", Ref(1)),) * 2)]),
    "more arguments than there are": with_call("aten::relu.default", Ref(1), Ref(1)),
    "an object": with_call("aten::relu.default", object()),
    "a huge number": with_call("aten::add.Tensor", Ref(1), 1 << 70),
    "a list without end": with_call("aten::relu.default", [[[[[[[[[[[1]]]]]]]]]]]),
    "a device": replace(GOOD, specs={1: replace(F32, device="cpu', os.system('x'), '")}),
    "a size that is text": replace(GOOD, specs={1: replace(F32, shape=("4",))}),  # type: ignore[arg-type]
    "a size beyond 64 bits": replace(GOOD, specs={1: replace(F32, shape=(1 << 64,))}),
    "a kernel that is not there": replace(GOOD, instructions=[Launch("b" * 64, (Ref(1),), (2,))]),
    "a kernel with a name of its own": replace(GOOD, kernels={"../../x": None}),
    "a tensor for a kernel that is none": with_launch(inputs=("v1",)),
    "a size for a kernel that is text": with_launch(sizes=("__import__('os')",)),
    "a dimension that is text": with_launch(sizes=(("size", Ref(1), "0]; import os; ["),)),
    "a number for a kernel that is an object": with_launch(scalars=(object(),)),
    "places that are none": with_launch(inplace=(("0", 0),)),
    "a place that is no tensor": with_launch(into=((0, 1),)),
}


@pytest.mark.parametrize("plan", HOSTILE.values(), ids=HOSTILE)
def test_everything_else_is_a_problem(plan: Plan) -> None:
    assert problems(plan)


@pytest.mark.parametrize("name", ["os", "load", "float32.__class__", "hub", "_C"])
def test_types_come_from_tables(name: str) -> None:
    for tag in ("dtype", "layout", "format"):
        with pytest.raises(KeyError):
            serial._unarg({tag: name})
    with pytest.raises(RuntimeError):
        serial._unarg({"device": name})


def test_a_plan_reaches_only_tensors_that_the_graph_names() -> None:
    asked: list[str] = []
    data = serial.to_data(replace(GOOD, attributes={9: ("mask", torch.ones(1))}))
    assert serial.from_data(data, lambda n: asked.append(n)).attributes == {9: ("mask", None)} and asked == ["mask"]
