# SPDX-License-Identifier: Apache-2.0
"""Debug logs, one line per request or per step, each naming its rank.

`VLLM_DSPARK_DEBUG_SCHEDULER=1` logs what a rank would do by itself: per request its `verify_len`
and survivals before the sync, and where they come from rank 0 also its own drafted block's
survivals. `VLLM_DSPARK_LOG_GRAPH_KEY=1` logs which graph a rank replays. Comparing two ranks' lines
of one step shows where they would part.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from vllm_dspark.config import Switches

logger = logging.getLogger("vllm.dspark.decisions")


class DecisionLog:
    """Writes the lines of one rank."""

    def __init__(self, rank: int, switches: Switches) -> None:
        self._rank = rank
        self._schedules = switches.debug_scheduler
        self._graphs = switches.log_graph_key

    def planned(
        self,
        step: int,
        budget: int | None,
        req_ids: Sequence[str],
        admitted: np.ndarray | None,
        confidence: np.ndarray,
    ) -> None:
        """This rank's plan, before it is replaced by the group's.

        Args:
            admitted: `[num_reqs]` drafts admitted, None if only the device knows.
            confidence: `[num_reqs, gamma]` that the plan was made from.
        """
        if not self._schedules:
            return
        survivals = _survivals(confidence)
        for row, req_id in enumerate(req_ids):
            verify_len = "device" if admitted is None else str(int(admitted[row]) + 1)
            logger.info(
                "rank=%d step=%d req=%s budget=%s verify_len=%s survivals=%s",
                self._rank,
                step,
                req_id,
                -1 if budget is None else budget,
                verify_len,
                survivals[row],
            )

    def drafted(self, step: int, slots: np.ndarray, own_confidence: np.ndarray) -> None:
        """This rank's own block of `step`, whatever rank 0's was; `[num_reqs, gamma]`."""
        if not self._schedules:
            return
        for slot, survivals in zip(slots, _survivals(own_confidence), strict=True):
            logger.info(
                "rank=%d step=%d slot=%d own_survivals=%s", self._rank, step, slot, survivals
            )

    def graph(self, step: int, key: int | None, num_tokens: int, num_reqs: int) -> None:
        """The graph of a step: its token count, None if the step runs without one."""
        if self._graphs:
            logger.info(
                "rank=%d step=%d graph_key=%s num_tokens=%d num_reqs=%d",
                self._rank,
                step,
                "none" if key is None else key,
                num_tokens,
                num_reqs,
            )


def open_decision_log(rank: int) -> DecisionLog | None:
    """A log if one of its switches is set, else None."""
    switches = Switches.from_env()
    wanted = switches.debug_scheduler or switches.log_graph_key
    return DecisionLog(rank, switches) if wanted else None


def _survivals(confidence: np.ndarray) -> list[str]:
    """One word per row; nine digits tell neighbouring float32 values apart."""
    rows = np.cumprod(confidence.astype(np.float64), axis=1)
    return [",".join(f"{value:.9g}" for value in row) for row in rows]
