import pytest

from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.errors import LayoutError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tensor_model_parallel_size": 0},
            r"parallel.tensor_model_parallel_size: 0 must be at least 1",
        ),
        ({"data_parallel_size": 0}, r"parallel.data_parallel_size: 0 must be at least 1, or null"),
        ({"sequence_parallel": True}, r"needs parallel.tensor_model_parallel_size of at least 2"),
        ({"virtual_pipeline_model_parallel_size": 2}, r"needs at least 2 chunks and"),
        ({"context_parallel_size": 0}, r"parallel.context_parallel_size: 0 must be at least 1"),
        ({"num_layers_in_first_pipeline_stage": 1}, r"1 needs parallel.pipeline_model_parallel"),
        ({"num_layers_in_last_pipeline_stage": 0}, r"0 must be at least 1, or null"),
        ({"overlap_param_gather": True}, r"needs parallel.use_distributed_optimizer: true"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(fields, message):
    with pytest.raises(LayoutError, match=message):
        ParallelLayout(**fields)


def test_replicas_are_what_the_number_of_processes_leaves():
    layout = ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=3)
    assert layout.data_parallel(24) == 4
    assert layout.default_world_size == 6
    shared = ParallelLayout(tensor_model_parallel_size=2, context_parallel_size=2)
    assert shared.data_parallel(24) == 6


def test_processes_that_do_not_fill_replicas_are_refused_with_the_fix():
    layout = ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    with pytest.raises(
        LayoutError, match=r"6 processes cannot hold replicas of 4 .* start a multiple of 4"
    ):
        layout.data_parallel(6)


def test_a_data_parallel_size_that_contradicts_the_world_is_refused_with_the_fix():
    layout = ParallelLayout(tensor_model_parallel_size=2, data_parallel_size=3)
    with pytest.raises(
        LayoutError, match=r"8 processes make 4 replicas of 2; set it to 4 or null, or start 6"
    ):
        layout.data_parallel(8)
