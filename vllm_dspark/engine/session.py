# SPDX-License-Identifier: Apache-2.0
"""What belongs to one model runner.

The host builds speculator, verification manager, graph manager and rejection sampler one after the
other and hands each of them its speculative config, never the runner. That config identifies the
runner's session. A session owns no device memory: the host's objects own our pieces, the session
only refers to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_dspark.config import DSparkConfig
from vllm_dspark.engine.modes import Resolved, VerifyMode

if TYPE_CHECKING:
    from vllm_dspark.engine.planner import StepPlanner
    from vllm_dspark.engine.proposer import DSparkProposer
    from vllm_dspark.metrics import MetricsWriter

_sessions: dict[int, Session] = {}


@dataclass
class Session:
    """Options, resolved mode and live pieces of one runner."""

    config: DSparkConfig
    resolved: Resolved | None = None
    temperatures: Callable[[], Any] | None = None
    """Sampling temperatures ``[max_num_reqs]`` by request slot, on the host."""
    widths: tuple[int, ...] = ()
    """Block widths that may be drafted, ascending; 0 is not drafting."""
    mixed_full_graphs: bool = False
    """Steps that mix prefill and decode replay full graphs."""
    device_obstacle: str = ""
    """Why the device cannot fix lengths, as far as the configuration tells."""
    writer: MetricsWriter | None = None
    before_traffic: list[Callable[[], None]] = field(default_factory=list)
    """What must be compiled before the first request, on GPUs."""
    _planner: weakref.ref[StepPlanner] | None = field(default=None, repr=False)
    _proposer: weakref.ref[DSparkProposer] | None = field(default=None, repr=False)

    @property
    def mode(self) -> VerifyMode:
        """Resolved mode; static until the host's abilities are known."""
        return self.resolved.mode if self.resolved is not None else VerifyMode.STATIC

    @property
    def block_widths(self) -> tuple[int, ...]:
        """Widths of which there are blocks, so all but 0."""
        return tuple(width for width in self.widths if width)

    @property
    def planner(self) -> StepPlanner | None:
        return self._planner() if self._planner is not None else None

    @property
    def has_confidence(self) -> bool:
        """The draft publishes a confidence for every drafted token; known once it is loaded."""
        proposer = self._proposer() if self._proposer is not None else None
        return proposer is not None and proposer.publish_confidence

    def next_width(self) -> int:
        """Width of the next block to draft."""
        planner = self.planner
        return planner.draft_width if planner is not None else self.widths[-1]

    def attach_planner(self, planner: StepPlanner | None) -> None:
        """Make ``planner`` the one that the other pieces ask."""
        self._planner = weakref.ref(planner) if planner is not None else None

    def attach_proposer(self, proposer: DSparkProposer) -> None:
        """Remember who drafts for this runner."""
        self._proposer = weakref.ref(proposer)


def open_session(speculative_config: Any, config: DSparkConfig) -> Session:
    """Session of a runner that is being built; it ends when the runner's config does."""
    key = id(speculative_config)
    session = _sessions[key] = Session(config)
    weakref.finalize(speculative_config, _sessions.pop, key, None)
    return session


def find_session(speculative_config: Any) -> Session | None:
    """Session of the runner that owns this speculative config (None: it has none), if the plugin
    has taken it over.
    """
    return _sessions.get(id(speculative_config))
