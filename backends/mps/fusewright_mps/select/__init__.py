"""Which calls and kernels a region becomes."""
