"""The native engine: one scheduler over torch, C and (in `cuda`) CUDA graph runners."""
