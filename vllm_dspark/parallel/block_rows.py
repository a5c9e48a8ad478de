# SPDX-License-Identifier: Apache-2.0
"""What one step publishes, packed into one int32 tensor `[num_reqs, 2 * gamma + 2]`.

Columns: the float32 bits of gamma confidences, tokens committed, drafts verified, gamma drafted
ids.
Bits travel, not values, so what arrives is what was sent, NaN payloads included.

Invariant: shape and type depend on `num_reqs` and gamma alone. What this rank does not have is sent
as "unknown" (`None` in, NaN, 0 or -1 on the wire), so a rank without confidences sends the same
message as the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class BlockValues:
    """One step's rows on the host."""

    confidence: np.ndarray
    """`[num_reqs, gamma]` float32, of the block that was drafted."""
    num_sampled: np.ndarray
    """`[num_reqs]` int32, tokens that the step committed."""
    verified: np.ndarray
    """`[num_reqs]` int32, drafts that the step verified; -1 where the host decided."""
    drafts: np.ndarray
    """`[num_reqs, gamma]` int32 drafted ids."""


class BlockRows:
    """Packs and unpacks rows of `gamma` drafts."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self.width = 2 * gamma + 2

    def pack(
        self,
        num_reqs: int,
        device: torch.device,
        confidence: torch.Tensor | None,
        num_sampled: torch.Tensor | None,
        verified: torch.Tensor | None,
        drafts: torch.Tensor,
    ) -> torch.Tensor:
        """A new tensor `[num_reqs, width]` int32; the arguments may be rewritten right after.

        Args:
            confidence: `[num_reqs, gamma]` float32, None if this rank has none.
            num_sampled: `[num_reqs]` integers, None if nothing was committed.
            verified: `[num_reqs]` integers, None where the host decided.
            drafts: `[num_reqs, gamma]` integer ids.
        """
        if confidence is None:
            confidence = torch.full((num_reqs, self.gamma), torch.nan, device=device)
        columns = [
            confidence.float().view(torch.int32),
            _column(num_sampled, 0, num_reqs, device),
            _column(verified, -1, num_reqs, device),
            drafts.to(torch.int32),
        ]
        return torch.cat(columns, dim=1)

    def confidence(self, rows: torch.Tensor) -> torch.Tensor:
        """Confidences `[num_reqs, gamma]` float32, sharing the memory of `rows`."""
        return rows.view(torch.float32)[:, : self.gamma]

    def drafts(self, rows: torch.Tensor) -> torch.Tensor:
        """Drafted ids `[num_reqs, gamma]` int32, sharing the memory of `rows`."""
        return rows[:, self.gamma + 2 :]

    def unpack(self, rows: np.ndarray) -> BlockValues:
        """Host values of `rows` `[num_reqs, width]` int32; one copy that all of them share."""
        gamma, rows = self.gamma, rows.copy()
        return BlockValues(
            rows[:, :gamma].view(np.float32),
            rows[:, gamma],
            rows[:, gamma + 1],
            rows[:, gamma + 2 :],
        )


def _column(
    values: torch.Tensor | None, unknown: int, num_reqs: int, device: torch.device
) -> torch.Tensor:
    if values is None:
        return torch.full((num_reqs, 1), unknown, dtype=torch.int32, device=device)
    return values.to(torch.int32).unsqueeze(1)
