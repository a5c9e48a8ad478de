# SPDX-License-Identifier: Apache-2.0
"""What one GPU can do at best, measured: the bounds that a step is held against.

    python benchmarks/ceilings.py --out benchmarks/results/h200_ceilings.json

| figure | what is timed |
|---|---|
| `copy_tb_s` | a copy of 8 GiB, bytes read and written |
| `read_tb_s` | 16 GiB of bf16 weights with one vector, bytes read: a step of one request |
| `bf16_tflops` | an 8,192 x 8,192 x 8,192 matrix product of random bf16 numbers |
| `fp8_tflops` | the same of e4m3 numbers, one scale per row and column |

Medians over repetitions, each timed by the device.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from device_timing import median_ms

from vllm_dspark.cli.provenance import header, save

SIDE = 8192
COPY_BYTES = 8 * 2**30
ROWS, COLUMNS = 2**21, 4096


def copy_rate() -> float:
    """Bytes read and written per second."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_ms(lambda: target.copy_(source)) * 1e3


def read_rate() -> float:
    """Bytes read per second."""
    matrix = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    vector = torch.randn(COLUMNS, device="cuda", dtype=torch.bfloat16)
    return 2 * ROWS * COLUMNS / median_ms(lambda: torch.mv(matrix, vector)) * 1e3


def arithmetic() -> dict[str, float]:
    operations = 2 * SIDE**3
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bf16 = operations / median_ms(lambda: a @ b) / 1e9
    small_a, small_b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    by_row, by_column = (torch.ones(shape, device="cuda") for shape in ((SIDE, 1), (1, SIDE)))

    def rounded() -> torch.Tensor:
        # The second operand is read column by column.
        return torch._scaled_mm(
            small_a, small_b.t(), by_row, by_column, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    fp8 = operations / median_ms(rounded) / 1e9
    return {"bf16_tflops": round(bf16), "fp8_tflops": round(fp8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--commit", help="where there is no git")
    options = parser.parse_args()
    torch.manual_seed(0)
    document = {
        **header(["python", *sys.argv], options.commit),
        "copy_tb_s": round(copy_rate() / 1e12, 2),
        "read_tb_s": round(read_rate() / 1e12, 2),
        **arithmetic(),
    }
    print(json.dumps(document, indent=1))
    if options.out is not None:
        save(document, options.out)


if __name__ == "__main__":
    main()
