# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a tensor-parallel group may part ways, and which places may go unsynced.

Pure data: options are checked with it before torch or the host is imported.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum


class SyncSite(StrEnum):
    """A value that rank 0 decides for the group."""

    PLAN = "plan"
    """Budget and graph tier, and the confidences that they are computed from."""
    LENS = "lens"
    """Drafts admitted per request."""
    DRAFT = "draft"
    """Drafted token ids."""
    ACCEPT = "accept"
    """Tokens that verification committed."""


DEFAULT_SITES = frozenset({SyncSite.PLAN, SyncSite.LENS, SyncSite.DRAFT})
"""ACCEPT is left out: ranks sample from gathered logits, and `consensus` watches what they commit.
"""


def sites_for(chosen: str | Collection[str], probabilistic: bool) -> frozenset[SyncSite]:
    """Sites that are synced, of `dspark.tp_sync_sites` and the way of drafting.

    Probabilistic drafting keeps the draft's distribution per rank. A rank whose drafts were
    replaced would reject by the wrong one, so there the accepted tokens come from rank 0 as well.
    """
    if not isinstance(chosen, str):
        return frozenset(SyncSite(site) for site in chosen)
    return frozenset(SyncSite) if probabilistic else DEFAULT_SITES


def objection(
    sites: Collection[SyncSite], *, protocol: str, checked: bool, probabilistic: bool
) -> str:
    """What has to be allowed instead of these named sites; empty if they may be synced alone.

    Args:
        protocol: `dspark.tp_sync`.
        checked: a consensus checker stops the group where ranks part.
        probabilistic: drafts are sampled, and each rank keeps the distribution of its own.
    """
    if protocol not in ("inputs", "outputs"):
        return f"'auto' with tp_sync = {protocol!r}, which syncs no site"
    if not sites:
        return "'auto' or at least one site; tp_sync = 'off' syncs none"
    if (SyncSite.PLAN in sites) != (SyncSite.LENS in sites):
        return "both of 'plan' and 'lens' or neither: they have to fit the same graph"
    if SyncSite.DRAFT not in sites and SyncSite.ACCEPT in sites:
        return "'accept' only with 'draft': no rank may commit a token that it has not verified"
    if probabilistic and SyncSite.DRAFT in sites and SyncSite.ACCEPT not in sites:
        return (
            "'draft' only with 'accept' where draft_sample_method is not 'greedy': a rank would "
            "reject replaced drafts by the distribution of its own"
        )
    lacking = [str(site) for site in SyncSite if site in DEFAULT_SITES and site not in sites]
    if lacking and not checked:
        return (
            f"{lacking[0]!r} as well, or consensus_interval above 0, which ends the server where "
            "its ranks part; they may hang otherwise"
        )
    return ""
