from pathlib import Path

import pytest
import yaml

from gnmr_megatron.errors import ConfigError, LayoutError
from gnmr_megatron.training.config import RunConfig, validate
from gnmr_megatron.training.config_files import parse_run, run_parser, with_resume, write_config

CONFIGS = Path(__file__).parents[3] / "configs"
RUNS = sorted((CONFIGS / "runs").glob("*.yaml"))


def parse(*arguments):
    return parse_run(
        run_parser("train", description="", epilog=""), [str(argument) for argument in arguments]
    )[0]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_fits_its_own_layout_on_few_and_on_many_processes(path):
    config = parse("--config", path)
    replicas_of_a_laptop = (1,) if config.train.global_batch_size == 8 else (1, 2)
    for replicas in replicas_of_a_laptop if config.model.num_layers == 4 else (1, 8):
        world_size = config.parallel.model_parallel_size * replicas
        validate(config, world_size=world_size, vocab_size=32_000)


def test_every_group_of_settings_is_used_by_a_run():
    used = {
        (path.parent / value).resolve()
        for path in RUNS
        for value in yaml.safe_load(path.read_text()).values()
        if isinstance(value, str) and value.endswith(".yaml")
    }
    suites = (CONFIGS / "experiments").glob("*.yaml")
    shipped = {path.resolve() for path in CONFIGS.rglob("*.yaml")} - {
        path.resolve() for path in (*RUNS, *suites)
    }
    assert used == shipped


# Billions of parameters of the published models, with a vocabulary of 32,000 and embeddings that are not tied.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2_60m", 0.058),
        ("llama2_130m", 0.134),
        ("llama2_350m", 0.368),
        ("llama2_7b", 6.738),
        ("llama2_13b", 13.016),
    ],
)
def test_the_presets_have_the_published_sizes(name, billions):
    model = parse("--config", CONFIGS / "runs" / f"{name}.yaml").model
    assert model.num_parameters(32_000) / 1e9 == pytest.approx(billions, rel=0.02)


def test_later_options_override_files_and_small_numbers_are_numbers(tmp_path):
    (tmp_path / "model.yaml").write_text("num_layers: 8\nhidden_size: 512\n")
    (tmp_path / "run.yaml").write_text("model: model.yaml\noptimizer:\n  lr: 1e-5\n")
    config = parse(
        "--config", tmp_path / "run.yaml", "--model.num_layers", 6, "--optimizer.min_lr_ratio=1e-2"
    )
    assert (config.model.num_layers, config.model.hidden_size) == (6, 512)
    assert (config.optimizer.lr, config.optimizer.min_lr_ratio) == (1e-5, 1e-2)


def test_the_resolved_settings_read_back_as_they_were(tmp_path):
    config = parse(
        "--config",
        CONFIGS / "runs/quickstart.yaml",
        '--gnmr.alpha={"0": 4.0, "100": 2.5}',
        "--tracking.wandb_tags=[a, b]",
    )
    assert config.gnmr.alpha == {0: 4.0, 100: 2.5}
    write_config(config, tmp_path / "config.yaml")
    assert parse("--config", tmp_path / "config.yaml") == config


def test_all_errors_of_all_sections_come_at_once():
    with pytest.raises(ConfigError) as caught:
        parse("--model.num_layers=0", "--gnmr.delta=0", "--optimizer.lr=0")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "model.num_layers",
        "gnmr.delta",
        "optimizer.lr",
    ]


def test_a_section_that_names_a_wrong_file_key_is_found_in_that_file(tmp_path):
    (tmp_path / "model.yaml").write_text("# a comment\nnum_layer: 8\n")
    (tmp_path / "run.yaml").write_text("model: model.yaml\n")
    with pytest.raises(
        ConfigError,
        match=r"model\.yaml:2: unknown key `model\.num_layer`; did you mean `num_layers`\?",
    ):
        parse("--config", tmp_path / "run.yaml")


TP2, PP2 = "--parallel.tensor_model_parallel_size=2", "--parallel.pipeline_model_parallel_size=2"
VPP2 = "--parallel.virtual_pipeline_model_parallel_size=2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--parallel.tensor_model_parallel_size=3"], "model.hidden_size: 256 is not divisible by"),
        ([TP2, "--model.vocab_padding_multiple=1"], "the padded vocabulary"),
        (
            [TP2, "--parallel.sequence_parallel=true", "--data.sequence_length=33"],
            "data.sequence_length: 33 is not divisible by 2 (parallel.tensor_model_parallel_size 2 with "
            "sequence_parallel); nearest that are: 32, 34",
        ),
        (
            [
                TP2,
                "--parallel.sequence_parallel=true",
                "--parallel.context_parallel_size=2",
                "--data.sequence_length=36",
            ],
            "data.sequence_length: 36 is not divisible by 8 (2 x parallel.context_parallel_size 2 x parallel.tensor_",
        ),
        (
            [PP2, "--model.num_layers=8", "--parallel.num_layers_in_first_pipeline_stage=8"],
            "model.num_layers: 8, of which 8 are in uneven stages, is not divisible by the 1 pipeline chunks",
        ),
        (
            [
                PP2,
                "--model.num_layers=8",
                "--parallel.num_layers_in_first_pipeline_stage=1",
                "--parallel.num_layers_in_last_pipeline_stage=1",
            ],
            "leaves 6 for no stage",
        ),
        (
            [
                "--parallel.pipeline_model_parallel_size=3",
                "--model.num_layers=8",
                "--parallel.num_layers_in_last_pipeline_stage=3",
            ],
            "8, of which 3 are in uneven stages, is not divisible by the 2 pipeline chunks (parallel.pipeline_"
            "model_parallel_size x parallel.virtual_pipeline_model_parallel_size); nearest that are: 7, 9",
        ),
        (
            ['--faults=[{"kind": "kill_rank", "step": 3, "rank": 7}]'],
            "faults[0].rank: 7, but there are 1",
        ),
        (
            [PP2, VPP2, "--train.global_batch_size=6", "--train.eval_samples=6"],
            "makes 3 microbatches",
        ),
        (
            ["--train.eval_samples=5"],
            "train.eval_samples: 5 is not divisible by 2 (train.micro_batch_size x replicas); nearest that are: 4, 6",
        ),
        (
            ["--data.train_samples=10"],
            "data.train_samples: 10 is less than train.steps x train.global_batch_size (3200)",
        ),
        (
            [
                "--precision.low=saved_int8",
                "--precision.recovery=bf16",
                "--precision.group_size=100",
            ],
            "precision.group_size: 100 does not divide 256",
        ),
        (
            ["--tracking.unit_metrics=['*.linear_fc1', '*.linear_fc3']"],
            "tracking.unit_metrics: '*.linear_fc3' matches no unit; they are like decoder.layers.0.",
        ),
    ],
)
def test_sections_that_do_not_fit_each_other_are_refused(changes, message):
    config = parse(*changes)
    with pytest.raises(LayoutError) as caught:
        validate(config, world_size=config.parallel.model_parallel_size, vocab_size=2049)
    assert message in str(caught.value)


def test_defaults_run_on_one_process():
    validate(RunConfig(), world_size=1, vocab_size=2048)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--resume"], ["--resume=latest"]),
        (["--resume", "--json"], ["--resume=latest", "--json"]),
        (["--resume", "auto"], ["--resume", "auto"]),
        (["--resume", "runs/x"], ["--config", "runs/x/config.yaml", "--resume", "runs/x"]),
        (["--resume=runs/x"], ["--config", "runs/x/config.yaml", "--resume=runs/x"]),
        (
            ["--config", "a.yaml", "--resume", "runs/x"],
            ["--config", "a.yaml", "--resume", "runs/x"],
        ),
        ([], []),
    ],
)
def test_resume_may_stand_alone_or_name_a_run_whose_settings_then_count(typed, meant):
    assert with_resume(typed) == meant
