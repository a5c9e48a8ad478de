# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampling kernels, interpreted, draw from the target's distribution.

The kernels run in a second process (this file as a script), for the reason given in
`test_cpu_backend_kernels.py`. Seeds are fixed, so a test either always passes or never does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DRAWS = 400
TARGET = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
DRAFT = [0.1, 0.3, 0.3, 0.1, 0.1, 0.1]
CHI2_LIMIT = 20.52  # 5 degrees of freedom, p = 0.001


def chi2(counts: list[int], probabilities: list[float]) -> float:
    total = sum(counts)
    expected = [p * total for p in probabilities]
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


def _draw_with_gumbel(temperature: float) -> list[int]:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    logits = (torch.tensor(TARGET).log() * temperature).expand(DRAWS, -1).contiguous()
    drawn = gumbel_sample(
        logits,
        torch.arange(DRAWS, dtype=torch.int32),
        torch.full((DRAWS,), temperature),
        torch.arange(DRAWS, dtype=torch.int64) * 7919,
        torch.full((DRAWS,), 5, dtype=torch.int64),
        apply_temperature=True,
        is_drafting=False,
    )
    return torch.bincount(drawn, minlength=len(TARGET)).tolist()


def _draw_with_rejection(probabilistic: bool) -> dict[str, Any]:
    """First committed token of requests with one draft each, and how many drafts were accepted."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    generator = torch.Generator().manual_seed(3)
    drafted = torch.multinomial(torch.tensor(DRAFT), DRAWS, True, generator=generator)
    if not probabilistic:
        drafted.fill_(0)
    rows = torch.arange(DRAWS, dtype=torch.int32)
    sampled, num_sampled = rejection_sample(
        target_logits=torch.tensor(TARGET).log().expand(2 * DRAWS, -1).contiguous(),
        draft_logits=(
            torch.tensor(DRAFT).log().expand(DRAWS, 1, -1).contiguous() if probabilistic else None
        ),
        draft_sampled=torch.stack([torch.zeros_like(drafted), drafted], 1).flatten(),
        cu_num_logits=torch.arange(0, 2 * DRAWS + 1, 2, dtype=torch.int32),
        pos=torch.tensor([10, 11]).repeat(DRAWS),
        idx_mapping=rows,
        expanded_idx_mapping=rows.repeat_interleave(2),
        expanded_local_pos=torch.tensor([0, 1], dtype=torch.int32).repeat(DRAWS),
        temperature=torch.ones(DRAWS),
        seed=torch.arange(DRAWS, dtype=torch.int64) * 104729,
        num_speculative_steps=1,
    )
    return {
        "counts": torch.bincount(sampled[:, 0], minlength=len(TARGET)).tolist(),
        "accepted": int((num_sampled == 2).sum()),
    }


def _top_k_top_p() -> bool:
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    k, p = torch.tensor([5, 300, 40]), torch.tensor([1.0, 0.5, 0.8])
    kept = sampler.apply_top_k_top_p(logits.clone(), k, p) > float("-inf")
    wanted = sampler.apply_top_k_top_p_pytorch(logits.clone(), k, p) > float("-inf")
    return torch.equal(kept, wanted) and kept[0].sum().item() == 5


def _main() -> None:
    from vllm_dspark.cpu import interpreter

    assert interpreter.install()
    results = {
        "gumbel": _draw_with_gumbel(temperature=1.7),
        "greedy_draft": _draw_with_rejection(probabilistic=False),
        "probabilistic_draft": _draw_with_rejection(probabilistic=True),
        "top_k_top_p": _top_k_top_p(),
    }
    print(json.dumps(results))


@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_gumbel_sampling_has_the_target_distribution(drawn: dict[str, Any]) -> None:
    assert chi2(drawn["gumbel"], TARGET) < CHI2_LIMIT


@pytest.mark.parametrize("kind", ["greedy_draft", "probabilistic_draft"])
def test_rejection_sampling_has_the_target_distribution(drawn: dict[str, Any], kind: str) -> None:
    assert chi2(drawn[kind]["counts"], TARGET) < CHI2_LIMIT


def test_drafts_are_accepted_at_the_rate_of_theory(drawn: dict[str, Any]) -> None:
    overlap = sum(map(min, TARGET, DRAFT))
    for kind, rate in (("greedy_draft", TARGET[0]), ("probabilistic_draft", overlap)):
        deviation = (DRAWS * rate * (1 - rate)) ** 0.5
        assert abs(drawn[kind]["accepted"] - DRAWS * rate) < 3.5 * deviation


def test_the_limit_notices_a_bias(drawn: dict[str, Any]) -> None:
    """Drafts committed without rejection, the bias to fear, exceed the limit by far."""
    assert chi2([round(p * DRAWS) for p in DRAFT], TARGET) > CHI2_LIMIT
    biased = [0.8 * p + 0.2 * (token == 1) for token, p in enumerate(TARGET)]
    assert chi2(drawn["gumbel"], biased) > CHI2_LIMIT


def test_top_k_and_top_p_keep_the_same_tokens_as_pytorch(drawn: dict[str, Any]) -> None:
    assert drawn["top_k_top_p"] is True


if __name__ == "__main__":
    _main()
