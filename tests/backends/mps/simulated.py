"""Runs kernels for tests of the Metal emitter: their source is compiled by the shim, with every access checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fusewright.toolkit.ir import Kernel, interpret
from fusewright.toolkit.ir.checks import error
from fusewright_mps.emit.source import SLOT, Source, error_word
from fusewright_mps.emitter import emit, library, variant_for
from fusewright_mps.simulate.library import ShaderLibrary, compile_shader

Number = int | float | bool


def compiled(kernels: Sequence[Kernel], checked: bool = True, backward: bool = False, **variant: bool) -> Module:
    """Compile the kernels into one library."""
    sources = []
    for k in kernels:
        found = emit(k, replace(variant_for(k, k.hints, check_division=True), **variant))
        sources.append(found)
    return Module(sources, compile_shader(library(sources), checked, backward))


class Module:
    """Sources and their compiled library."""

    def __init__(self, sources: Sequence[Source], shaders: ShaderLibrary) -> None:
        self.sources, self.shaders = sources, shaders

    def run(
        self, k: int, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = (), scalars: Sequence[Number] = ()
    ) -> None:
        """Run the k-th kernel. Raises the error that a check of it reports."""
        source = self.sources[k]
        errors = torch.zeros(source.errors, dtype=SLOT) if source.errors else None
        for call in source.calls(tensors, sizes, scalars, errors):
            getattr(self.shaders, call.entry)(*call.args, threads=call.threads, group_size=call.group_size)
        if errors is not None and (word := error_word(errors)):
            raise error(source.kernel, word, sizes)


def run(
    kernel: Kernel,
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[int] = (),
    scalars: Sequence[Number] = (),
    checked: bool = True,
    backward: bool = False,
    **variant: bool,
) -> None:
    """Run one kernel on CPU tensors."""
    compiled([kernel], checked, backward, **variant).run(0, tensors, sizes, scalars)


def reference(
    kernel: Kernel, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = (), scalars: Sequence[Number] = ()
) -> list[torch.Tensor]:
    """Return the buffers after running the reference interpreter."""
    out = [t.clone() for t in tensors]
    interpret(kernel, out, sizes, scalars)
    return out
