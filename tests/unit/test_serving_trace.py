# SPDX-License-Identifier: Apache-2.0
"""Traces of the serving benchmark: sums of kernels, kinds of steps, parts of a step."""

from typing import Any

import pytest
import serving_trace
from serving_anatomy import parts_of


def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_kernels_are_summed_and_overlap_counts_once() -> None:
    events = [
        event("user_annotation", "execute_context_0(0)_generation_8(64)", 0, 900),
        event("user_annotation", "execute_context_1(9)_generation_8(64)", 1000, 900),
        event("cpu_op", "aten::mm", 0, 500),
        event("kernel", "gemm", 100, 400),
        event("kernel", "gemm", 1100, 400),
        event("kernel", "copy", 300, 400),
        {"ph": "M", "name": "process_name"},
    ]
    (profile,) = serving_trace.summarize(events)
    assert (profile.device, profile.kind, profile.steps) == (True, "traced", 2)
    assert profile.by_name == [("gemm", 2, 0.8), ("copy", 1, 0.4)]
    assert (profile.busy_ms, profile.span_ms) == (1.0, 1.4)
    assert "gemm" in profile.text()
    assert not serving_trace.summarize(events[:3])[0].device
    with pytest.raises(ValueError, match="neither kernels"):
        serving_trace.summarize(events[:2])


def test_decode_and_mixed_steps_are_told_apart_by_the_devices_marks() -> None:
    marks = [("context_0(0)", 0), ("context_1(9)", 1000), ("context_0(0)", 3000), ("x", 4000)]
    events = [event("gpu_user_annotation", f"execute_{name}", ts, 500) for name, ts in marks]
    events += [
        event("kernel", "gemm", 100, 300),
        event("kernel", "draft", 900, 50),  # after the mark's end, before the next step
        event("kernel", "gemm", 1100, 1500),
        event("kernel", "gemm", 3000, 600),
        event("kernel", "gemm", 4100, 600),  # of the last step, whose end is unknown
    ]
    decode, mixed = serving_trace.summarize(events)
    assert (decode.kind, decode.steps, decode.span_ms, decode.busy_ms) == ("decode", 2, 2.0, 0.95)
    assert decode.by_name == [("gemm", 2, pytest.approx(0.9)), ("draft", 1, 0.05)]
    assert (mixed.kind, mixed.steps, mixed.span_ms, mixed.busy_ms) == ("mixed", 1, 2.0, 1.5)
    for profile in (decode, mixed):
        idle_ms = sum(total.idle_ms for total in profile.by_part.values())
        assert idle_ms == pytest.approx(profile.span_ms - profile.busy_ms)


STEP = [
    ("inputs", ["Memcpy", "_gather_block_tables_kernel"]),
    ("target forward", ["triton_embedding_rms_norm", "nvjet_a", "triton_rms_norm", "rms_norm_2"]),
    ("target LM head", ["gather", "nvjet_b"]),
    ("acceptance", ["_block_argmax_kernel", "_accept_kernel", "_post_update_kernel"]),
    ("draft context", ["_prepare_dflash_inputs_kernel", "nvjet_a", "vllm::rms_norm_kernel"]),
    ("draft backbone", ["triton_embedding_rms_norm", "nvjet_a", "triton_rms_norm"]),
    ("draft LM head", ["gather", "nvjet_b"]),
    ("Markov loop", ["_start_kernel", "_greedy_kernel", "_greedy_kernel", "_finish_kernel"]),
    ("confidences", ["_confidence_kernel"]),
    ("results", ["copy", "Memcpy"]),
]


def test_kernels_are_told_apart_by_their_place_in_the_step() -> None:
    names = [name for _, kernels in STEP for name in kernels]
    expected = [part for part, kernels in STEP for _ in kernels]
    assert parts_of(names) == expected
    # The host's loop and sampler.
    loop = ["index", "nvjet_c", "add", "reduce_kernel<ArgMaxOps>"]
    host = {"Markov loop": loop * 2, "confidences": ["cat", "dot", "sigmoid"],
            "acceptance": ["_gather_draft_sampled_kernel", "_rejection_kernel"]}  # fmt: skip
    names = [name for part, kernels in STEP for name in host.get(part, kernels)]
    expected = [part for part, kernels in STEP for _ in host.get(part, kernels)]
    assert parts_of(names) == expected


@pytest.mark.parametrize("drafted", [0, 5])
def test_a_step_without_a_part_leaves_it_empty(drafted: int) -> None:
    kept = STEP[:4] + STEP[4 : 4 + (1 if drafted else 0)]
    names = [name for _, kernels in kept for name in kernels]
    assert set(parts_of(names)) == {part for part, _ in kept}
    assert parts_of([]) == []


def test_idle_time_counts_to_the_part_that_ends_it() -> None:
    """Every kernel lasts 2 us and starts 3 us after the one before, the forward 10 us later."""
    events, ts = [event("gpu_user_annotation", "execute_context_0(0)", 0, 1)], 0.0
    for part, names in STEP:
        ts += 10.0 * (part == "target forward")
        for name in names:
            events.append(event("kernel", name, ts + 1, 2))
            ts += 3
    events.append(event("gpu_user_annotation", "execute_context_0(0)", ts + 7, 1))
    (profile,) = serving_trace.summarize(events)
    idle = {part: round(1e3 * total.idle_ms, 6) for part, total in profile.by_part.items()}
    expected = {part: float(len(names)) for part, names in STEP}
    expected["target forward"] += 10.0
    assert idle == {**expected, "next step": 7.0}
    figures = profile.figures(kernels=2)
    assert figures["parts"]["inputs"] == {"ms": 0.004, "idle_ms": 0.002, "calls": 2.0}
    assert (figures["kind"], figures["steps"], len(figures["kernels"])) == ("decode", 1, 2)
    assert figures["step_ms"] == pytest.approx(ts / 1e3 + 0.007)
    assert "next step" in profile.text()
