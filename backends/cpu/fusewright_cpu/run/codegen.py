"""Emit kernels as LLVM IR, object code and assembly."""

from __future__ import annotations

from collections.abc import Mapping

import llvmlite.binding as llvm

from fusewright.toolkit.ir.ir import Kernel
from fusewright_cpu.emit.entry import emit_kernel, new_module
from fusewright_cpu.emit.text import Module
from fusewright_cpu.emit.unroll import unrolled
from fusewright_cpu.kernels.amx_attention import OnTiles
from fusewright_cpu.kernels.amx_linear import emit_amx_linear
from fusewright_cpu.kernels.arm.bf16_linear import emit_bf16_linear
from fusewright_cpu.kernels.arm.int8_conv import emit_int8_conv
from fusewright_cpu.kernels.arm.int8_linear import emit_int8_linear
from fusewright_cpu.kernels.attention import Body, emit_attention
from fusewright_cpu.kernels.by_hand import (
    AmxLinear,
    Attention,
    Bf16Linear,
    Depthwise,
    DirectConv,
    FirstConv,
    Gemv,
    Int8Conv,
    Int8Linear,
    VectorLinear,
)
from fusewright_cpu.kernels.depthwise import emit_depthwise
from fusewright_cpu.kernels.direct_conv import emit_direct_conv
from fusewright_cpu.kernels.first_conv import emit_first_conv
from fusewright_cpu.kernels.gemv import emit_gemv
from fusewright_cpu.kernels.transposed_conv import emit_transposed_conv
from fusewright_cpu.kernels.vector_linear import emit_vector_linear
from fusewright_cpu.run.sources import Source, symbol_name
from fusewright_cpu.target import CpuTarget


def kernels_to_text(kernels: Mapping[str, Source], target: CpuTarget, parallel: bool) -> tuple[str, tuple[str, ...]]:
    """Return the LLVM IR of the kernels (by hash) for any target, and the external symbols that it needs."""
    module = new_module(target)
    for h, kernel in kernels.items():
        _emit(module, kernel, symbol_name(h), parallel)
    return module.render(), tuple(sorted(module.symbols))


def _emit(module: Module, source: Source, name: str, parallel: bool) -> None:
    """Add the function `name` to the module. Raise UnsupportedKernel if its target lacks what the source needs."""
    match source:
        case Kernel():
            emit_kernel(module, unrolled(source), name, parallel)
        case Attention():
            emit_attention(module, source, name, parallel, OnTiles if OnTiles.takes(source, module.target) else Body)
        case Gemv():
            emit_gemv(module, source, name, parallel)
        case Int8Linear():
            emit_int8_linear(module, source, name, parallel)
        case Int8Conv():
            emit_int8_conv(module, source, name, parallel)
        case Bf16Linear():
            emit_bf16_linear(module, source, name, parallel)
        case Depthwise():
            emit_depthwise(module, source, name, parallel)
        case AmxLinear():
            emit_amx_linear(module, source, name, parallel)
        case VectorLinear():
            emit_vector_linear(module, source, name, parallel)
        case DirectConv() if source.transposed:
            emit_transposed_conv(module, source, name, parallel)
        case FirstConv():
            emit_first_conv(module, source, name, parallel)
        case DirectConv():
            emit_direct_conv(module, source, name, parallel)


def to_object(text: str, machine: llvm.TargetMachine) -> bytes:
    """Return the object code of a module."""
    code: bytes = machine.emit_object(_optimized(text, machine))
    return code


def to_assembly(text: str, machine: llvm.TargetMachine) -> str:
    """Return the same code as assembly, for reading."""
    code: str = machine.emit_assembly(_optimized(text, machine))
    return code


def _optimized(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    """Run three LLVM passes. The code is already vectorised and its invariants hoisted, so they give the speed of the O2 pipeline
    in a tenth of its time."""
    module = llvm.parse_assembly(text)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=0))
    passes = llvm.create_new_function_pass_manager()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_loop_rotate_pass()
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    return module
