"""Tables of `fusewright bench`: whole words at every width, and no verdict on noise."""

import io

import pytest
from rich.console import Console

from fusewright.bench.tables import NOISY, render

NAMES = ("eager", "inductor", "inductor-freezing", "x86_onednn")


def entry(ms):
    steady = {"median_ms": ms, "p10_ms": ms * 0.98, "p90_ms": ms * 1.05, "rounds_ms": [ms, ms]}
    accuracy = {"passed": True, "ratio_max": 1.25, "ratio_rms": 1.0, "reason": ""}
    return {"status": "ok", "steady": steady, "speedup": 150.2 / ms, "accuracy": accuracy}


def row(model, noise="low", ours=53.7):
    contenders = dict(zip(NAMES, map(entry, (150.2, 145.5, 145.3, ours)), strict=True))
    first = {name: {"cold_s": 12.6, "warm_s": 3.15} for name in NAMES}
    return {
        "model": model,
        "dtype": "fp32",
        "mode": "inference",
        "noise": noise,
        "contenders": contenders,
        "first_call": first,
    }


def printed(*rows, width):
    document = {"backend": NAMES[-1], "rows": list(rows)}
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    for part in render(document, width):
        console.print(part)
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("models", [1, 3])
def test_every_header_and_figure_stands_whole_on_its_line(width, models):
    text = printed(*(row(f"model_{k}") for k in range(models)), width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    headers = (
        ["median ms", "p10..p90", "first call s"] if models == 1 else ["over inductor-freezing", "inductor-freezing ms"]
    )
    assert all(any(h in line for line in lines) for h in [*headers, "error/eager's"]), text
    assert "2.80x" in text and "12.6 / 3.15" in text
    assert "…" not in text


def test_a_narrow_table_goes_on_below_with_the_models_again():
    text = printed(row("bert"), row("vit"), row("gpt2"), width=80)
    assert text.count("bert") >= 2 and text.count("geomean") == text.count("bert")
    assert printed(row("bert"), row("vit"), row("gpt2"), width=200).count("bert") == 1


@pytest.mark.parametrize("width", [80, 120])
def test_a_noisy_row_has_no_verdict_and_no_part_in_the_mean(width):
    one = printed(row("bert", "high"), width=width)
    assert NOISY in one and "2.80x" not in one and "is the machine busy" in one
    three = printed(row("bert"), row("vit"), row("gpt2", "high", ours=1.0), width=width)
    assert "150.20x" not in three and "1 noisy" in three and three.count("2.80x") >= 3


def test_what_a_compiler_printed_is_one_line_of_the_table():
    failed = row("bert")
    said = "InductorError: CppCompileError: C++ compile error\n\nCommand:\ng++ " + "-I/a/folder " * 99 + "\n\nOutput:\nno -ltorch\n"
    failed["contenders"]["inductor"] = {"status": "failed", "reason": said}
    text = printed(failed, width=120)
    assert "! bert fp32: inductor failed: InductorError: CppCompileError: C++ compile error" in text and "g++" not in text
