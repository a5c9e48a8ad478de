# SPDX-License-Identifier: Apache-2.0
"""Verify blocks before FlashAttention: the host's own classes, and on a GPU its kernel as well."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_batches import BATCHES, BLOCK, HEADS, KV_HEADS, PAGE, operands
from batches import DEVICE
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backends import flash_attn

from vllm_dspark.config import ConfigError
from vllm_dspark.engine import block_attention
from vllm_dspark.engine.attention_check import disagreement
from vllm_dspark.kernels.verify_attention import Scratch, Splits, verify_attention_reference

SIZE = 64
LAYER_BATCHES = BATCHES | {"long contexts": ([8, 3], [2500, 1100])}

pytestmark = pytest.mark.usefixtures("by_value")


class Layer:
    """A layer with the host's implementation, and the plans that reach it."""

    def __init__(self, forward: Callable[..., Any] | None, **options: Any) -> None:
        shape = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE}
        plain = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
        with set_current_vllm_config(VllmConfig()):
            arguments = {"scale": SIZE**-0.5, **shape, **plain, **options}
            self.impl = flash_attn.FlashAttentionImpl(**arguments)
        self._q_scale = self._k_scale = self._v_scale = torch.ones((), device=DEVICE)
        self.plans: list[Any] = []
        original = forward or self.impl.forward

        def recording(*operands: Any, **further: Any) -> Any:
            self.plans.append(operands[5])
            return original(*operands, **further)

        self.impl.forward = recording


def definition(
    layer: Any,
    query: Any,
    key: Any,
    value: Any,
    kv_cache: Any,
    plan: Any,
    output: Any,
    output_scale: Any = None,
    output_block_scale: Any = None,
) -> Any:
    """FlashAttention's implementation where there is no GPU."""
    size = query.shape[-1]
    keys, values = kv_cache.transpose(1, 2).split(size, dim=-1)
    starts, queries = plan.query_start_loc, query[: plan.num_actual_tokens]
    done = verify_attention_reference(
        queries, keys, values, starts, plan.seq_lens, plan.block_table, size**-0.5
    )
    for start, end in itertools.pairwise(starts.tolist()):
        output.view(*query.shape)[start:end] = done[start:end]
    return output


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "_processors", lambda: 132)


@pytest.fixture
def make_layer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Layer]:
    """Layers whose implementation attends by FlashAttention 3, or by its definition."""
    if DEVICE.type == "cuda":
        return lambda **options: Layer(None, **options)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda *args, **kwargs: 3)
    return lambda **options: Layer(definition, **options)


def configuration(*layers: Layer, ubatching: bool = False, model_len: int = 4096) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=PAGE),
        compilation_config=SimpleNamespace(
            static_forward_context={f"layer {i}": layer for i, layer in enumerate(layers)}
        ),
        device_config=SimpleNamespace(device=DEVICE),
        model_config=SimpleNamespace(max_model_len=model_len, dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(use_ubatching=ubatching),
        scheduler_config=SimpleNamespace(max_num_seqs=64),
        speculative_config=SimpleNamespace(num_speculative_tokens=BLOCK - 1),
    )


def attend(layer: Layer, always: bool = True, **options: Any) -> int:
    names = {"layer 0", "a layer of another rank"}
    changed = block_attention.attend_blocks(configuration(layer, **options), names, always)
    # The check before traffic is none of a test's steps.
    layer.plans.clear()
    return changed


def step(layer: Layer, name: str, **changes: Any) -> bool:
    """One forward pass; whether the output is attention's, and nothing is written behind it."""
    lens, contexts = LAYER_BATCHES[name]
    given = operands(lens, contexts, torch.bfloat16, SIZE)
    cache = torch.cat([given["keys"], given["values"]], dim=-1).transpose(1, 2)
    tokens = sum(lens)
    # The host's buffers are longer than the batch.
    query = torch.cat([given["queries"], given["queries"].new_zeros(3, HEADS, SIZE)])
    output = torch.full_like(query, float("nan"))
    plan = flash_attn.FlashAttentionMetadata(
        **{
            "num_actual_tokens": tokens,
            "max_query_len": max(lens),
            "query_start_loc": given["starts"],
            "max_seq_len": max(contexts),
            "seq_lens": given["contexts"],
            "block_table": given["pages"],
            "slot_mapping": torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
            "max_num_splits": 32,
            **changes,
        }
    )
    # As the host's custom op calls it.
    further = {"output": output, "output_scale": None, "output_block_scale": None}
    answer = layer.impl.forward(layer, query, None, None, cache, plan, **further)
    assert answer is output
    wanted = verify_attention_reference(**given).float()
    worst = float((output[:tokens].float() - wanted).abs().max())
    return worst < 0.03 and bool(output[tokens:].isnan().all())


@pytest.mark.parametrize("model_len, splits", [(4096, 1), (4097, 32)])
@pytest.mark.parametrize("name", LAYER_BATCHES)
def test_a_batch_is_shared_out_between_ours_and_the_hosts(
    make_layer: Callable[..., Layer], name: str, model_len: int, splits: int
) -> None:
    layer = make_layer()
    assert attend(layer, model_len=model_len) == 1
    assert step(layer, name)
    if max(LAYER_BATCHES[name][0]) <= BLOCK:
        assert layer.plans == []
        return
    (plan,) = layer.plans
    assert plan.scheduler_metadata is None and plan.max_num_splits == splits


def test_small_batches_stay_with_the_host(
    make_layer: Callable[..., Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = len(BATCHES["blocks"][0])
    for least, reaches_host in ((slots, False), (slots + 1, True)):
        count = KV_HEADS * least / block_attention._LEAST_TILES
        monkeypatch.setattr(block_attention, "_processors", lambda count=count: count)
        layer = make_layer()
        assert attend(layer, always=False) == 1
        assert step(layer, "blocks")
        assert bool(layer.plans) is reaches_host


def test_a_step_without_a_plan_stays_with_the_host(make_layer: Callable[..., Layer]) -> None:
    layer, seen = make_layer(), []
    layer.impl.forward = lambda *operands: seen.append(operands[5])
    forward = block_attention._before(
        layer.impl, block_attention.Limits(BLOCK, 64, 4096, 1, 1), None
    )
    forward(layer, None, None, None, None, None, None)
    assert seen == [None]


@pytest.mark.parametrize(
    "changes", [{"rswa_prefix_lens": 1}, {"mm_prefix_query_range_tensor": 1}], ids=str
)
def test_other_masks_stay_with_the_host(
    make_layer: Callable[..., Layer], changes: dict[str, Any]
) -> None:
    layer = make_layer()
    assert attend(layer) == 1
    assert step(layer, "blocks", **changes)
    assert len(layer.plans) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 16},
        {"alibi_slopes": [0.5] * HEADS},
        {"kv_cache_dtype": "fp8"},
        {"logits_soft_cap": 30.0},
        {"head_size": 96},
        {"num_heads": 6},
    ],
    ids=str,
)
def test_other_layers_are_left_alone(
    make_layer: Callable[..., Layer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the machine says of 8-bit caches is not the question here.
    monkeypatch.setattr(flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *a, **k: True)
    layer = make_layer(**options)
    forward = layer.impl.forward
    assert attend(layer) == 0
    assert layer.impl.forward is forward


def test_heads_of_other_sizes_are_served_where_asked(make_layer: Callable[..., Layer]) -> None:
    assert block_attention._can_serve(make_layer(head_size=128).impl, always=True)
    assert not block_attention._can_serve(make_layer(head_size=128).impl, always=False)
    assert block_attention._can_serve(make_layer().impl, always=False)


def test_halves_of_a_batch_that_run_at_a_time_are_left_alone(
    make_layer: Callable[..., Layer],
) -> None:
    config = configuration(make_layer(), ubatching=True)
    assert block_attention.attend_blocks(config, {"layer 0"}, always=True) == 0


def wrong(*operands: Any) -> Any:
    definition(*operands)
    operands[6].mul_(1.5)


def broken(*operands: Any) -> Any:
    raise AttributeError("no such field")


@pytest.mark.parametrize(
    "forward, why", [(wrong, "outputs differ by"), (broken, "AttributeError: no such field")]
)
def test_a_disagreement_leaves_attention_to_the_host(
    make_layer: Callable[..., Layer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    forward: Callable[..., Any],
    why: str,
) -> None:
    monkeypatch.setattr(block_attention, "_before", lambda *args: forward)
    layers = (make_layer(), make_layer())
    before = [layer.impl.forward for layer in layers]
    config = configuration(*layers)
    assert block_attention.attend_blocks(config, ["layer 0", "layer 1"], always=False) == 0
    assert [layer.impl.forward for layer in layers] == before
    assert f"2 layers to FlashAttention: {why}" in caplog.text
    with pytest.raises(ConfigError, match=f"block_attention = 'on' cannot run: {why}"):
        block_attention.attend_blocks(config, ["layer 0", "layer 1"], always=True)


def test_agreement_is_no_reason(make_layer: Callable[..., Layer]) -> None:
    layer = make_layer()
    assert disagreement(layer, layer.impl.forward, BLOCK, configuration(layer)) == ""
    # A block and a prompt, both behind their own keys.
    plan = layer.plans[0]
    assert plan.query_start_loc.diff().tolist() == [BLOCK, BLOCK + 1]
    assert int(plan.seq_lens.min()) == BLOCK + 1 and int(plan.seq_lens.max()) > PAGE


@pytest.mark.parametrize(
    "slots, rows, model_len, expected",
    [
        (1, 64, 512, Splits(1, 512)),
        (1, 64, 513, Splits(2, 512)),
        (31, 64, 65536, Splits(4, 512)),
        (31, 600, 65536, Splits(1, 512)),
        (31, 300, 65536, Splits(3, 512)),
        (31, 2000, 9, Splits(1, 512)),
        (32, 64, 4096, Splits(1, 4096)),
        (32, 64, 65536, Splits(4, 4096)),
    ],
)
def test_splits_follow_the_batch_and_fit_the_scratch(
    slots: int, rows: int, model_len: int, expected: Splits
) -> None:
    scratch = Scratch(1000, 1, 16, DEVICE)
    limits = block_attention.Limits(BLOCK, 64, model_len, least_slots=1, many_slots=32)
    assert block_attention.split_plan(slots, rows, limits, scratch) == expected
    assert block_attention.split_plan(slots, rows, limits, None).most == 1


@pytest.mark.parametrize(
    "heads, block, queries", [(2, 8, 16), (8, 8, 8), (8, 5, 8), (32, 16, 8), (256, 8, 1)]
)
def test_a_tile_holds_a_block_of_few_rows(
    make_layer: Callable[..., Layer], heads: int, block: int, queries: int
) -> None:
    impl = make_layer(num_heads=heads).impl
    assert block_attention._tiles(impl, block).queries == queries


def test_blocks_of_several_tiles(make_layer: Callable[..., Layer]) -> None:
    layer = make_layer()
    config = configuration(layer)
    config.speculative_config.num_speculative_tokens = 39
    assert block_attention.attend_blocks(config, {"layer 0"}, always=True) == 1
    layer.plans.clear()
    assert step(layer, "prompts") and step(layer, "long contexts")
    assert layer.plans == []


def test_limits_count_tiles_of_all_kv_heads(make_layer: Callable[..., Layer]) -> None:
    layer = make_layer(num_kv_heads=8)
    limits = block_attention._limits(configuration(layer), layer.impl)
    assert limits == block_attention.Limits(BLOCK, 64, 4096, least_slots=50, many_slots=132)
