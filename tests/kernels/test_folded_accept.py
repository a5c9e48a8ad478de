# SPDX-License-Identifier: Apache-2.0
"""Acceptance as it is captured: on padded buckets, from hidden states, in a graph on a GPU.

The captured body is a function of its own, so it also runs, eagerly, where nothing can be captured.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import DEVICE, GAMMA, Batch, as_input_batch, draw_batch, make_batch

from vllm_dspark.engine.accept_buffers import AcceptBuffers
from vllm_dspark.engine.folded_accept import (
    MAX_GRAPH_ROWS,
    AcceptGraphs,
    FoldedAccept,
    graph_row_sizes,
    host_reason,
)
from vllm_dspark.kernels.greedy_accept import Accepted, greedy_accept_reference

MAX_REQS, MAX_TOKENS, VOCAB = 12, 128, 211
SIZES = [1, 2, 4, 8, 16, 32, 64, 96]


class Runner:
    """Buffers of a model runner, and an LM head that copies hidden states to logits."""

    def __init__(self, dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> None:
        self.hidden_states = torch.zeros(MAX_TOKENS, vocab, dtype=dtype, device=DEVICE)
        self.head = torch.eye(vocab, dtype=dtype, device=DEVICE)
        self.inputs = SimpleNamespace(
            input_ids=torch.zeros(MAX_TOKENS, dtype=torch.int32, device=DEVICE),
            positions=torch.zeros(MAX_TOKENS, dtype=torch.int64, device=DEVICE),
            seq_lens=torch.zeros(MAX_REQS, dtype=torch.int32, device=DEVICE),
        )
        self.buffers = AcceptBuffers(MAX_REQS, GAMMA, DEVICE)
        self.graphs = AcceptGraphs(
            self.hidden_states,
            lambda hidden: torch.nn.functional.linear(hidden, self.head),
            self.inputs,
            SIZES,
            self.buffers,
        )

    def prepare(self, batch: Batch) -> Any:
        """Put a step where the host's verify graph leaves it."""
        here = batch.to(DEVICE)
        self.inputs.input_ids[: len(here.input_ids)] = here.input_ids
        self.inputs.positions[: len(here.positions)] = here.positions
        self.inputs.seq_lens[: batch.num_reqs] = here.seq_lens
        self.hidden_states[here.logits_indices] = here.logits
        return as_input_batch(here)


def decode_batch(seed: int, count: int, dtype: torch.dtype = torch.float32) -> Batch:
    """A ragged batch of requests that are past their prompts."""
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(0, GAMMA + 1, (count,), generator=generator).tolist()
    accepted = torch.randint(0, GAMMA + 1, (count,), generator=generator).tolist()
    pairs = zip(accepted, drafts, strict=True)
    return make_batch(
        drafts, [min(pair) for pair in pairs], vocab=VOCAB, seed=seed, dtype=dtype,
        max_reqs=MAX_REQS, invalid_from={0: 2},
    )  # fmt: skip


def assert_accepted(got: Accepted, batch: Batch) -> None:
    want = greedy_accept_reference(*batch.arguments, GAMMA)
    for name, have, wanted in zip(Accepted._fields, got, want, strict=True):
        assert have.tolist() == wanted.tolist(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 5, MAX_REQS])
def test_the_captured_body_accepts_padded_batches(count: int, dtype: torch.dtype) -> None:
    """One runner for all batches: nothing of an earlier one may be left in a later outcome."""
    runner = Runner(dtype)
    for seed in range(6):
        batch = decode_batch(seed, count, dtype)
        rows = runner.graphs.stage(runner.prepare(batch))
        assert rows == min(size for size in SIZES if size >= len(batch.logits_indices))
        runner.graphs.accept(rows)
        assert_accepted(runner.buffers.read_accept(count), batch)


def test_logits_of_the_host_give_the_same_outcome() -> None:
    """The way of steps that replay no graph, prompts included."""
    for seed in range(8):
        batch = draw_batch(seed, count=9, vocab=VOCAB, dtype=torch.float32).to(DEVICE)
        buffers = AcceptBuffers(9, GAMMA, DEVICE)
        folded = FoldedAccept(buffers, SimpleNamespace(gpu=batch.prefill_len))
        got = folded.run(batch.logits, as_input_batch(batch), None)
        assert_accepted(got, batch.to(torch.device("cpu")))


def test_a_graph_is_refused_with_the_reason() -> None:
    runner = Runner()
    batch = runner.prepare(decode_batch(1, 3))
    hidden = runner.hidden_states[:32]
    assert runner.graphs.reason(hidden, batch) == ""
    batch.has_prefill = True
    assert runner.graphs.reason(hidden, batch) == "prefill"
    batch.has_prefill = False
    assert runner.graphs.reason(hidden.clone(), batch) == "eager_forward"
    batch.logits_indices = torch.zeros(SIZES[-1] + 1, dtype=torch.int64)
    assert runner.graphs.reason(hidden, batch) == "rows"
    folded = FoldedAccept(runner.buffers, None)
    assert folded.graph_reason(hidden, batch) == "no_graphs"


def test_row_sizes_are_the_hosts_up_to_a_limit() -> None:
    host = [1, 2, 4, 8, 248, 256, 264, 512]
    assert graph_row_sizes(host, 4096) == [1, 2, 4, 8, 248, MAX_GRAPH_ROWS]
    assert graph_row_sizes(host, 16) == [1, 2, 4, 8]
    assert graph_row_sizes([], 16) == []


class _Everything(SimpleNamespace):
    """Sampler, verifier and batch of two requests that want nothing but greedy tokens."""

    def __init__(self) -> None:
        import numpy as np

        self.temperature, self.needs = np.zeros(4), np.zeros(4, bool)
        self.logprobs = np.full(4, -1)
        states = SimpleNamespace(
            temperature=SimpleNamespace(np=self.temperature),
            max_num_logprobs=lambda rows: int(self.logprobs[rows].max()),
        )
        self.sampler = SimpleNamespace(
            sampling_states=states,
            needs_logits_processing=self.needs,
            compute_nans=False,
            return_sampling_mask=False,
        )
        self.verifier = SimpleNamespace(watermark_key=None, synthetic_conditional_rates=None)
        self.batch = SimpleNamespace(
            idx_mapping_np=np.array([3, 1]), has_structured_output_reqs=False
        )
        self.invalid: torch.Tensor | None = None

    def reason(self) -> str:
        return host_reason(self.sampler, self.verifier, self.batch, self.invalid)


CHANGES = {
    "sampled": lambda e: e.temperature.__setitem__(1, 0.7),
    "logits_processing": lambda e: e.needs.__setitem__(3, True),
    "logprobs": lambda e: e.logprobs.__setitem__(1, 0),
    "structured_output": lambda e: setattr(e.batch, "has_structured_output_reqs", True),
    "nan_check": lambda e: setattr(e.sampler, "compute_nans", True),
    "sampling_mask": lambda e: setattr(e.sampler, "return_sampling_mask", True),
    "watermark": lambda e: setattr(e.verifier, "watermark_key", 3),
    "synthetic_acceptance": lambda e: setattr(e.verifier, "synthetic_conditional_rates", 1),
    "relaxed_acceptance": lambda e: setattr(e.verifier, "fly_window_size", 2),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_the_host_has_to_accept(reason: str) -> None:
    everything = _Everything()
    assert everything.reason() == ""
    CHANGES[reason](everything)
    assert everything.reason() == reason


def test_drafts_that_a_grammar_rules_out_are_the_hosts() -> None:
    everything = _Everything()
    everything.invalid = torch.zeros(3, dtype=torch.bool)
    assert everything.reason() == "structured_output"


def test_other_requests_settings_do_not_matter() -> None:
    """Slots 0 and 2 belong to nobody in this batch."""
    everything = _Everything()
    everything.temperature[[0, 2]] = 1.0
    everything.needs[[0, 2]] = True
    everything.logprobs[[0, 2]] = 5
    assert everything.reason() == ""


# ---------------------------------------------------------------------- on a GPU


@pytest.fixture
def captured() -> Runner:
    runner = Runner(torch.bfloat16)
    runner.graphs.capture(lambda: contextlib.nullcontext(torch.cuda.graph_pool_handle()))
    return runner


@pytest.mark.gpu
def test_replays_accept_what_the_definition_does(captured: Runner) -> None:
    folded = FoldedAccept(captured.buffers, None)
    folded._graphs = captured.graphs
    for seed in range(40):
        batch = decode_batch(seed, 1 + seed % MAX_REQS, torch.bfloat16)
        prepared = captured.prepare(batch)
        assert folded.graph_reason(captured.hidden_states, prepared) == ""
        assert_accepted(folded.replay(prepared), batch)


@pytest.mark.gpu
def test_replay_eager_and_delayed_read_agree(captured: Runner) -> None:
    """Outcomes of many replays, copied to the host behind a spin kernel, step by step."""
    stream, late = torch.cuda.Stream(), []
    folded = FoldedAccept(captured.buffers, None)
    folded._graphs = captured.graphs
    for seed in range(24):
        batch = decode_batch(seed, 1 + seed % MAX_REQS, torch.bfloat16)
        read = folded.replay(captured.prepare(batch), (stream,))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)
            late.append((batch, Accepted(*(t.to("cpu", non_blocking=True) for t in read))))
    torch.cuda.synchronize()
    for batch, copied in late:
        assert_accepted(copied, batch)


@pytest.mark.gpu
def test_no_kernel_is_compiled_once_every_path_has_run(captured: Runner) -> None:
    """Batch sizes, row counts and ragged lengths vary; variants do not."""
    from triton import knobs

    from vllm_dspark.kernels.allocate import allocate

    def step(seed: int) -> None:
        count = 1 + seed % MAX_REQS
        batch = decode_batch(seed, count, torch.bfloat16)
        captured.graphs.replay(captured.prepare(batch))
        here = batch.to(DEVICE)
        folded = FoldedAccept(captured.buffers, SimpleNamespace(gpu=here.prefill_len))
        folded.run(here.logits, as_input_batch(here), None)
        lens = torch.full((count,), GAMMA, dtype=torch.int32, device=DEVICE)
        allocate(
            torch.rand(MAX_REQS, GAMMA, device=DEVICE),
            torch.arange(count, device=DEVICE),
            lens,
            torch.ones_like(lens),
            1 + seed % (count * GAMMA),
            1,
            count + 1 + seed % (count * GAMMA),
            torch.empty(MAX_REQS + 1, dtype=torch.int32, device=DEVICE),
        )

    step(0)
    compiled: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["fn"].name)
    try:
        for seed in range(1, 60):
            step(seed)
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert compiled == []
