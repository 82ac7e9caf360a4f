"""What a run needs, against closed forms; tests/end_to_end/test_doctor.py compares it with real tensors and files."""

import subprocess

import pytest

from gnmr_megatron.training.checkup.disk_need import checkpoints_at_once, disk_need
from gnmr_megatron.training.checkup.memory_need import (
    activation_bytes,
    memory_need,
    parameters_of_stage,
)
from gnmr_megatron.training.checkup.resources import (
    available_memory,
    check_disk,
    check_needs,
    locked_memory,
    open_files,
    shared_memory,
    total_memory,
)

VOCABULARY = 500
TENSOR, PIPELINE = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {PIPELINE: 2},
        {PIPELINE: 4},
        {PIPELINE: 2, "parallel.num_layers_in_first_pipeline_stage": 1},
        {PIPELINE: 2, "parallel.virtual_pipeline_model_parallel_size": 2},
        {"model.tie_embeddings": "true"},
    ],
)
def test_the_stages_together_hold_the_whole_model(tiny_plan, changes):
    plan = tiny_plan(**changes)
    stages = range(plan.config.parallel.pipeline_model_parallel_size)
    held = sum(parameters_of_stage(plan, stage, vocab_size=VOCABULARY) for stage in stages)
    assert held == plan.config.model.num_parameters(VOCABULARY)


def test_tensor_parallel_ranks_share_all_but_the_norms(tiny_plan):
    held = parameters_of_stage(tiny_plan(**{TENSOR: 4}), 0, vocab_size=VOCABULARY)
    norms = (2 * 4 + 1) * 64
    whole = tiny_plan().config.model.num_parameters(VOCABULARY)
    assert 4 * held == whole + 3 * norms


def test_tied_embeddings_are_held_at_both_ends_of_a_pipeline(tiny_plan):
    plan = tiny_plan(**{PIPELINE: 2, "model.tie_embeddings": "true"})
    held = sum(parameters_of_stage(plan, stage, vocab_size=VOCABULARY) for stage in range(2))
    assert held == plan.config.model.num_parameters(VOCABULARY) + 512 * 64


def test_the_distributed_optimizer_shares_its_state_and_nothing_else(tiny_plan):
    replicas = {"parallel.data_parallel_size": 2, "train.global_batch_size": 8}
    alone, shared = (
        memory_need(
            tiny_plan(**replicas, **{"parallel.use_distributed_optimizer": is_shared}),
            vocab_size=VOCABULARY,
            on_gpu=False,
        )
        for is_shared in ("false", "true")
    )
    assert shared.optimizer == alone.optimizer // 2
    assert (shared.weights, shared.gradients) == (alone.weights, alone.gradients)


def test_earlier_stages_keep_more_microbatches_and_recompute_keeps_fewer_values(tiny_plan):
    def kept(stage, **changes):
        plan = tiny_plan(**{PIPELINE: 4, **changes})
        return activation_bytes(plan, stage, vocab_size=VOCABULARY, on_gpu=False)

    # one layer a stage; the last one also has the head
    assert kept(0) == 4 * kept(2) // 2 == 4 * kept(1) // 3
    assert kept(0, **{"train.global_batch_size": 4}) == kept(2)  # two microbatches only
    tokens, hidden = 2 * 32, 64
    full = kept(0, **{"train.recompute": "full"})
    assert full == 4 * tokens * 4 * hidden + kept(0) // 4
    assert full < kept(0, **{"train.recompute": "core_attn"}) < kept(0)


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"checkpoint.interval": 0}, 1),
        ({"checkpoint.interval": 4}, 3),  # steps 4, 8 and 12
        ({"checkpoint.interval": 5}, 3),  # 5, 10 and the last
        ({"checkpoint.interval": 1, "checkpoint.keep_last": 2}, 3),
        # 2 of 11, and 4 and 8 for their steps
        ({"checkpoint.interval": 1, "checkpoint.keep_last": 2, "checkpoint.keep_every": 4}, 5),
    ],
)
def test_kept_checkpoints_and_the_one_in_writing_are_counted(tiny_config, changes, most):
    assert checkpoints_at_once(tiny_config(**changes)) == most


def test_a_disk_that_is_too_small_is_found(tiny_config, tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a small file system can only be mounted by root")
    try:
        changes = {"runs_dir": tmp_path / "runs", "checkpoint.interval": 4}
        need = disk_need(tiny_config(**changes), vocab_size=VOCABULARY, world_size=1)
        assert need.checkpoint < 4 << 20 < need.total
        finding = check_disk(tiny_config(**changes), vocab_size=VOCABULARY, world_size=1)
        assert finding.status == "problem"
        assert f"4.2 MB free in {tmp_path}" in finding.detail
        assert "checkpoint.keep_last" in finding.advice
        changes["checkpoint.interval"] = 0
        finding = check_disk(tiny_config(**changes), vocab_size=VOCABULARY, world_size=1)
        assert finding.status == "ok"
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_memory_that_no_machine_has_is_found(tiny_plan):
    plan = tiny_plan(**{"model.num_layers": 200, "model.hidden_size": 65536})
    findings = {found.check: found for found in check_needs(plan, vocab_size=VOCABULARY)}
    assert findings["memory for the run"].status == "problem"
    tiny = {found.check: found for found in check_needs(tiny_plan(), vocab_size=VOCABULARY)}
    assert tiny["memory for the run"].status == "ok"


def test_the_memory_of_a_container_counts_and_not_that_of_the_machine(tmp_path):
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert (total_memory(tmp_path), available_memory(tmp_path)) == (3_000_000, 2_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert total_memory(tmp_path) > 3_000_000


def test_low_limits_are_warnings_with_the_command_that_raises_them(tmp_path):
    assert open_files(1024, 65536).advice == "ulimit -n 65536"
    assert open_files(65536, 65536).status == "ok"
    assert locked_memory(65536, has_infiniband=True).status == "warning"
    assert locked_memory(65536, has_infiniband=False).status == "not applicable"
    assert shared_memory(tmp_path / "none").status == "warning"
