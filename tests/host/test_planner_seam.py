# SPDX-License-Identifier: Apache-2.0
"""The planner behind the runner's calls, driven as the runner drives it, without an engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from planner_harness import BONUS, GAMMA, PROMPT, SLOTS, Outcome, Runner, drafts_of, started
from vllm.config.compilation import CUDAGraphMode

from vllm_dspark.core.cost_model import CostModel, Curve
from vllm_dspark.core.plan import PlanReason
from vllm_dspark.core.survival import RowDoubt
from vllm_dspark.core.tiers import ExecMode
from vllm_dspark.engine.agreement import Agreement
from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.engine.slot_table import MAX_AGE_STEPS
from vllm_dspark.parallel.tp_sync import HostPlan, TpSync

TRIMMING = [VerifyMode.HOST, VerifyMode.UNIFORM, VerifyMode.DEVICE]
PINS = [None, 0, 1, 3, 0.5, 1.0]
# Every token costs a third of an empty step: trimming pays as soon as confidences are low.
COST = CostModel({ExecMode.EAGER: Curve(np.arange(1, 200), 3.0 + np.arange(1, 200.0), limit=0)})


@pytest.fixture(autouse=True)
def stand_ins(cuda_stand_ins: None) -> None: ...


def test_the_host_time_of_a_step_is_reported_by_part() -> None:
    spent: list[tuple[str, float]] = []
    runner = started(VerifyMode.HOST, on_host_time=lambda part, s: spent.append((part, s)))
    spent.clear()
    runner.step(drafts_of(runner))
    # The newest step is read when it is published; the one before is read with it at the latest.
    assert [part for part, _ in spent if part != "wait"] == ["plan", "spend", "spend", "publish"]
    assert sum(part == "wait" for part, _ in spent) == 1
    assert all(seconds >= 0.0 for _, seconds in spent)


# ---------------------------------------------------------------------- every mode, every budget


@pytest.mark.parametrize("pin", PINS)
@pytest.mark.parametrize("mode", list(VerifyMode))
def test_a_random_service_keeps_the_books(mode: VerifyMode, pin: int | float | None) -> None:
    """Requests come, go and change slots; the assertions are in `Runner.step`."""
    rng = np.random.default_rng(11)
    runner = Runner(mode, pin=pin, cost=COST if pin is None else None)
    outcomes: list[Outcome] = []
    committed: list[np.ndarray] = []
    for number in range(40):
        free = sorted(set(range(SLOTS)) - set(runner.states.req_id_to_index.values()))
        if free and rng.random() < 0.4:
            name = f"n{number}"
            runner.add(name, int(rng.choice(free)))
            runner.prefill(rng.random((1, GAMMA)), (name,))
        names = list(runner.states.req_id_to_index)
        if not names:
            continue
        drafts = {name: int(rng.integers(0, GAMMA + 1)) for name in names}
        drafts[names[0]] = GAMMA
        sampled: list[int] = []

        def commit(lens: int, sampled: list[int] = sampled) -> int:
            sampled.append(int(rng.integers(1, lens + 2)))
            return sampled[-1]

        confidence = rng.random((len(names), GAMMA)) ** 0.3
        outcomes.append(runner.step(drafts, confidence, commit))
        committed.append(np.array(sampled or [1] * len(names)))
        if rng.random() < 0.2:
            runner.remove(str(rng.choice(names)))
    # All but the step that is still in flight have reached the observer, once and in order.
    assert [d for d, _ in runner.settled] == [o.decision for o in outcomes[: len(runner.settled)]]
    assert len(runner.settled) >= len(outcomes) - 2
    for (decision, accepted), outcome, sampled in zip(
        runner.settled, outcomes, committed, strict=False
    ):
        assert accepted.tolist() == (sampled - 1).tolist()
        if mode.trims:
            assert decision.admitted.tolist() == outcome.lens.tolist()
    if pin is not None and mode is not VerifyMode.STATIC:
        for outcome in outcomes:
            scheduled = int(outcome.decision.eligible.sum())
            wanted = min(pin, scheduled) if isinstance(pin, int) else int(pin * scheduled)
            admitted = outcome.lens if mode.trims else outcome.window
            if mode is VerifyMode.UNIFORM:
                assert admitted.sum() <= wanted
                full = np.minimum(outcome.decision.eligible, admitted.max())
                assert admitted.tolist() == full.tolist(), "one length for all"
            else:
                assert admitted.sum() == wanted


@pytest.mark.parametrize("mode", [VerifyMode.STATIC, VerifyMode.CAP_ACCEPT])
def test_modes_that_do_not_trim_run_everything(mode: VerifyMode) -> None:
    runner = started(mode, pin=0.5)
    outcome = runner.step({"r0": GAMMA, "r1": 2, "r2": 0})
    assert sorted(outcome.lens.tolist()) == [0, 2, GAMMA]
    assert outcome.batch.num_scheduled_tokens.tolist() == (outcome.lens + 1).tolist()
    window = outcome.window
    assert window.dtype == np.int32
    assert window.sum() == (3 if mode is VerifyMode.CAP_ACCEPT else 6)


@pytest.mark.parametrize("mode", [VerifyMode.HOST, VerifyMode.UNIFORM])
def test_host_arrays_carry_what_runs(mode: VerifyMode) -> None:
    runner = started(mode, pin=0.5)
    outcome = runner.step(drafts_of(runner))
    assert outcome.batch.num_scheduled_tokens.tolist() == (outcome.lens + 1).tolist()
    assert outcome.batch.max_query_len == outcome.lens.max() + 1
    assert outcome.lens.sum() == 6


def test_without_a_cost_model_everything_is_verified() -> None:
    for mode in VerifyMode:
        runner = started(mode)
        outcome = runner.step(drafts_of(runner))
        assert outcome.lens.tolist() == [GAMMA] * 3
        assert outcome.decision.plan.budget is None


def test_the_live_block_gets_the_budget_where_it_can_be_read() -> None:
    """The last block drafted says that only the third request is worth verifying."""
    for mode in (VerifyMode.HOST, VerifyMode.DEVICE):
        runner = started(mode, pin=GAMMA)
        runner.step(drafts_of(runner), confidence=np.array([[0.1], [0.2], [0.99]]))
        assert runner.step(drafts_of(runner)).lens.tolist() == [0, 0, GAMMA]


@pytest.mark.parametrize("mode", [VerifyMode.HOST, VerifyMode.DEVICE])
def test_a_budget_passes_by_drafts_that_cannot_be_delivered(mode: VerifyMode) -> None:
    """The second request may generate two more tokens: one draft and the token after it."""
    runner = started(mode, pin=GAMMA + 2)
    ends = runner.states.num_computed_tokens_np[1] + 3
    runner.states.max_seq_len[1] = ends
    assert runner.step(drafts_of(runner), confidence=0.99).lens[1] <= 1
    # A budget that the others cannot use up is spent all the same: the step stays a full one.
    runner.planner.core.policy = replace(runner.planner.core.policy, pin=1.0)
    runner.states.max_seq_len[1] = runner.states.num_computed_tokens_np[1] + 3
    assert runner.step(drafts_of(runner)).lens.tolist() == [GAMMA] * 3


@pytest.mark.parametrize("mode", [VerifyMode.HOST, VerifyMode.DEVICE])
def test_while_a_step_is_in_flight_the_end_may_be_farther(mode: VerifyMode) -> None:
    runner = started(mode, pin=GAMMA, overlaps=True)
    runner.step(drafts_of(runner), confidence=np.array([[0.1], [0.99], [0.1]]))
    runner.states.max_seq_len[1] = runner.states.num_computed_tokens_np[1] + 3
    assert runner.step(drafts_of(runner)).lens.tolist() == [0, GAMMA, 0]


@pytest.mark.parametrize("mode", TRIMMING)
def test_the_arity_of_the_answer_follows_the_runner(mode: VerifyMode) -> None:
    runner = started(mode, pin=3, answers_admitted=True)
    runner.decide(drafts_of(runner))
    runner.planner.compact_batch(
        np.full(3, GAMMA, np.int32), np.full(3, GAMMA + 1, np.int32), np.arange(4, dtype=np.int32)
    )
    answer = runner.planner.reallocate_drafts(["r0", "r1", "r2"], torch.arange(3))
    assert len(answer) == 4
    assert answer[3] is None


def test_a_decision_is_made_once_per_step() -> None:
    runner = started(VerifyMode.HOST, pin=3)
    runner.decide(drafts_of(runner))
    with pytest.raises(AssertionError, match="one decision per step"):
        runner.planner.reallocate_drafts(["r1", "r0", "r2"], torch.arange(3))


# ---------------------------------------------------------------------- budget and live block


@pytest.mark.parametrize("mode", TRIMMING)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_budget_does_not_see_the_live_block(mode: VerifyMode, on_gpu: bool) -> None:
    """Histories that differ in the newest block only give the same budget; one step later not."""
    rng = np.random.default_rng(5)
    later_differs = 0
    for _ in range(12):
        history = [rng.uniform(0.2, 1.0, (3, GAMMA)) for _ in range(4)]
        budgets: list[tuple[int, int]] = []
        for live in (0.02, 0.98, float("nan")):
            runner = Runner(mode, cost=COST)
            if on_gpu:
                runner.planner._live_host = False
                runner.planner._lagged = runner.planner._latest
            for slot in range(3):
                runner.add(f"r{slot}", slot)
            runner.prefill()
            for confidence in history:
                runner.step(drafts_of(runner), confidence)
            runner.step(drafts_of(runner), confidence=live)
            now = runner.decide(drafts_of(runner))
            runner.planner._decision = None
            runner.planner._awaiting.pop()
            runner._record(["r0", "r1", "r2"], 0.5)
            budgets.append((now, runner.decide(drafts_of(runner))))
        assert len({now for now, _ in budgets}) == 1
        later_differs += len({later for _, later in budgets}) > 1
    assert later_differs > 0, "the block never mattered, so the test shows nothing"


def test_lagged_values_split_the_budget_where_the_live_block_is_out_of_reach() -> None:
    runner = started(VerifyMode.HOST, pin=GAMMA)
    runner.planner._live_host = False
    runner.planner._lagged = runner.planner._latest
    runner.step(drafts_of(runner), confidence=np.array([[0.1], [0.2], [0.99]]))
    runner.step(drafts_of(runner), confidence=np.array([[0.99], [0.2], [0.1]]))
    assert runner.step(drafts_of(runner)).lens.tolist() == [0, 0, GAMMA]


# ---------------------------------------------------------------------- rows in doubt


def doubts(outcome: Outcome) -> dict[RowDoubt, int]:
    return {doubt: rows for doubt, rows in outcome.decision.plan.doubts.items() if rows}


@pytest.mark.parametrize("mode", [VerifyMode.HOST, VerifyMode.DEVICE])
def test_a_slot_with_a_new_owner_knows_nothing_of_the_old_one(mode: VerifyMode) -> None:
    runner = started(mode, cost=COST)
    runner.step(drafts_of(runner), confidence=0.05)
    # The old owner's last step is still in flight when the slot changes hands.
    runner.remove("r1")
    runner.add("new", 1)
    runner.prefill(0.9, ("new",))
    outcome = runner.step(drafts_of(runner), confidence=0.05)
    assert doubts(outcome) == {RowDoubt.FRESH: 1}
    new = outcome.req_ids.index("new")
    assert outcome.lens[new] == GAMMA
    assert outcome.lens.sum() < 3 * GAMMA, "nobody else was trimmed"
    assert doubts(runner.step(drafts_of(runner))) == {}


def test_a_row_that_was_not_drafted_for_long_is_stale() -> None:
    runner = started(VerifyMode.HOST, cost=COST)
    others = {"r0": GAMMA, "r2": GAMMA}
    for _ in range(MAX_AGE_STEPS + 1):
        assert doubts(runner.step(others, confidence=0.3)) == {}
    outcome = runner.step(drafts_of(runner), confidence=0.3)
    assert doubts(outcome) == {RowDoubt.STALE: 1}
    assert outcome.lens[outcome.req_ids.index("r1")] == GAMMA
    runner.step(drafts_of(runner), confidence=0.3)
    assert doubts(runner.step(drafts_of(runner), confidence=0.3)) == {}


@pytest.mark.parametrize(
    ("value", "doubt"),
    [(float("nan"), RowDoubt.NON_FINITE), (float("inf"), RowDoubt.NON_FINITE), (1.5, None)],
)
@pytest.mark.parametrize("mode", list(VerifyMode))
def test_values_that_mean_nothing_verify_everything_of_their_row(
    mode: VerifyMode, value: float, doubt: RowDoubt | None
) -> None:
    runner = started(mode, cost=COST)
    confidence = np.full((3, GAMMA), 0.05)
    confidence[1, 2] = value
    for _ in range(2):
        runner.step(drafts_of(runner), confidence)
    outcome = runner.step(drafts_of(runner), confidence)
    assert outcome.lens[1] == GAMMA
    if mode is not VerifyMode.STATIC:
        assert doubts(outcome) == {doubt or RowDoubt.OUT_OF_RANGE: 1}


@pytest.mark.parametrize("mode", list(VerifyMode))
def test_without_confidences_everything_is_verified(mode: VerifyMode) -> None:
    runner = started(mode, cost=COST, has_confidence=False)
    outcome = runner.step(drafts_of(runner), confidence=float("nan"))
    assert outcome.lens.tolist() == [GAMMA] * 3
    assert outcome.decision.plan.reason is PlanReason.NO_CONFIDENCE


@pytest.mark.parametrize("pin", [None, 1.0])
@pytest.mark.parametrize("mode", TRIMMING)
def test_placeholders_of_a_migrated_request_are_not_run(
    mode: VerifyMode, pin: float | None
) -> None:
    """A request that arrives with its KV cache has drafts scheduled before it was ever drafted."""
    runner = started(mode, pin=pin)
    runner.add("moved", 5)
    runner.states.num_computed_tokens_np[5] = PROMPT - 1
    outcome = runner.step(drafts_of(runner))
    moved = outcome.req_ids.index("moved")
    assert outcome.lens[moved] == 0
    assert outcome.lens.sum() == 3 * GAMMA
    assert outcome.decision.samples[moved]


@pytest.mark.parametrize("mode", list(VerifyMode))
def test_a_prompt_chunk_beside_decodes(mode: VerifyMode) -> None:
    runner = started(mode, pin=0.5)
    runner.add("long", 4)
    runner.states.prefill_len.np[4] = 100
    outcome = runner.step({**drafts_of(runner), "long": 0}, base={"long": 32})
    chunk = outcome.req_ids.index("long")
    assert outcome.lens[chunk] == 0
    assert not outcome.decision.samples[chunk]
    assert outcome.decision.samples.sum() == 3


# ---------------------------------------------------------------------- steps without drafts


@pytest.mark.parametrize("mode", list(VerifyMode))
def test_any_number_of_steps_without_drafts(mode: VerifyMode) -> None:
    """A prompt of many chunks: blocks are published, and nobody asks for a decision."""
    runner = started(mode, pin=0.5)
    for _ in range(20):
        runner.prefill(0.9)
    outcome = runner.step(drafts_of(runner))
    assert outcome.decision.step == runner.planner._relay.published - 1


def test_decisions_meet_the_outcome_of_their_own_step() -> None:
    runner = started(VerifyMode.HOST, pin=GAMMA)
    runner.settled.clear()
    numbers = iter([1, 2, 3, 1])
    for _ in range(4):
        count = next(numbers)
        runner.step(drafts_of(runner), committed=lambda lens, n=count: min(n, lens + 1))
        runner.prefill(0.9)
    runner.step(drafts_of(runner))
    got = [int(accepted.max()) for _, accepted in runner.settled][-4:]
    assert got == [0, 1, 2, 0]


class Counted(TpSync):
    """Counts what each message is about; every value stays this rank's."""

    def __init__(self) -> None:
        group = SimpleNamespace(rank_in_group=0, world_size=2, ranks=[0, 1])
        super().__init__(group)
        self.messages: list[str] = []

    def agree_block(self, rows: torch.Tensor, gamma: int) -> torch.Tensor:
        self.messages.append("block")
        return rows

    def agree_plan(self, step: int, plan: HostPlan, num_reqs: int) -> HostPlan:
        self.messages.append("plan")
        return plan

    def agree_split(
        self, lens: torch.Tensor | None, draft_tokens: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor | None:
        self.messages.append("split")
        return lens


@pytest.mark.parametrize("mode", VerifyMode)
def test_every_step_enters_every_sync_even_if_it_has_nothing_to_decide(mode: VerifyMode) -> None:
    """A rank that leaves out a collective hangs all others."""
    sync = Counted()
    runner = started(mode, pin=0, agreement=Agreement(sync))
    runner.prefill(float("nan"))
    runner.step({"r0": 0, "r1": 1, "r2": 0})
    planned = ["plan", "split", "block"]
    assert sync.messages == ["block", *planned, *planned, "block", *planned]


# ---------------------------------------------------------------------- limits of the host


def test_device_lengths_stay_within_one_chunk_of_logits() -> None:
    runner = started(VerifyMode.DEVICE, max_total_logits=3 * BONUS + 5)
    assert runner.step(drafts_of(runner)).lens.sum() == 5
    assert not runner.planner.runs_device_lens, "a sampler without a plan is told nothing"


def test_requests_that_fill_a_chunk_by_themselves_verify_nothing() -> None:
    """More requests than a chunk has rows: the host cuts them, so lengths must be its own."""
    runner = started(VerifyMode.DEVICE, max_total_logits=2 * BONUS)
    outcome = runner.step(drafts_of(runner))
    assert outcome.lens.tolist() == [0, 0, 0]
    assert outcome.decision.host_lens is not None


def test_regimes_of_the_requests_reach_policy_and_observers() -> None:
    asked: list[list[int]] = []

    def regimes_of(slots: np.ndarray) -> np.ndarray:
        asked.append(slots.tolist())
        return slots % 2

    runner = started(VerifyMode.HOST, pin=0.5, regimes_of=regimes_of)
    runner.step({"r2": GAMMA, "r0": GAMMA})
    runner.step(drafts_of(runner))
    assert asked[-2:] == [[2, 0], [0, 1, 2]]
    assert runner.settled[-1][0].regimes.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("mode", "pin", "expected"),
    [
        (VerifyMode.UNIFORM, 6, 3),
        (VerifyMode.UNIFORM, 0, 1),
        (VerifyMode.HOST, 5, None),
        (VerifyMode.DEVICE, 0, 1),
        (VerifyMode.CAP_ACCEPT, 6, None),
        (VerifyMode.STATIC, 6, None),
    ],
)
def test_the_uniform_query_length_of_a_trimmed_step(
    mode: VerifyMode, pin: int, expected: int | None
) -> None:
    runner = started(mode, pin=pin)
    # Unequal confidences, so that a ragged split is ragged.
    runner.step(drafts_of(runner), confidence=np.array([[0.1], [0.5], [0.99]]))
    assert runner.planner.uniform_query_len is None, "between steps nothing is decided"
    runner.decide(drafts_of(runner))
    assert runner.planner.uniform_query_len == expected


def test_the_replayed_graph_is_noted_and_eager_is_not() -> None:
    runner = started(VerifyMode.UNIFORM, pin=6)
    runner.decide(drafts_of(runner))
    decision = runner.planner._decision
    runner.planner.dispatched(SimpleNamespace(cg_mode=CUDAGraphMode.NONE, num_tokens=9))
    assert decision.graph_tokens is None
    runner.planner.dispatched(SimpleNamespace(cg_mode=CUDAGraphMode.FULL, num_tokens=12))
    assert decision.graph_tokens == 12


class Width:
    """A width choice that the test makes."""

    current = GAMMA

    def due(self) -> bool:
        return False


@pytest.mark.parametrize("mode", TRIMMING)
def test_a_block_that_was_left_out_is_never_verified(mode: VerifyMode) -> None:
    width = Width()
    runner = started(mode, cost=COST, pin=1.0, widths=width)
    drafts = dict.fromkeys(("r0", "r1", "r2"), GAMMA)
    width.current = 0
    assert runner.step(drafts).lens.tolist() == [GAMMA] * 3, "the block drafted before"
    assert runner.planner.draft_width == 0
    width.current = GAMMA
    plain = runner.step(drafts)
    assert plain.lens.tolist() == [0, 0, 0]
    assert (plain.num_tokens, plain.decision.plan.reason) == (3, PlanReason.NO_DRAFTS)
    assert runner.planner.draft_width == GAMMA
    assert runner.step(drafts).lens.tolist() == [GAMMA] * 3, "the block drafted since"


@pytest.mark.parametrize("mode", TRIMMING)
def test_plain_decoding_replays_the_graph_of_one_token_per_request(mode: VerifyMode) -> None:
    width = Width()
    runner = started(mode, cost=COST, pin=1.0, widths=width)
    width.current = 0
    runner.step(dict.fromkeys(("r0", "r1", "r2"), GAMMA))
    runner.decide(dict.fromkeys(("r0", "r1", "r2"), GAMMA))
    assert runner.planner.uniform_query_len == 1
