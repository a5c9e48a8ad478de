# SPDX-License-Identifier: Apache-2.0
"""Markov heads whose bias needs more than the previous token: gated, rnn, and none at all.

A head turns the embedding `e = W1[x_prev]` of the previous token and the hidden state `h` of the
current block position into a feature of `rank` numbers; the transition bias is `W2 @ feature`
(arXiv 2607.05147, eq. 5-6; the gated head exists only in the reference code). vLLM's own head is
the case `feature = e` and keeps its own class and code path.

Contract, shared by all heads here:

* `state = init_state(hidden)` once per block, then `feature, state = step(e, h, state)` for each
  position in order. A step reads nothing from later positions and nothing of the token that it
  helps to draw, which is what keeps the proposal an exact autoregressive distribution.
* All tensors are made by torch on the device of `hidden`, without a host round trip, so a whole
  block can be captured in a CUDA graph.
* Weights are replicated over tensor-parallel ranks: every rank computes the same feature.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

State = torch.Tensor | None


class MarkovStepHead(nn.Module):
    """Common part: the two low-rank factors, taken over from the head that vLLM built.

    `w1` maps token ids `[num_reqs]` to `[num_reqs, rank]`; `w2` is whatever vLLM's logits processor
    accepts as an output layer of width `rank`.
    """

    def __init__(self, w1: nn.Module, w2: nn.Module) -> None:
        super().__init__()
        self.markov_w1 = w1
        self.markov_w2 = w2

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[num_reqs]` ids to `[num_reqs, rank]`; also the confidence head's Markov feature."""
        embedding: torch.Tensor = self.markov_w1(token_ids)
        return embedding

    def bias(
        self, feature: torch.Tensor, logits_processor: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Transition bias `[num_reqs, draft_vocab]` of a feature `[num_reqs, rank]`."""
        return logits_processor(self.markov_w2, feature)

    def init_state(self, hidden: torch.Tensor) -> State:
        """State before the first position, for the rows of `hidden` `[num_reqs, hidden_size]`."""
        return None

    def step(
        self, embed: torch.Tensor, hidden: torch.Tensor, state: State
    ) -> tuple[torch.Tensor | None, State]:
        """Feature `[num_reqs, rank]` of this position (None: no bias) and the next state."""
        raise NotImplementedError


class GatedMarkovHead(MarkovStepHead):
    """`feature = sigmoid(G [h; e] + b) * e`: the hidden state decides how much of e counts."""

    def __init__(self, w1: nn.Module, w2: nn.Module, *, rank: int, hidden_size: int) -> None:
        super().__init__(w1, w2)
        # Not called gate_proj: vLLM's weight mapper would take that for half of an MLP.
        self.gate = nn.Linear(hidden_size + rank, rank)

    def step(
        self, embed: torch.Tensor, hidden: torch.Tensor, state: State
    ) -> tuple[torch.Tensor | None, State]:
        gate = torch.sigmoid(self.gate(torch.cat([hidden, embed], dim=-1)))
        return gate * embed, state


class RnnMarkovHead(MarkovStepHead):
    """A minimal gated recurrence over the block.

    `[g, z, o] = J [s; e; h] + b`, `feature = tanh(o)`, `s' = sigmoid(g) s + (1 - sigmoid(g))
    tanh(z)`, `s_0 = 0`. The output branch reads the old state.
    """

    def __init__(self, w1: nn.Module, w2: nn.Module, *, rank: int, hidden_size: int) -> None:
        super().__init__(w1, w2)
        self.rank = rank
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def init_state(self, hidden: torch.Tensor) -> State:
        return hidden.new_zeros(hidden.shape[0], self.rank)

    def step(
        self, embed: torch.Tensor, hidden: torch.Tensor, state: State
    ) -> tuple[torch.Tensor | None, State]:
        joint = self.joint_proj(torch.cat([state, embed, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)


class NoMarkovHead(MarkovStepHead):
    """`markov_rank = 0`: every position is drawn from its base logits alone."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), nn.Identity())

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.empty(token_ids.shape[0], 0, device=token_ids.device)

    def step(
        self, embed: torch.Tensor, hidden: torch.Tensor, state: State
    ) -> tuple[torch.Tensor | None, State]:
        return None, state
