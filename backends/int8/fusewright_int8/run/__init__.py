"""What runs at call time: the native core, and the same computations in torch."""
