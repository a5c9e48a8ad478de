# SPDX-License-Identifier: Apache-2.0
"""The width of the next block: priced like a step, kept until a change pays."""

import numpy as np
import pytest

from vllm_dspark.core.cost_model import CostModel, Curve
from vllm_dspark.core.draft_width import Load, WidthChoice, widths_for
from vllm_dspark.core.tiers import ExecMode, TierLadder

GAMMA = 7
FLAT = np.full((GAMMA, 8), 0.9).cumprod(axis=0)


def cost(draft_ms: dict[int, float], token_ms: float = 0.01) -> CostModel:
    sizes = np.arange(1, 257)
    return CostModel(
        {ExecMode.FULL: Curve(sizes, 5.0 + token_ms * sizes)},
        draft_width=GAMMA,
        draft_widths={w: Curve(np.array([1, 64]), np.full(2, ms)) for w, ms in draft_ms.items()},
    )


def load(requests: int = 8) -> Load:
    return Load(requests, requests, requests, 0, ExecMode.FULL)


def brute_force(survival: np.ndarray, model: CostModel, widths: tuple[int, ...]) -> int:
    """Best width over every budget, one at a time; the narrower one on ties."""
    best = (-1.0, 0)
    for width in widths:
        values = sorted(survival[:width].ravel(), reverse=True)
        for budget in range(len(values) + 1):
            ms = float(model.step_ms(np.array([8 + budget]), 8, 0, 8 + budget)[0])
            rate = (8 + sum(values[:budget])) / (ms + (model.draft_ms(8, width) if width else 0))
            if rate > best[0] * (1 + 1e-12):
                best = (rate, width)
    return best[1]


@pytest.mark.parametrize(("gamma", "widths"), [(1, (1,)), (3, (1, 2, 3)), (7, (1, 2, 3, 5, 7))])
def test_widths_end_with_gamma(gamma: int, widths: tuple[int, ...]) -> None:
    assert widths_for(gamma) == widths


def test_leaving_out_the_draft_is_a_width_where_the_host_can() -> None:
    assert widths_for(3, may_skip=True) == (0, 1, 2, 3)


@pytest.mark.parametrize("widths", [(), (0,), (3, 1), (2, 2), (-1, 1)])
def test_bad_widths_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must ascend from 0 or more and hold a block"):
        WidthChoice(widths)


@pytest.mark.parametrize("slope", [0.01, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("decay", [0.3, 0.6, 0.95])
def test_choice_is_the_best_rate(slope: float, decay: float) -> None:
    widths = widths_for(GAMMA, may_skip=True)
    survival = np.full((GAMMA, 8), decay).cumprod(axis=0)
    model = cost({w: 0.5 + slope * w for w in widths}, token_ms=0.02)
    choice = WidthChoice(widths, margin=0.0)
    assert choice.choose(survival, load(), model, TierLadder()) == brute_force(
        survival, model, widths
    )


def test_expensive_drafts_narrow_the_block_and_cheap_ones_widen_it_again() -> None:
    widths = widths_for(GAMMA)
    choice = WidthChoice(widths)
    hopeless = np.full((GAMMA, 8), 0.2).cumprod(axis=0)
    assert choice.choose(hopeless, load(), cost({w: 2.0 * w for w in widths}), TierLadder()) == 1
    assert choice.choose(FLAT, load(), cost(dict.fromkeys(widths, 0.1)), TierLadder()) == GAMMA


def test_a_change_must_pay_the_margin() -> None:
    model = cost({5: 1.00, 7: 1.02})
    survival = np.vstack([FLAT[:5], np.full((2, 8), 1e-6)])
    assert WidthChoice((5, 7), margin=0.0).choose(survival, load(), model, TierLadder()) == 5
    assert WidthChoice((5, 7), margin=0.05).choose(survival, load(), model, TierLadder()) == 7


def test_evaluated_every_few_steps_only() -> None:
    widths = widths_for(GAMMA)
    choice = WidthChoice(widths, every=3)
    cheap, dear = cost(dict.fromkeys(widths, 0.1)), cost({w: 5.0 * w for w in widths})
    hopeless = np.full((GAMMA, 8), 0.1).cumprod(axis=0)
    seen = []
    for step in range(4):
        survival, model = (hopeless, dear) if step else (FLAT, cheap)
        if choice.due():
            choice.choose(survival, load(), model, TierLadder())
        seen.append(choice.current)
    assert seen == [GAMMA, GAMMA, GAMMA, 1]


def test_a_single_width_is_never_evaluated() -> None:
    choice = WidthChoice((GAMMA,), every=1)
    assert not any(choice.due() for _ in range(3))
    assert choice.current == GAMMA


def steps(choice: WidthChoice, count: int, survival: np.ndarray, model: CostModel) -> list[int]:
    seen = []
    for _ in range(count):
        if choice.due():
            choice.choose(survival, load(), model, TierLadder())
        seen.append(choice.current)
    return seen


def test_drafting_stops_where_plain_decoding_is_faster_and_looks_again() -> None:
    widths = widths_for(GAMMA, may_skip=True)
    hopeless = np.full((GAMMA, 8), 0.05).cumprod(axis=0)
    dear = cost({w: 1.0 + w for w in widths if w})
    seen = steps(WidthChoice(widths, every=2, redraft=8), 20, hopeless, dear)
    # Eight steps without a block, then blocks until the next evaluation.
    assert seen == [0] * 8 + [1] * 2 + [0] * 8 + [1] * 2


def test_drafting_goes_on_where_it_pays() -> None:
    widths = widths_for(GAMMA, may_skip=True)
    cheap = cost({w: 0.1 for w in widths if w})
    assert set(steps(WidthChoice(widths, every=2, redraft=8), 20, FLAT, cheap)) == {GAMMA}


def test_drafting_resumes_when_it_pays_again() -> None:
    widths = widths_for(GAMMA, may_skip=True)
    choice = WidthChoice(widths, every=2, redraft=10**6)
    hopeless = np.full((GAMMA, 8), 0.05).cumprod(axis=0)
    dear = cost({w: 1.0 + w for w in widths if w})
    assert steps(choice, 4, hopeless, dear) == [0] * 4
    assert steps(choice, 4, FLAT, cost({w: 0.1 for w in widths if w})) == [GAMMA] * 4
