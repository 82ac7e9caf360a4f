"""The GNMR controller, slow and obvious: one unit after the other, every mean summed afresh. Pure Python.

Semantics, in words, for whoever reimplements it:

- GNMR is the norm over the mean of the unit's earlier norms; 1 without earlier norms or where their mean is 0.
- delta-GNMR is GNMR over the mean of the unit's last `delta` GNMR values; 1 until there are so many. Where that mean is
  0, it is infinite if GNMR is positive and 1 otherwise.
- A norm that is not finite makes both infinite, and neither is remembered. Nothing is remembered of a skipped step.
- A GNMR beyond the range of float64 is infinite, makes delta-GNMR infinite too, and is remembered as such.
- The score is the larger of GNMR / alpha and delta-GNMR / beta, and with a collapse ratio c also c / GNMR. A unit is
  risky if its score is above 1, and a candidate if it is risky or its lock is above 0. In warm-up there are none.
- The candidates of highest score are selected, up to the budget; the earlier unit wins a tie.
- A selected risky unit gets its lock set to `lock_steps`; every other lock above 0 goes down by one.
- In `active` mode the selected units are recovered in the next step, in `monitor` mode none.
- With `history: per_path`, GNMR's mean is over the earlier norms of the same path only (a unit is on its recovery path
  in the step after it was put into the recovery set); delta-GNMR's GNMR values are those of both paths.
- Without `fold_switches`, the first step of a unit on another path than the step before is not remembered. The first
  step of all counts as one on the low path before.
- Warm-up counts decisions, those of skipped steps too. A schedule of the budget is rounded down.
"""

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path


def at(schedule, step):
    """A constant, or {step: value}: linear between, constant outside."""
    if not isinstance(schedule, dict):
        return schedule
    steps = sorted(schedule)
    if step <= steps[0]:
        return schedule[steps[0]]
    for left, right in itertools.pairwise(steps):
        if step < right:
            return schedule[left] + (step - left) * (schedule[right] - schedule[left]) / (
                right - left
            )
    return schedule[steps[-1]]


def budget_at(schedule, step):
    """The same in whole numbers, rounded down from the exact fraction."""
    if isinstance(schedule, dict):
        schedule = {at_step: Fraction(value) for at_step, value in schedule.items()}
    return math.floor(at(schedule, step))


class ReferenceUnit:
    """One unit's memory."""

    def __init__(self):
        self.norms, self.gnmrs, self.lock = [], [], 0
        self.is_recovered = self.was_recovered = False

    def mean(self, settings):
        norms, kind = [norm for norm, _ in self.norms], settings.get("mean", "cumulative")
        if settings.get("history") == "per_path":
            norms = [norm for norm, path in self.norms if path == self.is_recovered]
        if not norms:
            return 0.0
        if kind == "window":
            norms = norms[-settings["window"] :]
        if kind == "ema":
            decay, total, weight = settings["ema_decay"], 0.0, 0.0
            for norm in norms:
                total = decay * total + (1.0 - decay) * norm
                weight = decay * weight + (1.0 - decay)
            return total / weight
        total = 0.0
        for norm in norms:
            total += norm
        return total / len(norms)

    def ratios(self, norm, settings):
        if not math.isfinite(norm):
            return math.inf, math.inf
        mean = self.mean(settings)
        gnmr = norm / mean if mean > 0 else 1.0
        if gnmr == math.inf:  # the quotient is beyond the range of floats
            return math.inf, math.inf
        delta = settings["delta"]
        if len(self.gnmrs) < delta:
            return gnmr, 1.0
        total = 0.0
        for value in self.gnmrs[-delta:]:
            total += value
        recent = total / delta
        if recent == 0:
            return gnmr, math.inf if gnmr > 0 else 1.0
        return gnmr, gnmr / recent


class ReferenceController:
    """All units; `decide` returns selected and recovered indices, GNMRs, delta-GNMRs, scores and locks."""

    def __init__(self, num_units, settings):
        self.units = [ReferenceUnit() for _ in range(num_units)]
        self.settings, self.steps = settings, 0

    def decide(self, norms, *, step, updated):
        settings = self.settings
        alpha, beta = at(settings["alpha"], step), at(settings["beta"], step)
        ratios = [unit.ratios(norm, settings) for unit, norm in zip(self.units, norms, strict=True)]
        scores = []
        for gnmr, delta_gnmr in ratios:
            score = max(gnmr / alpha, delta_gnmr / beta)
            collapse = settings.get("collapse_ratio")
            if collapse is not None:
                score = max(score, collapse / gnmr if gnmr > 0 else math.inf)
            scores.append(score)
        candidates = [i for i, unit in enumerate(self.units) if scores[i] > 1 or unit.lock > 0]
        if self.steps < settings["warmup_steps"]:
            candidates = []
        candidates.sort(key=lambda i: (-scores[i], i))
        selected = candidates[: budget_at(settings["max_recovered"], step)]
        for i, unit in enumerate(self.units):
            if i in selected and scores[i] > 1:
                unit.lock = settings["lock_steps"]
            elif unit.lock > 0:
                unit.lock -= 1
            counts = settings.get("fold_switches", True) or unit.is_recovered == unit.was_recovered
            if updated and math.isfinite(norms[i]) and counts:
                unit.norms.append((norms[i], unit.is_recovered))
                unit.gnmrs.append(ratios[i][0])
            unit.was_recovered = unit.is_recovered
            unit.is_recovered = i in selected and settings.get("mode") != "monitor"
        self.steps += 1
        return {
            "selected": selected,
            "recovery_set": [] if settings.get("mode") == "monitor" else selected,
            "gnmr": [gnmr for gnmr, _ in ratios],
            "delta_gnmr": [delta_gnmr for _, delta_gnmr in ratios],
            "score": scores,
            "lock": [unit.lock for unit in self.units],
        }


def ema_ratio_score(past, norm, *, alpha, decay):
    """AdaGC's rule as a trigger: norm over a moving average of norms clipped at max(alpha, 1.05) times that average."""
    if not math.isfinite(norm):
        return math.inf
    average = 0.0
    for earlier in past:
        clipped = min(earlier, max(alpha, 1.05) * average)
        average = decay * average + (1 - decay) * clipped if average > 0 else earlier
    return (norm / average if average > 0 else 1.0) / alpha


def zscore_score(past, norm, *, alpha, decay):
    """ZClip's rule as a trigger: deviations above a moving average; 0 without deviation or below the average."""
    if not math.isfinite(norm):
        return math.inf
    mean, variance = (past[0] if past else 0.0), 0.0
    for earlier in past:
        distance = earlier - mean
        mean += (1 - decay) * distance
        variance = decay * (variance + (1 - decay) * (distance * distance))
    deviation = math.sqrt(variance)
    return max((norm - mean) / deviation, 0.0) / alpha if deviation > 0 else 0.0


def write_golden_trace(path: Path, settings, units, steps):
    """Write what the reference decides.

    `<name>.json` holds settings, units, norms and selected unit ids; `<name>.expected.json` the numbers behind them.
    Numbers that are not finite are strings.
    """
    controller, trace, expected = ReferenceController(len(units), settings), [], []
    for number, step in enumerate(steps, start=1):
        decided = controller.decide(step["norms"], step=number, updated=step["updated"])
        selected = [units[index]["id"] for index in decided["selected"]]
        trace.append({"step": number, **step, "selected": selected})
        expected.append({key: decided[key] for key in ("gnmr", "delta_gnmr", "score", "lock")})
    _write(path, {"config": settings, "units": units}, trace)
    _write(path.with_suffix(".expected.json"), {}, expected)


def _write(path, head, steps):
    """JSON with one line a step."""
    lines = [f'"{key}": {json.dumps(value)},\n' for key, value in head.items()]
    rows = ",\n".join(json.dumps(_plain(step), allow_nan=False) for step in steps)
    path.write_text("{" + "".join(lines) + f'"steps": [\n{rows}\n]' + "}\n")


def _plain(value):
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
