# SPDX-License-Identifier: Apache-2.0
"""The host's batch order: sorted once for runner and plan, and never taken from another step."""

import pytest

from vllm_dspark.engine.batch_order import BatchOrder

LENGTH = 8


class Host:
    """Sorts as the host does, decodes first, and counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, tokens: dict[str, int], drafts: dict[str, list[int]], decode_query_len: int
    ) -> list[str]:
        self.calls += 1
        return sorted(tokens, key=lambda r: (tokens[r] > decode_query_len, -len(drafts.get(r, ()))))


def step() -> tuple[dict[str, int], dict[str, list[int]]]:
    return {"a": 40, "b": 1, "c": 8}, {"c": [0] * 7}


def test_what_the_runner_sorted_is_the_plans_order_too() -> None:
    host = Host()
    order = BatchOrder(host)
    tokens, drafts = step()
    assert order.sort(tokens, drafts, LENGTH) == ["c", "b", "a"]
    assert order.again(tokens, drafts, LENGTH) == ["c", "b", "a"]
    assert host.calls == 1


def test_a_plan_that_comes_first_is_sorted() -> None:
    host = Host()
    assert BatchOrder(host).again(*step(), LENGTH) == ["c", "b", "a"]
    assert host.calls == 1


@pytest.mark.parametrize("other", ["tokens", "drafts", "length"])
def test_anything_but_the_very_step_is_sorted_again(other: str) -> None:
    """Equal dicts may be another step's: only the same objects count."""
    host = Host()
    order = BatchOrder(host)
    tokens, drafts = step()
    order.sort(tokens, drafts, LENGTH)
    asked = (
        dict(tokens) if other == "tokens" else tokens,
        dict(drafts) if other == "drafts" else drafts,
        LENGTH - 1 if other == "length" else LENGTH,
    )
    assert order.again(*asked) == Host()(*asked)
    assert host.calls == 2


@pytest.mark.parametrize("change", ["comes", "goes"])
def test_requests_that_come_or_go_are_seen(change: str) -> None:
    order = BatchOrder(Host())
    tokens, drafts = step()
    order.sort(tokens, drafts, LENGTH)
    if change == "comes":
        tokens["d"] = 2
    else:
        del tokens["c"]
    assert order.again(tokens, drafts, LENGTH) == Host()(tokens, drafts, LENGTH)


def test_an_order_is_given_once() -> None:
    """A second plan of one step, a dummy run's say, may come after the dicts were reused."""
    host = Host()
    order = BatchOrder(host)
    tokens, drafts = step()
    order.sort(tokens, drafts, LENGTH)
    for calls in (1, 2, 3):
        assert order.again(tokens, drafts, LENGTH) == ["c", "b", "a"]
        assert host.calls == calls
