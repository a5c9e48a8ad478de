# SPDX-License-Identifier: Apache-2.0
"""Which dummy batches are timed at start-up, and the cost model that their times give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_dspark.core.planner import Planner
from vllm_dspark.core.policy import PolicyConfig
from vllm_dspark.core.tiers import ExecMode, TierLadder
from vllm_dspark.engine import profile
from vllm_dspark.engine.profile import LONG_REPLAYS, LONG_TOKENS, REPLAYS, StartupProfile

GAMMA, MAX_REQS, WIDTHS = 7, 64, (1, 2, 3, 5, 7)
MAX_TOKENS = 3000
COUNTS = [1, 2, 4, 8, 16, 24, 32, 48, 64]


VARLEN = {
    "reaching the largest batch": [1, 2, 4, 8, 16, 64, 128, 256],
    "too small for it": [1, 2, 4, 8, 16, 64],
    "none": [],
}


def profiled(varlen: str) -> tuple[StartupProfile, Any, list[int]]:
    ladders = {ExecMode.FULL: TierLadder(VARLEN[varlen])}
    families = {k: TierLadder([n * (k + 1) for n in COUNTS]) for k in (0, GAMMA)}
    core = Planner(PolicyConfig(), GAMMA, ladders, width_ladders=families)
    runner = SimpleNamespace(
        max_num_reqs=MAX_REQS,
        decode_query_len=GAMMA + 1,
        max_model_len=512,
        max_num_tokens=MAX_TOKENS,
    )
    widths: list[int] = []
    return StartupProfile(core, runner, WIDTHS, widths.append), runner, widths


def timed(varlen: str) -> list[tuple[int, int, int]]:
    """(query length, requests, draft width) of every dummy batch with a graph."""
    startup, runner, widths = profiled(varlen)
    shapes = []
    for batch in startup.batches():
        query_len = runner.decode_query_len
        if not batch["uniform_decode"]:
            continue
        shapes.append((query_len, batch["num_tokens"] // query_len, widths[-1]))
        assert batch["context_len"] + query_len <= runner.max_model_len
    assert runner.decode_query_len == GAMMA + 1, "given back"
    assert widths[-1] == GAMMA
    return shapes


@pytest.mark.parametrize("varlen", VARLEN)
def test_every_width_is_timed_up_to_the_largest_batch(varlen: str) -> None:
    shapes = timed(varlen)
    for query_len, requests, width in set(shapes):
        replays = REPLAYS if query_len * requests <= LONG_TOKENS else LONG_REPLAYS
        assert shapes.count((query_len, requests, width)) % replays == 0
    for width in WIDTHS:
        counts = {requests for _, requests, drafted in shapes if drafted == width}
        assert {1, MAX_REQS} <= counts
    full = {requests for query, requests, _ in shapes if query == GAMMA + 1}
    assert full == set(COUNTS)


def without_graph(**changes: int) -> tuple[list[int], StartupProfile]:
    """Totals that are timed past the graphs, each as often as it is."""
    startup, runner, _ = profiled("reaching the largest batch")
    vars(runner).update(changes)
    totals = []
    for batch in startup.batches():
        if not batch["uniform_decode"]:
            assert runner.decode_query_len == GAMMA + 1
            queries = -(-batch["num_tokens"] // runner.max_num_reqs)
            assert batch["context_len"] + queries <= runner.max_model_len
            totals.append(batch["num_tokens"])
    return totals, startup


def test_totals_past_the_graphs_are_timed_up_to_the_largest_batch() -> None:
    captured = (GAMMA + 1) * COUNTS[-1]
    totals, _ = without_graph()
    assert sorted(set(totals)) == [768, 1024, 2048, 2944]
    assert all(totals.count(total) == LONG_REPLAYS for total in totals)
    assert min(totals) > captured
    # One request more than half of the graph would fall back into it.
    many, _ = without_graph(max_num_reqs=1000)
    assert min(many) > captured
    assert without_graph(max_num_tokens=captured)[0] == []
    assert set(without_graph(max_num_tokens=captured + 100)[0]) == {576}


def test_a_total_past_the_graphs_costs_what_it_was_timed_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last two graphs cost the same here; from them, twice the tokens would be free."""
    monkeypatch.setattr(StartupProfile, "_logit_row_ms", lambda self: 0.0)
    startup, _, _ = profiled("reaching the largest batch")

    def forward_ms(tokens: int, has_graph: bool) -> float:
        return 5.0 + 0.02 * min(tokens, 384) if has_graph else 7.0 + 0.02 * tokens

    samples = [
        SimpleNamespace(
            num_target_tokens=batch["num_tokens"],
            num_reqs=8,
            forward_ms=forward_ms(batch["num_tokens"], batch["uniform_decode"]),
            drafter_ms=1.0,
            full_cudagraph=batch["uniform_decode"],
        )
        for batch in startup.batches()
    ]
    cost = startup.fit(samples)
    assert cost is not None
    for mode in (ExecMode.FULL, ExecMode.PIECEWISE, ExecMode.EAGER):
        got = cost.step_ms(np.array([256, 512, 1024, 2000, 4000]), 8, 0, 0, mode)
        wanted = [forward_ms(256, True), forward_ms(512, True)]
        wanted += [forward_ms(tokens, False) for tokens in (1024, 2000, 4000)]
        assert got == pytest.approx(wanted, rel=0.01)


def test_narrow_blocks_ride_along_with_varlen_batches_that_leave_their_graphs_room() -> None:
    shapes = timed("reaching the largest batch")
    for query_len, _, width in shapes:
        if query_len in profile._VARLEN_QUERY_LENS:
            assert width + 1 == query_len
    # One and three wide are not timed apart then.
    assert {width for query_len, _, width in shapes if query_len == 1} == {2, 5, 7}


def test_graphs_of_narrow_blocks_that_were_not_timed_are_interpolated() -> None:
    """65 requests draft in the graph of 96, not in the next one that was timed."""
    same = [SimpleNamespace(full_cudagraph=True, num_reqs=64, drafter_ms=1.0)]
    most = [SimpleNamespace(full_cudagraph=True, num_reqs=256, drafter_ms=4.0)]
    timed = {profile._Shape(1, 64, 2): same, profile._Shape(1, 256, 2): most}
    curve = profile._draft_curves(timed, {32, 64, 96, 128, 256, 512})[2]
    assert curve.sizes.tolist() == [64, 96, 128, 256]
    assert curve.at(np.array([10, 65, 200])).tolist() == [1.0, 1.5, 4.0]


def test_times_become_curves_by_tokens_and_by_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StartupProfile, "_logit_row_ms", lambda self: 0.002)

    def graph_ms(tokens: int) -> float:
        return 4.0 + 0.02 * tokens + (3.0 if tokens > 100 else 0.0)

    startup, runner, widths = profiled("reaching the largest batch")
    samples = []
    for batch in startup.batches():
        tokens, query_len = batch["num_tokens"], runner.decode_query_len
        # A varlen graph runs as many requests as it can hold.
        uniform = query_len in (1, GAMMA + 1)
        requests = tokens // query_len if uniform else min(tokens, MAX_REQS)
        samples.append(
            SimpleNamespace(
                num_target_tokens=tokens,
                num_reqs=requests,
                forward_ms=graph_ms(tokens) + 2e-4 * requests * batch["context_len"],
                drafter_ms=1.0 + 0.005 * requests * widths[-1],
                full_cudagraph=True,
            )
        )
    cost = startup.fit(samples)
    assert cost is not None
    assert sorted(cost.draft_widths) == list(WIDTHS)
    for width in WIDTHS:
        assert cost.draft_ms(MAX_REQS, width) == pytest.approx(1.0 + 0.005 * MAX_REQS * width)
    assert cost.logit_row_ms == 0.002
    assert cost.context_token_ms == pytest.approx(2e-4)
    # Few requests with many drafts pay for their own context, not for that of a full graph.
    served = cost.step_ms(np.array([128, 256]), 16, 16 * 300)
    rows = 2e-4 * 16 * 300
    assert served == pytest.approx([graph_ms(128) + rows, graph_ms(256) + rows], rel=0.01)
    # 320 tokens were not timed, 256 and 384 were.
    assert cost.step_ms(np.array([320]), 16, 0)[0] == pytest.approx(graph_ms(320), rel=0.01)
    assert startup.fit(samples) is None, "the shapes are used up"
