# SPDX-License-Identifier: Apache-2.0
"""Results on their way to the host: reader copies, in order, readable by step number alone."""

from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import StandInEvent

from vllm_dspark.engine.relay import BlockRelay, Landed

GAMMA, SLOTS = 3, 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def stand_ins(cuda_stand_ins: None) -> None: ...


def publish(relay: BlockRelay, value: float, slots: tuple[int, ...] = (2, 0)) -> torch.Tensor:
    """A step whose every number is told by `value`."""
    rows = len(slots)
    return relay.publish(
        np.array(slots),
        torch.full((rows, GAMMA), value),
        torch.full((rows,), int(value * 10), dtype=torch.int32),
        torch.full((rows,), -1, dtype=torch.int64),
        GAMMA,
    )


def test_what_lands_is_what_was_published() -> None:
    relay = BlockRelay(SLOTS, GAMMA, CPU)
    confidence = torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]])
    agreed = relay.publish(
        np.array([3, 1]), confidence, torch.tensor([4, 1]), torch.tensor([3, -1]), 2
    )
    assert torch.equal(agreed, confidence)
    (landed,) = relay.collect(0)
    assert (landed.step, landed.width) == (0, 2)
    assert landed.slots.tolist() == [3, 1]
    assert np.array_equal(landed.confidence, confidence.numpy())
    assert landed.confidence.dtype == np.float32
    assert landed.num_sampled.tolist() == [4, 1]
    assert landed.verified.tolist() == [3, -1]


def test_sources_may_be_rewritten_right_after() -> None:
    """Confidences, counts and slots live in buffers that the next replay overwrites."""
    relay = BlockRelay(SLOTS, GAMMA, CPU)
    slots = np.array([1, 2])
    confidence = torch.full((2, GAMMA), 0.5)
    sampled, verified = torch.tensor([2, 3]), torch.tensor([1, 1])
    agreed = relay.publish(slots, confidence, sampled, verified, GAMMA)
    confidence.fill_(0.125)
    sampled.zero_()
    verified.fill_(-7)
    slots[:] = 0
    (landed,) = relay.collect(0)
    assert (landed.confidence == 0.5).all()
    assert landed.num_sampled.tolist() == [2, 3]
    assert landed.verified.tolist() == [1, 1]
    assert landed.slots.tolist() == [1, 2]
    assert (agreed == 0.5).all()


def test_what_was_read_survives_the_reuse_of_its_buffer() -> None:
    relay = BlockRelay(SLOTS, GAMMA, CPU, depth=1)
    publish(relay, 0.25)
    (first,) = relay.collect(0)
    publish(relay, 0.75)
    assert (first.confidence == 0.25).all()
    assert (first.num_sampled == 2).all()


def test_steps_are_read_in_order_but_for_the_newest() -> None:
    relay = BlockRelay(SLOTS, GAMMA, CPU)
    read: list[Landed] = []
    for step in range(7):
        publish(relay, step / 8)
        read += relay.collect(2)
        assert [landed.step for landed in read] == list(range(step - 1))
    read += relay.collect(0)
    assert [landed.step for landed in read] == list(range(7))
    assert [float(landed.confidence[0, 0]) for landed in read] == [step / 8 for step in range(7)]
    assert list(relay.collect(0)) == []
    assert relay.published == 7


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_full_ring_is_an_error_and_not_an_overwrite(depth: int) -> None:
    relay = BlockRelay(SLOTS, GAMMA, CPU, depth=depth)
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
        def __init__(self, *args: object) -> None:
            super().__init__()
            events.append(self)

        def query(self) -> bool:
            raise AssertionError("the state of a copy decided something")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    relay = BlockRelay(SLOTS, GAMMA, CPU)
    publish(relay, 0.5)
    publish(relay, 0.5)
    list(relay.collect(1))
    assert [event.synchronized for event in events] == [1, 0]
    list(relay.collect(0))
    assert [event.synchronized for event in events] == [1, 1]


def test_the_copy_stream_waits_for_the_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = object()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: producer)
    relay = BlockRelay(SLOTS, GAMMA, CPU)
    publish(relay, 0.5)
    assert relay._stream.waited_for == [producer]


def test_every_step_is_broadcast_once_and_everybody_reads_the_answer() -> None:
    sent: list[torch.Tensor] = []

    def from_rank_0(packed: torch.Tensor) -> torch.Tensor:
        sent.append(packed.clone())
        return torch.full_like(packed, 3.0)

    relay = BlockRelay(SLOTS, GAMMA, CPU, broadcast=from_rank_0)
    for value, slots in ((0.5, (0, 1)), (float("nan"), (0,)), (0.25, (2, 1, 0))):
        agreed = publish(relay, value if value == value else 0.0, slots)
        assert (agreed == 3.0).all()
    # One message per step, whatever the batch holds: confidences and both counts together.
    assert [tuple(packed.shape) for packed in sent] == [(2, 5), (1, 5), (3, 5)]
    assert sent[0][:, :GAMMA].eq(0.5).all()
    for landed in relay.collect(0):
        assert (landed.confidence == 3.0).all()
        assert (landed.num_sampled == 3).all()


def test_doubtful_values_travel_as_they_are() -> None:
    relay = BlockRelay(SLOTS, GAMMA, CPU)
    odd = torch.tensor([[float("nan"), float("inf"), -1.0]])
    relay.publish(np.array([0]), odd, torch.tensor([1]), torch.tensor([-1]), GAMMA)
    (landed,) = relay.collect(0)
    assert np.array_equal(landed.confidence, odd.numpy(), equal_nan=True)


def test_an_empty_ring_yields_nothing() -> None:
    relay: Any = BlockRelay(SLOTS, GAMMA, CPU)
    assert list(relay.collect(0)) == list(relay.collect(5)) == []
