# SPDX-License-Identifier: Apache-2.0
"""`vllm-dspark calibrate`: fit the confidences to what the target accepted.

The error is measured on requests that the fit has not seen: every other request (of a trace: every
other run of blocks) is held out, and the table that is saved is then fitted on all of them. Only
slots that the target verified count, in the fit and in the error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_dspark.cli import FAILURE, CommandError
from vllm_dspark.cli.charts import Chart
from vllm_dspark.cli.outputs import write_text, writing
from vllm_dspark.cli.recorded import Blocks, Floats, add_input_arguments, read_recording
from vllm_dspark.core.calibration import (
    NUM_REGIMES,
    REGIME_NAMES,
    CalibrationTable,
    logit,
)
from vllm_dspark.core.calibration_io import save_calibration
from vllm_dspark.core.platt import conditional_labels, fit_scale_bias
from vllm_dspark.core.reliability import expected_calibration_error
from vllm_dspark.core.sts import fit_sts

MIN_BLOCKS = 64
"""Blocks of one sampling regime below which it is left as it is."""
_RUN = 32
"""Blocks of a trace, which knows no requests, that go to one half together."""

Mask = npt.NDArray[np.bool_]
Fit = Callable[[Blocks, Mask], CalibrationTable]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="calibration file to write (JSON)"
    )
    parser.add_argument(
        "--method",
        choices=sorted(FITS),
        default="scale-bias",
        help="scale-bias fits two numbers a slot on all verified slots; sts fits the paper's "
        "temperatures on blocks that were verified whole (default: %(default)s)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="PATH.svg", help="reliability before and after"
    )
    parser.add_argument(
        "--bins", type=int, choices=range(2, 101), default=10, metavar="N", help="bins of the ECE"
    )
    parser.add_argument(
        "--force", action="store_true", help="save the fit even if the held-out error did not fall"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code: 1 if nothing was saved."""
    recording = read_recording(args)
    blocks = recording.blocks
    if len(blocks) < 2 * MIN_BLOCKS:
        raise CommandError(
            f"{recording.source}: {len(blocks)} blocks, at least {2 * MIN_BLOCKS} are needed"
        )
    rows = held_out(blocks)
    fit = FITS[args.method]
    identity, halved = CalibrationTable.identity(blocks.gamma), fit(blocks, ~rows)
    before, after = (
        Errors.of(survivals_under(table, blocks), blocks, rows, args.bins)
        for table in (identity, halved)
    )
    print(
        f"{recording.source}: {len(blocks)} blocks of {blocks.gamma} drafts, "
        f"{np.count_nonzero(rows)} of them held out"
    )
    print(_table(before, after))
    if args.plot is not None:
        write_text(args.plot, reliability_chart(blocks, rows, halved).svg())
        print(f"reliability plot written to {args.plot}")
    if not after.mean < before.mean and not args.force:
        print("nothing saved: the fit does not lower the held-out error (--force saves it anyway)")
        return FAILURE
    table = fit(blocks, np.ones(len(blocks), dtype=np.bool_))
    with writing(args.out):
        save_calibration(table, args.out)
    changed = [REGIME_NAMES[regime] for regime in table.changed]
    where = "every regime" if len(changed) == NUM_REGIMES else ", ".join(changed)
    print(f"calibration of {where} written to {args.out}")
    print(f'use it with --additional-config \'{{"dspark": {{"calibration": "{args.out}"}}}}\'')
    return 0


# -- errors ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """Calibration error of the survivals at each position, `[gamma]`; NaN without a slot."""

    ece: Floats
    predicted: Floats
    observed: Floats
    count: npt.NDArray[np.int64]

    @classmethod
    def of(cls, survivals: Floats, blocks: Blocks, rows: Mask, bins: int = 10) -> Errors:
        """Errors on the verified slots of `rows`; survivals `[n, gamma]`."""
        known, outcome = blocks.known & rows[:, None], blocks.outcome
        slots = [(survivals[known[:, k], k], outcome[known[:, k], k]) for k in range(blocks.gamma)]
        nan = float("nan")
        return cls(
            ece=np.array([expected_calibration_error(p, o, bins) for p, o in slots]),
            predicted=np.array([p.mean() if len(p) else nan for p, _ in slots]),
            observed=np.array([o.mean() if len(o) else nan for _, o in slots]),
            count=np.array([len(p) for p, _ in slots]),
        )

    @property
    def mean(self) -> float:
        """Mean over positions that have a verified slot."""
        return float(np.nanmean(self.ece))


def _table(before: Errors, after: Errors) -> str:
    lines = ["position   slots  observed | predicted     ECE | calibrated     ECE"]
    for k, count in enumerate(before.count):
        lines.append(
            f"{k + 1:8d}  {count:6d}  {before.observed[k]:8.3f} | {before.predicted[k]:9.3f}  "
            f"{before.ece[k]:6.4f} | {after.predicted[k]:10.3f}  {after.ece[k]:6.4f}"
        )
    lines.append(f"mean ECE on the held-out half: {before.mean:.4f} -> {after.mean:.4f}")
    return "\n".join(lines)


def held_out(blocks: Blocks) -> Mask:
    """`[n]` blocks that the fit must not see: those of every other request."""
    groups = blocks.request
    if groups.max() == groups.min():
        groups = np.arange(len(blocks)) // _RUN
    return np.asarray(groups % 2 == 1)


# -- fits --------------------------------------------------------------------------------------


def _fit_scale_bias(blocks: Blocks, rows: Mask) -> CalibrationTable:
    label, known = conditional_labels(blocks.gamma, blocks.accepted, blocks.verified)
    known &= blocks.known & rows[:, None]
    z = logit(np.where(blocks.known, blocks.confidence, 0.5))
    identity = CalibrationTable.identity(blocks.gamma)
    fitted = {}
    for regime, mine in _regimes(blocks, rows).items():
        fitted[regime] = fit_scale_bias(z[mine], label[mine], known[mine])
    return identity.with_regimes(_everywhere(blocks, fitted), 1)


def _fit_sts(blocks: Blocks, rows: Mask) -> CalibrationTable:
    whole = rows & blocks.known.all(axis=1)
    fitted = {}
    for regime, mine in _regimes(blocks, whole).items():
        temperatures = fit_sts(blocks.confidence[mine], blocks.accepted[mine]).temperatures
        fitted[regime] = (1.0 / temperatures, np.zeros(blocks.gamma))
    identity = CalibrationTable.identity(blocks.gamma)
    return identity.with_regimes(_everywhere(blocks, fitted), 1)


FITS: dict[str, Fit] = {"scale-bias": _fit_scale_bias, "sts": _fit_sts}


def _regimes(blocks: Blocks, rows: Mask) -> dict[int, Mask]:
    """Rows of every sampling regime that has enough of them; one regime if none is recorded.

    Raises:
        CommandError: no regime has enough.
    """
    recorded = np.zeros(len(blocks), dtype=np.int64) if blocks.regimes is None else blocks.regimes
    found = {int(r): rows & (recorded == r) for r in np.unique(recorded[rows])}
    enough = {r: mine for r, mine in found.items() if np.count_nonzero(mine) >= MIN_BLOCKS // 2}
    if not enough:
        raise CommandError(
            f"no sampling regime has {MIN_BLOCKS // 2} blocks to fit on "
            f"({np.count_nonzero(rows)} blocks in all); record more, or, for sts, record with "
            "verify: static so that blocks are verified whole"
        )
    return enough


def _everywhere(
    blocks: Blocks, fitted: Mapping[int, tuple[Floats, Floats]]
) -> Mapping[int, tuple[Floats, Floats]]:
    """A fit without a regime holds for all of them, as an STS table does."""
    if blocks.regimes is not None:
        return fitted
    only = next(iter(fitted.values()))
    return dict.fromkeys(range(NUM_REGIMES), only)


# -- what a table makes of the blocks ----------------------------------------------------------


def survivals_under(table: CalibrationTable, blocks: Blocks) -> Floats:
    """`[n, gamma]` survivals under `table`; NaN where a slot was not drafted."""
    regimes = 0 if blocks.regimes is None else blocks.regimes
    calibrated = table.apply(blocks.confidence.T.astype(np.float32), regimes)
    return np.asarray(np.cumprod(calibrated, axis=0, dtype=np.float64).T, dtype=np.float64)


def reliability_curve(predicted: Floats, outcome: Mask, points: int = 10) -> tuple[Floats, Floats]:
    """Mean prediction and observed rate of equally filled bins, both `[<= points]`."""
    order = np.argsort(predicted, kind="stable")
    bins = [part for part in np.array_split(order, points) if len(part)]
    return (
        np.array([predicted[part].mean() for part in bins]),
        np.array([outcome[part].mean() for part in bins]),
    )


def reliability_chart(blocks: Blocks, rows: Mask, table: CalibrationTable) -> Chart:
    """Observed survival over predicted, all positions together, before and after `table`."""
    known = blocks.known & rows[:, None]
    chart = Chart(
        "Reliability on the held-out half",
        "predicted survival",
        "observed survival",
        x_range=(0.0, 1.0),
        y_range=(0.0, 1.0),
        width=420,
        height=380,
    ).reference((0.0, 1.0), (0.0, 1.0))
    for name, tried in (("before", CalibrationTable.identity(blocks.gamma)), ("after", table)):
        x, y = reliability_curve(survivals_under(tried, blocks)[known], blocks.outcome[known])
        chart.line(x, y, name)
    return chart
