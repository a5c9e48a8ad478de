# SPDX-License-Identifier: Apache-2.0
"""The `vllm-dspark` command.

A subcommand is a module of this package with `add_arguments(parser)` and `run(args) -> int`. It is
imported only when it is called, so `vllm-dspark --help` costs nothing.

Exit codes: 0 the command did what it promises, 1 it did not, 2 bad usage (argparse's own code).
"""

from __future__ import annotations

import argparse
import importlib
import io
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from vllm_dspark import __version__

FAILURE = 1

COMMANDS = {
    "demo": "serve the demo pair, compare it with a server without speculation, print the figures",
    "doctor": "print versions, host symbols, effective settings and whether the plugin will run",
    "profile": "measure what a step costs here and save it as a cost table",
    "calibrate": "fit the confidences to what the target accepted and save the calibration",
    "replay": "recorded steps under other policies and cost tables: accept length and tokens/s",
    "report": "one page that says whether speculation helps and what limits it",
}


class CommandError(Exception):
    """A command cannot go on; the message is all that the operator needs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the subcommand that `argv` (default: the process's arguments) names."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = _top_parser().parse_args(arguments[:1]).command
    module = importlib.import_module(f"{__name__}.{name}")
    parser = argparse.ArgumentParser(prog=f"vllm-dspark {name}", description=COMMANDS[name])
    module.add_arguments(parser)
    args = parser.parse_args(arguments[1:])
    # A terminated command must still stop the servers that it started.
    previous = signal.signal(signal.SIGTERM, _exit_on_signal)
    # A log file of the command must show its lines in order, beside those of stderr.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        return int(module.run(args))
    except CommandError as error:
        print(f"vllm-dspark {name}: {error}", file=sys.stderr)
        return FAILURE
    except KeyboardInterrupt:
        print(f"vllm-dspark {name}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous)


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="vllm-dspark",
        description="DSpark speculative decoding for vLLM.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="vllm-dspark [-h] [--version] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"vllm-dspark {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="see below")
    return parser


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
