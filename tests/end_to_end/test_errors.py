"""Each error that a user can cause is one clear message, before any process starts."""

import pytest

from gnmr_megatron.observability.events import FaultEvent, FinishEvent, StepEvent, read_events
from tests.conftest import TINY, options, run_cli


@pytest.fixture
def train(dataset, tmp_path):
    """Runs `train` on the tiny settings, changed; a file's text may be given as `file`."""

    def run(*extra, file=None, **changes):
        settings = {
            **TINY,
            "data.datasets": f"[{dataset}]",
            "runs_dir": tmp_path / "runs",
            **changes,
        }
        arguments = options(settings)
        if file is not None:
            (tmp_path / "mine.yaml").write_text(file)
            arguments = ["--config", tmp_path / "mine.yaml", *arguments]
        return run_cli("train", *arguments, *extra)

    return run


def check(result, *parts):
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"model.num_attention_heads": 6, "model.hidden_size": 96, "model.num_query_groups": 6,
             "parallel.tensor_model_parallel_size": 4, "precision.group_size": 8},
            ["model.num_attention_heads: 6 is not divisible by parallel.tensor_model_parallel_size (4)", "4, 8"],
        ),
        (
            {"parallel.pipeline_model_parallel_size": 3},
            ["model.num_layers: 4 is not divisible by the 3 pipeline chunks", "nearest that are: 3, 6"],
        ),
        ({"train.global_batch_size": 7}, ["train.global_batch_size: 7 is not divisible by 2", "6, 8"]),
        ({"precision.group_size": 48}, ["precision.group_size: 48 does not divide 64", "linear_qkv", "16, 32, 64"]),
        ({"optimizer.warmup_steps": 12}, ["optimizer.warmup_steps: 12 must be below train.steps (12)"]),
        ({"gnmr.delta": 0, "optimizer.lr": -1}, ["gnmr.delta: 0 must be an integer of at least 1", "optimizer.lr: -1"]),
        ({"model.num_layers": "many"}, ["model.num_layers", "Expected a", "many"]),
        ({"precision.low": "saved_int5"}, ["precision.low: no `saved_int5`; did you mean `saved_int", "deepseek_fp6"]),
        (
            {"precision.low": "te_fp8_tensorwise", "precision.recovery": "te_bf16"},
            ["te_fp8_tensorwise needs a GPU, and there is none (unit decoder.layers.0.self_attention.linear_qkv)",
             "possible here: fp32, bf16, saved_int8"],
        ),
        (
            {"precision.overrides": '[{"units": "*.mlp.linear_fc3", "fixed": "bf16"}]'},
            ["precision.overrides[0]: '*.mlp.linear_fc3' matches no unit; nearest: decoder.layers."],
        ),
        (
            {"precision.low": "torch_fp8_rowwise", "parallel.tensor_model_parallel_size": 4,
             "model.ffn_hidden_size": 96},
            ["torch_fp8_rowwise multiplies sizes that are multiples of 16, but the input on a rank is 24"],
        ),
        (
            {"parallel.engine_options": '{"tp_com_overlap": true}'},
            ["parallel.engine_options: megatron-core has no `tp_com_overlap`; did you mean `tp_comm_overlap`?"],
        ),
        ({"data.datasets": "[nowhere/at/all]"}, ["nowhere/at/all: is no prepared dataset", "prepare-data INPUT"]),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_with_key_value_and_fix(train, changes, parts):
    check(train(**changes), *parts)


def test_an_unknown_key_in_a_file_has_its_line_and_a_suggestion(train):
    check(
        train(file="train:\n  seed: 1\nmodel:\n  num_layer: 3\n"),
        "mine.yaml:2: unknown key `train.seed`",
    )
    check(
        train(file="model:\n  num_layer: 3\n"),
        "mine.yaml:2: unknown key `model.num_layer`; did you mean `num_layers`?",
    )


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("", "mine.yaml: is empty"),
        ("- a\n", "mine.yaml: must hold `key: value` settings"),
        (
            "seed: 3\nmodel: 5\n",
            "mine.yaml:2: `model` must hold settings, or name a .yaml file that does",
        ),
        ("model: [1]\n", "mine.yaml:1: `model` must hold settings"),
        ("model: none.yaml\n", "none.yaml: cannot be read"),
        ("gnmr:\n  seed: null\n", "gnmr.seed: null is no value for it"),
        ("gnmr:\n  collapse_ratio: [1]\n", "gnmr.collapse_ratio: [1] is none of float"),
    ],
)
def test_a_file_of_the_wrong_form_is_refused_with_its_line(train, file, message):
    check(train(file=file), message)


def test_arguments_that_are_no_options_are_refused(train):
    check(train("foo"), "unexpected argument 'foo'")


def test_an_unknown_option_has_a_suggestion(train):
    check(train("--gnmr.alhpa=3"), "unknown option --gnmr.alhpa; did you mean `gnmr.alpha`?")


def test_a_file_that_is_no_yaml_or_not_there_is_named(train, tmp_path):
    check(train(file="model: [\n"), "mine.yaml", "is not YAML")
    check(run_cli("train", "--config", tmp_path / "none.yaml"), "none.yaml: cannot be read")


def test_resume_without_anything_to_resume_is_refused(train):
    result = train("--resume", "latest")
    assert result.returncode == 1
    assert "no run of the name 'run'" in result.stderr


def test_an_unknown_verb_lists_those_there_are():
    result = run_cli("trian")
    assert result.returncode == 2
    assert "unknown verb 'trian'" in result.stderr
    assert "prepare-data" in result.stderr


@pytest.mark.parametrize(
    "verb", ["train", "prepare-data", "units", "checkpoint", "launch", "summary"]
)
def test_every_verb_has_a_help_that_teaches(verb):
    result = run_cli(verb, "--help")
    assert result.returncode == 0
    assert "usage: gnmr-megatron" in result.stdout
    assert len(result.stdout.splitlines()) > 8


def test_losses_that_stay_not_finite_stop_the_run_and_name_the_units(train, tmp_path):
    result = train(**{"optimizer.lr": 1e30, "optimizer.clip_grad": 0, "train.max_skipped_steps": 3})
    assert result.returncode == 1
    assert "was not finite for 3 steps in a row (train.max_skipped_steps)" in result.stderr
    assert "decoder.layers." in result.stderr
    events = list(read_events(tmp_path / "runs/run/events.jsonl"))
    faults = [event for event in events if isinstance(event, FaultEvent)]
    skipped = [event.step for event in events if isinstance(event, StepEvent) and not event.updated]
    assert [event.step for event in faults] == skipped
    assert len(skipped) == 3
    assert isinstance(events[-1], FinishEvent)
    assert events[-1].reason == "diverged"


def test_values_that_are_not_finite_and_reach_a_quantiser_are_an_event(train, tmp_path):
    train(
        **{
            "optimizer.lr": 1e30,
            "optimizer.clip_grad": 0,
            "train.max_skipped_steps": 1,
            "precision.low": "deepseek_fp6",
        }
    )
    events = list(read_events(tmp_path / "runs/run/events.jsonl"))
    (fault,) = (e for e in events if isinstance(e, FaultEvent) and e.kind == "non_finite_quantized")
    assert fault.message.startswith("NaN or infinity in ")
    assert "decoder.layers.3.mlp.linear_fc2" in fault.units
