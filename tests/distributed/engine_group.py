# SPDX-License-Identifier: Apache-2.0
"""A real tensor-parallel server that can be disturbed, and whose ranks can be compared."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import engine_faults
from prometheus_client.parser import text_string_to_metric_families

from vllm_dspark.cli import demo
from vllm_dspark.cli.counters import SETTLE_S
from vllm_dspark.cli.server import Server
from vllm_dspark.cli.traffic import Client, Greedy, read_prompts

WORLD = 2
MAX_NUM_SEQS = 8
READY_S = 240.0
SETTLE_LIMIT_S = 20.0
PROMPTS, TOKENS, CONCURRENCY = 8, 32, 4
STACKS_S = 1.0
FIELDS = ("budget", "running", "graph", "lens", "drafts", "committed")
"""Of a traced step, equal on all ranks."""


@dataclass(frozen=True)
class Comparison:
    """How the ranks of a server did the same steps."""

    steps: int
    """Steps that every rank has traced."""
    differing: int
    """Steps in which some rank did something else than rank 0."""
    by_field: Counter[str]
    """Differing steps by what differed."""


@dataclass
class Disturbed:
    """Folder of one server: the fault of the moment, and the traces."""

    folder: Path
    world: int = WORLD
    collectives: str = ""
    """See `engine_faults.COLLECTIVES`."""
    _read: Counter[Path] = field(default_factory=Counter, init=False)
    """Bytes of each trace that were read."""
    _steps: list[dict[int, dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self._steps = [{} for _ in range(self.world)]

    @property
    def fault_file(self) -> Path:
        return self.folder / "fault.json"

    def set_fault(self, fault: Mapping[str, Any] | None) -> None:
        """Disturb from the next step on; None leaves the ranks alone."""
        if fault is None:
            self.fault_file.unlink(missing_ok=True)
            return
        unknown = fault.keys() - {"kind", "ranks", "size", "every"}
        if unknown or "ranks" not in fault:
            raise ValueError(f"fault {fault}: needs kind and ranks, and may have size and every")
        written = self.fault_file.with_suffix(".new")
        written.write_text(json.dumps(fault))
        written.rename(self.fault_file)

    def environment(self, alternate: int = 0) -> dict[str, str]:
        """What the server's processes need to find the plugin and its files."""
        info = self.folder / "plugin" / "dspark_test_faults-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: dspark-test-faults\nVersion: 0\n"
        )
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\ndspark_test_faults = engine_faults:register\n"
        )
        self._traces.mkdir(exist_ok=True)
        paths = [str(info.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        return {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            engine_faults.FAULT_FILE: str(self.fault_file),
            engine_faults.TRACE_FOLDER: str(self._traces),
            engine_faults.ALTERNATE: str(alternate),
            engine_faults.COLLECTIVES: self.collectives,
        }

    def steps(self) -> list[dict[int, dict[str, Any]]]:
        """What each rank did, by step; one list entry per rank. Only what is new is read."""
        for rank, steps in enumerate(self._steps):
            for file in self._files(rank, "jsonl"):
                for values in self._new_lines(file):
                    # Steps without drafts are not decided; what they commit is of no interest.
                    if "budget" in values or values["step"] in steps:
                        steps.setdefault(values["step"], {}).update(values)
        return self._steps

    def _new_lines(self, file: Path) -> Iterator[dict[str, Any]]:
        with file.open("rb") as lines:
            lines.seek(self._read[file])
            for line in lines:
                # The last line may be incomplete, for now or because its server was killed.
                if not line.endswith(b"\n"):
                    return
                self._read[file] += len(line)
                yield json.loads(line)

    def pids(self) -> dict[int, int]:
        """Processes of the ranks that have built their planner, by rank."""
        return {
            rank: int(file.stem.partition("-")[2])
            for rank in range(self.world)
            for file in self._files(rank, "jsonl")
        }

    def stacks(self) -> dict[int, str]:
        """Where the threads of every rank that still runs are, by rank."""
        pids = self.pids()
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(STACKS_S)
        return {
            rank: "".join(file.read_text() for file in self._files(rank, "stacks")) for rank in pids
        }

    @property
    def _traces(self) -> Path:
        return self.folder / "traces"

    def _files(self, rank: int, kind: str) -> list[Path]:
        return list(self._traces.glob(f"rank{rank}-*.{kind}"))

    def compare(self, since: int = 0) -> Comparison:
        """Steps from `since` on. What a rank has not yet traced of a step is left out."""
        first, *others = self.steps()
        common = {step for step in first if step >= since}.intersection(*others)
        by_field: Counter[str] = Counter()
        differing = 0
        for step in common:
            wrong = {
                field
                for other in others
                for field in FIELDS
                if field in first[step]
                and field in other[step]
                and first[step][field] != other[step][field]
            }
            by_field.update(wrong)
            differing += bool(wrong)
        return Comparison(len(common), differing, by_field)

    def last_step(self) -> int:
        """Latest step that rank 0 has traced, -1 before the first."""
        return max(self.steps()[0], default=-1)


class Group:
    """A running server, its client, and what it writes undisturbed."""

    def __init__(self, disturbed: Disturbed, running: Server, count: int = PROMPTS) -> None:
        self.disturbed, self.running, self.count = disturbed, running, count
        self.client = Client(running.url, demo.SERVED_NAME)
        self.undisturbed = self.write()

    def write(self) -> list[Greedy]:
        """Greedy continuations of the demo's first `count` prompts."""
        return write(self.client, self.count)

    def check_disturbed(self, fault: Mapping[str, Any]) -> None:
        """With `fault`, the tokens are the same and the ranks take the same steps."""
        start = self.disturbed.last_step() + 1
        self.disturbed.set_fault(fault)
        try:
            written = self.write()
        finally:
            self.disturbed.set_fault(None)
        differences = self.client.differences(self.undisturbed, written)
        assert all(difference.near_tie for difference in differences), differences
        found = self.disturbed.compare(since=start)
        assert found.steps > TOKENS / 8
        assert found.differing == 0, found
        steps = self.disturbed.steps()[0].values()
        assert sum(step["budget"] is not None for step in steps) > len(steps) / 2, "nothing trimmed"


def write(client: Client, count: int = PROMPTS) -> list[Greedy]:
    """Greedy continuations of the demo's first `count` prompts."""
    prompts = read_prompts(demo.DEMO_FOLDER / "prompts.jsonl", count)
    return client.greedy_all(prompts, TOKENS, CONCURRENCY)[0]


def by_label(
    running: Server, name: str, label: str, awaited: Collection[str] = ()
) -> dict[str, float]:
    """Sums of a counter of the server by one of its labels, at rest and with the awaited ones.

    Workers hand their counters over every second or so, later where the machine is busy.
    """
    begin, before = time.monotonic(), None
    while True:
        time.sleep(SETTLE_S)
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(running.metrics_text()):
            for sample in family.samples:
                if sample.name == name:
                    value = sample.labels[label]
                    totals[value] = totals.get(value, 0.0) + sample.value
        at_rest = totals == before and set(awaited) <= totals.keys()
        if at_rest or time.monotonic() - begin > SETTLE_LIMIT_S:
            return totals
        before = totals


def server(
    disturbed: Disturbed,
    dspark: Mapping[str, Any],
    *,
    overlap: bool,
    log: Path,
    alternate: int = 0,
    speculative: Mapping[str, Any] | None = None,
    extra: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Server:
    """A server with the demo pair.

    Args:
        overlap: asynchronous scheduling.
        alternate: steps with and without sync in turn, see `engine_faults`; 0 for always.
        speculative: more keys of vLLM's `--speculative-config`.
        extra: more arguments of the server.
        environment: more variables of its processes.
    """
    scheduling = "--async-scheduling" if overlap else "--no-async-scheduling"
    options = demo.pair_options(
        dspark=dspark,
        max_num_seqs=MAX_NUM_SEQS,
        extra=("--tensor-parallel-size", str(disturbed.world), scheduling, *extra),
    )
    if speculative is not None:
        options = replace(options, speculative={**(options.speculative or {}), **speculative})
    variables = {**disturbed.environment(alternate), **(environment or {})}
    return Server(options, log, on_gpu=False, environment=variables)
