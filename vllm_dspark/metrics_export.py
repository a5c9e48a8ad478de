# SPDX-License-Identifier: Apache-2.0
"""How counters get from worker processes to the server's own `/metrics`.

The channel is prometheus_client's multiprocess file format: each writer owns three small mapped
files in one directory, and a reader sums them. No socket, no route, no message on the hot path.

Which directory
* `PROMETHEUS_MULTIPROC_DIR`, if set: vLLM (several API servers) then serves a registry that reads
  every file there, ours included.
* otherwise `VLLM_DSPARK_METRICS_DIR`: a private directory that `prepare_parent` makes in the first
  process of a server, children inherit through the environment, and the maker removes at exit.
  The API server shows it through one collector in the default registry (`install_exporter`). An
  operator may set the variable to a directory of their own; it is then never removed.

Invariants: file names never meet those of prometheus_client itself; a file appears only when it is
complete enough to be read; reading never fails a scrape and ignores what it cannot read; a
collector has no `_name`, so vLLM's clean-up of its own collectors does not take it away.
"""

import atexit
import glob
import itertools
import logging
import multiprocessing
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_dspark.metrics_snapshot import Series, Snapshot

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

    from vllm_dspark.metrics import Sample

logger = logging.getLogger(__name__)

DIRECTORY_ENV = "VLLM_DSPARK_METRICS_DIR"
MULTIPROC_ENV = "PROMETHEUS_MULTIPROC_DIR"
_DIRECTORY_PREFIX = "vllm-dspark-"
_OWNER_FILE = "owner.pid"
_FILES = "*_dspark-*.db"

_made: str | None = None  # directory made by this process or by the one it was forked from
_store_numbers = itertools.count()
_registries: "weakref.WeakSet[CollectorRegistry]" = weakref.WeakSet()


def metrics_dir() -> str | None:
    """Directory that writers of this process use, or None if no process prepared one."""
    return os.environ.get(MULTIPROC_ENV) or os.environ.get(DIRECTORY_ENV) or None


def private_dir() -> str | None:
    """The plugin's own directory of this server (also in vLLM's multiprocess mode)."""
    return os.environ.get(DIRECTORY_ENV) or None


def prepare_parent() -> str | None:
    """Make the private directory unless this process belongs to a server that has one.

    Call it from the plugin's registration; idempotent, cheap, never raises. Returns the private
    directory, or None if none can be made (the counters then stay in their processes).
    """
    global _made
    inherited = private_dir()
    if inherited and not _belongs_to_another_server(inherited):
        return inherited
    try:
        directory = tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX)
        with open(os.path.join(directory, _OWNER_FILE), "w") as file:
            file.write(str(os.getpid()))
    except OSError as error:
        logger.warning("DSpark metrics will not reach /metrics: no directory: %s", error)
        os.environ.pop(DIRECTORY_ENV, None)
        return None
    os.environ[DIRECTORY_ENV] = _made = directory
    atexit.register(_remove, directory, os.getpid())
    return directory


def _belongs_to_another_server(directory: str) -> bool:
    """True in a new top-level process that merely inherited the variable, e.g. a server started
    by a script that had loaded the plugin; the two must not add up their counters."""
    if directory == _made or multiprocessing.parent_process() is not None:
        return False
    if "RAY_RAYLET_PID" in os.environ:  # a Ray worker is a fresh process that belongs to its driver
        return False
    return os.path.exists(os.path.join(directory, _OWNER_FILE))


def _remove(directory: str, maker_pid: int) -> None:
    if os.getpid() == maker_pid:
        shutil.rmtree(directory, ignore_errors=True)


def running_servers() -> dict[int, str]:
    """Private directories made on this machine and still there: pid of the maker to path."""
    found: dict[int, str] = {}
    pattern = os.path.join(tempfile.gettempdir(), _DIRECTORY_PREFIX + "*", _OWNER_FILE)
    for path in glob.glob(pattern):
        try:
            with open(path) as file:
                found[int(file.read())] = os.path.dirname(path)
        except (OSError, ValueError):
            continue
    return found


class MmapStore:
    """Files of one writer. Not thread-safe; a writer serialises its publications."""

    def __init__(self, directory: str) -> None:
        from prometheus_client.mmap_dict import MmapedDict, mmap_key

        self._open: Callable[[str], Any] = MmapedDict
        self._key_of = mmap_key
        self._directory = directory
        # Prometheus takes type and gauge mode from the parts between underscores.
        self._tag = f"dspark-{os.getpid()}-{next(_store_numbers)}"
        self._files: dict[str, Any] = {}
        self._written: dict[tuple[str, str, tuple[tuple[str, str], ...]], tuple[str, float]] = {}

    def write(self, samples: "Iterable[Sample]") -> None:
        """Publish the values that changed. Errors: `OSError` if a file cannot be made or grown."""
        now = time.time()
        fresh: dict[str, str] = {}
        for metric, suffix, labels, value in samples:
            series = (metric.name, suffix, labels)
            key, before = self._written.get(series, ("", None))
            if value == before:
                continue
            kind: str = "gauge_mostrecent" if metric.kind == "gauge" else metric.kind
            if not key:
                names, values = [name for name, _ in labels], [text for _, text in labels]
                sample_name = metric.family + suffix
                key = self._key_of(metric.family, sample_name, names, values, metric.help)
            if kind not in self._files:
                fresh[kind] = os.path.join(self._directory, f".{kind}_{self._tag}.new")
                self._files[kind] = self._open(fresh[kind])
            self._files[kind].write_value(key, value, now if metric.kind == "gauge" else 0.0)
            self._written[series] = (key, value)
        for kind, path in fresh.items():
            os.rename(path, os.path.join(self._directory, f"{kind}_{self._tag}.db"))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def open_store(directory: str | None) -> MmapStore | None:
    """Store in `directory` (None: that of the environment); None, with one warning, if it cannot
    be used. "" means: publish nowhere."""
    if directory is None:
        directory = metrics_dir()
        if directory is None:
            logger.warning("DSpark metrics stay in this process: %s is not set", DIRECTORY_ENV)
    if not directory:
        return None
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} is not writable")
        return MmapStore(directory)
    except (OSError, ImportError) as error:
        logger.warning("DSpark metrics stay in this process: %s", error)
        return None


def _families(directory: str) -> "list[Family]":
    """Merged metric families of the plugin's files; unreadable files are left out."""
    from prometheus_client.multiprocess import MultiProcessCollector

    paths = sorted(glob.glob(os.path.join(directory, _FILES)))
    try:
        return list(MultiProcessCollector.merge(paths, accumulate=True))
    except Exception:
        return list(MultiProcessCollector.merge(_readable(paths), accumulate=True))


def _readable(paths: Sequence[str]) -> list[str]:
    from prometheus_client.multiprocess import MultiProcessCollector

    good = []
    for path in paths:
        try:
            MultiProcessCollector.merge([path])
            good.append(path)
        except Exception as error:
            logger.debug("DSpark metrics: %s cannot be read: %s", path, error)
    return good


def read_snapshot(directory: str) -> Snapshot:
    """Current values published in `directory`, summed over its writers.

    Errors: `FileNotFoundError` if there is no such directory.
    """
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"no metrics directory at {directory}")
    return {
        Series.of(sample.name, sample.labels.items()): float(sample.value)
        for family in _families(directory)
        for sample in family.samples
    }


class DSparkCollector:
    """Collector of the published files; follows `metrics_dir()` unless given a directory."""

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._warned = False

    def describe(self) -> "Iterator[Family]":
        """Names only, so that `/metrics?name[]=` can select them."""
        from prometheus_client.metrics_core import Metric as Family

        from vllm_dspark.metrics import CATALOGUE

        for metric in CATALOGUE:
            yield Family(metric.family, metric.help, metric.kind)

    def collect(self) -> "Iterator[Family]":
        directory = self._directory or metrics_dir()
        if not directory:
            return
        try:
            families = _families(directory)
        except Exception as error:
            families = []
            if not self._warned:
                self._warned = True
                logger.warning("DSpark metrics cannot be read from %s: %s", directory, error)
        yield from families


def install_exporter(registry: "CollectorRegistry | None" = None) -> bool:
    """Show the plugin's series in `registry` (default: the one of a single API server).

    Idempotent; never raises; returns whether the registry shows them now.
    """
    try:
        from prometheus_client import REGISTRY

        target = REGISTRY if registry is None else registry
        if target not in _registries:
            target.register(DSparkCollector())
            _registries.add(target)
        return True
    except Exception as error:
        logger.warning("DSpark metrics cannot be added to /metrics: %s", error)
        return False
