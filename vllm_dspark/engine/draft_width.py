# SPDX-License-Identifier: Apache-2.0
"""Drafting blocks of several widths with one speculator.

A block of w slots costs w/gamma of the draft's backbone, LM head and Markov loop, so a step that
will verify few drafts should not pay for gamma of them. Everything the host's speculator derives
from its number of drafts is swapped for the duration of a call; each width has draft graphs of its
own (`draft_graphs`), laid out over the request counts that the host's capture sizes name, up to the
largest batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from vllm_dspark.engine.graphs import thin


class DraftFamilies:
    """The width-dependent parts of one speculator.

    Args:
        speculator: the host's speculator, fully constructed.
    """

    def __init__(self, speculator: Any) -> None:
        self._speculator = speculator
        self._gamma: int = speculator.num_speculative_steps
        self._fill = speculator.num_query_per_req - self._gamma
        self.widths: tuple[int, ...] = (self._gamma,)
        self._anchors: dict[int, torch.Tensor] = {}

    def allow(self, widths: tuple[int, ...]) -> None:
        """Draft at these widths; call before graphs are made."""
        self.widths = widths

    @contextmanager
    def at(self, width: int) -> Iterator[None]:
        """The speculator drafts ``width`` tokens per request inside this context."""
        spec = self._speculator
        if width == self._gamma:
            yield
            return
        names = ("num_speculative_steps", "num_query_per_req", "_anchor_idx")
        usual = {name: getattr(spec, name) for name in names}
        confidence = spec.draft_token_confidence_probs
        spec.num_speculative_steps = width
        spec.num_query_per_req = width + self._fill
        spec._anchor_idx = self._anchor_idx(spec.num_query_per_req)
        spec.draft_token_confidence_probs = confidence[:, :width]
        try:
            yield
        finally:
            spec.draft_token_confidence_probs = confidence
            for name, value in usual.items():
                setattr(spec, name, value)

    def at_query(self, query_len: int) -> AbstractContextManager[None]:
        """As `at`, named by the query tokens per request."""
        return self.at(query_len - self._fill)

    @contextmanager
    def capture_sizes(self) -> Iterator[None]:
        """Graph managers made inside this context cover every batch size, whatever the target's
        largest graph.
        """
        spec = self._speculator
        usual = spec.vllm_config
        lent = copy.copy(usual)
        lent.compilation_config = copy.copy(usual.compilation_config)
        sizes = sorted(usual.compilation_config.cudagraph_capture_sizes or ())
        requests = thin([size for size in sizes if size < spec.max_num_reqs] + [spec.max_num_reqs])
        query = spec.num_query_per_req
        tokens = [count * query for count in requests if count * query <= spec.max_num_tokens]
        if sizes and tokens:
            lent.compilation_config.cudagraph_capture_sizes = tokens
            lent.compilation_config.max_cudagraph_capture_size = tokens[-1]
        spec.vllm_config = lent
        try:
            yield
        finally:
            spec.vllm_config = usual

    def _anchor_idx(self, num_query: int) -> torch.Tensor:
        """First query of each request ``[max_num_reqs]`` int64; one fixed buffer per width, since
        graphs read it.
        """
        if num_query not in self._anchors:
            full = self._speculator._anchor_idx
            usual = self._gamma + self._fill
            self._anchors[num_query] = full // usual * num_query
        return self._anchors[num_query]
