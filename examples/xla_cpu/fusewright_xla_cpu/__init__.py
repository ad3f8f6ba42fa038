"""The function that `torch.compile(model, backend="xla_cpu")` finds by its entry point. Importing it imports no JAX."""

from fusewright.dynamo import entry

xla_cpu = entry("xla_cpu")
