"""Fast paths of the Llama family: fused modules, C functions on a CPU, Triton kernels on a GPU."""
