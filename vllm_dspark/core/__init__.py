# SPDX-License-Identifier: Apache-2.0
"""The scheduling policy of DSpark verification, without vLLM, GPU or I/O.

The interface is `Planner(PolicyConfig(...), gamma, ladders, cost, calibration).plan(StepInput)`.
"""

from vllm_dspark.core.calibration import CalibrationTable
from vllm_dspark.core.cost_model import CostModel
from vllm_dspark.core.plan import PlanReason, StepInput, VerifyPlan
from vllm_dspark.core.planner import Planner
from vllm_dspark.core.policy import PolicyConfig, SearchMode
from vllm_dspark.core.survival import RowDoubt
from vllm_dspark.core.tiers import ExecMode, TierLadder

__all__ = [
    "CalibrationTable",
    "CostModel",
    "ExecMode",
    "PlanReason",
    "Planner",
    "PolicyConfig",
    "RowDoubt",
    "SearchMode",
    "StepInput",
    "TierLadder",
    "VerifyPlan",
]
