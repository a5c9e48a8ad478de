# SPDX-License-Identifier: Apache-2.0
"""Writers get views, readers get copies, and both wrong ways round are noticed."""

from __future__ import annotations

import pytest
import torch
from batches import DEVICE, GAMMA

from vllm_dspark.engine.accept_buffers import AcceptBuffers
from vllm_dspark.kernels.greedy_accept import Accepted

ROWS = 5
SPIN_CYCLES = 200_000_000


def make(kind: type[AcceptBuffers] = AcceptBuffers) -> AcceptBuffers:
    return kind(ROWS, GAMMA, DEVICE)


def write(buffers: AcceptBuffers, value: int, num_reqs: int = ROWS) -> None:
    """A step that every number of its outcome tells from others."""
    for place, target in enumerate(buffers.accept_buffers(num_reqs)):
        target.fill_(value + place)


def told(read: Accepted, value: int) -> bool:
    return all(bool((tensor == value + place).all()) for place, tensor in enumerate(read))


def assert_lossless(buffers: AcceptBuffers) -> None:
    """What is written comes back, and stays when the next step is written."""
    write(buffers, 10)
    first = buffers.read_accept(ROWS)
    assert told(first, 10), "written values do not come back"
    write(buffers, 20)
    assert told(first, 10), "a reader's values changed with the next step"
    assert told(buffers.read_accept(ROWS), 20)


class CloneAsTarget(AcceptBuffers):
    """Wrong: what is written goes nowhere."""

    def accept_buffers(self, num_reqs: int) -> Accepted:
        return self.read_accept(num_reqs)


class ViewAsResult(AcceptBuffers):
    """Wrong: readers see later steps (SGLang #42465)."""

    def read_accept(self, num_reqs: int, readers: object = ()) -> Accepted:
        return self.accept_buffers(num_reqs)


def test_values_come_back_and_stay() -> None:
    assert_lossless(make())


@pytest.mark.parametrize(
    ("wrong", "symptom"),
    [(CloneAsTarget, "do not come back"), (ViewAsResult, "changed with the next step")],
)
def test_either_way_round_is_noticed(wrong: type[AcceptBuffers], symptom: str) -> None:
    with pytest.raises(AssertionError, match=symptom):
        assert_lossless(make(wrong))


def test_readers_share_no_storage_with_writers_or_each_other() -> None:
    buffers = make()
    reads = [buffers.read_accept(ROWS), buffers.read_accept(ROWS)]
    storages = [
        {tensor.untyped_storage().data_ptr() for tensor in found}
        for found in (buffers.accept_buffers(ROWS), *reads)
    ]
    assert [len(found) for found in storages] == [1, 1, 1], "reading is one copy"
    assert len(set.union(*storages)) == 3


def test_fields_do_not_overlap() -> None:
    buffers = make()
    for place, target in enumerate(buffers.accept_buffers(ROWS)):
        target.copy_(torch.arange(target.numel(), device=DEVICE).view(target.shape) + 100 * place)
    for place, found in enumerate(buffers.read_accept(ROWS)):
        assert found.flatten().tolist() == [100 * place + i for i in range(found.numel())]


def test_shapes_and_types_are_the_samplers() -> None:
    for found in (make().accept_buffers(3), make().read_accept(3)):
        assert [tuple(tensor.shape) for tensor in found] == [(3, GAMMA + 1), (3,), (3,)]
        assert [tensor.dtype for tensor in found] == [torch.int64, torch.int32, torch.int32]
        assert all(tensor.is_contiguous() for tensor in found)


def test_a_small_step_leaves_the_other_rows() -> None:
    buffers = make()
    write(buffers, 1)
    write(buffers, 9, num_reqs=2)
    found = buffers.read_accept(ROWS)
    assert found.num_sampled.tolist() == [10, 10, 2, 2, 2]
    assert told(buffers.read_accept(2), 9)


@pytest.mark.parametrize("count", [-1, ROWS + 1])
def test_rows_that_do_not_exist_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"num_reqs is {count}; allowed: 0 to {ROWS}"):
        make().accept_buffers(count)
    with pytest.raises(ValueError, match="num_reqs"):
        make().read_accept(count)


def test_a_late_copy_reads_its_own_step() -> None:
    """Every output is copied to the host only when two later steps have been written."""
    buffers, late = make(), []
    for step in range(50):
        write(buffers, 3 * step)
        late.append((step, buffers.read_accept(ROWS)))
        if len(late) > 2:
            oldest, read = late.pop(0)
            assert told(Accepted(*(tensor.cpu().clone() for tensor in read)), 3 * oldest)


def test_buffers_offer_no_other_way_out() -> None:
    public = {name for name in dir(AcceptBuffers) if not name.startswith("_")}
    assert public == {"accept_buffers", "read_accept", "max_num_reqs"}


# ---------------------------------------------------------------------- on a GPU


def late_host_copy(read: Accepted, stream: torch.cuda.Stream) -> list[torch.Tensor]:
    """As the runner copies an output, on a stream that is kept busy before it gets to it."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN_CYCLES)
        return [tensor.to("cpu", non_blocking=True) for tensor in read]


def replayed_step(buffers: AcceptBuffers) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A captured writer, and the value that it writes."""
    value = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def body() -> None:
        for place, target in enumerate(buffers.accept_buffers(ROWS)):
            target.copy_((value + place).to(target.dtype).expand(target.shape))

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        body()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph, value


@pytest.mark.gpu
def test_a_copy_behind_a_spin_kernel_reads_its_own_step() -> None:
    buffers, stream = make(), torch.cuda.Stream()
    graph, value = replayed_step(buffers)
    value.fill_(100)
    graph.replay()
    copied = late_host_copy(buffers.read_accept(ROWS, [stream]), stream)
    # The reader's copies are dropped here; what follows may reuse their memory only after the
    # spin kernel, and replays overwrite the buffers meanwhile.
    for step in range(64):
        value.fill_(step)
        graph.replay()
        buffers.read_accept(ROWS)
    torch.cuda.synchronize()
    assert told(Accepted(*copied), 100)


@pytest.mark.gpu
def test_the_spin_kernel_would_show_a_shared_buffer() -> None:
    """The same with views for readers: without this, the test above may be blind."""
    buffers, stream = make(ViewAsResult), torch.cuda.Stream()
    graph, value = replayed_step(buffers)
    value.fill_(100)
    graph.replay()
    copied = late_host_copy(buffers.read_accept(ROWS), stream)
    value.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert told(Accepted(*copied), 5)


@pytest.mark.gpu
def test_writers_chase_readers_for_many_steps() -> None:
    buffers, stream = make(), torch.cuda.Stream()
    graph, value = replayed_step(buffers)
    late = []
    for step in range(200):
        value.fill_(3 * step)
        graph.replay()
        read = buffers.read_accept(ROWS, [stream])
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000)
            late.append([tensor.to("cpu", non_blocking=True) for tensor in read])
    torch.cuda.synchronize()
    for step, copied in enumerate(late):
        assert told(Accepted(*copied), 3 * step), step
