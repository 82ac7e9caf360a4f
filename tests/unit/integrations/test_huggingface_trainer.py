"""Control in Hugging Face's Trainer: norms before clipping, its own checkpoints, its own logs."""

import json

import numpy as np
import pytest

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.errors import ConfigError, EngineError
from gnmr_megatron.integrations.huggingface_trainer import attach
from gnmr_megatron.observability.events import StepEvent
from gnmr_megatron.precision.config import PrecisionConfig
from tests.unit.integrations.tiny_trainer import RecordedNorms, tiny_model, tiny_trainer

PATHS = PrecisionConfig(low="saved_int4", recovery="saved_int8", group_size=8)
GNMR = ControlConfig(alpha=1.1, beta=1.1, delta=1, warmup_steps=1, max_recovered=2, lock_steps=1)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # the Trainer's, of CPUs
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.parametrize("max_grad_norm", [0.1, 0.0])
def test_norms_are_those_before_clipping_and_decisions_those_of_the_controller(
    tmp_path, max_grad_norm
):
    trainer = tiny_trainer(tmp_path, max_grad_norm=max_grad_norm, gradient_accumulation_steps=2)
    callback = attach(trainer, GNMR, PATHS)
    seen = RecordedNorms(trainer, callback)
    trainer.train()
    np.testing.assert_allclose(seen.measured, seen.expected, rtol=1e-6)
    global_norms = [norms[-1] for norms in seen.measured]
    assert logged(trainer, "grad_norm") == pytest.approx(global_norms, rel=1e-5)
    assert min(global_norms) > 0.1  # so that every step was clipped where it may be

    alone = Controller(GNMR, callback.module.units)
    assert len(alone.units) == 14
    decided = [
        len(alone.decide(np.array(norms[:-1]), step=step).recovery_set)
        for step, norms in enumerate(seen.measured, start=1)
    ]
    recovered = logged(trainer, "gnmr_recovered")
    assert recovered == [0, *decided[:-1]]
    assert 0 < max(recovered) <= GNMR.max_recovered


def test_on_exact_paths_the_trainer_trains_as_without_control(tmp_path):
    plain, controlled = (tiny_trainer(tmp_path, max_steps=4) for _ in range(2))
    attach(controlled, GNMR, PrecisionConfig(low="fp32", recovery="fp32"))
    plain.train()
    controlled.train()
    assert logged(controlled, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)
    assert logged(controlled, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-4)


def test_a_resumed_run_goes_on_to_the_bit(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 4}
    whole = tiny_trainer(tmp_path / "whole", **saves)
    attach(whole, GNMR, PATHS, folder=tmp_path / "run")
    whole.train()
    reference = RecordedRun(tmp_path / "run").matrix

    resumed = tiny_trainer(tmp_path / "resumed", **saves)
    callback = attach(resumed, GNMR, PATHS, folder=tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    run = RecordedRun(tmp_path / "run")
    assert run.matrix.steps.tolist() == list(range(1, 9))
    for column in ("norms", "gnmr", "delta_gnmr", "recovered", "selected"):
        np.testing.assert_array_equal(getattr(run.matrix, column), getattr(reference, column))
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert [event.loss for event in run.events_of(StepEvent)] == logged(whole, "loss")
    assert [start.step for start in run.starts] == [1, 5]
    assert callback.module.steps_taken == 8


def test_a_checkpoint_of_a_run_without_control_starts_control_at_its_step(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 4}
    tiny_trainer(tmp_path, max_steps=4, **saves).train()
    trainer = tiny_trainer(tmp_path, **saves)
    attach(trainer, GNMR, PATHS, folder=tmp_path / "run")
    trainer.train(resume_from_checkpoint=True)
    assert RecordedRun(tmp_path / "run").matrix.steps.tolist() == [5, 6, 7, 8]
    state = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    saved = state["stateful_callbacks"]["GnmrCallback"]["attributes"]["control"]
    assert saved["step"] == 8


def test_units_run_on_the_path_that_was_decided(tmp_path):
    trainer = tiny_trainer(tmp_path)
    callback = attach(trainer, GNMR, PATHS)
    trainer.train()
    for name in callback.module.units.ids:
        is_recovered = name in callback.module.recovered
        path = trainer.model.get_submodule(name).path.name
        assert path == ("saved_int8" if is_recovered else "saved_int4")
    assert callback.module.recovered


def test_gradients_that_are_clipped_elsewhere_are_told(tmp_path):
    trainer = tiny_trainer(tmp_path)
    attach(trainer, GNMR, PATHS)
    trainer._clip_grad_norm = lambda _model: 1.0
    with pytest.raises(EngineError, match=r"step 1: the Trainer did not call .*clip_grad_norm_"):
        trainer.train()


def test_what_cannot_be_done_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="control restores itself"):
        attach(tiny_trainer(tmp_path, restore_callback_states_from_checkpoint=True), GNMR, PATHS)
    with pytest.raises(ConfigError, match=r"gnmr\.mode: active needs the two paths"):
        attach(tiny_trainer(tmp_path), GNMR)
    frozen = tiny_model()
    frozen.requires_grad_(requires_grad=False)
    with pytest.raises(ConfigError, match="no trainable"):
        attach(tiny_trainer(tmp_path, model=frozen), GNMR, PATHS)
