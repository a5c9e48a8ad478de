# SPDX-License-Identifier: Apache-2.0
"""Step records of a made-up server with a known calibration error and known step costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vllm_dspark.core.allocation import allocate
from vllm_dspark.records import StepRecord
from vllm_dspark.records_io import save_records

GAMMA = 5
SCALE, BIAS = 1.8, 0.6
"""The target accepts with probability sigmoid(SCALE * logit(confidence) + BIAS)."""
FIXED_MS, TOKEN_MS, REQUEST_MS = 6.0, 0.04, 0.5
FINGERPRINT = {
    "gpu": "made up",
    "model": "tiny (qwen3, 2 layers of 64)",
    "tp": 1,
    "graph_ladder": [],
    "gamma": GAMMA,
    "dtype": "bfloat16",
}
META = {
    "gamma": GAMMA,
    "model": "models/tiny",
    "draft_model": "models/tiny-draft",
    "mode": "host",
    "engine": 0,
    "fingerprint": FINGERPRINT,
}


def make_records(
    steps: int = 400, share: float = 1.0, seed: int = 0, most: int = 8, tier: int = 0
) -> list[StepRecord]:
    """Steps of 1 to `most` requests that verify `share` of their drafts, the likeliest.

    `tier` is the multiple that graph sizes have; 0 replays none.
    """
    random = np.random.default_rng(seed)
    return [_step(number, share, random, most, tier) for number in range(steps)]


def _step(
    number: int, share: float, random: np.random.Generator, most: int, tier: int
) -> StepRecord:
    requests = int(random.integers(1, most + 1))
    confidence = random.uniform(0.3, 0.97, (requests, GAMMA))
    odds = SCALE * np.log(confidence / (1 - confidence)) + BIAS
    hits = random.random((requests, GAMMA)) < 1 / (1 + np.exp(-odds))
    true_accepts = np.cumprod(hits, axis=1).sum(axis=1)
    scheduled = np.full(requests, GAMMA)
    budget = int(share * scheduled.sum())
    survivals = np.cumprod(confidence, axis=1)
    admitted = allocate(survivals, scheduled, budget)
    tokens = requests + int(admitted.sum())
    graph = -(-tokens // tier) * tier if tier else 0
    cost_ms = FIXED_MS + TOKEN_MS * (graph or tokens) + REQUEST_MS * requests
    return StepRecord(
        step=number,
        time_s=1000.0 + 0.01 * number,
        num_reqs=requests,
        num_sampling=requests,
        base_tokens=requests,
        scheduled=scheduled,
        budget=budget if share < 1.0 else -1,
        lag_steps=1,
        mode="compact",
        reason="trimmed" if share < 1.0 else "full_best",
        tier_tokens=graph,
        verify_lens=admitted + 1,
        survivals=survivals,
        accepted=np.minimum(true_accepts, admitted),
        predicted_ms=cost_ms,
        measured_ms=cost_ms * float(random.normal(1.0, 0.02)),
        request_ids=[f"r{i}-{number // 20}" for i in range(requests)],
        confidence=confidence,
        regimes=np.zeros(requests, dtype=np.int64),
    )


def write(path: Path, records: list[StepRecord], **meta: Any) -> Path:
    """Save records with `META`, its keys replaced by `meta` (None leaves a key out)."""
    header: Mapping[str, Any] = {k: v for k, v in {**META, **meta}.items() if v is not None}
    save_records(str(path), records, header)
    return path
