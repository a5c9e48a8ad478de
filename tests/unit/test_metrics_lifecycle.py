# SPDX-License-Identifier: Apache-2.0
"""Who makes the directory of counters, who inherits it, and who may remove it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from vllm_dspark import metrics_export
from vllm_dspark.metrics import MetricsWriter
from vllm_dspark.metrics_export import (
    DIRECTORY_ENV,
    DSparkCollector,
    install_exporter,
    prepare_parent,
    read_snapshot,
    running_servers,
)
from vllm_dspark.metrics_snapshot import total

ROOT = Path(__file__).resolve().parents[2]
D = "vllm:dspark_"

pytestmark = pytest.mark.usefixtures("no_metrics_directory")


def test_maker_removes_and_children_inherit(tmp_path: Path) -> None:
    script = (
        "import multiprocessing, os\n"
        "from vllm_dspark.metrics_export import prepare_parent, running_servers\n"
        "def child(queue): queue.put(prepare_parent())\n"
        "if __name__ == '__main__':\n"
        "    mine = prepare_parent()\n"
        "    assert prepare_parent() == mine and os.stat(mine).st_mode & 0o777 == 0o700\n"
        "    assert running_servers()[os.getpid()] == mine\n"
        "    for method in ('fork', 'spawn'):\n"
        "        context = multiprocessing.get_context(method)\n"
        "        queue = context.Queue()\n"
        "        process = context.Process(target=child, args=(queue,))\n"
        "        process.start(); theirs = queue.get(timeout=30); process.join()\n"
        "        assert theirs == mine and os.path.isdir(mine), method\n"
        "    if not (pid := os.fork()): raise SystemExit\n"  # runs the atexit of its parent
        "    os.waitpid(pid, 0); assert os.path.isdir(mine)\n"
        "    print(mine)\n"
    )
    (tmp_path / "server.py").write_text(script)
    main = subprocess.run(
        [sys.executable, str(tmp_path / "server.py")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert main.returncode == 0, main.stderr
    assert not Path(main.stdout.strip()).exists()


def test_another_server_gets_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # What earlier tests have made under this process's id is not looked at.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(metrics_export, "_made", None)
    monkeypatch.setenv(DIRECTORY_ENV, "")
    mine = prepare_parent()
    assert mine is not None
    script = "from vllm_dspark.metrics_export import prepare_parent; print(prepare_parent())"
    command = [sys.executable, "-c", script]
    other = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert other.stdout.strip() not in ("", "None", mine)
    monkeypatch.setenv("RAY_RAYLET_PID", "1")
    ray = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    assert ray.stdout.strip() == mine
    assert running_servers()[os.getpid()] == mine


def test_directory_of_the_operator_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY_ENV, str(tmp_path / "chosen"))
    assert prepare_parent() == str(tmp_path / "chosen")
    writer = MetricsWriter(0, 0, 7)
    writer.observe_plan(mode="static")
    writer.close()
    assert total(read_snapshot(str(tmp_path / "chosen")), D + "steps_total") == 1


def test_exporter_is_idempotent_and_survives_the_clean_up_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry(auto_describe=True)
    theirs = Counter("vllm:num_requests", "The host's.", registry=registry)
    assert install_exporter(registry) and install_exporter(registry)
    monkeypatch.setenv(DIRECTORY_ENV, str(tmp_path))
    writer = MetricsWriter(0, 0, 7)
    writer.observe_plan(mode="static")
    writer.close()
    # What vllm.v1.metrics.prometheus.unregister_vllm_metrics does.
    for collector in list(registry._collector_to_names):
        if hasattr(collector, "_name") and collector._name.startswith("vllm:"):
            registry.unregister(collector)
    text = generate_latest(registry).decode()
    assert theirs._name == "vllm:num_requests" and "num_requests" not in text
    assert text.count('vllm:dspark_steps_total{engine="0",mode="static"') == 1
    selected = registry.restricted_registry(["vllm:dspark_steps_total"])
    assert b"vllm:dspark_steps_total" in generate_latest(selected)


def test_scrape_without_a_directory_is_empty(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    registry.register(DSparkCollector())
    assert generate_latest(registry) == b""
    with pytest.raises(FileNotFoundError, match="absent"):
        read_snapshot(str(tmp_path / "absent"))
