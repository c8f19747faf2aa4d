"""The native engine on a GPU: captured CUDA graphs over Triton kernels and a paged KV cache."""
