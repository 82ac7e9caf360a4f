"""What has to be equal for a checkpoint to be taken up."""

from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.training.identity import differences, run_identity, saved_model

NEWER = (
    "vocab_size",
    "model.rope_scaling",
    "model.rope_scaling_factor",
    "model.rope_original_positions",
)


def identity(**fields):
    return run_identity(LlamaConfig(**fields), tokenizer="abc", vocab_size=500, seed=1)


def test_a_checkpoint_of_an_older_version_is_of_the_run_that_has_the_defaults():
    saved = {key: value for key, value in identity().items() if key not in NEWER}
    assert len(saved) == len(identity()) - len(NEWER)
    assert differences(saved, identity()) == []
    scaled = identity(rope_scaling="linear", rope_scaling_factor=2.0)
    assert differences(saved, scaled) == [
        "model.rope_scaling: saved none, now linear",
        "model.rope_scaling_factor: saved 1.0, now 2.0",
    ]
    assert saved_model(saved) == LlamaConfig()


def test_each_difference_is_a_line_unless_it_is_ignored():
    now = {**identity(num_layers=6), "seed": 2}
    assert differences(identity(), now) == [
        "model.num_layers: saved 4, now 6",
        "seed: saved 1, now 2",
    ]
    assert differences(identity(), now, ignored={"seed", "model.num_layers"}) == []
