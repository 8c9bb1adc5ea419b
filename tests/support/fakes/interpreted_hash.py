"""`TRITON_INTERPRET=1 python interpreted_hash.py SIZE…`: SGLang's hash kernel on a CPU, over patterned bytes.

It does what sglang's `gpu_tensor_hash` does, but takes a CPU tensor. The last line is JSON: size → checksum.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from sglang.kernels.ops.memory import gpu_tensor_hash as kernel

SEED = 0x243F6A88
TILE = 8192
CHUNK = 1024


def kernel_hash(data: torch.Tensor) -> str:
    """Of uint8, shape [bytes]."""
    words = torch.nn.functional.pad(data, (0, -data.numel() % 4)).view(torch.uint32)
    if not words.numel():
        return f"{0:016x}"
    sums = torch.empty(triton.cdiv(words.numel(), TILE), dtype=torch.uint64)
    kernel.hash_tiles32_kernel_blocked[(sums.numel(),)](
        words, sums, words.numel(), seed1=SEED, seed2=((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF,
        FM_C1=kernel.FMIX32_C1, FM_C2=kernel.FMIX32_C2, POS_A=kernel.POS_C1, POS_B=kernel.POS_C2,
        TILE=TILE, BLOCK=256, USE_CG=False, num_warps=4, num_stages=4,
    )  # fmt: skip
    while sums.numel() > 1:
        fewer = torch.empty(triton.cdiv(sums.numel(), CHUNK), dtype=torch.uint64)
        kernel.add_tree_reduce_u64_kernel[(fewer.numel(),)](sums, fewer, sums.numel(), CHUNK=CHUNK)
        sums = fewer
    return f"{kernel._final_splitmix64(int(sums.item())):016x}"


def main() -> None:
    found = {}
    for size in map(int, sys.argv[1:]):
        places = torch.arange(size, dtype=torch.int64)
        found[size] = kernel_hash(((places * 2654435761 >> 7) ^ places).to(torch.uint8))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
