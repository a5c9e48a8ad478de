# SPDX-License-Identifier: Apache-2.0
"""Systems under test and model shapes: everything in which two runs of the benchmark may differ.

A system is written as `none`, `fixed3[:JSON]` (further speculative options), `schedule[:JSON]`,
`adaptive`, `plugin[:JSON]` or `NAME=SYSTEM` for a variant with a short name. All systems get the
same engine arguments except `speculative_config` and `additional_config`, and all but `plugin` run
with the plugin switched off. Pure: neither vLLM nor torch is imported.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GAMMA = 7
CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# (first batch size, last batch size, drafts): long blocks while the batch leaves the GPU idle.
SCHEDULE = [[1, 4, 7], [5, 32, 4], [33, 160, 3], [161, 256, 2]]
TEMPERATURES = {"greedy": 0.0, "t0.8": 0.8}

# Arguments of widen_pair.py. `demo` is the pair itself, `demo-8kv` has heads for eight ranks. The
# width of `1.7b` is 1024 because the ratio to the pair's 256 must be a power of 4; the other sizes
# make up for it.
SHAPES: dict[str, dict[str, int]] = {
    "demo": {},
    "demo-8kv": {
        "hidden": 256,
        "layers": 6,
        "ffn": 768,
        "q-heads": 16,
        "kv-heads": 8,
        "vocab": 4096,
        "draft-layers": 3,
        "rank": 64,
    },
    "1.7b": {
        "hidden": 1024,
        "layers": 30,
        "ffn": 12288,
        "q-heads": 32,
        "kv-heads": 16,
        "vocab": 151936,
        "draft-layers": 5,
        "rank": 256,
    },
    "8b": {
        "hidden": 4096,
        "layers": 36,
        "ffn": 12288,
        "q-heads": 64,
        "kv-heads": 16,
        "vocab": 151936,
        "draft-layers": 5,
        "rank": 256,
    },
}

# Same for all systems. FlashInfer's sampler and all-reduce compile for minutes on their first use.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONFAULTHANDLER": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
CPU_ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}


@dataclass(frozen=True)
class System:
    """One way to serve: `speculative` lacks the model and the draft sampling of the run."""

    name: str
    speculative: dict[str, Any] | None
    plugin: dict[str, Any] | None = None  # options of the plugin, None: switched off

    @property
    def native(self) -> bool:
        """Whether it is a speculating setting of vLLM without the plugin."""
        return self.speculative is not None and self.plugin is None

    @property
    def profiles(self) -> bool:
        """Whether it times steps while it starts, which a busy neighbour would spoil."""
        adaptive = "enable_adaptive_verification" in (self.speculative or {})
        return adaptive or self.plugin is not None


def parse_system(text: str) -> System:
    """System of a command-line word. Raises `ValueError` on anything else."""
    alias = re.fullmatch(r"([\w.+-]+)=(.+)", text, re.DOTALL)
    name, spelling = alias.groups() if alias else (text, text)
    kind, colon, rest = spelling.partition(":")
    options = _json(text, rest) if colon else None
    fixed = re.fullmatch(r"fixed([1-9]\d*)", kind)
    if fixed and isinstance(options, dict | None):
        return System(name, {"num_speculative_tokens": int(fixed[1]), **(options or {})})
    if kind == "none" and options is None:
        return System(name, None)
    if kind == "adaptive" and options is None:
        return System(name, _block(enable_adaptive_verification=True))
    if kind == "schedule" and isinstance(options, list | None):
        schedule = SCHEDULE if options is None else options
        return System(name, _block(num_speculative_tokens_per_batch_size=schedule))
    if kind == "plugin" and isinstance(options, dict | None):
        return System(name, _block(), options or {})
    raise ValueError(
        f"system {text!r}: expected none, fixed1[:OBJECT], fixed2[:OBJECT], …, schedule[:LIST], "
        "adaptive or plugin[:OBJECT], each with NAME= in front or not"
    )


def requests_by_concurrency(words: Sequence[str]) -> dict[int, int]:
    """Requests of a measurement, from words `C:N`. Raises `ValueError` on anything else."""
    found = {}
    for word in words:
        match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", word)
        if match is None or int(match[2]) < 2 * int(match[1]):
            raise ValueError(f"--requests {word!r}: expected C:N, N at least two requests per slot")
        found[int(match[1])] = int(match[2])
    return found


def _json(text: str, rest: str) -> Any:
    try:
        return json.loads(rest)
    except ValueError as error:
        raise ValueError(f"system {text!r}: not JSON after the colon: {error}") from None


def _block(**options: Any) -> dict[str, Any]:
    return {"num_speculative_tokens": GAMMA, **options}


@dataclass(frozen=True)
class EngineOptions:
    """What the operator may change; the same for all systems of a run."""

    capture_sizes: tuple[int, ...] = CAPTURE_SIZES  # empty: vLLM's own
    max_model_len: int = 1024
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.85
    kv_cache_gib: float | None = None  # instead of what the utilisation leaves
    eager: bool = False
    profile_dir: str = ""
    profile_steps: int = 30
    speculative: dict[str, Any] = field(default_factory=dict)  # further speculative options
    extra: dict[str, Any] = field(default_factory=dict)  # further arguments of the engine


def engine_arguments(
    system: System, pair: Path, sampling: str, options: EngineOptions
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`; `pair` holds `target/` and `draft/`."""
    arguments: dict[str, Any] = {
        "model": str(pair / "target"),
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "cudagraph_metrics": True,
        "kernel_config": {"enable_jit_warmup": False, "enable_flashinfer_autotune": False},
    }
    if options.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(options.kv_cache_gib * 2**30)
    if options.eager:
        arguments["enforce_eager"] = True
    elif options.capture_sizes:
        arguments["compilation_config"] = {
            "cudagraph_capture_sizes": list(options.capture_sizes),
            "max_cudagraph_capture_size": max(options.capture_sizes),
        }
    if system.speculative is not None:
        arguments["speculative_config"] = {
            "method": "dspark",
            "model": str(pair / "draft"),
            "draft_sample_method": "probabilistic" if TEMPERATURES[sampling] else "greedy",
            **system.speculative,
            **options.speculative,
        }
    if system.plugin is not None:
        arguments["additional_config"] = {"dspark": system.plugin}
    if options.profile_dir:
        arguments["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": options.profile_dir,
            "torch_profiler_with_stack": False,
            "ignore_frontend": True,
            "max_iterations": options.profile_steps,
        }
    return {**arguments, **options.extra}


def environment(system: System, *, cpu: bool, cache: Path) -> dict[str, str]:
    """Environment of the engine's process; the caller's own settings win over the defaults."""
    chosen = {"VLLM_CACHE_ROOT": str(cache), **ENVIRONMENT, **(CPU_ENVIRONMENT if cpu else {})}
    result = {**chosen, **os.environ}
    result["VLLM_DSPARK_ENABLED"] = "0" if system.plugin is None else "1"
    # The plugin makes one directory per engine; an inherited one would add up several engines.
    result.pop("VLLM_DSPARK_METRICS_DIR", None)
    return result


def prepare_pair(shape: str, demo: Path, work: Path, widen_tool: Path) -> Path:
    """Folder with the pair in `shape`, widened into `work` unless it is there already."""
    if not SHAPES[shape]:
        return demo.resolve()
    pair = (work / f"pair-{shape}").resolve()
    done = pair / "complete"
    if not done.exists():
        command = [sys.executable, str(widen_tool), str(demo), str(pair)]
        for option, value in SHAPES[shape].items():
            command += [f"--{option}", str(value)]
        subprocess.run(command, check=True)
        done.touch()
    return pair
