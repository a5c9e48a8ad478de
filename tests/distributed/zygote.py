# SPDX-License-Identifier: Apache-2.0
"""Forks the ranks of one job after another from a process that has imported everything once.

Jobs are JSON lines on stdin, answers JSON lines on stdout. A rank that is not done in time is asked
for its stacks and killed: a hang is an answer, not a stuck run. The process has one thread and no
process group of its own, so forking it is safe.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import rank_programs
import torch

STACKS_S = 1.0


def run_rank(job: dict, rank: int) -> int:
    """The child's life; returns its exit code."""
    folder = Path(job["folder"])
    log = (folder / f"rank{rank}.log").open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    answer = {"error": None, "message": ""}
    try:
        program = getattr(rank_programs, job["program"])
        group = rank_programs.join(folder, rank, job["world"])
        answer["result"] = program(group, **job["arguments"])
    except BaseException as error:
        traceback.print_exc()
        answer |= {"error": type(error).__name__, "message": str(error)}
    (folder / f"rank{rank}.json").write_text(json.dumps(answer))
    log.flush()
    return 0


def wait(pids: dict[int, int], limit_s: float) -> dict[int, str]:
    """How each rank ended: `exit N`, `signal N` or `hang`."""
    ends: dict[int, str] = {}
    deadline = time.monotonic() + limit_s
    while len(ends) < len(pids) and time.monotonic() < deadline:
        for rank, pid in pids.items():
            if rank not in ends:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    ends[rank] = f"exit {code}" if code >= 0 else f"signal {-code}"
        time.sleep(0.005)
    stuck = {rank: pid for rank, pid in pids.items() if rank not in ends}
    for signal_number, pause_s in ((signal.SIGUSR1, STACKS_S), (signal.SIGKILL, 0.0)):
        for pid in stuck.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        if stuck:
            time.sleep(pause_s)
    for rank, pid in stuck.items():
        os.waitpid(pid, 0)
        ends[rank] = "hang"
    return ends


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pids: dict[int, int] = {}
        for rank in range(job["world"]):
            pid = os.fork()
            if not pid:
                os._exit(run_rank(job, rank))
            pids[rank] = pid
        ends = wait(pids, job["limit_s"])
        print(json.dumps([ends[rank] for rank in sorted(ends)]), flush=True)


if __name__ == "__main__":
    main()
