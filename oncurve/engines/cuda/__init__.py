"""The native engine on a GPU: CUDA graphs over Triton kernels and a paged KV cache."""
