# SPDX-License-Identifier: Apache-2.0
"""The two ends that a block must not pass: the model's length, and the request's last token.

*Model length.* The host's scheduler shortens a verification so that no token of the target lies
past the model length, and its draft clamps positions to it, so rotary tables are never left. What
the draft does not clamp is where it writes: a query past the end takes the last block of the
request's table at its own offset, which is the place of an earlier token (vLLM Ascend #16153 drops
such blocks as a whole). ``drop_writes`` takes these places away.

*Last token.* A draft past the last token that the request may still generate can be accepted but
never delivered. Leaving it out of a full step would cost the step its uniform graph, so it stays
eligible, and only a budget that others can use up passes it by.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID


def passes_end(input_batch: Any, num_query: int, max_model_len: int) -> bool:
    """Whether a block drafted behind this batch may reach past the model length.

    Decided from the host's bounds, so that steps far from the end do nothing at all.
    """
    longest = int(input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].max())
    return longest + num_query > max_model_len


def drop_writes(
    slot_mappings: torch.Tensor,
    sample_pos: torch.Tensor,
    num_reqs: int,
    num_query: int,
    num_steps: int,
    max_model_len: int,
) -> None:
    """Let draft queries past the model length write nowhere.

    Args:
        slot_mappings: ``[groups, max_num_tokens]`` KV places of the draft's queries, changed.
        sample_pos: ``[max_num_reqs * num_steps]`` positions of the tokens that are drafted.
        num_reqs: requests of the batch.
        num_query: queries per request: one per drafted token, behind an anchor of its own in
            drafts that fill in.
        num_steps: drafted tokens per request.
        max_model_len: positions end before it.
    """
    drafted = sample_pos[: num_reqs * num_steps].view(num_reqs, num_steps)
    # A query that predicts the next token stands one place before it.
    query_pos = drafted - 1 if num_query == num_steps else drafted
    places = slot_mappings[:, : num_reqs * num_query].view(-1, num_reqs, num_query)
    # The anchor is a committed token and always inside.
    places[..., num_query - num_steps :].masked_fill_(query_pos >= max_model_len, PAD_SLOT_ID)


def useful_drafts(max_seq_len: np.ndarray, computed: np.ndarray, in_flight: int) -> np.ndarray:
    """Drafts ``[num_reqs]`` whose acceptance could still be delivered.

    Args:
        max_seq_len: ``[num_reqs]`` prompt and generation at their longest.
        computed: ``[num_reqs]`` tokens that the scheduler takes for computed.
        in_flight: how many of them the step in flight may reject, 0 in the synchronous loop.
    """
    # One token is committed and not computed yet, and a step commits one besides its drafts.
    left = max_seq_len.astype(np.int64) - (computed.astype(np.int64) - in_flight) - 2
    return np.maximum(left, 0)
