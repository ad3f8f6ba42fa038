"""The backends `nvidia_triton` and `rocm_triton`: Triton loop kernels, with torch's own library calls between them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fusewright import machine, ops
from fusewright.errors import OptionError, nearest
from fusewright.interface import (
    CompileContext,
    Compiled,
    Decline,
    Device,
    DevicePolicy,
    Fragment,
    KernelCode,
    OpView,
    Recorder,
    Region,
    Splits,
    Unavailable,
    Verdict,
    Why,
)
from fusewright.plan.ir import Launch
from fusewright.toolkit.backend.fused import FusedBackend, Loader
from fusewright.toolkit.fuse.eager import Alone, Condition
from fusewright.toolkit.fuse.fuser import fuse
from fusewright.toolkit.ir import Kernel
from fusewright.toolkit.lower.tables import RULES
from fusewright.toolkit.region import gemv
from fusewright.toolkit.region.builder import Builder
from fusewright_triton import target
from fusewright_triton.emit.schedule import Config
from fusewright_triton.kernels import attention_ops
from fusewright_triton.lowerings import CUDNN, LOWERINGS
from fusewright_triton.run.handwritten import INSTALL, NAMESPACE, Order, library
from fusewright_triton.run.precompile import orders
from fusewright_triton.select import aligned
from fusewright_triton.select.calls import few_rows, rewritten
from fusewright_triton.select.convolutions import SHORTCUT

if TYPE_CHECKING:
    from fusewright_triton.runtime import CompiledModule

_INSTALL = "pip install 'fusewright-triton[simulate]'"
_NO_TRITON = Unavailable("triton cannot be imported", INSTALL)


SWITCHES = (
    "backends.cuda.matmul.allow_tf32", "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation", "backends.cudnn.enabled", "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32", "backends.cudnn.conv.fp32_precision", "backends.cuda.flash_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.math_sdp_enabled", "backends.cuda.cudnn_sdp_enabled",
)  # fmt: skip
ENV = (
    "TRITON_F32_DEFAULT", "TRITON_DEFAULT_FP_FUSION", "TRITON_ALLOW_NON_CONSTEXPR_GLOBALS", "TRITON_PTXAS_*", "PTXAS_OPTIONS",
    "TRITON_OVERRIDE*", "TRITON_LIBDEVICE_PATH", "TRITON_INTERPRET", "TRITON_HIP_*", "DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT",
    "AMDGCN_*", "NVIDIA_TF32_OVERRIDE", "CUBLAS*", "CUDNN_*",
)  # fmt: skip
"""External settings of Triton and of GPU libraries that affect code or measured choices."""


EAGER = (
    Condition(
        "rows of a table", frozenset({"embedding", "index_select"}), least=1 << 17, alone=Alone.only_moves,
        why="a kernel looks at the index of every element: bf16, 10.2 us, eager 7.9",
        source=f"{target.H100.source.device}, {target.H100.source.date}, docs/studies/gpu-kernels.md",
    ),
)  # fmt: skip
"""Ops that torch's own kernels compute faster; for smaller results the call overhead dominates."""


ALL = 1 << 31
"""Long columns never stay in registers between passes: on an H200 the gradient of a norm of 1024 x 25088 took 217 us with the sum
of gradients inside, eager's four kernels 167 (2026-11-23, docs/studies/gpu-models.md)."""


HELD_COLUMN = 128
"""Elements of a row across memory that a program holds for 32 neighbours, with 32 to each lane (see `emit.schedule`)."""


def multiple(t: target.Target, dtype: torch.dtype, m: int, k: int, n: int) -> int:
    """Return what rows of a product should be multiples of in training: whole vectors where a matrix is large and was measured."""
    large = t.fitted is not None and max(m * k, m * n, k * n) >= t.fitted.padded_results
    return aligned.vector(dtype) if large and k > aligned.FEW and min(m, n) > 1 else 1


CONTRACTED = 1 << 20
"""The least multiplications of a sum that is left to a library; not measured. Those of up to 4.3e9 in a layer of Mamba 2 took 40 ms
as kernels, and the whole layer 1.4 as products (H200, 2026-11-29)."""


def contracts(dtype: torch.dtype, batch: int, m: int, k: int, n: int) -> bool:
    """Return whether a sum of products is left to the library: where a kernel would read each element eight times and more."""
    return dtype is not torch.float64 and min(m, k, n) >= 8 and batch * m * k * n >= CONTRACTED


def gathers(bounds: gemv.Bounds, dtype: torch.dtype, rows: int, matrices: int, k: int, n: int) -> bool:
    """Return whether rows read matrices of their own: where kernels take such matrices, and most of a random choice differ. On an
    H200 a library's grouped product of two rows reads at half of the bandwidth (2026-11-29, docs/studies/gpu-decoding.md)."""
    return dtype in gemv.FLOATS and rows <= matrices and bounds.hold(k, k * n)


class TritonLoader:
    """Load kernels as machine code for one target or, simulated, as source for Triton's interpreter."""

    def __init__(
        self,
        found: target.Target,
        simulated: bool = False,
        configs: Mapping[str, Config] = MappingProxyType({}),
        by_hand: Iterable[Order] = (),
    ) -> None:
        self.target, self.simulated, self.configs, self.by_hand = found, simulated, configs, by_hand

    def __call__(self, kernels: Mapping[str, Kernel]) -> Mapping[str, KernelCode]:
        from fusewright_triton import runtime  # triton is imported when something is compiled

        if self.simulated:
            module = runtime.simulate_kernels(list(kernels.values()), self.target)
        else:
            module = runtime.compile_kernels(list(kernels.values()), self.target, configs=self.configs)
        return _codes(module, kernels)

    def pack(self, kernels: Mapping[str, Kernel]) -> bytes | None:
        """Serialize kernels with their machine code; when simulated, the kernels alone, from which the source is printed."""
        from fusewright_triton import runtime
        from fusewright_triton.run import archive

        if self.simulated:
            return archive.pack(self.target, archive.Stored(kernels, {}, {}))
        return runtime.pack_kernels(kernels, self.target, self.configs, self.by_hand)

    def unpack(self, data: bytes) -> Mapping[str, KernelCode]:
        from fusewright_triton import runtime
        from fusewright_triton.run import archive

        if self.simulated:
            module = runtime.simulate_kernels(list(archive.unpack(data, self.target).kernels.values()), self.target)
        else:
            module = runtime.unpack_kernels(data, self.target)
        return _codes(module, module.kernels)

    def fingerprint(self) -> str:
        """The target is the device's."""
        return ""


def _codes(module: CompiledModule, kernels: Iterable[str]) -> Mapping[str, KernelCode]:
    return {
        h: KernelCode(module.by_hash(h), kernel=module.kernels[h], source=partial(lambda key: module.sources[key].text, h))
        for h in kernels
    }


@functools.cache
def _triton() -> str:
    """Return Triton's version as read from its file: stored code runs without importing Triton."""
    spec = importlib.util.find_spec("triton")
    text = Path(spec.origin).read_text() if spec is not None and spec.origin else ""
    found = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
    return found[1] if found else "of no version"


class TritonBackend(FusedBackend):
    """The part that both vendors share. `target` finds the row of a device in the vendor's table."""

    device_type = "cuda"  # torch names HIP devices so too
    priority = 50
    constant_masks = True  # flash and cuDNN attention are twice as fast without
    batched_attention = True  # no fused kernel takes another number of dimensions
    row_major_training = True  # products make rows, and norms read them
    lowerings = LOWERINGS
    namespaces = (NAMESPACE,)
    options: ClassVar[Mapping[str, Any]] = {
        "target": "",
        # Whole plans of fixed shapes are recorded as a graph of the device and replayed.
        "graphs": True,
        # Configurations near the formula's are measured when a kernel is first compiled, and the fastest is remembered.
        "autotune": False,
    }
    environment: ClassVar[Mapping[str, str]] = {
        "FUSEWRIGHT_TRITON_WORKERS": "how many processes build kernels at once; default: one a processor"
    }
    rules: ClassVar[Sequence[str]] = (SHORTCUT,)
    targets: ClassVar[Mapping[str, target.Target]]
    typical: ClassVar[str]
    """The target that is simulated when none is named."""

    def __init__(self, device: Device | None = None, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(device, options)
        if self.values["target"] and not (device and device.simulated):
            raise OptionError("option 'target' chooses what is simulated; give 'simulate': True with it")
        if self.values["autotune"] and device and device.simulated:
            raise OptionError(
                "option 'autotune' measures on a device, and a simulated one has no speed; drop one of them"
            )
        self._tuned: dict[str, Config] = {}
        self._by_hand: dict[Order, None] = {}

    @classmethod
    def simulated(cls, options: Mapping[str, Any]) -> Device | Unavailable:
        name = options["target"] or cls.typical
        found = cls.targets.get(name)
        if found is None:
            raise OptionError(f"{cls.name} has no target {name!r}; {nearest(name, cls.targets)}")
        if importlib.util.find_spec("triton") is None:
            return Unavailable("kernels are simulated by Triton's interpreter, and triton is missing", _INSTALL)
        return Device(cls.device_type, name, found.all_features, simulated=True)

    @classmethod
    def target(cls, device: Device) -> target.Target:
        """The target of a device that `probe` found."""
        raise NotImplementedError

    def policy(self) -> DevicePolicy:
        """Results come from torch's stream-ordered allocator; nothing depends on the host's threads."""
        found = self.target(self.running_on())
        by, splits = found.bounds, Splits(passes_again=ALL, held_row=target.FORMULA.persistent, held_column=HELD_COLUMN)
        few = few_rows(self.running_on())
        return DevicePolicy(
            multiple=partial(multiple, found), contracts=contracts, gathers=None if few is None else partial(gathers, few),
            splits=splits, adds_bias=True, eager=EAGER, flops_per_second=by.library_flops, bytes_per_second=by.bandwidth,
        )  # fmt: skip

    def prepare(self) -> None:
        """Start the compiler processes while the graph is traced."""
        from fusewright_triton.build import workers

        device = self.running_on()
        if not device.simulated:
            workers.pool().warm_up(self.target(device).compiler)

    def supports(self, op: OpView) -> Verdict:
        """Answer by the kernel rules; every other row of the opset may run between kernels as torch's own call."""
        verdict = super().supports(op)
        refused = (Why.NO_LOWERING, Why.ATTR) if op.op in RULES else (Why.NO_LOWERING, Why.ATTR, Why.DTYPE)
        if not verdict and verdict.why in refused and op.op in ops.OPS:
            return Verdict(Why.CARRIED, "torch's own call, inside the region")
        return verdict

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        """Compile like every fused backend; decline what this emitter cannot print."""
        from fusewright_triton.runtime import refused

        b = rewritten(self.lowerings, region, ctx)
        self._precompile(b)
        fragment = fuse(b.finish(), ctx, b.calls, policy=self.policy())
        found = self.target(self.running_on())
        for i in fragment.instructions:
            reason = refused(fragment.kernels[i.kernel], found) if isinstance(i, Launch) else None
            if reason is not None:
                raise Decline(reason, ops=i.op_ids)
        notes = {**fragment.notes, **b.notes}
        if self.values["autotune"]:
            return replace(fragment, notes=self._tune(fragment, ctx, notes))
        self._ask(fragment)
        return replace(fragment, notes=notes)

    def _precompile(self, b: Builder) -> None:
        """Start building handwritten kernels in the compiler processes while the rest of the region is lowered."""
        device = self.running_on()
        if not device.simulated:
            for order in orders(b):
                self._by_hand[order] = None
                library(self.target(device)).ask(order)

    def _ask(self, fragment: Fragment) -> None:
        """Start building the kernels while the plan is made."""
        from fusewright_triton.runtime import ask_for_kernels

        device = self.running_on()
        if not device.simulated:
            ask_for_kernels(fragment.kernels, self.target(device))

    def _tune(self, fragment: Fragment, ctx: CompileContext, notes: Mapping[int, str]) -> Mapping[int, str]:
        """Choose configurations for the kernels of a fragment; the returned notes describe the choices."""
        from fusewright_triton.autotune import tune

        tuned = tune(fragment.kernels, self.target(self.running_on()), ctx.choose)
        self._tuned.update(tuned.configs)
        launches = [i for i in fragment.instructions if isinstance(i, Launch)]
        words = {op: tuned.notes[i.kernel] for i in launches for op in i.op_ids}
        return {**notes, **{op: f"{notes[op]}, {w}" if op in notes else w for op, w in words.items()}}

    def fingerprint(self) -> str:
        """The host adds a hash of this package's files to the keys of plans."""
        d = self.running_on()
        gpu = torch.cuda.get_device_name() if not d.simulated and torch.cuda.is_available() else "no GPU"
        told = f"{machine.torch_switches(*SWITCHES)}-{machine.environment(*ENV)}"
        return f"{super().fingerprint()}-torch {torch.__version__}-triton {_triton()}-{gpu}-{told}"

    def recorder(self) -> Recorder | None:
        """Return a recorder of device graphs, unless they are switched off or there is no device."""
        if not self.values["graphs"] or self.running_on().simulated:
            return None
        from fusewright_triton.run.graphs import Graphs

        return Graphs()

    def _loader(self) -> Loader:
        device = self.running_on()
        return TritonLoader(self.target(device), device.simulated, self._tuned, self._by_hand)


class NvidiaTriton(TritonBackend):
    """NVIDIA GPUs of compute capability 8.0 and later."""

    name = "nvidia_triton"
    lowerings = CUDNN
    channels_last_training = True  # cuDNN's tensor core kernels are channels-last, and transpose other images
    targets, typical = target.NVIDIA, "sm_90"

    def tracing(self, symbolic: bool) -> contextlib.AbstractContextManager[None]:
        """Keep steps of training that differ in length from kernels of attention that are planned for each length."""
        return attention_ops.without_plans() if symbolic else contextlib.nullcontext()

    @classmethod
    def probe(cls) -> Device | Unavailable:
        if torch.version.hip is not None:
            return Unavailable("torch is a ROCm build", "use rocm_triton, or install a CUDA build of torch")
        if torch.version.cuda is None:
            return Unavailable("torch is built without CUDA", "install a CUDA build of torch")
        if not torch.cuda.is_available():
            return Unavailable("no NVIDIA GPU is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
        capability = torch.cuda.get_device_capability()
        found = target.nvidia(capability)
        if found is None:
            have = "{}.{}".format(*capability)
            fix = "use a GPU of 8.0 or later, or add its row to target.py"
            return Unavailable(f"compute capability {have} has no target", fix)
        if importlib.util.find_spec("triton") is None:
            return _NO_TRITON
        return Device("cuda", "sm_{}{}".format(*capability), found.all_features, torch.version.cuda)

    @classmethod
    def target(cls, device: Device) -> target.Target:
        digits = device.arch.removeprefix("sm_")
        found = target.nvidia((int(digits[:-1]), int(digits[-1])))
        if found is None:
            raise ValueError(f"{device.arch} has no target")
        return found


class RocmTriton(TritonBackend):
    """AMD GPUs: CDNA2 to CDNA4 and RDNA3."""

    name = "rocm_triton"
    targets, typical = target.AMD, "gfx942"

    @classmethod
    def probe(cls) -> Device | Unavailable:
        if torch.version.hip is None:
            return Unavailable("torch is built without ROCm", "install a ROCm build of torch")
        if not torch.cuda.is_available():
            return Unavailable("no AMD GPU is visible", "check rocminfo and HIP_VISIBLE_DEVICES")
        arch = torch.cuda.get_device_properties(None).gcnArchName
        found = target.amd(arch)
        if found is None:
            known = ", ".join(target.AMD)
            return Unavailable(f"{arch} has no target", f"use one of {known}, or add its row to target.py")
        if importlib.util.find_spec("triton") is None:
            return _NO_TRITON
        return Device("cuda", found.arch, found.all_features, torch.version.hip)

    @classmethod
    def target(cls, device: Device) -> target.Target:
        return target.AMD[device.arch]


def prepare(name: str) -> None:
    """Let a backend prepare itself if its device is there."""
    cls = next(c for c in (NvidiaTriton, RocmTriton) if c.name == name)
    device = cls.probe()
    if isinstance(device, Device):
        cls(device).prepare()
