"""Control in a plain loop: exact norms, the controller's decisions, and paths that are really in force."""

import json

import numpy as np
import pytest
import torch

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.errors import CheckpointError, ConfigError
from gnmr_megatron.integrations.torch_module import attach
from gnmr_megatron.observability.events import StepEvent
from gnmr_megatron.precision.config import PrecisionConfig

PATHS = PrecisionConfig(low="saved_int4", recovery="saved_int8", group_size=8)
EXACT = PrecisionConfig(low="fp32", recovery="fp32")
GNMR = ControlConfig(alpha=1.2, beta=1.2, delta=1, warmup_steps=1, max_recovered=2, lock_steps=1)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(seed=0):
    torch.manual_seed(seed)
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def backward(model, step, *, factor=1.0):
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step)) * (1 + step % 4)
    loss = model(x).square().mean()
    (loss * factor).backward()
    return loss.item()


def whole_norms(model, names):
    """In float64, by numpy."""
    gradients = {
        name: parameter.grad.double().numpy() for name, parameter in model.named_parameters()
    }
    norms = [np.sqrt((gradients[f"{name}.weight"] ** 2).sum()) for name in names]
    return norms, np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))


def train(control, model, optimizer, steps):
    """Recovered units after each step, and losses."""
    recovered, losses = [], []
    for step in steps:
        optimizer.zero_grad()
        losses.append(backward(model, step))
        control.step(loss=losses[-1], learning_rate=0.05)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        recovered.append(control.recovered)
    return recovered, losses


def test_norms_are_those_of_the_gradients_and_decisions_those_of_the_controller():
    model, optimizer = build()
    control = attach(model, GNMR, PATHS)
    assert control.units.ids == tuple(
        f"layers.{layer}.{name}" for layer in range(3) for name in ("up", "down")
    )
    alone, recovered = Controller(GNMR, control.units), []
    for step in range(1, 21):
        optimizer.zero_grad()
        backward(model, step)
        decision = control.step()
        norms, total = whole_norms(model, control.units.ids)
        np.testing.assert_allclose(control.measured.norms, norms, rtol=1e-6)
        assert control.measured.global_norm == pytest.approx(total, rel=1e-6)
        expected = alone.decide(control.measured.norms, step=step).recovery_set
        assert decision.recovery_set.tolist() == expected.tolist()
        for name in control.units.ids:
            path = model.get_submodule(name).path.name
            assert path == ("saved_int8" if name in control.recovered else "saved_int4")
        optimizer.step()
        recovered.append(control.recovered)
    assert max(map(len, recovered)) == GNMR.max_recovered
    assert sum(map(len, recovered)) > 5


def test_on_exact_paths_training_is_as_without_control():
    losses = []
    for is_controlled in (False, True):
        model, optimizer = build()
        control = attach(model, GNMR, EXACT) if is_controlled else None
        mine = []
        for step in range(1, 11):
            optimizer.zero_grad()
            mine.append(backward(model, step))
            if control is not None:
                control.step()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        losses.append(mine)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_resumed_run_decides_and_rounds_to_the_bit_as_one_that_was_not_stopped(tmp_path):
    paths = PrecisionConfig(
        low="fp6_e3m2", recovery="fp8_e4m3", group_size=8, rounding="stochastic"
    )
    model, optimizer = build()
    control = attach(model, GNMR, paths, folder=tmp_path / "run", total_steps=12)
    first = train(control, model, optimizer, range(1, 7))
    saved = json.dumps(control.state_dict())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    rest = train(control, model, optimizer, range(7, 13))
    control.close()

    model, optimizer = build(seed=1)
    control = attach(model, GNMR, paths, folder=tmp_path / "run", total_steps=12)
    model.load_state_dict(weights)
    control.load_state_dict(json.loads(saved))
    assert train(control, model, optimizer, range(7, 13)) == rest
    control.close()

    run = RecordedRun(tmp_path / "run")
    assert run.matrix.steps.tolist() == list(range(1, 13))
    events = list(run.events_of(StepEvent))
    assert [event.loss for event in events] == first[1] + rest[1]
    in_force = [[], *first[0], *rest[0]]
    assert [event.recovered for event in events] == in_force[:-1]
    assert run.segments[0].config == GNMR
    assert run.starts[-1].resumed_from == "a checkpoint of PyTorch at step 6"


def test_a_scale_is_taken_off_and_a_step_that_is_not_finite_is_not_folded():
    model, _ = build()
    control = attach(model, ControlConfig(mode="monitor"))
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler.scale(torch.ones(()))  # makes the scale
    backward(model, 1)
    expected, _ = whole_norms(model, control.units.ids)
    model.zero_grad()
    backward(model, 1, factor=512.0)
    control.step(scaler=scaler)
    np.testing.assert_allclose(control.measured.norms, expected, rtol=1e-6)
    history = control.state_dict()["controller"]["history"]
    model.layers[1].up.weight.grad[0, 0] = float("inf")
    assert not control.step(scaler=scaler).updated
    assert control.state_dict()["controller"]["history"] == history


def test_sixteen_bit_gradients_are_summed_in_fp32():
    model, _ = build()
    model.bfloat16()
    control = attach(model, ControlConfig(mode="monitor"))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    control.step()
    size = 16 * 32
    expected = float(torch.tensor(0.1).bfloat16()) * size**0.5
    np.testing.assert_allclose(control.measured.norms, expected, rtol=1e-6)


def test_globs_overrides_and_frozen_weights_choose_the_units():
    model, _ = build()
    model.layers[0].up.weight.requires_grad_(requires_grad=False)
    paths = PrecisionConfig(
        group_size=8, overrides=[{"units": "layers.1.*", "fixed": "saved_int8"}]
    )
    control = attach(model, GNMR, paths)
    assert control.units.ids == ("layers.0.down", "layers.2.up", "layers.2.down")
    assert model.layers[1].up.path.name == "saved_int8"
    assert type(model.layers[0].up) is torch.nn.Linear
    only = attach(build()[0], ControlConfig(mode="monitor"), units="*.up")
    assert only.units.ids == tuple(f"layers.{layer}.up" for layer in range(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": GNMR}, "gnmr.mode: active needs the two paths"),
        ({"config": ControlConfig(mode="disabled")}, "gnmr.mode: disabled measures nothing"),
        ({"precision": PrecisionConfig()}, "group_size: 128 does not divide 16.*layers.0.up"),
        ({"precision": PrecisionConfig(low="te_mxfp8")}, "te_mxfp8 is run by Transformer Engine"),
        ({"units": "*.gate", "precision": PATHS}, "'\\*.gate'; there are layers.0.up"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_the_model_alone(arguments, message):
    model, _ = build()
    with pytest.raises(ConfigError, match=message):
        attach(model, **arguments)
    assert {type(layer.up) for layer in model.layers} == {torch.nn.Linear}


def test_states_of_other_units_and_folders_of_other_runs_are_refused(tmp_path):
    model, optimizer = build()
    control = attach(model, GNMR, PATHS, folder=tmp_path)
    other = attach(build()[0], GNMR, PATHS, units="*.up")
    with pytest.raises(CheckpointError, match="does not fit"):
        control.load_state_dict(other.state_dict())
    with pytest.raises(CheckpointError, match="does not fit"):
        control.load_state_dict({})
    train(control, model, optimizer, [1])
    control.close()
    again = attach(build()[0], GNMR, PATHS, folder=tmp_path)
    backward(again._model, 1)
    with pytest.raises(ConfigError, match="holds a run already"):
        again.step()
