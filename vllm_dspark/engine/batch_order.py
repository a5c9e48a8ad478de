# SPDX-License-Identifier: Apache-2.0
"""The host's batch order, worked out once a step though the runner and the plan both need it.

The runner sorts the scheduled requests and then asks for the budget with the same two dicts, so
what it has just sorted is the answer; sorting them again grows with the batch, on the host.
"""

from __future__ import annotations

from collections.abc import Callable

OrderRequests = Callable[[dict[str, int], dict[str, list[int]], int], list[str]]
"""The runner's batch order for scheduled tokens, scheduled drafts and the decode query length."""


class BatchOrder:
    """Remembers the last order that the host was given, for one look.

    Args:
        sort: the host's own function.
    """

    def __init__(self, sort: OrderRequests) -> None:
        self._sort = sort
        self._latest: tuple[dict[str, int], dict[str, list[int]], int, list[str]] | None = None

    def sort(
        self,
        num_tokens_per_req: dict[str, int],
        draft_tokens: dict[str, list[int]],
        decode_query_len: int,
    ) -> list[str]:
        """The host's order, for the host."""
        order = self._sort(num_tokens_per_req, draft_tokens, decode_query_len)
        self._latest = (num_tokens_per_req, draft_tokens, decode_query_len, order)
        return order

    def again(
        self,
        num_tokens_per_req: dict[str, int],
        draft_tokens: dict[str, list[int]],
        decode_query_len: int,
    ) -> list[str]:
        """The same for the plan: remembered if these very dicts were sorted last."""
        latest, self._latest = self._latest, None
        if latest is not None:
            tokens, drafts, query_len, order = latest
            # Requests that come or go change the length; the host sorts and asks in one call.
            if (
                tokens is num_tokens_per_req
                and drafts is draft_tokens
                and query_len == decode_query_len
                and len(order) == len(tokens)
            ):
                return order
        return self._sort(num_tokens_per_req, draft_tokens, decode_query_len)
