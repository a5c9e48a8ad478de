# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel runs of `benchmarks/`: what they send, compare and write."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "distributed"))

import tp_divergence  # noqa: E402
import tp_workloads  # noqa: E402
from engine_faults import Twice, synced_twice  # noqa: E402
from engine_group import Disturbed  # noqa: E402
from tp_servers import Servers  # noqa: E402
from tp_stability import FAILURES, Soak  # noqa: E402
from tp_stability import summary as stability_summary  # noqa: E402
from tp_workloads import Answer  # noqa: E402

from vllm_dspark.cli.traffic import Client  # noqa: E402

PROMPTS = ["one", "two", "three"]


def soak(tmp_path: Path, world: int = 2, **changes: Any) -> Soak:
    servers = Servers(tmp_path, world, False, tmp_path, 8, 1024, 60.0)
    given: dict[str, Any] = {
        "tokens": 32,
        "batch_sizes": [1, 4],
        "protocols": ["inputs", "outputs"],
        "workloads": ["even", "short", "sampled"],
        "consensus": 0,
    }
    return Soak(servers, PROMPTS, **(given | changes))


class TestWorkloads:
    @pytest.mark.parametrize("name", tp_workloads.WORKLOADS)
    def test_every_workload_fills_the_batch(self, name: str) -> None:
        requests = tp_workloads.build(name, PROMPTS, 9, 64)
        assert len(requests) == 9
        assert all(1 <= request.tokens <= 64 for request in requests)
        assert any(request.prompt for request in requests)

    @pytest.mark.parametrize("name", tp_workloads.WORKLOADS)
    def test_requests_do_not_depend_on_how_many_there_are(self, name: str) -> None:
        """Small batches are compared with a large one."""
        prompts = [f"prompt {i} " + "x" * 60 for i in range(100)]
        most = tp_workloads.build(name, prompts, 128, 64)
        for count in (1, 4, 64, 96, 100):
            assert tp_workloads.build(name, prompts, count, 64) == most[:count]

    def test_ten_workloads_differ(self) -> None:
        built = [tp_workloads.build(name, PROMPTS, 9, 64) for name in tp_workloads.WORKLOADS]
        assert len(built) == 10
        assert all(one != other for i, one in enumerate(built) for other in built[:i])

    def test_one_token_is_a_token(self) -> None:
        for name in tp_workloads.WORKLOADS:
            assert all(r.tokens >= 1 for r in tp_workloads.build(name, PROMPTS, 9, 1))

    def test_some_clients_leave_and_some_stay(self) -> None:
        leaves = {request.leaves for request in tp_workloads.build("leaving", PROMPTS, 4, 8)}
        assert leaves == {True, False}


class TestComparedAnswers:
    def test_answers_to_different_prompts_are_no_comparison(self) -> None:
        one, other = (Answer("ok", token_ids=(5,), prompt_ids=ids) for ids in ((1, 2), (1, 3)))
        with pytest.raises(ValueError, match="different prompts"):
            tp_workloads.other_tokens(None, [one], [other])

    def test_near_ties_are_told_from_wrong_tokens(self) -> None:
        """And answers that failed are left to those who count failures."""

        def answers(*tokens: tuple[int, ...] | None) -> list[Answer]:
            return [
                Answer("hang") if ids is None else Answer("ok", token_ids=ids, prompt_ids=(1, 2))
                for ids in tokens
            ]

        class Gaps(Client):
            def __init__(self) -> None: ...

            def logit_gap(self, context: list[int], one: int, other: int) -> float | None:
                assert context[:2] == [1, 2]
                return {9: 0.0, 8: 50.0}[other]

        expected = answers((5, 6), (5, 6), (5, 6), None, (5, 6))
        got = answers((5, 6), (5, 9), (8, 6), (5, 6), None)
        assert tp_workloads.other_tokens(Gaps(), expected, got) == {
            "compared": 3,
            "near_ties": 1,
            "wrong": 1,
        }
        assert tp_workloads.other_tokens(Gaps(), [], [])["compared"] == 0


def traced(folder: Path, *ranks: list[dict[str, Any]]) -> Disturbed:
    (folder / "traces").mkdir()
    for rank, lines in enumerate(ranks):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "traces" / f"rank{rank}-7{rank}.jsonl").write_text(text)
    return Disturbed(folder, len(ranks))


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {"step": number, "budget": 3, "lens": [1, 2], "drafts": [[5], [6, 7]], **changes}


class TestComparison:
    def test_equal_ranks(self, tmp_path: Path) -> None:
        found = traced(tmp_path, *[[step(1), step(2)]] * 3).compare()
        assert (found.steps, found.differing, dict(found.by_field)) == (2, 0, {})

    def test_the_third_rank_counts_too(self, tmp_path: Path) -> None:
        odd = [step(1), step(2, budget=4, lens=[2, 2])]
        disturbed = traced(tmp_path, [step(1), step(2)], [step(1), step(2)], odd)
        found = disturbed.compare()
        assert (found.steps, found.differing) == (2, 1)
        assert found.by_field == {"budget": 1, "lens": 1}
        assert disturbed.compare(since=3).steps == 0

    def test_steps_that_a_rank_has_not_written_are_left_out(self, tmp_path: Path) -> None:
        found = traced(tmp_path, [step(1), step(2)], [step(1)]).compare()
        assert found.steps == 1

    def test_lines_of_one_step_are_joined(self, tmp_path: Path) -> None:
        lines = [step(1), {"step": 1, "graph": 16}, {"step": 1, "committed": [[5]]}]
        other = [step(1), {"step": 1, "graph": 32}]
        found = traced(tmp_path, lines, other).compare()
        assert found.by_field == {"graph": 1}

    def test_a_line_that_was_cut_off_is_no_difference(self, tmp_path: Path) -> None:
        disturbed = traced(tmp_path, [step(1)], [step(1)])
        with (tmp_path / "traces" / "rank1-71.jsonl").open("a") as trace:
            trace.write('{"step": 2, "bud')
        assert (disturbed.compare().steps, disturbed.compare().differing) == (1, 0)
        assert disturbed.pids() == {0: 70, 1: 71}

    def test_lines_are_read_as_they_come(self, tmp_path: Path) -> None:
        disturbed = traced(tmp_path, [step(1), step(2)], [step(1)])
        assert (disturbed.compare().steps, disturbed.last_step()) == (1, 2)
        late = json.dumps(step(2, budget=4))
        for text in (late[:9], late[9:] + "\n", json.dumps({"step": 2, "graph": 8}) + "\n"):
            with (tmp_path / "traces" / "rank1-71.jsonl").open("a") as trace:
                trace.write(text)
            found = disturbed.compare()
            assert found.steps == 1 + (text != late[:9])
        assert found.by_field == {"budget": 1}
        assert disturbed.steps()[1][2]["graph"] == 8


class CountingSync:
    """Adds one to what passes, and counts."""

    sites = frozenset({"plan"})

    def __init__(self) -> None:
        self.calls: list[str] = []

    def agree_block(self, rows: int, gamma: int) -> int:
        self.calls.append("block")
        return rows + 1

    def agree_plan(self, step: int, plan: int, num_reqs: int) -> int:
        self.calls.append("plan")
        return plan + 1

    def agree_split(self, lens: int, draft_tokens: Any, slots: Any) -> int:
        self.calls.append("split")
        return lens + 1

    def agree_accept(self, *values: int) -> tuple[int, ...]:
        self.calls.append("accept")
        return tuple(value + 1 for value in values)


@pytest.mark.parametrize("twice", [False, True])
def test_a_second_sync_gets_what_the_first_agreed_on(twice: bool) -> None:
    sync = CountingSync()
    wrapped, added = Twice(sync, lambda: twice), 1 + twice
    assert wrapped.agree_block(10, 7) == 10 + added
    assert wrapped.agree_plan(3, 20, 2) == 20 + added
    assert wrapped.agree_split(30, None, None) == 30 + added
    assert wrapped.agree_accept(1, 2, 3) == (1 + added, 2 + added, 3 + added)
    assert [sync.calls.count(kind) for kind in ("block", "plan", "split", "accept")] == [added] * 4
    assert wrapped.sites == sync.sites


def test_windows_alternate() -> None:
    assert [synced_twice(number, 2) for number in range(6)] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]


class TestMatrix:
    def test_every_combination_runs_on_one_server(self, tmp_path: Path) -> None:
        cells = [cell for cell in soak(tmp_path).cells(restarts=0) if not cell.restart]
        assert len(set(cells)) == len(cells) == 2 * 2 * 2 * 3

    def test_restarts_take_turns_and_are_bounded(self, tmp_path: Path) -> None:
        cells = [cell for cell in soak(tmp_path).cells(restarts=2) if cell.restart]
        assert [(c.workload, c.batch_size, c.protocol) for c in cells if c.overlap] == [
            ("even", 1, "inputs"),
            ("short", 4, "outputs"),
        ]
        assert len(cells) == 4

    @pytest.mark.parametrize(("world", "ranks"), [(2, [1]), (4, [2, 3]), (8, [4, 7])])
    def test_two_ranks_drift_where_there_are_more_than_two(
        self, tmp_path: Path, world: int, ranks: list[int]
    ) -> None:
        assert soak(tmp_path, world).fault["ranks"] == ranks

    def test_failures_are_summed(self, tmp_path: Path) -> None:
        row = dict.fromkeys(FAILURES, 1) | {"steps": 5}
        found = stability_summary({}, soak(tmp_path, 4), [row, row], {}, 9)
        assert [found[name] for name in FAILURES] == [2] * len(FAILURES)
        assert (found["runs"], found["planned_runs"], found["tp"]) == (2, 9, 4)
        assert found["steps_compared"] == 10


def test_the_summary_counts_parts_and_says_what_was_not_run(tmp_path: Path) -> None:
    rows = [{"steps": 10, "mismatches": 2}, {"steps": 5, "mismatches": 1}]
    document: dict[str, Any] = {
        "native": {
            "custom": {"undisturbed": rows, "drift": {"steps": 3, "mismatches": 3}},
            "nccl": {"undisturbed": rows},
        }
    }
    stability = tmp_path / "stability.json"
    stability.write_text(json.dumps({"runs": 4, "hangs": 0, "errors": 1, "rows": [1, 2]}))
    out = tmp_path / "out.json"
    tp_divergence.save(argparse.Namespace(stability=stability, out=out), document)
    found = json.loads(out.read_text())
    assert found["steps"] == {"native": 33, "synced": None}
    assert found["native_mismatches"] == 9
    assert found["plugin_mismatches"] is None
    assert found["ray_ok"] is None
    assert (found["runs"], found["hangs"], found["errors"]) == (4, 0, 1)
    assert "rows" not in found["stability"]
