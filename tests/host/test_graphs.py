# SPDX-License-Identifier: Apache-2.0
"""Which graphs are laid out, which one a batch replays, and at which width drafts are captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

from vllm_dspark.config import DSparkConfig
from vllm_dspark.core.tiers import ExecMode
from vllm_dspark.engine.draft_graphs import DraftGraphManager
from vllm_dspark.engine.graphs import VerifyGraphManager
from vllm_dspark.engine.modes import Resolved, VerifyMode
from vllm_dspark.engine.session import Session, open_session

SIZES, MAX_REQS, BLOCK = [1, 2, 4, 8, 16, 32, 64], 8, 4
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


class SpeculativeConfig(SimpleNamespace):
    """A real class, because a session ends with the config that it belongs to."""

    def uses_dynamic_speculative_decoding(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)


def host_config() -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQS),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=list(SIZES), max_cudagraph_capture_size=SIZES[-1]
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        speculative_config=SpeculativeConfig(num_speculative_tokens=BLOCK - 1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        num_speculative_tokens=BLOCK - 1,
    )


def verify_graphs(mode: VerifyMode, mixed_full: bool) -> tuple[VerifyGraphManager, Session]:
    config = host_config()
    session = open_session(config.speculative_config, DSparkConfig())
    session.resolved = Resolved(mode, "chosen by the test")
    session.mixed_full_graphs = mixed_full
    manager = VerifyGraphManager(config, None, CUDAGraphMode.FULL_AND_PIECEWISE, BLOCK)
    manager._graphs_captured = True  # dispatch answers only then
    return manager, session


def replayed(manager: VerifyGraphManager, reqs: int, tokens: int, longest: int | None) -> Any:
    uniform = longest if longest is not None and reqs * longest == tokens else None
    return manager.dispatch(reqs, tokens, uniform, 0, max_query_len=longest)


def test_a_full_budget_replays_the_uniform_graph_and_a_trimmed_one_a_varlen_graph() -> None:
    manager, _ = verify_graphs(VerifyMode.DEVICE, mixed_full=True)
    full = replayed(manager, 4, 16, BLOCK)
    assert (full.cg_mode, full.num_tokens, full.num_reqs) == (FULL, 16, 4)
    assert full.uniform_token_count == BLOCK
    trimmed = manager.dispatch(4, 9, None, 0, max_query_len=BLOCK)
    assert (trimmed.cg_mode, trimmed.num_tokens) == (FULL, 16)
    assert (trimmed.uniform_token_count, trimmed.max_query_len) == (None, BLOCK)


@pytest.mark.parametrize(("mixed_full", "expected"), [(True, FULL), (False, PIECEWISE)])
@pytest.mark.parametrize("mode", [VerifyMode.DEVICE, VerifyMode.UNIFORM, VerifyMode.HOST])
def test_a_step_with_a_prefill_replays_what_the_backend_can(
    mode: VerifyMode, mixed_full: bool, expected: CUDAGraphMode
) -> None:
    manager, _ = verify_graphs(mode, mixed_full)
    mixed = manager.dispatch(3, 20, None, 0, max_query_len=None)
    assert (mixed.cg_mode, mixed.num_tokens, mixed.max_query_len) == (expected, 32, None)
    assert manager.dispatch(3, SIZES[-1] + 1, None, 0).cg_mode is CUDAGraphMode.NONE
    assert manager.ladders()[ExecMode.PIECEWISE].tokens.tolist() == SIZES


def test_lengths_that_only_the_host_fixed_replay_a_graph_that_takes_any_batch() -> None:
    manager, _ = verify_graphs(VerifyMode.HOST, mixed_full=True)
    ragged = manager.dispatch(4, 9, None, 0, max_query_len=BLOCK)
    assert (ragged.cg_mode, ragged.num_tokens, ragged.uniform_token_count) == (FULL, 16, None)
    full = replayed(manager, 4, 16, BLOCK)
    assert full.uniform_token_count == BLOCK, "the fixed-length step keeps its own graph"


def test_uniform_mode_has_a_family_per_query_length() -> None:
    manager, session = verify_graphs(VerifyMode.UNIFORM, mixed_full=False)
    assert sorted(manager.width_ladders()) == [0, 1, 2, 3]
    for query_len in range(1, BLOCK + 1):
        graph = replayed(manager, 4, 4 * query_len, query_len)
        assert (graph.uniform_token_count, graph.num_reqs) == (query_len, 4)
    assert session.planner is None


class SingleTokenPlanner:
    """Has decided to verify nothing."""

    uniform_query_len = 1

    def dispatched(self, graph: Any) -> None: ...


@pytest.mark.parametrize("mode", [VerifyMode.DEVICE, VerifyMode.HOST, VerifyMode.CAP_ACCEPT])
def test_single_tokens_replay_no_graph_of_longer_queries(mode: VerifyMode) -> None:
    """The attention plan of a batch of single tokens does not fit the graphs of longer ones."""
    manager, session = verify_graphs(mode, mixed_full=True)
    decode = replayed(manager, 8, 8, 1)
    has_family = mode is not VerifyMode.CAP_ACCEPT
    assert decode.cg_mode == (FULL if has_family else PIECEWISE)
    assert decode.uniform_token_count == (1 if has_family else None)
    # The last token of a prompt among decodes: the host names no length, a longer one it does not.
    last_of_prompt = manager.dispatch(6, 6, None, 0, max_query_len=None)
    assert last_of_prompt.cg_mode == PIECEWISE
    assert replayed(manager, 6, 7, None).cg_mode == FULL
    planner = SingleTokenPlanner()
    session.attach_planner(planner)
    planned = manager.dispatch(8, 8, None, 0, max_query_len=BLOCK)
    assert planned.uniform_token_count == (1 if has_family else None)


def test_captures_run_from_the_largest_graph_to_the_smallest() -> None:
    manager, _ = verify_graphs(VerifyMode.DEVICE, mixed_full=True)
    tokens = [desc.num_tokens for desc in manager._capture_descs[FULL]]
    assert tokens == sorted(tokens, reverse=True)
    assert len(set(manager._capture_descs[FULL])) == len(tokens), "no graph twice"


def draft_graphs(widths: tuple[int, ...], seen: list[int]) -> DraftGraphManager:
    managers = []
    for width in widths:
        config = host_config()
        config.compilation_config.cudagraph_capture_sizes = [width * n for n in (1, 4, 8)]
        config.compilation_config.max_cudagraph_capture_size = width * 8
        mode = CUDAGraphMode.FULL_DECODE_ONLY
        managers.append(DFlashCudaGraphManager(config, None, mode, decode_query_len=width))

    @contextmanager
    def at_query(query_len: int) -> Iterator[None]:
        seen.append(query_len)
        yield
        seen.append(-query_len)

    return DraftGraphManager(managers, at_query)


def test_every_width_finds_its_own_draft_graph() -> None:
    manager = draft_graphs((1, 3), [])
    manager._graphs_captured = True
    for width in (1, 3):
        for requests, padded in ((1, 1), (2, 4), (5, 8)):
            graph = manager.dispatch(requests, requests * width, width, 0)
            assert (graph.num_reqs, graph.num_tokens) == (padded, padded * width)
    assert manager.dispatch(9, 9 * 3, 3, 0).cg_mode is CUDAGraphMode.NONE


def test_draft_graphs_are_captured_in_one_run_each_at_its_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    runs: list[int] = []
    forwards: list[tuple[int, int]] = []

    def base_capture(self: Any, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
        runs.append(len(seen))
        for desc in self._capture_descs[FULL]:
            for warmup in (True, False):
                create_forward_fn(desc, warmup=warmup)(CUDAGraphMode.NONE)

    monkeypatch.setattr(cudagraph_utils.CudaGraphManager, "capture", base_capture)
    monkeypatch.setattr(
        "vllm.v1.worker.gpu.spec_decode.dflash.cudagraph._prepare_dflash_inputs_to_capture",
        lambda *args, **kwargs: (None, None),
    )

    def forward(num_reqs: int, num_tokens: int, *rest: Any) -> None:
        forwards.append((seen[-1], num_tokens // num_reqs))

    manager = draft_graphs((1, 3), seen)
    arguments: dict[str, Any] = {"prepare_forward": lambda *args: forwards.append((seen[-1],) * 2)}
    accepted = DFlashCudaGraphManager.capture.__code__.co_varnames
    names = ("input_buffers", "block_tables", "attn_groups", "kv_cache_config", "max_model_len")
    arguments = {name: value for name, value in arguments.items() if name in accepted}
    manager.capture(forward, **dict.fromkeys(names), causal=False, **arguments)
    assert runs == [0], "one run"
    assert {width for width, _ in forwards} == {1, 3}
    assert all(at == width for at, width in forwards)
    tokens = [desc.num_tokens for desc in manager._capture_descs[FULL]]
    assert tokens == [24, 12, 8, 4, 3, 1]
