"""Whether a row of torch's float32 product has the same bits whatever number of rows the product has, on this machine.

    python bench/product_bits.py

For each shape of a weight it prints the numbers of rows whose products differ from the first rows of the product of 64 rows.
A step of the torch runner has one number of rows for a call, so it needs no such equality; drafts of any width would.
"""

from __future__ import annotations

import torch

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHAPES = ((64, 192), (256, 768), (896, 1152), (896, 4864))


def differing(inputs: int, outputs: int) -> list[int]:
    """The numbers of rows whose products differ from the first rows of the largest."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(max(ROWS), inputs, generator=generator)
    most = torch.nn.functional.linear(x, weight)
    return [rows for rows in ROWS if not torch.equal(torch.nn.functional.linear(x[:rows], weight), most[:rows])]


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for shape in SHAPES:
        print(f"{shape[0]} → {shape[1]}: other bits with {differing(*shape) or 'no number of'} rows")
