"""Triton kernels of a decode step. Imported only where Triton is; tested on a CPU by its interpreter."""
