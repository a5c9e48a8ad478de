# SPDX-License-Identifier: Apache-2.0
"""Figures of one demo run: what is printed, and what `--json` writes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_dspark.cli.counters import Counters
from vllm_dspark.cli.outputs import write_text
from vllm_dspark.cli.provenance import header
from vllm_dspark.cli.traffic import NEAR_TIE_LOGIT_GAP, Difference

ACCEPT_LEN_WANTED = 3.0


@dataclass(frozen=True)
class DemoFigures:
    """What the two servers did with the same greedy prompts."""

    prompts: int
    tokens_per_prompt: int
    concurrency: int
    seconds: float
    seconds_without: float
    counters: Counters
    differences: list[Difference]

    @property
    def tokens(self) -> int:
        return self.prompts * self.tokens_per_prompt

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tok_s_without(self) -> float:
        return self.tokens / self.seconds_without

    @property
    def tokens_equal(self) -> bool:
        return not self.differences

    @property
    def lossless(self) -> bool:
        """Equal, or different only where the target's own two best tokens are a near-tie."""
        return all(difference.near_tie for difference in self.differences)

    @property
    def passed(self) -> bool:
        return self.lossless and self.counters.accept_len >= ACCEPT_LEN_WANTED

    def table(self) -> str:
        c = self.counters
        share = f" ({c.trimmed / c.scheduled:.0%})" if c.scheduled else ""
        counted = "" if c.from_plugin else "  (not counted: the plugin's metrics are absent)"
        rows = [
            ("greedy tokens", f"{self.prompts} prompts x {self.tokens_per_prompt}"),
            ("tokens equal", self._verdict()),
            ("accepted length", f"{c.accept_len:.2f}  (at least {ACCEPT_LEN_WANTED} wanted)"),
            ("drafts scheduled", f"{c.scheduled}"),
            ("drafts verified", f"{c.verified}{counted}"),
            ("drafts trimmed", f"{c.trimmed}{share}"),
            ("drafts accepted", f"{c.accepted}"),
            ("tokens/s with", f"{self.tok_s:.1f}"),
            ("tokens/s without", f"{self.tok_s_without:.1f}"),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {value}" for name, value in rows]
        return "\n".join([*lines, *map(describe, self.differences)])

    def _verdict(self) -> str:
        if self.tokens_equal:
            return "yes"
        return f"{len(self.differences)} differ, " + (
            "near-ties only" if self.lossless else "NOT all near-ties"
        )

    def record(self) -> dict[str, Any]:
        """JSON of the run, with what is needed to run it again."""
        return {
            "tokens_equal": self.tokens_equal,
            "lossless": self.lossless,
            "accept_len": round(self.counters.accept_len, 3),
            "tok_s": round(self.tok_s, 2),
            "tok_s_without": round(self.tok_s_without, 2),
            "prompts": self.prompts,
            "tokens_per_prompt": self.tokens_per_prompt,
            "concurrency": self.concurrency,
            "drafts": asdict(self.counters),
            "differences": [asdict(d) | {"near_tie": d.near_tie} for d in self.differences],
            "near_tie_logit_gap": NEAR_TIE_LOGIT_GAP,
            **header(["vllm-dspark", *sys.argv[1:]]),
        }


def describe(difference: Difference) -> str:
    """One line about a prompt whose tokens differ."""
    d = difference
    gap = "not the target's best two" if d.logit_gap is None else f"logit gap {d.logit_gap:.4f}"
    kind = "near-tie" if d.near_tie else "DIFFERENT"
    where = f"prompt {d.prompt}, token {d.position}"
    return f"  {where}: {d.expected} without, {d.got} with ({gap}): {kind}"


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a result file; errors as in `write_text`."""
    write_text(path, json.dumps(record, indent=2) + "\n")
