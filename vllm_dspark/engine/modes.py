# SPDX-License-Identifier: Apache-2.0
"""Which verify mode a server runs.

A mode that the operator names either runs or is refused with the reason; ``auto`` takes the best
one that can run. Pure data in, pure data out: this module imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vllm_dspark.config import ConfigError, DSparkConfig


class VerifyMode(StrEnum):
    """Who verifies what."""

    STATIC = "static"
    """Every scheduled draft is verified; the host's fixed-gamma step."""
    CAP_ACCEPT = "cap-accept"
    """Every draft is verified, only the planned window is committed."""
    HOST = "host"
    """Only admitted drafts run; lengths are fixed on the host and exact everywhere."""
    UNIFORM = "uniform"
    """As HOST, with one length for all requests, on uniform decode graphs."""
    DEVICE = "device"
    """Only admitted drafts run; the device spends the budget on the live block."""

    @property
    def trims(self) -> bool:
        """The batch that runs may be smaller than the batch that was scheduled."""
        return self in (VerifyMode.HOST, VerifyMode.UNIFORM, VerifyMode.DEVICE)


@dataclass(frozen=True)
class HostFacts:
    """What decides which modes can run."""

    full_graphs: bool
    """Decode steps replay full CUDA graphs."""
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    batch_sharded_sampling: bool = False
    whole_blocks: str = ""
    """What reports on every scheduled draft, so that none may be left out; empty if nothing."""
    device_obstacle: str = ""
    """Why the device cannot fix lengths here; empty if it can."""
    graph_obstacle: str = ""
    """Why decode steps replay no full graph although they are asked for; empty if they do."""


@dataclass(frozen=True)
class Resolved:
    """The mode of a server, and in words why it is this one."""

    mode: VerifyMode
    why: str


def resolve(config: DSparkConfig, facts: HostFacts) -> Resolved:
    """Mode for this configuration on this host.

    Raises:
        ConfigError: the operator asked for a mode that cannot run here.
    """
    hindrance = obstacle(facts)
    if config.verify == "static":
        return Resolved(VerifyMode.STATIC, "dspark.verify = 'static'")
    if hindrance:
        if config.verify != "auto":
            raise ConfigError(f"dspark.verify = {config.verify!r} cannot run: {hindrance}")
        return Resolved(VerifyMode.STATIC, hindrance)
    if config.verify == "cap-accept":
        return Resolved(VerifyMode.CAP_ACCEPT, "dspark.verify = 'cap-accept'")
    if config.lens == "uniform" and facts.graph_obstacle:
        raise ConfigError(f"dspark.lens = 'uniform' cannot run: {facts.graph_obstacle}")
    if config.lens in ("host", "uniform"):
        return Resolved(VerifyMode(config.lens), f"dspark.lens = {config.lens!r}")
    if config.lens == "device" and facts.device_obstacle:
        raise ConfigError(f"dspark.lens = 'device' cannot run: {facts.device_obstacle}")
    if not facts.device_obstacle:
        return Resolved(VerifyMode.DEVICE, "decode graphs take any query lengths")
    if facts.full_graphs:
        return Resolved(VerifyMode.UNIFORM, f"uniform CUDA graphs: {facts.device_obstacle}")
    return Resolved(VerifyMode.HOST, f"host-exact lengths: {facts.device_obstacle}")


def obstacle(facts: HostFacts) -> str:
    """Why a batch cannot be trimmed at all here; empty if it can."""
    if facts.pipeline_parallel_size > 1:
        return "only the last pipeline stage knows the confidences"
    if facts.data_parallel_size > 1:
        return "data-parallel ranks pad to the largest of them, which undoes a trim"
    if facts.batch_sharded_sampling:
        return "batch-sharded sampling plans from the scheduled counts"
    if facts.whole_blocks:
        return f"{facts.whole_blocks} reports on every scheduled draft"
    return ""


def graph_obstacle(full_graphs: bool, capture_sizes: Sequence[int], block: int) -> str:
    """Why no full graph takes a request's whole block; empty if one does, or none is wanted.

    Args:
        full_graphs: decode steps are to replay full graphs.
        capture_sizes: token counts that the host captures.
        block: tokens of a block, the anchor included.
    """
    if not full_graphs or max(capture_sizes, default=0) >= block:
        return ""
    return (
        f"cudagraph_capture_sizes = {list(capture_sizes)}: allowed with {block - 1} speculative"
        f" tokens: at least one size of {block} or more, which holds one request's block"
    )


def device_obstacle(
    *,
    full_graphs: bool,
    lora: bool,
    pipeline_parallel_size: int,
    speculative_tokens: int,
    graphs: str = "",
    attention: str = "",
) -> str:
    """Why the device cannot fix lengths, as far as the configuration tells; empty if it can.

    Attention backends that the host picks by itself have their say later, see
    ``HostFacts.device_obstacle``. ``graphs`` is the answer of ``graph_obstacle``, ``attention`` is
    the backend that the operator has picked if it reads lengths on the host.
    """
    if graphs:
        return graphs
    if attention:
        return f"{attention} attention reads the lengths of a batch on the host"
    if not full_graphs:
        return "decode steps replay no full CUDA graphs"
    if lora:
        return "LoRA maps adapters to tokens from host lengths"
    if pipeline_parallel_size > 1:
        return "only the last pipeline stage knows the confidences"
    if speculative_tokens < 2:
        return "one draft per request leaves nothing to split"
    return ""
