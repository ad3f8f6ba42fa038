"""Loop kernels to Metal Shading Language."""
