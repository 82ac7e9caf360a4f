"""Settings of the controller for a wanted rate of exceedances, from the norms of a recorded run.

What a good calibration is, and how it is found, on the first 60 % of the steps (the fit); the others check it:

- The rate of exceedances (unit-steps with a score above 1, of those after the warm-up) falls as alpha or beta rise.
  Of all pairs with the wanted rate the balanced one is taken: as many unit-steps pass alpha as pass beta.
- Warm-up ends where exceedances have settled (`clusters.settled_after`), with thresholds of the later half of the fit.
- delta is the one of 4, 8, 16 and 32 with the lowest beta at the wanted rate, as it notices the smallest jump; within
  2 % of that the smallest, which forgets an event soonest.
- lock_steps is the smallest that covers 90 % of the returns of a unit over a threshold beyond those that chance brings,
  1 where there are none; it is lowered until candidates outnumber the budget in at most 5 % of the steps.

Assumed: the coming run has norms like this one's (the same model, data, batch size and low path), and recovered units
would not have changed them; so a trace of `gnmr.mode: monitor` is the best one.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnmr_megatron.analysis.calibration import SATURATED, Calibration, Part, Point
from gnmr_megatron.analysis.clusters import LOCKS, covering_lock, settled_after
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.analysis.replay import Replay, replay
from gnmr_megatron.analysis.stretches import segment_rows
from gnmr_megatron.analysis.thresholds import Ratios, balanced_thresholds, trace_ratios
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.statistics import BoolArray, FloatArray
from gnmr_megatron.errors import ConfigError, DataError

FIT_SHARE = 0.6
DELTAS = (4, 8, 16, 32)
CURVE = (0.25, 0.5, 1.0, 2.0, 4.0)
LEAST_WARMUP = 10
LEAST_EXPECTED, FEW_EXPECTED = 2, 10


def calibrate(run: RecordedRun, *, target: float, max_recovered: int) -> Calibration:
    """Find settings whose exceedance rate is the wanted one.

    Args:
        run: a recorded run, best one in `monitor` mode.
        target: wanted rate, such as 0.002.
        max_recovered: budget to go with it.

    Raises:
        ConfigError: the wanted rate or budget is out of range.
        DataError: the trace is too short to tell.
    """
    trace = _Trace.of(run)
    _check(run, trace, target, max_recovered, warmup=LEAST_WARMUP)
    base = dataclasses.replace(
        trace.config,
        mode="active",
        policy="gnmr",
        alpha=1.0,
        beta=1.0,
        max_recovered=max_recovered,
        collapse_ratio=None,
    )
    warmup = _warmup(trace, base, target)
    _check(run, trace, target, max_recovered, warmup=warmup)
    base = dataclasses.replace(base, warmup_steps=warmup)
    try:
        delta = _delta(trace, base, target)
        base = dataclasses.replace(base, delta=delta)
        fitted = trace.ratios(base).part(warmup, trace.fit_end)
        alpha, beta = balanced_thresholds(fitted, target)
        base = dataclasses.replace(base, alpha=alpha, beta=beta)
        risky = fitted.is_risky(alpha, beta)
        base = dataclasses.replace(base, lock_steps=_lock_steps(run, trace, base, risky))
        curve = [
            _point(run, trace, base, fitted, rate)
            for rate in (share * target for share in CURVE)
            if rate == target or _is_enough(trace, rate, warmup)
        ]
    except ValueError as error:
        raise DataError(
            f"{run.folder}: no thresholds give a rate of {target:g}: {error}"
        ) from error
    chosen = next(point for point in curve if point.target == target)
    return Calibration(
        run=str(run.folder),
        settings=_settings(base),
        chosen=chosen,
        curve=tuple(curve),
        by_gnmr=_share(fitted.gnmr / alpha > 1, risky),
        by_delta_gnmr=_share(fitted.delta_gnmr / beta > 1, risky),
        warnings=tuple(_warnings(run, trace, base, chosen)),
    )


@dataclass(frozen=True)
class _Trace:
    """The steps since the history last began, `fit_end` of them to fit on."""

    first_row: int
    steps: list[int]
    norms: FloatArray
    updated: BoolArray
    config: ControlConfig
    fit_end: int

    @classmethod
    def of(cls, run: RecordedRun) -> _Trace:
        begin, end, was_on = 0, 0, True
        config = None
        for segment, rows in segment_rows(run):
            is_on = segment.config.mode != "disabled"
            if is_on and not rows:  # ended before its first step; the next starts where it did
                continue
            if is_on:
                if segment.restarts_history or not was_on:
                    begin = rows.start
                config, end = segment.config, rows.stop
            was_on = is_on
        if config is None or end <= begin:
            raise DataError(f"{run.folder}: has no steps with norms since its history last began")
        matrix = run.matrix
        return cls(
            begin,
            matrix.steps[begin:end].tolist(),
            np.array(matrix.norms[begin:end]),
            matrix.updated[begin:end],
            config,
            int(FIT_SHARE * (end - begin)),
        )

    def ratios(self, config: ControlConfig) -> Ratios:
        return trace_ratios(self.norms, self.updated, config)


def _check(
    run: RecordedRun, trace: _Trace, target: float, max_recovered: int, *, warmup: int
) -> None:
    count = trace.norms.shape[1]
    if not 0 < target <= 0.25:
        raise ConfigError(f"--target-exceedance: {target:g} must be above 0 and at most 0.25")
    if not 1 <= max_recovered <= count:
        raise ConfigError(
            f"--max-recovered: {max_recovered} must be between 1 and the {count} units of the run"
        )
    if not _is_enough(trace, target, warmup):
        wanted = LEAST_EXPECTED / (target * count)
        least = math.ceil(max((wanted + warmup) / FIT_SHARE, wanted / (1 - FIT_SHARE))) + 1
        raise DataError(
            f"{run.folder}: {len(trace.steps)} steps x {count} units are too few for a rate of {target:g}, with "
            f"{warmup} steps of warm-up; record at least {least}, or raise --target-exceedance"
        )


def _is_enough(trace: _Trace, target: float, warmup: int) -> bool:
    shorter = min(trace.fit_end - warmup, len(trace.steps) - trace.fit_end)
    return shorter > 0 and shorter * trace.norms.shape[1] * target >= LEAST_EXPECTED


def _warmup(trace: _Trace, base: ControlConfig, target: float) -> int:
    """Steps until exceedances have settled; at most half of the fit."""
    ratios = trace.ratios(base).part(0, trace.fit_end)
    try:
        alpha, beta = balanced_thresholds(ratios.part(trace.fit_end // 2, trace.fit_end), target)
    except ValueError:  # too many norms that are not finite: told when the thresholds are set
        return LEAST_WARMUP
    return max(settled_after(ratios.is_risky(alpha, beta), target), LEAST_WARMUP)


def _delta(trace: _Trace, base: ControlConfig, target: float) -> int:
    betas: dict[int, float] = {}
    for delta in DELTAS:
        if delta <= DELTAS[0] or 4 * delta <= trace.fit_end - base.warmup_steps:
            ratios = trace.ratios(dataclasses.replace(base, delta=delta))
            fitted = ratios.part(base.warmup_steps, trace.fit_end)
            betas[delta] = balanced_thresholds(fitted, target)[1]
    lowest = min(betas.values())
    return next(delta for delta, beta in betas.items() if beta <= 1.02 * lowest)


def _lock_steps(run: RecordedRun, trace: _Trace, base: ControlConfig, risky: BoolArray) -> int:
    wanted = covering_lock(risky)
    fit = RecordedRun(run.folder, last_step=trace.steps[trace.fit_end - 1])
    for lock in sorted((lock for lock in LOCKS if lock <= wanted), reverse=True):
        result = replay(fit, _changes(dataclasses.replace(base, lock_steps=lock)))
        begin = trace.first_row + base.warmup_steps
        if _saturated(result, slice(begin, None)) <= SATURATED:
            return lock
    return LOCKS[0]


def _saturated(result: Replay, rows: slice) -> float:
    return float(np.mean(result.candidates[rows] > result.budget[rows]))


def _changes(config: ControlConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)


def _point(
    run: RecordedRun,
    trace: _Trace,
    base: ControlConfig,
    fitted: Ratios,
    rate: float,
) -> Point:
    alpha, beta = balanced_thresholds(fitted, rate)
    result = replay(run, _changes(dataclasses.replace(base, alpha=alpha, beta=beta)))
    begin, split = base.warmup_steps, trace.fit_end
    return Point(
        target=rate,
        alpha=alpha,
        beta=beta,
        fit=_part(trace, result, rate, range(begin, split)),
        held_out=_part(trace, result, rate, range(split, len(trace.steps))),
    )


def _part(trace: _Trace, result: Replay, rate: float, steps: range) -> Part:
    first = int(np.searchsorted(result.steps, trace.steps[0]))
    rows = slice(first + steps.start, first + steps.stop)
    unit_steps = len(steps) * len(result.units)
    exceedances = int(result.over_threshold[rows].sum())
    return Part(
        first_step=trace.steps[steps.start],
        last_step=trace.steps[steps.stop - 1],
        exceedance_rate=exceedances / unit_steps,
        expected=rate * unit_steps,
        exceedances=exceedances,
        recovered_rate=int(np.count_nonzero(result.in_force[rows])) / unit_steps,
        saturated=_saturated(result, rows),
    )


def _share(part: BoolArray, risky: BoolArray) -> float:
    return float(np.count_nonzero(part)) / max(int(np.count_nonzero(risky)), 1)


def _settings(config: ControlConfig) -> dict[str, Any]:
    keys = ["alpha", "beta", "delta", "max_recovered", "lock_steps", "warmup_steps"]
    keys += {"ema": ["mean", "ema_decay"], "window": ["mean", "window"]}.get(config.mean, [])
    return {"policy": "gnmr"} | {key: getattr(config, key) for key in keys}


def _warnings(run: RecordedRun, trace: _Trace, base: ControlConfig, chosen: Point) -> list[str]:
    return [*_warnings_of_trace(run, trace), *_warnings_of_choice(trace, base, chosen)]


def _warnings_of_trace(run: RecordedRun, trace: _Trace) -> list[str]:
    found = []
    rows = slice(trace.first_row, trace.first_row + len(trace.steps))
    switched = int(np.count_nonzero(run.matrix.recovered[rows]))
    if switched:
        found.append(
            f"{switched:,} unit-steps of this run ran on the recovery path, so their norms are not those of the low "
            "path; a run with gnmr.mode: monitor is better"
        )
    if switched and (trace.config.history == "per_path" or not trace.config.fold_switches):
        found.append(
            "thresholds are fitted with one history of all norms, as without gnmr.history: per_path and with "
            "gnmr.fold_switches"
        )
    if trace.steps[0] > 1:
        found.append(f"history began anew with step {trace.steps[0]}: steps before it are left out")
    if trace.config.collapse_ratio is not None:
        found.append(
            "gnmr.collapse_ratio of the run is left out: its exceedances are not calibrated"
        )
    return found


def _warnings_of_choice(trace: _Trace, base: ControlConfig, chosen: Point) -> list[str]:
    found = []
    if base.warmup_steps > 0.4 * trace.fit_end:
        found.append(
            f"exceedances have hardly settled: the warm-up of {base.warmup_steps} steps is near half of the fit"
        )
    if chosen.alpha < 1:
        found.append(
            f"alpha {chosen.alpha:g} is below 1: norms fall through the run and their cumulative mean lags behind; see "
            "gnmr.mean"
        )
    if min(chosen.fit.expected, chosen.held_out.expected) < FEW_EXPECTED:
        found.append(
            f"the trace is short: {chosen.fit.expected:.1f} exceedances are expected in the fit, "
            f"{chosen.held_out.expected:.1f} in the check, so the rates are rough"
        )
    if chosen.fit.saturated > SATURATED:
        found.append(
            f"in {chosen.fit.saturated:.1%} of the steps candidates outnumber max_recovered {base.max_recovered}; "
            "raise it, or lower the target"
        )
    if not chosen.fit.is_met:
        found.append(
            f"the fit itself misses the target: {chosen.fit.exceedance_rate:.3%} in steps {chosen.fit.first_step} to "
            f"{chosen.fit.last_step}, wanted {chosen.target:.3%}"
        )
    if not chosen.held_out.is_met:
        found.append(
            f"the check misses the target: {chosen.held_out.exceedance_rate:.3%} in steps {chosen.held_out.first_step} "
            f"to {chosen.held_out.last_step}, wanted {chosen.target:.3%}; the norms changed, so do not rely on it"
        )
    return found
