# SPDX-License-Identifier: Apache-2.0
"""What an engine reports after a measurement, without an engine."""

from typing import Any

from serving_load import Step, Window, client_metrics, engine_metrics


def measured(concurrency: int, tok_s: float) -> dict[str, Any]:
    window = Window(0.0, 3.0)
    steps = [Step(i / 10, tokens=4, rows=2) for i in range(31)]
    figures = {**client_metrics([], window), **engine_metrics(steps, window), "tok_s": tok_s}
    more = {"gpu_mem_gib": 10.0 + concurrency, "plugin": {}}
    return {"event": "sweep", "concurrency": concurrency, **figures, **more}
