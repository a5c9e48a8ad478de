# SPDX-License-Identifier: Apache-2.0
"""Sampled output has the target's distribution, whatever is drafted, verified and trimmed.

Every sampled token is judged by the target's own distribution after the tokens before it, computed
by another implementation of the model. Tokens are sorted into bins by their rank in it (the best
token, the second, ...). Given what came before, a bin is hit with a known probability, so hits
minus probabilities are martingale differences, and their sum, weighted by the inverse of its
covariance, is chi-squared. A rule that prefers drafts moves weight between bins. Seeds are fixed:
the verdict of a run is the same everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import STEADY, Engine, Output, demo_prompts, plain_greedy, request

from vllm_dspark.cli.demo import DEMO_FOLDER

pytestmark = pytest.mark.slow

P_LIMIT = 1e-3
BIN_STARTS = (0, 1, 2, 4, 8, 32)
"""First rank of each bin."""
TEMPERATURE = 1.0
REQUESTS, TOKENS = 24, 24
FEW_REQUESTS, FEW_TOKENS = 16, 16


@functools.cache
def target() -> Any:
    """The demo target in `transformers`, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER / "target", dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def conditionals(output: Output, temperature: float) -> torch.Tensor:
    """Target probabilities `[tokens, vocab]` of every sampled token's place."""
    ids = output.prompt_ids + output.token_ids
    logits = target()(torch.tensor([ids])).logits[0, len(output.prompt_ids) - 1 : -1]
    return (logits.double() / temperature).softmax(dim=-1)


def bins_of(probabilities: torch.Tensor) -> torch.Tensor:
    """Bin `[tokens, vocab]` of every token of the vocabulary, by its rank."""
    order = probabilities.argsort(dim=-1, descending=True)
    ranks = torch.empty_like(order)
    ranks.scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
    return torch.searchsorted(torch.tensor(BIN_STARTS), ranks, right=True) - 1


def deviation_p_value(judged: Iterable[tuple[torch.Tensor, list[int]]]) -> float:
    """Chance of a deviation this large if every token was drawn from its probabilities.

    Each item is one sequence: probabilities `[tokens, vocab]`, and the tokens that were drawn.
    """
    bins = len(BIN_STARTS)
    deviation = torch.zeros(bins, dtype=torch.float64)
    covariance = torch.zeros(bins, bins, dtype=torch.float64)
    for probabilities, tokens in judged:
        where = bins_of(probabilities)
        mass = torch.zeros(len(where), bins, dtype=torch.float64)
        mass.scatter_add_(1, where, probabilities)
        hits = where.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        deviation += torch.nn.functional.one_hot(hits, bins).double().sum(0) - mass.sum(0)
        covariance += mass.sum(0).diag() - mass.T @ mass
    # The bins of a token sum to one, so one of them is told by the others.
    statistic = deviation[1:] @ torch.linalg.solve(covariance[1:, 1:], deviation[1:])
    freedom = torch.tensor((bins - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def p_value(outputs: Iterable[Output], temperature: float = TEMPERATURE) -> float:
    """`deviation_p_value` of sampled continuations under the target."""
    return deviation_p_value((conditionals(o, temperature), o.token_ids) for o in outputs)


def sampled(
    engine: Engine, requests: int = REQUESTS, tokens: int = TOKENS, **sampling: Any
) -> list[Output]:
    """One continuation per seed, over the demo prompts."""
    options = {"temperature": TEMPERATURE, "max_tokens": tokens, "ignore_eos": True, **sampling}
    prompts = demo_prompts(requests)
    answers = engine.run([request(p, seed=n, **options) for n, p in enumerate(prompts)])
    return [choice for choices in answers for choice in choices]


# ---------------------------------------------------------------------- the judge


def synthetic(bias: float, seed: int) -> float:
    """p-value of tokens drawn from a mixture of the target and its best token."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(24, 64, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    best = torch.nn.functional.one_hot(truth.argmax(-1), 64).double()
    mixed = (1 - bias) * truth + bias * best
    drawn = torch.multinomial(mixed, 48, replacement=True, generator=generator)
    return deviation_p_value((truth, tokens) for tokens in drawn.T.tolist())


def test_the_judge_accepts_the_truth_and_not_a_bias() -> None:
    values = [synthetic(0.0, seed) for seed in range(40)]
    assert min(values) > P_LIMIT
    # Uniform under the truth: neither too strict nor too lenient.
    assert 0.35 < sum(values) / len(values) < 0.65
    assert max(synthetic(0.1, seed) for seed in range(8)) < P_LIMIT


# ---------------------------------------------------------------------- the engine


@pytest.fixture(scope="module", params=["greedy", "probabilistic"])
def drafting(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(drafting: str) -> Iterator[Engine]:
    dspark = {"strict": True, "verify": "compact", "lens": "host", **STEADY}
    with Engine(dspark, {"draft_sample_method": drafting}) as running:
        yield running


@pytest.mark.parametrize("pin", [1.0, 0.5])
def test_the_targets_distribution(engine: Engine, pin: float) -> None:
    engine.pin(pin)
    with engine.counting() as counted:
        outputs = sampled(engine)
    assert p_value(outputs) > P_LIMIT
    # Neither all accepted nor all rejected: the rule had something to decide.
    verified = counted["vllm:dspark_draft_tokens_admitted_total"]
    accepted = counted["vllm:dspark_draft_tokens_accepted_total"]
    assert 0.05 < accepted / verified < 0.95
    assert (counted["vllm:dspark_draft_tokens_trimmed_total"] > 0) is (pin < 1.0)


@pytest.mark.parametrize("pin", [0, 1])
def test_the_targets_distribution_with_hardly_any_draft(engine: Engine, pin: int) -> None:
    engine.pin(pin)
    assert p_value(sampled(engine, FEW_REQUESTS, FEW_TOKENS)) > P_LIMIT


def test_a_kept_rejected_draft_is_noticed(engine: Engine) -> None:
    engine.pin(0.5)
    engine.plant("keep-rejected")
    try:
        outputs = sampled(engine, FEW_REQUESTS, TOKENS)
    finally:
        engine.plant(None)
    assert p_value(outputs) < P_LIMIT


def test_another_temperature_is_noticed(engine: Engine) -> None:
    engine.pin(0.5)
    outputs = sampled(engine, FEW_REQUESTS, TOKENS, temperature=0.7)
    assert p_value(outputs, temperature=0.7) > P_LIMIT
    assert p_value(outputs, temperature=1.0) < P_LIMIT


def test_capped_blocks_keep_the_distribution() -> None:
    """Drafts beyond the window are verified and dropped, also where they were accepted."""
    dspark = {"strict": True, "verify": "cap-accept", "budget_pin": 0.4, **STEADY}
    with Engine(dspark, {"draft_sample_method": "probabilistic"}) as engine:
        outputs = sampled(engine)
    assert p_value(outputs) > P_LIMIT


def test_the_judges_model_is_the_engines() -> None:
    """Greedy tokens of the engine are the judge's best tokens."""
    for output in plain_greedy()[:4]:
        output = replace(output, token_ids=output.token_ids[:16])
        assert conditionals(output, 1.0).argmax(-1).tolist() == output.token_ids
