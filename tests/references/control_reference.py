"""The GNMR controller, slow and obvious: one unit after the other, every mean summed afresh. Pure Python.

Semantics, in words, for whoever reimplements it:

- GNMR is the norm over the mean of the unit's earlier norms; 1 without earlier norms or where their mean is 0.
- delta-GNMR is GNMR over the mean of the unit's last `delta` GNMR values; 1 until there are so many. Where that mean is
  0, it is infinite if GNMR is positive and 1 otherwise.
- A norm that is not finite makes both infinite (as does a quotient beyond float64), and neither is remembered. Nothing
  is remembered of a skipped step.
- The score is the larger of GNMR / alpha and delta-GNMR / beta, and with a collapse ratio c also c / GNMR. A unit is
  risky if its score is above 1, and a candidate if it is risky or its lock is above 0. In warm-up there are none.
- The candidates of highest score are selected, up to the budget; the earlier unit wins a tie.
- A selected risky unit gets its lock set to `lock_steps`; every other lock above 0 goes down by one.
"""

import itertools
import json
import math
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
            return schedule[left] + (step - left) / (right - left) * (
                schedule[right] - schedule[left]
            )
    return schedule[steps[-1]]


class ReferenceUnit:
    """One unit's memory."""

    def __init__(self):
        self.norms, self.gnmrs, self.lock = [], [], 0

    def mean(self, settings):
        norms, kind = self.norms, settings.get("mean", "cumulative")
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
    """All units; `decide` returns selected indices, GNMRs, delta-GNMRs, scores and locks."""

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
        selected = candidates[: int(at(settings["max_recovered"], step))]
        for i, unit in enumerate(self.units):
            if i in selected and scores[i] > 1:
                unit.lock = settings["lock_steps"]
            elif unit.lock > 0:
                unit.lock -= 1
            if updated and math.isfinite(norms[i]):
                unit.norms.append(norms[i])
                unit.gnmrs.append(ratios[i][0])
        self.steps += 1
        return {
            "selected": selected,
            "gnmr": [gnmr for gnmr, _ in ratios],
            "delta_gnmr": [delta_gnmr for _, delta_gnmr in ratios],
            "score": scores,
            "lock": [unit.lock for unit in self.units],
        }


def write_golden_trace(path: Path, settings, steps):
    """Write settings, norms and what the reference decides, as JSON; numbers that are not finite are strings."""
    controller = ReferenceController(len(steps[0]["norms"]), settings)
    decided = [
        {**step, **controller.decide(step["norms"], step=number, updated=step["updated"])}
        for number, step in enumerate(steps, start=1)
    ]
    path.write_text(
        json.dumps(_plain({"settings": settings, "steps": decided}), allow_nan=False) + "\n"
    )


def _plain(value):
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
