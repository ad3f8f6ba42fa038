"""Run-time code: the native core, and the same computations in torch."""
