"""What backends share: loop kernels, emitters, the fused backend."""
