# SPDX-License-Identifier: Apache-2.0
"""A general plugin of vLLM for tests: disturbs one rank of a real server and traces all of them.

It is installed through a distribution folder that `engine_group` writes. `FAULT_FILE` names a file
with the fault as JSON (`kind`, `rank`, `size`, `every`); while the file is missing nothing is
disturbed. `TRACE_FOLDER` names a folder where each rank writes what it did, a line per step, so
that ranks are compared by nothing that is under test.

`ALTERNATE` is a number of steps: the TP sync is on for so many, then off for so many, and so on, by
the step's number, which is equal on all ranks. It shows what the sync costs within one run.

Kinds: `perturb`, `missing`, `nan` (confidences), `flip` (a drafted id), `commit` (another first
token is committed, and the last one is not), `late` (the rank's main thread is late by `size`
seconds). A cost table is adopted at start-up, since a CPU measures none;
it differs on rank 1 before tables are shared.
"""

from __future__ import annotations

import json
import os
import time
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

FAULT_FILE = "DSPARK_TEST_FAULT_FILE"
TRACE_FOLDER = "DSPARK_TEST_TRACE_FOLDER"
ALTERNATE = "DSPARK_TEST_ALTERNATE"


def register() -> None:
    """Entry point; imports neither torch nor vLLM."""
    if os.environ.get(TRACE_FOLDER):
        from vllm_dspark.late_binding import on_import

        on_import("vllm_dspark.engine.planner", _bind)


def _bind(module: ModuleType) -> None:
    planner = module.StepPlanner
    _wrap(planner, "__init__", _after_init)
    _wrap(planner, "reallocate_drafts", _after_reallocate)
    original = planner.record_confidences

    @wraps(original)
    def record_confidences(self: Any, confidence: Any, batch: Any) -> Any:
        answer = original(self, _disturb(self, confidence, batch), batch)
        _alternate(self)
        return answer

    planner.record_confidences = record_confidences
    agree = planner.agree_accept

    @wraps(agree)
    def agree_accept(self: Any, output: Any) -> Any:
        agreed = agree(self, _disturb_accepted(self, output))
        pairs = zip(agreed.sampled_token_ids.tolist(), agreed.num_sampled.tolist(), strict=True)
        committed = [ids[:count] for ids, count in pairs]
        line = {"step": self._relay.published, "committed": committed}
        self.test_trace.write(json.dumps(line) + "\n")
        return agreed

    planner.agree_accept = agree_accept


def _wrap(owner: Any, name: str, after: Any) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        after(self)
        return answer

    setattr(owner, name, method)


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().rank_in_group


def _after_init(planner: Any) -> None:
    import numpy as np

    from vllm_dspark.core import CostModel, ExecMode
    from vllm_dspark.core.cost_model import Curve

    sizes = np.arange(1, 257)
    slope = 0.2 + 0.1 * _rank()
    cost = CostModel({ExecMode.EAGER: Curve(sizes, 4.0 + slope * sizes)})
    planner.bind_profile(type("Measured", (), {"fit": staticmethod(lambda samples: cost)}))
    planner.set_initial_cost_curves([])
    planner.bind_profile(None)
    folder = Path(os.environ[TRACE_FOLDER])
    planner.test_trace = (folder / f"rank{_rank()}-{os.getpid()}.jsonl").open("w", buffering=1)


def _after_reallocate(planner: Any) -> None:
    decision = planner._running
    lens = decision.host_lens
    drafts = planner._states.draft_tokens[decision.slots].tolist()
    line = {
        "step": decision.step,
        "requests": len(decision.req_ids),
        "budget": decision.plan.budget,
        "tokens": decision.num_tokens,
        "graph": decision.graph_tokens,
        "lens": None if lens is None else lens.tolist(),
        "drafts": None if lens is None else [d[:n] for d, n in zip(drafts, lens, strict=True)],
        "at_s": time.monotonic(),
    }
    planner.test_trace.write(json.dumps(line) + "\n")


def _alternate(planner: Any) -> None:
    """Choose whether the next step is synced."""
    window = int(os.environ.get(ALTERNATE, 0))
    if window:
        agreement = planner._agreement
        planner.test_sync = getattr(planner, "test_sync", agreement._sync)
        on = synced(planner._relay.published, window)
        agreement._sync = planner.test_sync if on else None


def synced(step: int, window: int) -> bool:
    """This step is one of those with the sync on."""
    return (step // window) % 2 == 0


def _fault(planner: Any) -> dict[str, Any]:
    """The fault that strikes this rank in this step; of kind `none` if there is none."""
    try:
        fault = json.loads(Path(os.environ[FAULT_FILE]).read_text())
    except (OSError, ValueError, KeyError):
        return {"kind": "none"}
    strikes = fault["rank"] == _rank() and planner._relay.published % fault.get("every", 1) == 0
    return fault if strikes else {"kind": "none"}


def _disturb_accepted(planner: Any, output: Any) -> Any:
    """The sampler's output as this rank shall have it."""
    from dataclasses import replace

    if _fault(planner)["kind"] != "commit":
        return output
    ids = output.sampled_token_ids.clone()
    ids[:, 0] = (ids[:, 0] + 1) % 256
    dropped = (output.num_sampled > 1).to(output.num_sampled.dtype)
    return replace(
        output,
        sampled_token_ids=ids,
        num_sampled=output.num_sampled - dropped,
        num_rejected=output.num_rejected + dropped,
    )


def _disturb(planner: Any, confidence: Any, batch: Any) -> Any:
    """The step's confidences as this rank shall have them."""
    import torch

    fault, step = _fault(planner), planner._relay.published
    kind, row = fault["kind"], step % batch.num_reqs
    if kind == "missing":
        return None
    if kind == "late":
        time.sleep(fault["size"])
    if kind == "flip":
        drafts = planner._states.draft_tokens
        drafts[batch.idx_mapping[row], 0] = (drafts[batch.idx_mapping[row], 0] + 1) % 256
    if kind == "nan":
        confidence = confidence.clone()
        confidence[row, 0] = torch.nan
    if kind == "perturb":
        noise = torch.randn(confidence.shape, generator=torch.Generator().manual_seed(step))
        confidence = (confidence * (1.0 + fault["size"] * noise)).clamp(0.0, 1.0)
    return confidence
