"""Metal kernels written by hand: launched, compiled and stored as loop kernels are."""
