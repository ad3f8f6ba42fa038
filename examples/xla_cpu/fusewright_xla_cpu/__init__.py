"""The function that `torch.compile(model, backend="xla_cpu")` finds through its entry point. Importing it does not import JAX."""

from fusewright.dynamo import entry

xla_cpu = entry("xla_cpu")
