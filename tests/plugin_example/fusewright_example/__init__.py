"""The function that `torch.compile(model, backend="example")` finds by its entry point."""

from fusewright.dynamo import entry

example = entry("example")
