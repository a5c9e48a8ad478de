# SPDX-License-Identifier: Apache-2.0
"""The verifier's greedy outcome is the host's own, batch for batch.

Both are computed in a second process (this file as a script): the host's kernels need the CPU
backend where there is no GPU, which is for a whole process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CASES = 24
FIELDS = ("sampled_token_ids", "num_sampled", "num_rejected")


def _stub_sampler(batch: Any, temperature: float) -> Any:
    """As much of the host's sampler as its rejection sampler reads."""
    import numpy as np
    from batches import DEVICE

    slots = len(batch.prefill_len)

    def by_slot(value: Any, dtype: torch.dtype) -> Any:
        gpu = torch.full((slots,), value, dtype=dtype, device=DEVICE)
        return SimpleNamespace(gpu=gpu, np=gpu.cpu().numpy())

    return SimpleNamespace(
        sampling_states=SimpleNamespace(
            temperature=by_slot(temperature, torch.float32),
            seeds=by_slot(11, torch.int64),
            max_num_logprobs=lambda rows: -1,
        ),
        req_states=SimpleNamespace(
            prefill_len=SimpleNamespace(gpu=batch.prefill_len), max_num_reqs=slots
        ),
        needs_logits_processing=np.zeros(slots, bool),
        apply_sampling_params=lambda logits, *args: logits,
        compute_nans=False,
        return_sampling_mask=False,
        use_fp64_gumbel=False,
        logprobs_mode="raw_logprobs",
    )


def _verifier(batch: Any, temperature: float, folded_accept: str) -> Any:
    """As in a server that may trim on the device."""
    from batches import DEVICE, GAMMA

    from vllm_dspark.config import DSparkConfig
    from vllm_dspark.engine import session
    from vllm_dspark.engine.verifier import Verifier

    config = type("SpeculativeConfig", (), {})()
    vars(config).update(
        num_speculative_tokens=GAMMA,
        enable_adaptive_verification=True,
        rejection_sample_method="standard",
        fly_entropy_threshold=0.0,
        fly_entropy_top_k=0,
    )
    opened = session.open_session(config, DSparkConfig(folded_accept=folded_accept))
    opened.writer = SimpleNamespace(paths=[])
    opened.writer.observe_accept_path = lambda *path: opened.writer.paths.append(path)
    return Verifier(_stub_sampler(batch, temperature), config, DEVICE)


def _outcomes(seed: int) -> dict[str, Any]:
    """Ours and the host's of one batch, committed tokens only."""
    from batches import DEVICE, as_input_batch, draw_batch

    dtype = torch.bfloat16 if seed % 2 else torch.float32
    batch = draw_batch(seed, count=1 + seed % 9, vocab=40 + 977 * (seed % 12), dtype=dtype)
    batch = batch.to(DEVICE)
    found: dict[str, Any] = {}
    for name, option in (("ours", "auto"), ("host", "off"), ("chunks", "off")):
        verifier = _verifier(batch, 0.0, option)
        with _logits_per_chunk(9 if name == "chunks" else None):
            output = verifier(batch.logits.clone(), as_input_batch(batch))
        counts = output.num_sampled.tolist()
        tokens = output.sampled_token_ids.tolist()
        found[name] = {
            "tokens": [row[:n] for row, n in zip(tokens, counts, strict=True)],
            "num_rejected": output.num_rejected.tolist(),
            "types": {field: str(getattr(output, field).dtype) for field in FIELDS},
            "shapes": {field: list(getattr(output, field).shape) for field in FIELDS},
        }
        found[name + "_path"] = verifier._session.writer.paths
    return found


@contextmanager
def _logits_per_chunk(rows: int | None) -> Iterator[None]:
    """How many rows of logits the host copies to float32 at a time; None for its own answer."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler as host

    usual = host.get_max_chunk_logits
    if rows is not None:
        host.get_max_chunk_logits = lambda vocab: rows
    try:
        yield
    finally:
        host.get_max_chunk_logits = usual


class _Planner:
    """As much of a planner as the property reads."""

    def __init__(self, device_lens: bool) -> None:
        self.runs_device_lens = device_lens


def _forbids_chunks(planner: _Planner | None) -> list[bool]:
    """What the host reads before, during and after its warm-up."""
    from batches import DEVICE, draw_batch

    batch = draw_batch(0, count=2, vocab=40, dtype=torch.float32).to(DEVICE)
    verifier = _verifier(batch, 0.0, "off")
    verifier._session.attach_planner(planner)
    found = [verifier.enable_adaptive_verification]
    for value in (False, True):
        verifier.enable_adaptive_verification = value
        found.append(verifier.enable_adaptive_verification)
    return found


def _main() -> None:
    if not torch.cuda.is_available():
        from vllm_dspark.cpu import interpreter

        assert interpreter.install()
    found = {
        "outcomes": [_outcomes(seed) for seed in range(CASES)],
        "forbids_chunks": [
            _forbids_chunks(planner) for planner in (None, _Planner(False), _Planner(True))
        ],
    }
    print(json.dumps(found))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    path = os.pathsep.join(
        [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def outcomes(found: dict[str, Any]) -> list[dict[str, Any]]:
    return found["outcomes"]


@pytest.mark.parametrize("case", range(CASES))
def test_the_outcome_is_the_hosts(outcomes: list[dict[str, Any]], case: int) -> None:
    found = outcomes[case]
    assert found["ours"] == found["host"] == found["chunks"]
    assert found["host_path"] == [["host", "off"]]
    assert found["ours_path"] == [["kernel", "no_graphs"]]


def test_only_steps_with_lengths_of_the_device_forbid_chunks(found: dict[str, Any]) -> None:
    """More logits than a chunk holds are an error of the host's where it takes the layout of the
    batch for one that the device may have changed.
    """
    no_plan, host_lens, device_lens = found["forbids_chunks"]
    assert no_plan == host_lens == [False] * 3
    assert device_lens == [True, False, True]


def test_the_batches_are_of_every_kind(outcomes: list[dict[str, Any]]) -> None:
    lengths = {len(tokens) for found in outcomes for tokens in found["host"]["tokens"]}
    assert lengths == set(range(9)), "nothing committed, everything accepted and all in between"


if __name__ == "__main__":
    _main()
