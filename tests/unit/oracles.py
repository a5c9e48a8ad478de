# SPDX-License-Identifier: Apache-2.0
"""Naive references: plain loops written from the definitions, sharing no code with the package."""

import math

import numpy as np

CASES = 10
"""Cases per generated example; 400 examples are drawn."""

PALETTES = {
    "smooth": None,
    "ties": [0.5, 0.5, 0.9, 1.0],
    "saturated": [1.0, 1.0, 1.0, 0.0],
    "dead": [0.0],
    "tiny": [1e-30, 1e-8, 0.3],
}


def cases(seed):
    """One random generator per case of an example."""
    return [np.random.default_rng((seed, case)) for case in range(CASES)]


def random_confidence(rng, palette, requests, gamma):
    """`[requests, gamma]` float32 confidences; palettes provoke ties and saturation."""
    values = PALETTES[palette]
    if values is None:
        return rng.random((requests, gamma)).astype(np.float32)
    return rng.choice(np.array(values, np.float32), (requests, gamma))


def survival_rows(confidence, draft_lens):
    """Survival lists per row, only scheduled slots."""
    rows = []
    for row, length in zip(confidence, draft_lens, strict=True):
        product, values = 1.0, []
        for slot in range(int(length)):
            product *= float(row[slot])
            values.append(product)
        rows.append(values)
    return rows


def admitted_by_sort(rows, budget, doubtful=()):
    """Admitted drafts per row: sort every slot by the total order and take the first `budget`."""
    slots = []
    for request, values in enumerate(rows):
        for position, value in enumerate(values):
            key = math.inf if request in doubtful else float(np.float32(value))
            slots.append((-key, position, request))
    admitted = [0] * len(rows)
    for _, _, request in sorted(slots)[: max(budget, 0)]:
        admitted[request] += 1
    return admitted


def tier_of(tiers, tokens):
    """Smallest tier that holds `tokens`, or the tokens themselves past the ladder."""
    for tier in sorted(tiers):
        if tier >= tokens:
            return tier
    return tokens


def realisable_budgets(tiers, base, low, high):
    """Budgets that end on a tier, lie past the ladder, or are one of the two bounds."""
    last = max(tiers, default=0)
    return [
        b
        for b in range(low, high + 1)
        if b in (low, high) or (base + b) in tiers or base + b > last
    ]
