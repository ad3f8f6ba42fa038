"""Fusewright backend `graviton_acl`: Arm Compute Library and bf16 on aarch64."""

from fusewright.dynamo import entry

graviton_acl = entry("graviton_acl")
"""The function behind `torch.compile(backend="graviton_acl")`."""
