# SPDX-License-Identifier: Apache-2.0
"""Steps are timed by the device, whenever the host reads them."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from vllm_dspark.engine.relay import BlockRelay
from vllm_dspark.parallel.block_rows import BlockRows

pytestmark = pytest.mark.gpu

CYCLES_PER_MS = 1_000_000
"""At 1 GHz; a GPU of up to 3 GHz needs a third of a millisecond."""


def test_times_are_those_of_the_device_in_order() -> None:
    device = torch.device("cuda")
    rows = BlockRows(3)
    relay = BlockRelay(2, rows, device, timed=True)
    block = torch.zeros(2, rows.width, dtype=torch.int32, device=device)
    for spins in (1, 8, 40, 8):
        torch.cuda._sleep(spins * CYCLES_PER_MS)
        relay.publish(np.array([0, 1]), 3, block)
    time.sleep(0.2)
    first, short, long, again = (landed.step_ms for landed in relay.collect(0))
    assert first is None
    assert short is not None and long is not None and again is not None
    assert 2.0 < short < 16.0 and 2.0 < again < 16.0
    assert 3 * short < long < 80.0
