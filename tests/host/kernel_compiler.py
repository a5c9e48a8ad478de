# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of a fused draft for an H100 as far as PTX, which needs no GPU.

Run as a script in a process that does not interpret kernels; prints one JSON object per kernel.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_dspark.kernels import confidence, markov_step
from vllm_dspark.kernels.markov_step import launch_options

TARGET = GPUTarget("cuda", 90, 32)
RANK = 256
WEIGHTS = {"w1_ptr": "*bf16", "w2_ptr": "*bf16", "base_ptr": "*bf16"}
CELLS = {"cells_ptr": "*u64"}


def compile_ptx(
    name: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int
) -> None:
    """Arguments that `types` does not name are 32-bit integers, as sizes and strides are; those
    that a launch specialises, and all pointers, are taken as multiples of 16.
    """
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    runtime = set(kernel.do_not_specialize) | set(constants)
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if n not in runtime and i not in runtime
        },
    )
    compiled = triton.compile(source, target=TARGET, options=options)
    ptx = compiled.asm["ptx"]
    found = {
        "kernel": name,
        "shared": compiled.metadata.shared,
        "matrix_product": "wgmma.mma_async" in ptx or "mma.sync" in ptx,
        "maximum": "max.u64" in ptx,
        # In this order: what is read before the wait must not depend on what came before.
        "overlap": 0 < ptx.find("griddepcontrol.launch") < ptx.find("griddepcontrol.wait"),
    }
    print(json.dumps(found), flush=True)


def main() -> None:
    for count in (1, 256):
        chosen = launch_options(count, RANK, overlap=True)
        sizes = {
            "RANK": RANK,
            "BLOCK_RANK": RANK,
            "BLOCK_VOCAB": chosen.block_vocab,
            "TILE_REQS": chosen.tile_reqs,
        }
        launch = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
        compile_ptx(
            f"greedy {count}",
            markov_step._greedy_kernel,
            WEIGHTS | CELLS | {"draft_to_target_ptr": "*i64"},
            sizes | {"OVERLAP": True},
            launch_pdl=True,
            **launch,
        )
        compile_ptx(
            f"logits {count}",
            markov_step._logits_kernel,
            WEIGHTS | {"previous_ptr": "*i64", "out_ptr": "*bf16"},
            sizes,
            **launch,
        )
    compile_ptx(
        "start",
        markov_step._start_kernel,
        CELLS | {"input_ids_ptr": "*i32", "anchor_idx_ptr": "*i64"},
        {"BLOCK": 256},
    )
    ids = {"tokens_ptr": "*i64", "previous_ptr": "*i64"}
    compile_ptx(
        "finish",
        markov_step._finish_kernel,
        CELLS | ids,
        {"draft_to_target_ptr": None, "BLOCK": 256},
    )
    floats = {"weight_ptr": "*fp32", "bias_ptr": "*fp32", "out_ptr": "*fp32"}
    compile_ptx(
        "confidence",
        confidence._confidence_kernel,
        floats | {"hidden_ptr": "*bf16", "table_ptr": "*bf16", "previous_ptr": "*i64"},
        {"RANK": RANK, "BLOCK": 2048, "BLOCK_RANK": RANK},
    )


if __name__ == "__main__":
    main()
