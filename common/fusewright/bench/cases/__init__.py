"""Cases outside the suite, by the prefix of their names: `kernel:`, `graph:`, `large:` and `decode:`."""

from __future__ import annotations

from fusewright.bench.cases import decoding, graphs, kernels, large
from fusewright.bench.models import Size
from fusewright.bench.suite import Built, DType, TrainStep, UnknownModel, build, check_name, on_device, train_step
from fusewright.interface import HOST


def resolve(model: str, size: Size, dtype: DType, device: str = HOST, steps: int | None = None) -> Built:
    """A call of any case or model on a device, of `steps` steps for a decoding. Raises `UnknownModel`."""
    if decoding.is_decoding(model):
        return decoding.build_decoding(model, size, dtype, device, steps)
    if large.is_large(model):
        return large.build_large(model, size, dtype, device)
    if kernels.is_kernel(model):
        return on_device(kernels.build_kernel(model, dtype), device)
    if graphs.is_graph(model):
        return on_device(graphs.build_graph(model, size, dtype), device)
    return on_device(build(model, size, dtype), device)


def resolve_step(model: str, size: Size, dtype: DType, device: str = HOST) -> TrainStep:
    """A training step of any case or model on a device. Raises `UnknownModel`."""
    if large.is_large(model):
        return large.large_step(model, size, dtype, device)
    step = graphs.graph_step(model, size, dtype) if graphs.is_graph(model) else train_step(model, size, dtype)
    return step.to(device)


def check_case(model: str, train: bool = False) -> None:
    """Raise `UnknownModel` for a name that `resolve` (or `resolve_step`) would reject, without building anything."""
    if train and (decoding.is_decoding(model) or kernels.is_kernel(model)):
        raise UnknownModel(f"{model!r} cannot be trained; leave out --train")
    if decoding.is_decoding(model):
        decoding.check(model)
    elif kernels.is_kernel(model):
        kernels.check(model)
    elif graphs.is_graph(model):
        graphs.check(model, train)
    elif large.is_large(model):
        large.spec_of(model)
    else:
        check_name(model, train)


def counts_bytes(model: str) -> bool:
    """Whether a case knows how many bytes it must move, so that a copy of as many bytes is a contender."""
    return kernels.is_kernel(model) or decoding.is_decoding(model)
