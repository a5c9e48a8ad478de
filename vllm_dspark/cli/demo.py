# SPDX-License-Identifier: Apache-2.0
"""`vllm-dspark demo`: a real server with the demo pair, checked against one without speculation.

The servers run one after the other, the one without speculation first, so that `--keep` can leave
the other up. The command succeeds only if every request is answered as asked, the greedy tokens
agree (up to near-ties of the target, each shown with its logit gap) and the accepted length reaches
`ACCEPT_LEN_WANTED`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_dspark.cli import FAILURE, CommandError
from vllm_dspark.cli.counters import settled
from vllm_dspark.cli.figures import DemoFigures, write_json
from vllm_dspark.cli.server import READY_LIMIT_S, Server, ServerOptions
from vllm_dspark.cli.traffic import PROMPT, Client, Greedy, read_prompts
from vllm_dspark.cpu.host import gpu_present

CHECKOUT = Path(__file__).resolve().parents[2]
DEMO_FOLDER = CHECKOUT / "demo"
SERVED_NAME = "dspark-demo"
CONCURRENCY = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", action="store_true", help="leave the server up when done")
    parser.add_argument(
        "--port", type=_port, default=0, help="port to listen on (default: a free one)"
    )
    parser.add_argument("--prompts", type=_count, default=16, help="greedy prompts to compare")
    parser.add_argument("--tokens", type=_count, default=64, help="tokens per greedy prompt")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures to this file")
    parser.add_argument("--model", type=Path, help="target checkpoint (default: the demo pair's)")
    parser.add_argument("--draft", type=Path, help="drafter checkpoint (default: the demo pair's)")
    parser.add_argument("--prompt-file", type=Path, help='JSON lines with "prompt"')
    parser.add_argument(
        "--dspark",
        type=_options,
        metavar="JSON",
        help="plugin options, as in --additional-config's dspark object "
        "(default on a CPU: configs/cpu-demo.yaml)",
    )
    parser.add_argument(
        "--ready-limit-s", type=float, default=READY_LIMIT_S, help="longest start-up of a server"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code of the demo; raises `CommandError` when a server or a request fails."""
    target, draft = pair(args.model, args.draft)
    prompts = read_prompts(args.prompt_file or DEMO_FOLDER / "prompts.jsonl", args.prompts)
    on_gpu = gpu_present()
    logs = Path(tempfile.mkdtemp(prefix="vllm-dspark-demo-"))

    def server(name: str, **options: Any) -> Server:
        given = ServerOptions(str(target), SERVED_NAME, **options)
        return Server(given, logs / f"{name}.log", on_gpu, args.port)

    plain = server("without-speculation")
    dspark = server(
        "dspark",
        speculative=speculative_config(draft),
        dspark=args.dspark or default_options(on_gpu=on_gpu),
    )
    try:
        print("1/2  server without speculation")
        with plain, plain.requests():
            client = _ready(plain, args.ready_limit_s)
            expected, seconds_without = _greedy(client, prompts, args.tokens)
        print("2/2  server with DSpark")
        dspark.start()
        with dspark.requests():
            client = _ready(dspark, args.ready_limit_s)
            for name, check in client.checks().items():
                print(f"     {name}: {check()}")
            before = settled(dspark.metrics_text)
            got, seconds = _greedy(client, prompts, args.tokens)
            counters = settled(dspark.metrics_text).since(before)
            differences = client.differences(expected, got)
        figures = DemoFigures(
            prompts=len(prompts),
            tokens_per_prompt=args.tokens,
            concurrency=CONCURRENCY,
            seconds=seconds,
            seconds_without=seconds_without,
            counters=counters,
            differences=differences,
        )
        return _finish(figures, dspark, args)
    except BaseException:
        dspark.stop()
        print(f"logs of the servers: {logs}", file=sys.stderr)
        raise


def _finish(figures: DemoFigures, dspark: Server, args: argparse.Namespace) -> int:
    print(figures.table())
    if args.json is not None:
        write_json(args.json, figures.record())
        print(f"figures written to {args.json}")
    if args.keep:
        print(snippets(dspark))
    else:
        dspark.stop()
        shutil.rmtree(dspark.log_path.parent)
    print("demo passed" if figures.passed else "demo FAILED")
    return 0 if figures.passed else FAILURE


def pair(model: Path | None, draft: Path | None) -> tuple[Path, Path]:
    """Folders of target and drafter.

    Raises:
        CommandError: a folder holds no checkpoint, or the demo pair is not beside the package.
    """
    if (model is None) != (draft is None):
        raise CommandError("--model and --draft belong together: give both or none")
    if model is None and not DEMO_FOLDER.is_dir():
        raise CommandError(
            "the demo pair is part of the repository, not of the installed package: run from a "
            "checkout, or name a target and its drafter with --model and --draft"
        )
    folders = model or DEMO_FOLDER / "target", draft or DEMO_FOLDER / "draft"
    for option, folder in zip(("--model", "--draft"), folders, strict=True):
        if not (folder / "config.json").is_file():
            raise CommandError(f"{option} {folder}: no config.json in it, so no checkpoint")
    return folders


def default_options(*, on_gpu: bool) -> dict[str, Any] | None:
    """Plugin options of the demo: on a CPU those of the checkout's `configs/cpu-demo.yaml`."""
    file = CHECKOUT / "configs" / "cpu-demo.yaml"
    return None if on_gpu or not file.is_file() else {"config_file": str(file)}


def speculative_config(draft: Path) -> dict[str, Any]:
    """`--speculative-config` for a drafter, with the block size of its checkpoint."""
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    block_size = config.get("block_size")
    if not isinstance(block_size, int):
        raise CommandError(f"--draft {draft}: config.json has no block_size, so no DSpark drafter")
    return {"method": "dspark", "model": str(draft), "num_speculative_tokens": block_size}


def pair_options(**options: Any) -> ServerOptions:
    """Options of a server that speculates with the demo pair, and others of `ServerOptions`."""
    target, draft = pair(None, None)
    return ServerOptions(str(target), SERVED_NAME, speculative=speculative_config(draft), **options)


def snippets(server: Server) -> str:
    """How to talk to the server that was left up, and how to end it."""
    body = json.dumps({"model": SERVED_NAME, "prompt": PROMPT, "max_tokens": 64, "temperature": 0})
    return f"""
the server stays up at {server.url} (process {server.pid}, log {server.log_path})

  curl -s {server.url}/v1/completions -H 'Content-Type: application/json' \\
    -d '{body}'

  from openai import OpenAI
  client = OpenAI(base_url="{server.url}/v1", api_key="none")
  answer = client.completions.create(
      model="{SERVED_NAME}", prompt={PROMPT!r}, max_tokens=64, temperature=0
  )
  print(answer.choices[0].text)

end it with: kill {server.pid}
"""


def _ready(server: Server, limit_s: float) -> Client:
    print(f"     ready after {server.show_start(limit_s):.0f} s")
    client = Client(server.url, SERVED_NAME)
    # The first request of a server pays for lazy set-up, which is no part of its speed.
    client.completion()
    return client


def _greedy(client: Client, prompts: list[str], tokens: int) -> tuple[list[Greedy], float]:
    answers, seconds = client.greedy_all(prompts, tokens, CONCURRENCY)
    print(f"     {len(prompts)} greedy prompts of {tokens} tokens in {seconds:.1f} s")
    return answers, seconds


def _integer(text: str, allowed: range, what: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = allowed.start - 1
    if value not in allowed:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _count(text: str) -> int:
    return _integer(text, range(1, 1_000_001), "an integer from 1 to 1000000")


def _port(text: str) -> int:
    return _integer(text, range(65536), "a port from 0 to 65535")


def _options(text: str) -> dict[str, Any]:
    from vllm_dspark.config import ConfigError, DSparkConfig

    try:
        options = json.loads(text)
        DSparkConfig.parse(options)
    except (json.JSONDecodeError, ConfigError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return options
