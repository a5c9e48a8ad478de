# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the demo target, with random weights: enough to change what it says."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_dspark.cli.demo import DEMO_FOLDER

RANK = 8
WITH_LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
"""Engine options."""
PROJECTIONS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")


def write_adapter(folder: Path, seed: int) -> str:
    """An adapter with random weights, as PEFT writes them."""
    config = json.loads((DEMO_FOLDER / "target" / "config.json").read_text())
    heads = {
        "self_attn.q_proj": config["num_attention_heads"] * config["head_dim"],
        "self_attn.v_proj": config["num_key_value_heads"] * config["head_dim"],
    }
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    inputs = {"self_attn.o_proj": heads["self_attn.q_proj"], "mlp.down_proj": wide}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name in PROJECTIONS:
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            shapes = {
                "lora_A": (RANK, inputs.get(name, hidden)),
                "lora_B": (heads.get(name, hidden), RANK),
            }
            for matrix, shape in shapes.items():
                weights[f"{prefix}.{matrix}.weight"] = 0.1 * torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [name.rpartition(".")[2] for name in PROJECTIONS],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return str(folder)


def adapters(folder: Path, count: int, bare: bool) -> list[str | None]:
    """Adapter of each of `count` requests: two by turns, and none where `bare` asks for it."""
    turns = [write_adapter(folder / "one", 1), write_adapter(folder / "two", 2), *[None][:bare]]
    return [turns[number % len(turns)] for number in range(count)]
