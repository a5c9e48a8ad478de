# SPDX-License-Identifier: Apache-2.0
"""`vllm-dspark doctor`: can the plugin work here, and with which settings?

Exit code 0 if every host symbol is usable and the settings are valid, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys

from vllm_dspark import compat
from vllm_dspark.config import ConfigError, DSparkConfig, Switches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--additional-config",
        metavar="JSON",
        help="the server's --additional-config, to check and show the effective settings",
    )
    parser.add_argument("--table", action="store_true", help="say why every host symbol is used")


def run(args: argparse.Namespace) -> int:
    for name, number in compat.versions().items():
        print(f"{name:20} {number}")
    print(f"{'python':20} {sys.version.split()[0]}")
    good = _print_settings(args.additional_config)
    results = compat.probe()
    print(f"\nHost symbols ({len(results)})")
    for result in results:
        symbol = result.symbol
        state = "ok" if result.ok else "MISSING" if result.missing else "absent"
        print(f"  {state:8} {symbol.effect:9} {symbol.path}")
        if result.problem:
            print(f"{'':11}{result.problem}")
        if args.table:
            print(f"{'':11}{symbol.why}\n{'':11}{symbol.upstream}; goes when {symbol.removal}")
    missing = sum(result.missing for result in results)
    verdict = "the plugin takes over method=dspark on this host"
    if missing:
        verdict = f"{missing} host symbols are missing: DSpark would run natively"
    elif not good:
        verdict = "the settings are not valid: a server would not start with them"
    elif not Switches.from_env().enabled:
        verdict = "switched off by VLLM_DSPARK_ENABLED=0: DSpark runs natively"
    print(f"\nVerdict: {verdict}")
    return 1 if missing or not good else 0


def _print_settings(text: str | None) -> bool:
    """Print switches and effective options; False if they are wrong."""
    print("\nSettings")
    try:
        switches = Switches.from_env()
        options = json.loads(text) if text else {}
        if not isinstance(options, dict):
            raise ConfigError(f"--additional-config = {text!r}: expected a JSON object")
        config = DSparkConfig.parse(options.get("dspark"))
    except ConfigError as error:
        print(f"  {error}")
        return False
    except ValueError as error:
        print(f"  --additional-config = {text!r}: {error}")
        return False
    print(f"  VLLM_DSPARK_ENABLED  {int(switches.enabled)}")
    for name, value in config:
        print(f"  {name:20} {value!r}")
    return True
