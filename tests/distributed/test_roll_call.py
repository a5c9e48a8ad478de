# SPDX-License-Identifier: Apache-2.0
"""A group whose ranks do not all run the plugin alike does not start."""

import pytest
from launcher import Launcher


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_are_alike_go_on(ranks: Launcher, world: int) -> None:
    endings = ranks.run(world, "roll_call", badges=["version 1, {}"] * world)
    for ending in endings[1:]:
        assert ending.error is None, ending.log
        assert ending.result < 2.0


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_without_the_plugin_is_named(ranks: Launcher, missing: int) -> None:
    badges = ["version 1, {}"] * 2
    badges[missing] = None
    endings = ranks.run(2, "roll_call", badges=badges, limit_s=20.0)
    assert endings[missing].error is None
    alone = endings[1 - missing]
    assert alone.error == "RollCallError", alone.log
    assert f"rank {missing} of the tensor-parallel group has not shown within 2 s" in alone.message
    assert "install it on every node" in alone.message


@pytest.mark.parametrize("other", ["version 2, {}", 'version 1, {"verify":"static"}'])
def test_another_version_or_other_options_are_shown(ranks: Launcher, other: str) -> None:
    for ending in ranks.run(2, "roll_call", badges=["version 1, {}", other]):
        assert ending.error == "RollCallError", ending.log
        assert other in ending.message
        assert "version 1, {}" in ending.message
