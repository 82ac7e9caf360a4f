"""The numbers of a run that W&B and TensorBoard show, under the same names."""

from __future__ import annotations

from gnmr_megatron.observability.events import EvaluationEvent, StepEvent


def step_scalars(event: StepEvent) -> dict[str, float]:
    """Numbers of a step by name; the part before the slash groups them."""
    return {
        "train/loss": event.loss,
        "train/grad_norm": event.grad_norm,
        "train/learning_rate": event.learning_rate,
        "train/tokens": event.tokens,
        "train/updated": int(event.updated),
        "perf/tokens_per_second": event.tokens_per_second,
        "perf/step_seconds": event.step_seconds,
        "control/seconds": event.control_seconds,
        "control/percent": 100 * event.control_seconds / event.step_seconds,
        "control/recovered": len(event.recovered),
        "control/over_threshold": event.over_threshold,
        "control/riskiest_score": event.riskiest_score,
    }


def evaluation_scalars(event: EvaluationEvent) -> dict[str, float]:
    """Numbers of an evaluation by name."""
    return {"eval/loss": event.loss, "eval/perplexity": event.perplexity}
