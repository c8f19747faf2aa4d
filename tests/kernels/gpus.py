"""NVIDIA's GPUs by compute capability: multiprocessors of one of them, and the shared memory that a program may have, by the
table of technical specifications in the CUDA programming guide."""

from oncurve.kernels.launch import Gpu

GPUS = {
    "T4": Gpu((7, 5), 40, 64 << 10),
    "A100": Gpu((8, 0), 108, 163 << 10),
    "RTX 3090, A10G": Gpu((8, 6), 84, 99 << 10),
    "RTX 4090, L4": Gpu((8, 9), 128, 99 << 10),
    "H100, H200": Gpu((9, 0), 132, 227 << 10),
    "B200": Gpu((10, 0), 148, 227 << 10),
    "RTX 5090": Gpu((12, 0), 170, 99 << 10),
}
