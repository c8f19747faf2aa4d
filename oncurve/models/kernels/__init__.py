"""Triton kernels of the learner, each a pair of plain functions: forward, and the derivative that autograd would compute.

They run on a GPU, and in Triton's interpreter on a CPU, where tests compare them with float64. No kernel adds with atomics:
equal inputs give equal bits. Numbers of tokens are plain arguments, not specialised: a pack of a new length compiles nothing.
"""
