# SPDX-License-Identifier: Apache-2.0
"""Large batches are planned without splits, on FlashAttention's real builder up to its kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.attention import AttentionConfig
from vllm.v1.attention.backends import flash_attn

from vllm_dspark.engine.attention_splits import limit_splits, needs_no_splits

H200 = 132
BLOCK = 8
LARGE, SMALL = 288, 32


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=H200),
    )


class Builder(flash_attn.FlashAttentionMetadataBuilder):
    """The host's builder as it stands in a server with full graphs; notes what the kernel's own
    planning is asked for. What it is not told of is None.
    """

    def __init__(self, splits: int = 32, dcp_world_size: int = 1) -> None:
        self.device = torch.device("cpu")
        self.num_heads_kv = 8
        self.max_num_splits = splits
        self.dcp_world_size = dcp_world_size
        self.aot_schedule = True
        self.aot_sliding_window = (-1, -1)
        self.use_full_cuda_graph = True
        self.max_cudagraph_size = 2048
        self.scheduler_metadata = torch.zeros(1 + 4 * 512, dtype=torch.int32)
        self.planned: list[int] = []

    def __getattr__(self, name: str) -> None:
        return None

    def _get_scheduler_metadata(self, *, max_num_splits: int, **plan: Any) -> None:
        self.planned.append(max_num_splits)


def batch(requests: int) -> Any:
    """Common metadata of a step, as far as the builder reads it; the rest is None."""

    class Common(SimpleNamespace):
        def __getattr__(self, name: str) -> None:
            return None

    return Common(
        num_reqs=requests,
        num_actual_tokens=4 * requests,
        max_query_len=4,
        max_seq_len=100,
        causal=True,
        query_start_loc=torch.arange(requests + 1, dtype=torch.int32) * 4,
        seq_lens=torch.full((requests,), 100, dtype=torch.int32),
    )


def limited(builder: Builder, max_model_len: int = 4096, **attention: int) -> Builder:
    config = SimpleNamespace(
        attention_config=AttentionConfig(**attention),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        speculative_config=SimpleNamespace(num_speculative_tokens=BLOCK - 1),
    )
    limit_splits([[SimpleNamespace(metadata_builders=[builder])]], config)
    return builder


def test_only_large_batches_do_without_splits() -> None:
    builder = limited(Builder())
    plans = [builder.build(0, batch(count)) for count in (LARGE, SMALL, LARGE)]
    assert builder.planned == [1, 32, 1]
    assert [plan.max_num_splits for plan in plans] == [1, 32, 1]
    assert builder.max_num_splits == 32


def test_the_limit_is_back_after_an_error() -> None:
    builder = limited(Builder())
    with pytest.raises(ValueError, match="int32"):
        builder.build(0, SimpleNamespace(**{**vars(batch(LARGE)), **_UNUSABLE}))
    assert builder.planned == [1]
    assert builder.max_num_splits == 32


_UNUSABLE = {
    "causal": torch.zeros(LARGE, dtype=torch.int64),
    "block_table_tensor": None,
    "slot_mapping": None,
}


@pytest.mark.parametrize(
    "builder, attention",
    [
        (Builder(splits=0), {}),
        (Builder(splits=8), {"flash_attn_max_num_splits_for_cuda_graph": 8}),
        (Builder(dcp_world_size=2), {}),
    ],
    ids=["no FlashAttention 3", "the operator's limit", "shared contexts"],
)
def test_who_keeps_the_hosts_limit(builder: Builder, attention: dict[str, int]) -> None:
    assert "build" not in vars(limited(builder, **attention))


def test_other_backends_are_left_alone() -> None:
    other = SimpleNamespace(max_num_splits=32, build=len)
    limited(other)  # type: ignore[arg-type]
    assert other.build is len


@pytest.mark.parametrize(
    "slots, kv_heads, max_model_len, expected",
    [
        (264, 8, 1024, True),  # two waves exactly, with a block for every eighth slot
        (256, 8, 1024, False),
        (512, 4, 1024, False),  # half the heads on each of two ranks
        (528, 4, 1024, True),
        (264, 8, 4224, True),
        (264, 8, 4225, False),  # one context could keep the others waiting
        (1024, 8, 40960, False),
    ],
)
def test_a_graph_is_filled_and_holds_no_context_that_all_wait_for(
    slots: int, kv_heads: int, max_model_len: int, expected: bool
) -> None:
    assert needs_no_splits(slots, BLOCK, kv_heads, H200, max_model_len) is expected
