# SPDX-License-Identifier: Apache-2.0
"""Results on their way to the host: reader copies, in order, readable by step number alone."""

from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import StandInEvent

from vllm_dspark.engine.relay import BlockRelay, Landed
from vllm_dspark.parallel.block_rows import BlockRows

GAMMA, SLOTS = 3, 4
ROWS = BlockRows(GAMMA)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def stand_ins(cuda_stand_ins: None) -> None: ...


def pack(
    confidence: torch.Tensor, num_sampled: torch.Tensor, verified: torch.Tensor | None = None
) -> torch.Tensor:
    count = len(confidence)
    drafts = torch.arange(count * GAMMA).view(count, GAMMA)
    return ROWS.pack(count, CPU, confidence, num_sampled, verified, drafts)


def step_rows(value: float, count: int = 2) -> torch.Tensor:
    """A step whose every number is told by `value`."""
    sampled = torch.full((count,), int(value * 10), dtype=torch.int32)
    return pack(torch.full((count, GAMMA), value), sampled)


def publish(relay: BlockRelay, value: float, slots: tuple[int, ...] = (2, 0)) -> None:
    relay.publish(np.array(slots), GAMMA, step_rows(value, len(slots)))


def test_what_lands_is_what_was_published() -> None:
    relay = BlockRelay(SLOTS, ROWS, CPU)
    confidence = torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]])
    rows = pack(confidence, torch.tensor([4, 1]), torch.tensor([3, -1]))
    relay.publish(np.array([3, 1]), 2, rows)
    (landed,) = relay.collect(0)
    assert (landed.step, landed.width) == (0, 2)
    assert landed.slots.tolist() == [3, 1]
    assert np.array_equal(landed.agreed.confidence, confidence.numpy())
    assert landed.agreed.confidence.dtype == np.float32
    assert landed.agreed.num_sampled.tolist() == [4, 1]
    assert landed.agreed.verified.tolist() == [3, -1]
    assert landed.agreed.drafts.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert landed.own is landed.agreed


@pytest.mark.parametrize("timed", [True, False])
def test_steps_are_timed_where_they_end(timed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late they are read, and however far ahead the host was then."""
    relay = BlockRelay(SLOTS, ROWS, CPU, timed=timed)
    times = []
    for step, now_ms in enumerate((5.0, 15.0, 45.0, 2045.0, 2055.0)):
        monkeypatch.setattr(StandInEvent, "now_ms", now_ms)
        publish(relay, 0.5)
        times += [landed.step_ms for landed in relay.collect(1)]
        assert len(times) == step
    times += [landed.step_ms for landed in relay.collect(0)]
    assert times == ([None, 10.0, 30.0, None, 10.0] if timed else [None] * 5)


def test_sources_may_be_rewritten_right_after() -> None:
    """Confidences, counts and slots live in buffers that the next replay overwrites."""
    relay = BlockRelay(SLOTS, ROWS, CPU)
    slots = np.array([1, 2])
    confidence = torch.full((2, GAMMA), 0.5)
    sampled, verified = torch.tensor([2, 3]), torch.tensor([1, 1])
    relay.publish(slots, GAMMA, pack(confidence, sampled, verified))
    confidence.fill_(0.125)
    sampled.zero_()
    verified.fill_(-7)
    slots[:] = 0
    (landed,) = relay.collect(0)
    assert (landed.agreed.confidence == 0.5).all()
    assert landed.agreed.num_sampled.tolist() == [2, 3]
    assert landed.agreed.verified.tolist() == [1, 1]
    assert landed.slots.tolist() == [1, 2]


def test_what_was_read_survives_the_reuse_of_its_buffer() -> None:
    relay = BlockRelay(SLOTS, ROWS, CPU, depth=1)
    publish(relay, 0.25)
    (first,) = relay.collect(0)
    publish(relay, 0.75)
    assert (first.agreed.confidence == 0.25).all()
    assert (first.agreed.num_sampled == 2).all()


def test_steps_are_read_in_order_but_for_the_newest() -> None:
    relay = BlockRelay(SLOTS, ROWS, CPU)
    read: list[Landed] = []
    for step in range(7):
        publish(relay, step / 8)
        read += relay.collect(2)
        assert [landed.step for landed in read] == list(range(step - 1))
    read += relay.collect(0)
    assert [landed.step for landed in read] == list(range(7))
    assert [float(landed.agreed.confidence[0, 0]) for landed in read] == [
        step / 8 for step in range(7)
    ]
    assert list(relay.collect(0)) == []
    assert relay.published == 7


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_full_ring_is_an_error_and_not_an_overwrite(depth: int) -> None:
    relay = BlockRelay(SLOTS, ROWS, CPU, depth=depth)
    for step in range(depth):
        publish(relay, step / 8)
    with pytest.raises(RuntimeError, match=f"{depth} steps published and none collected"):
        publish(relay, 1.0)
    assert [landed.step for landed in relay.collect(0)] == list(range(depth))
    publish(relay, 0.5)
    (landed,) = relay.collect(0)
    assert landed.step == depth


def test_reading_waits_for_the_copy_and_never_asks_whether_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy that is asked whether it has landed answers differently on different ranks."""
    events: list[StandInEvent] = []

    class Event(StandInEvent):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            events.append(self)

        def query(self) -> bool:
            raise AssertionError("the state of a copy decided something")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    relay = BlockRelay(SLOTS, ROWS, CPU)
    publish(relay, 0.5)
    publish(relay, 0.5)
    list(relay.collect(1))
    assert [event.synchronized for event in events] == [1, 0]
    list(relay.collect(0))
    assert [event.synchronized for event in events] == [1, 1]


def test_the_copy_stream_waits_for_the_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = object()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: producer)
    relay = BlockRelay(SLOTS, ROWS, CPU)
    publish(relay, 0.5)
    assert relay._stream.waited_for == [producer]


def test_the_own_rows_of_a_rank_land_beside_the_groups() -> None:
    relay = BlockRelay(SLOTS, ROWS, CPU, keeps_own=True)
    relay.publish(np.array([1, 3]), GAMMA, step_rows(0.5), step_rows(0.25))
    (landed,) = relay.collect(0)
    assert (landed.agreed.confidence == 0.5).all()
    assert (landed.own.confidence == 0.25).all()
    assert landed.own.num_sampled.tolist() == [2, 2]


def test_doubtful_values_travel_as_they_are() -> None:
    relay = BlockRelay(SLOTS, ROWS, CPU)
    odd = torch.tensor([[float("nan"), float("inf"), -1.0]])
    relay.publish(np.array([0]), GAMMA, pack(odd, torch.tensor([1])))
    (landed,) = relay.collect(0)
    assert np.array_equal(landed.agreed.confidence, odd.numpy(), equal_nan=True)


def test_no_confidences_are_doubtful_ones() -> None:
    relay = BlockRelay(SLOTS, ROWS, CPU)
    drafts = torch.zeros(2, GAMMA, dtype=torch.int64)
    relay.publish(np.array([0, 1]), GAMMA, ROWS.pack(2, CPU, None, None, None, drafts))
    (landed,) = relay.collect(0)
    assert np.isnan(landed.agreed.confidence).all()
    assert landed.agreed.num_sampled.tolist() == [0, 0]


def test_an_empty_ring_yields_nothing() -> None:
    relay: Any = BlockRelay(SLOTS, ROWS, CPU)
    assert list(relay.collect(0)) == list(relay.collect(5)) == []
