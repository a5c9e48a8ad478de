# SPDX-License-Identifier: Apache-2.0
"""Blocks near the model length and near a request's last token."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import draft_harness as harness
import numpy as np
import pytest
import torch
from draft_harness import BLOCK, HIDDEN, MAX_LEN, TAPS, DraftHost, Step
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_dspark.engine.window_clamp import drop_writes, passes_end, useful_drafts


def step_at(last: int, anchor: int = 3) -> Step:
    """A request whose last committed token but one stands at `last`."""
    generator = torch.Generator().manual_seed(last)
    features = torch.randn(4, len(TAPS) * HIDDEN, generator=generator)
    return Step(list(range(last - 3, last + 1)), 0, anchor, features)


def query_slots(host: DraftHost, num_reqs: int) -> list[list[int]]:
    proposer = host.proposer
    gid = proposer.draft_kv_cache_group_id
    slots = proposer.block_tables.slot_mappings[gid][: num_reqs * proposer.num_query_per_req]
    return slots.view(num_reqs, -1).tolist()


@pytest.fixture(scope="module", params=["ours", "native"])
def host(
    request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> DraftHost:
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    from vllm_dspark.engine.proposer import DSparkProposer

    config = harness.draft_config()
    draft = harness.write_checkpoint(
        tmp_path_factory.mktemp("draft"), config, harness.draft_weights(config)
    )
    kind = {"ours": DSparkProposer, "native": DSparkSpeculator}[request.param]
    made = DraftHost(harness.engine_config(target, draft), kind)
    made.ours = request.param == "ours"
    return made


@pytest.mark.parametrize("left", [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1])
def test_queries_past_the_model_length_write_nowhere(host: DraftHost, left: int) -> None:
    """`left` of the block's queries fit; a second request is far from the end."""
    host.propose([step_at(MAX_LEN - 1 - left), step_at(20)])
    near, far = query_slots(host, 2)
    fits = min(left, BLOCK)
    assert far == list(range(far[0], far[0] + BLOCK))
    assert near[:fits] == list(range(near[0], near[0] + fits)) if fits else True
    beyond = near[fits:]
    if host.ours:
        assert beyond == [PAD_SLOT_ID] * (BLOCK - fits)
    elif beyond:
        # What the clamp is for: the host's own draft writes there, over earlier tokens.
        assert min(beyond) >= 0
    assert max(host.proposer.input_buffers.positions[: 2 * BLOCK].tolist()) < MAX_LEN


def written_values(host: DraftHost, step: Step) -> int:
    """Numbers of the draft's cache that a step changes."""
    layers = host.config.compilation_config.static_forward_context
    caches = [layers[name].kv_cache for name in host.proposer.draft_attn_layer_names]
    for cache in caches:
        cache.fill_(1234.5)
    host.propose([step])
    return sum(int((cache != 1234.5).sum()) for cache in caches)


def test_the_cache_of_earlier_tokens_survives(host: DraftHost) -> None:
    """One query fits: beside the four tokens of context, nothing else is written."""
    per_place, rest = divmod(written_values(host, step_at(20)), 4 + BLOCK)
    assert rest == 0
    wanted = 4 + 1 if host.ours else 4 + BLOCK
    assert written_values(host, step_at(MAX_LEN - 2)) == wanted * per_place


def test_far_from_the_end_nothing_is_done() -> None:
    batch = SimpleNamespace(num_reqs=2, seq_lens_cpu_upper_bound=torch.tensor([10, 93, 500]))
    assert not passes_end(batch, 7, 100)
    assert passes_end(batch, 8, 100)


def test_the_anchor_of_a_draft_that_fills_in_stays() -> None:
    """Such a block has one query more than drafted tokens, and its tokens stand at the queries."""
    slots = torch.arange(100, 112)[None].repeat(2, 1)
    sample_pos = torch.tensor([7, 8, 9, 2, 3, 4])
    drop_writes(slots, sample_pos, 2, 4, 3, 9)
    assert slots.tolist() == [
        [100, 101, 102, PAD_SLOT_ID, 104, 105, 106, 107, *range(108, 112)]
    ] * 2  # fmt: skip


@pytest.mark.parametrize(
    ("max_seq_len", "computed", "in_flight", "useful"),
    [
        (100, 50, 0, 48),
        (100, 97, 0, 1),  # one accepted, one after it: the last
        (100, 98, 0, 0),
        (100, 99, 0, 0),
        (100, 98, 7, 7),  # up to seven of them may be rejected yet
    ],
)
def test_useful_drafts(max_seq_len: int, computed: int, in_flight: int, useful: int) -> None:
    found: Any = useful_drafts(np.array([max_seq_len], np.int32), np.array([computed]), in_flight)
    assert found.tolist() == [useful]
