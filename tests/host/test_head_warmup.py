# SPDX-License-Identifier: Apache-2.0
"""Which numbers of rows the LM head is run for before traffic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_dspark.engine import head_warmup
from vllm_dspark.engine.head_warmup import STEP, warm_head, warm_head_of

VOCAB, HIDDEN = 50, 4
ROW = 4 * VOCAB * 2


class Head:
    """An LM head that notes how many rows it was asked for."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert hidden_states.shape[1] == HIDDEN
        self.rows.append(len(hidden_states))
        return torch.zeros(len(hidden_states), VOCAB, dtype=torch.bfloat16)


def free(monkeypatch: pytest.MonkeyPatch, bytes_: int, held: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (bytes_, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000 + held)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)


def runner(requests: int = 5, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        max_num_reqs=requests,
        decode_query_len=8,
        lora_config=None,
        # Smaller than what traffic may bring: graphs end earlier.
        cudagraph_manager=SimpleNamespace(hidden_states=torch.ones(16, HIDDEN)),
        model=SimpleNamespace(compute_logits=Head()),
        **changes,
    )


def test_every_tile_is_run_from_the_largest_down(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1 << 30)
    monkeypatch.setattr(head_warmup, "_fewest_of_group", lambda count: count)
    served = runner()
    warm_head_of(served)
    assert served.model.compute_logits.rows == [1, 40, 32, 24, 16, 8]


@pytest.mark.parametrize("bytes_, held", [(25 * ROW, 0), (5 * ROW, 20 * ROW + 1)])
def test_no_more_rows_than_fit(monkeypatch: pytest.MonkeyPatch, bytes_: int, held: int) -> None:
    free(monkeypatch, bytes_, held)
    head = Head()
    assert warm_head(head, torch.ones(64, HIDDEN), lambda count: count) == 24
    assert head.rows == [1, 24, 16, 8]


def test_no_more_rows_than_fit_on_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1 << 30)
    brought: list[int] = []

    def fewest(count: int) -> int:
        brought.append(count)
        return 2 * STEP + 3

    head = Head()
    assert warm_head(head, torch.ones(64, HIDDEN), fewest) == 16
    assert brought == [64] and head.rows == [1, 16, 8]


def test_what_is_not_warmed() -> None:
    """Nothing is asked of the device or of other ranks either."""
    adapters = runner()
    adapters.lora_config = object()
    piecewise = runner()
    piecewise.cudagraph_manager = SimpleNamespace()
    for served in (adapters, piecewise):
        warm_head_of(served)
        assert served.model.compute_logits.rows == []
