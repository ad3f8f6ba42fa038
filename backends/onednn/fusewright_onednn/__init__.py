"""Fusewright backend `x86_onednn`: oneDNN calls and LLVM loop kernels for x86-64."""

from fusewright.dynamo import entry

x86_onednn = entry("x86_onednn")
"""The entry point of `torch.compile(backend="x86_onednn")`."""
