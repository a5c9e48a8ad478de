# SPDX-License-Identifier: Apache-2.0
"""What the options make of a tensor-parallel group: its sync, its sites, its warnings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dspark import __version__
from vllm_dspark.config import ConfigError, DSparkConfig
from vllm_dspark.engine import assembly
from vllm_dspark.engine.agreement import Agreement
from vllm_dspark.engine.modes import Resolved, VerifyMode
from vllm_dspark.engine.session import Session
from vllm_dspark.parallel.sync_sites import DEFAULT_SITES, SyncSite
from vllm_dspark.parallel.tp_sync import InputsSync, OutputsSync


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be said to other ranks: the roll call's arguments, and groups that connect."""
    calls: list[Any] = []
    monkeypatch.setattr(assembly, "default_store", lambda: "store")
    monkeypatch.setattr(assembly, "call_roll", lambda *args: calls.append(args))
    monkeypatch.setattr(assembly, "connect", lambda *args: calls.append(("connected", *args)))
    return calls


@pytest.fixture(autouse=True)
def no_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "open_checker", lambda *args: None)


def group_of(world: int, rank: int = 0) -> Any:
    return SimpleNamespace(rank_in_group=rank, world_size=world, ranks=list(range(world)))


def open_agreement(
    mode: VerifyMode = VerifyMode.HOST,
    drafting: str = "greedy",
    world: int = 2,
    rank: int = 0,
    **dspark: Any,
) -> Agreement:
    config = DSparkConfig.parse(dspark)
    writer = SimpleNamespace(observe_sync=None, observe_disagreement=None)
    session = Session(config, Resolved(mode, "test"), writer=writer)  # type: ignore[arg-type]
    speculative = SimpleNamespace(draft_sample_method=drafting)
    return assembly.open_agreement(session, group_of(world, rank), speculative)


def test_the_protocol_is_the_one_that_is_named() -> None:
    for name, kind in (("inputs", InputsSync), ("outputs", OutputsSync)):
        assert type(open_agreement(tp_sync=name)._sync) is kind
    for name in ("audit", "off"):
        assert open_agreement(tp_sync=name)._sync is None
    assert open_agreement(VerifyMode.STATIC)._sync is None
    assert open_agreement(world=1)._sync is None


def test_the_sites_are_those_that_drafting_needs() -> None:
    assert open_agreement()._sync.sites == DEFAULT_SITES
    assert open_agreement(drafting="probabilistic")._sync.sites == set(SyncSite)
    named = open_agreement(tp_sync_sites=["draft", "accept"], consensus_interval=4)
    assert named._sync.sites == {SyncSite.DRAFT, SyncSite.ACCEPT}
    assert named._sync.syncs_accept


def test_sites_that_drafting_forbids_are_refused() -> None:
    with pytest.raises(ConfigError, match="'draft' only with 'accept'"):
        open_agreement(drafting="probabilistic", tp_sync_sites=["plan", "lens", "draft"])


def test_version_and_options_are_shown_before_ranks_connect(met: list[Any]) -> None:
    group = group_of(2, rank=1)
    assembly.meet(DSparkConfig.parse({"records": 3}), group, "device")
    (store, ranks, rank, badge), connected = met
    assert (store, ranks, rank) == ("store", [0, 1], 1)
    assert f"version {__version__}," in badge
    assert '"records":3' in badge
    assert connected == ("connected", group, "device")


@pytest.mark.parametrize("dspark", [{"verify": "static"}, {"tp_sync": "audit"}, {"tp_sync": "off"}])
def test_ranks_that_sync_nothing_need_no_connection(met: list[Any], dspark: dict[str, Any]) -> None:
    assembly.meet(DSparkConfig.parse(dspark), group_of(2), "device")
    assert len(met) == 1


@pytest.mark.parametrize(
    ("dspark", "warning"),
    [
        ({"tp_sync": "audit"}, "ends after 180 s in such a step"),
        ({"tp_sync": "off"}, "only vLLM's VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS ends such a step"),
        ({"tp_sync": "off", "consensus_interval": 8}, ""),
        ({"tp_sync": "inputs"}, ""),
        ({"tp_sync": "outputs"}, ""),
    ],
)
def test_an_unsynced_group_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, dspark: dict[str, Any], warning: str
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(
        assembly.logger, "warning", lambda text, *args: messages.append(text % args)
    )
    for rank in (0, 1):
        open_agreement(rank=rank, **dspark)
    # Here nothing can hang.
    open_agreement(VerifyMode.CAP_ACCEPT, **dspark)
    open_agreement(world=1, **dspark)
    assert len(messages) == bool(warning)
    assert all(warning in message for message in messages)
