# SPDX-License-Identifier: Apache-2.0
"""Do the ranks of a tensor-parallel group part, by themselves and when one of them drifts?

    python benchmarks/tp_divergence.py --gpu --out benchmarks/results/h200x2_tp.json
    python benchmarks/tp_divergence.py --parts synced ray --concurrency 1 4 8 --steps 60

Every rank writes a trace of what it did in each step (budget, graph, lengths, drafted and committed
ids); a step that is not the same on all ranks is a mismatch. Parts, each on servers of its own:

* `native`: vLLM's adaptive verification, for every all-reduce (`custom`, `nccl`), undisturbed; then
  with the last rank drifting by 1e-3, until the ranks hang, fail or a minute has passed. The stacks
  of a hang are kept beside the server's log. Needs GPUs: it runs on full graphs only.
* `audit`: the same with the plugin, which syncs nothing then and checks what its ranks did.
* `synced`: the plugin as it is: undisturbed, with the drift, and with output copies that come late;
  mismatches are to be 0 and tokens those of the undisturbed run. Then the sync's share of a step:
  all along, everything is synced twice for 16 steps, once for 16 and so on (`tp_stability.price`).
* `ray`: the same server on a Ray cluster of one node: tokens, a clean end, a worker that is killed.

`--stability FILE` takes the figures of `tp_stability.py` into the document.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tp_servers
import tp_workloads
from tp_ray import ray_part, write
from tp_servers import DRIFT, Disturbed, Servers
from tp_stability import FAILURES, WINDOW_STEPS, price
from tp_workloads import REQUEST_LIMIT_S, Answer, other_tokens, send

from vllm_dspark.cli import demo, provenance
from vllm_dspark.cli.server import Server, ServerError
from vllm_dspark.cli.traffic import Client, Greedy, read_prompts

HANG_S = 60.0
SLOW_COPY_S = 0.02
PRICE_ROUNDS = 4
ALL_REDUCE = {"custom": (), "nccl": ("--disable-custom-all-reduce",)}
TRIMMED = {"strict": True, "verify": "compact", "min_gain": 0.0}


@dataclass
class Run:
    """What all parts share."""

    servers: Servers
    prompts: list[str]
    concurrency: Sequence[int]
    steps: int
    tokens: int
    outside_ray: list[Greedy] | None = None
    """Tokens that the `ray` part compares with, if another part has a server for them."""

    @property
    def drift(self) -> dict[str, Any]:
        return {"kind": "perturb", "ranks": [self.servers.world - 1], "size": DRIFT}


def undisturbed(run: Run, running: Server, disturbed: Disturbed) -> list[dict[str, Any]]:
    """Mismatches at every concurrency, over `run.steps` steps each or more."""
    rows = []
    for concurrency in run.concurrency:
        start, outcomes = disturbed.last_step() + 1, Counter[str]()
        while True:
            outcomes += Counter(a.outcome for a in burst(run, running, concurrency, 2 * HANG_S))
            found = disturbed.compare(since=start)
            if found.steps >= run.steps or outcomes.keys() != {"ok"}:
                break
        rows.append(
            {
                "concurrency": concurrency,
                "steps": found.steps,
                "mismatches": found.differing,
                "by_field": dict(found.by_field),
                "outcomes": dict(outcomes),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        if outcomes.keys() != {"ok"}:
            keep_stacks(disturbed)
            break
    return rows


def burst(
    run: Run, running: Server, concurrency: int, limit_s: float = REQUEST_LIMIT_S
) -> list[Answer]:
    """One filled batch of greedy requests, unevenly long."""
    requests = tp_workloads.build("uneven", run.prompts, concurrency, run.tokens)
    return send(running.url, demo.SERVED_NAME, requests, concurrency, limit_s)


def until_it_breaks(run: Run, running: Server, disturbed: Disturbed) -> dict[str, Any]:
    """What the drift of one rank does within `HANG_S`; stacks are kept if it is a hang."""
    start, begin = disturbed.last_step() + 1, time.monotonic()
    disturbed.set_fault(run.drift)
    outcomes, hang = Counter[str](), False
    bursts = threading.Thread(target=_bursts, args=(run, running, outcomes, begin), daemon=True)
    bursts.start()
    last = start
    while bursts.is_alive() and not hang:
        bursts.join(HANG_S / 4)
        reached = disturbed.last_step()
        hang = bursts.is_alive() and reached == last and still_runs(running)
        last = reached
    if hang:
        keep_stacks(disturbed)
    found = disturbed.compare(since=start)
    return {
        "seconds": round(time.monotonic() - begin, 1),
        "steps": found.steps,
        "mismatches": found.differing,
        "by_field": dict(found.by_field),
        "hang": hang,
        "server_alive": still_runs(running),
        "outcomes": dict(outcomes),
    }


def keep_stacks(disturbed: Disturbed) -> None:
    """Write where the ranks are, for those who want to know why."""
    for rank, text in disturbed.stacks().items():
        (disturbed.folder / f"stacks-rank{rank}.txt").write_text(text, encoding="utf-8")


def _bursts(run: Run, running: Server, outcomes: Counter[str], begin: float) -> None:
    while time.monotonic() - begin < HANG_S and not outcomes.keys() - {"ok"}:
        outcomes.update(a.outcome for a in burst(run, running, run.concurrency[0], HANG_S))


def still_runs(running: Server) -> bool:
    """The server's process has not ended."""
    try:
        running.check_alive()
    except ServerError:
        return False
    return True


def native_part(run: Run) -> dict[str, Any]:
    """vLLM's own, by all-reduce."""
    found: dict[str, Any] = {}
    for name, extra in ALL_REDUCE.items():
        adaptive = {"enable_adaptive_verification": True}
        with run.servers.native(adaptive, extra=extra) as (running, disturbed):
            found[name] = {"undisturbed": undisturbed(run, running, disturbed)}
            if name == "custom" and still_runs(running):
                found[name]["drift"] = until_it_breaks(run, running, disturbed)
                print(json.dumps(found[name]["drift"]), flush=True)
    return found


def audit_part(run: Run) -> dict[str, Any]:
    """The plugin without its sync, by all-reduce; one is enough where there are no GPUs."""
    found: dict[str, Any] = {}
    for name, extra in ALL_REDUCE.items() if run.servers.on_gpu else [("gloo", ())]:
        with run.servers.plugin({**TRIMMED, "tp_sync": "audit"}, extra=extra) as served:
            found[name] = {"undisturbed": undisturbed(run, *served)}
    return found


def synced_part(run: Run) -> dict[str, Any]:
    """The plugin as it is, disturbed and not, and the price of its sync."""
    largest = max(run.concurrency)
    faults = {"none": None, "drift": run.drift}
    if run.servers.on_gpu:
        everyone = list(range(run.servers.world))
        faults["slow output copies"] = {
            "kind": "slow_copy",
            "ranks": everyone[1:],
            "size": SLOW_COPY_S,
        }
    found: dict[str, Any] = {}
    options = {**TRIMMED, "consensus_interval": 16}
    with run.servers.plugin(options, alternate=WINDOW_STEPS) as (running, disturbed):
        reference = burst(run, running, largest)
        for name, fault in faults.items():
            disturbed.set_fault(fault)
            start = disturbed.last_step() + 1
            answers = burst(run, running, largest)
            disturbed.set_fault(None)
            compared = disturbed.compare(since=start)
            found[name] = {
                "steps": compared.steps,
                "mismatches": compared.differing,
                "outcomes": dict(Counter(answer.outcome for answer in answers)),
                "other_tokens": other_tokens(
                    Client(running.url, demo.SERVED_NAME), reference, answers
                ),
            }
            print(json.dumps({name: found[name]}), flush=True)
        found["undisturbed"] = undisturbed(run, running, disturbed)
        found["sync_price"] = {
            batch: price(running, disturbed, run.prompts, run.tokens, batch, PRICE_ROUNDS)
            for batch in sorted({1, *run.concurrency})
        }
        print(json.dumps(found["sync_price"]), flush=True)
        run.outside_ray = write(running, run.prompts)
    return found


PARTS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "native": native_part,
    "audit": audit_part,
    "synced": synced_part,
    "ray": lambda run: ray_part(run.servers, run.prompts, TRIMMED, run.outside_ray),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tp_servers.add_arguments(parser)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--concurrency", type=int, nargs="+", default=[32, 128, 256])
    add("--steps", type=int, default=1700, help="at least, per server and concurrency")
    add("--tokens", type=int, default=256, help="of the longest output")
    add("--stability", type=Path, help="result of tp_stability.py on the same machine")
    options = parser.parse_args()
    document = provenance.header(["python", *sys.argv], options.commit) | {"tp": options.tp}
    largest = max(options.concurrency)
    prompts = read_prompts(demo.DEMO_FOLDER / "prompts.jsonl", min(largest, 100))
    with tempfile.TemporaryDirectory(prefix="dspark-tp-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        servers = tp_servers.from_arguments(options, folder, largest, 1024)
        run = Run(servers, prompts, options.concurrency, options.steps, options.tokens)
        for name in options.parts:
            try:
                document[name] = PARTS[name](run)
            except Exception as error:
                # Parts are independent, and machine time is dear: the others still run.
                document[name] = {"failed": str(error)[-4000:]}
                print(f"{name}: {error}", flush=True)
            save(options, document)
    print(json.dumps({name: document[name] for name in SUMMARY}))
    return 1 if any("failed" in document[name] for name in options.parts) else 0


SUMMARY = (
    *("steps", "native_mismatches", "plugin_mismatches", "runs", "hangs", "errors"),
    *("sync_share", "ray_ok"),
)


def save(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """The document with its summary; what was not run is None there."""
    stability = json.loads(options.stability.read_text()) if options.stability else {}
    stability.pop("rows", None)
    synced = document.get("synced", {})
    prices = synced.get("sync_price", {})
    document |= {
        "steps": {part: _total(document.get(part), "steps") for part in ("native", "synced")},
        "native_mismatches": _total(document.get("native"), "mismatches"),
        "plugin_mismatches": _total(document.get("synced"), "mismatches"),
        "runs": stability.get("runs"),
        **{name: stability.get(name) for name in FAILURES},
        "sync_share": {str(c): round(found["step_ratio"] - 1.0, 4) for c, found in prices.items()},
        "ray_ok": document.get("ray", {}).get("ray_ok"),
        "stability": stability or None,
    }
    if options.out is not None:
        provenance.save(document, options.out)


def _total(value: Any, key: str) -> int | None:
    """Sum of every `key` inside a part; None if the part was not run."""
    if value is None:
        return None
    if isinstance(value, list):
        return sum(_total(item, key) or 0 for item in value)
    if isinstance(value, dict):
        inside = sum(_total(item, key) or 0 for name, item in value.items() if name != key)
        return inside + (value[key] if isinstance(value.get(key), int) else 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
