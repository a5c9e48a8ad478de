# SPDX-License-Identifier: Apache-2.0
"""Sampling regimes of a batch: one number where all requests sample alike, else one each."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_dspark.core.calibration import DraftMethod, regime_of
from vllm_dspark.engine.assembly import regimes_of

METHODS = [method.value for method in DraftMethod]


def lookup(temperatures: list[float], method: str) -> Any:
    session: Any = SimpleNamespace(temperatures=lambda: np.array(temperatures, np.float32))
    speculative = SimpleNamespace(draft_sample_method=method)
    found = regimes_of(session, SimpleNamespace(speculative_config=speculative))
    assert found is not None
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "slots", [[0, 1, 2, 3], [0, 2], [1, 3], [3], [2, 3, 1], [4, 4], [0, 4], []]
)
def test_every_request_has_its_own_regime(slots: list[int], method: str) -> None:
    """Whichever form the answer takes; a temperature that is no number never makes all alike."""
    temperatures = [0.0, 0.8, 0.0, 0.8, float("nan")]
    chosen = np.array(slots, dtype=np.int64)
    found = lookup(temperatures, method)(chosen)
    expected = regime_of(DraftMethod(method), np.array(temperatures, np.float32)[chosen])
    np.testing.assert_array_equal(np.broadcast_to(found, len(slots)), expected)


@pytest.mark.parametrize("method", METHODS)
def test_requests_that_sample_alike_are_one_number(method: str) -> None:
    found = lookup([0.0, 0.8, 0.8], method)(np.array([2, 1]))
    assert isinstance(found, int)
    assert found == int(regime_of(DraftMethod(method), np.array([0.8]))[0])


def test_without_a_sampler_there_are_no_regimes() -> None:
    session: Any = SimpleNamespace(temperatures=None)
    assert regimes_of(session, None) is None
