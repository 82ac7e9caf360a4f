import pytest

from gnmr_megatron.errors import CheckpointError
from gnmr_megatron.training.run_folder import Job, choose_run_folder


def finish_checkpoint(run, step=10):
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text("{}")


def test_a_new_run_never_writes_into_an_old_folder(tmp_path):
    names = [choose_run_folder(tmp_path, "tiny", None).path.name for _ in range(3)]
    assert names == ["tiny", "tiny-2", "tiny-3"]


def test_latest_is_the_newest_run_of_that_name_that_has_a_checkpoint(tmp_path):
    runs = [choose_run_folder(tmp_path, "tiny", None).path for _ in range(11)]
    choose_run_folder(tmp_path, "tiny-wide", None)
    finish_checkpoint(runs[1])
    finish_checkpoint(runs[9])  # tiny-10: above tiny-2 as a number, below it as a word
    (runs[10] / "checkpoints" / "step_00000010.partial").mkdir(parents=True)
    chosen = choose_run_folder(tmp_path, "tiny", "latest")
    assert chosen.path.name == "tiny-10"
    assert chosen.is_resumed


def test_latest_without_a_checkpoint_is_an_error_that_names_the_run(tmp_path):
    choose_run_folder(tmp_path, "tiny", None)
    with pytest.raises(CheckpointError, match=r"no run of the name 'tiny' .* has a checkpoint"):
        choose_run_folder(tmp_path, "tiny", "latest")


def test_auto_starts_anew_where_nothing_can_be_resumed(tmp_path):
    first = choose_run_folder(tmp_path, "tiny", "auto")
    assert not first.is_resumed


def test_auto_goes_on_in_the_newest_folder_with_all_its_checkpoints_the_newest_first(tmp_path):
    runs = [choose_run_folder(tmp_path, "tiny", None).path for _ in range(2)]
    finish_checkpoint(runs[0])
    begun = choose_run_folder(tmp_path, "tiny", "auto")  # killed before its first checkpoint
    assert (begun.path, begun.is_resumed, begun.candidates) == (runs[1], True, ())
    for step in (10, 20):
        finish_checkpoint(runs[1], step)
    found = choose_run_folder(tmp_path, "tiny", "auto")
    assert [path.name for path in found.candidates] == ["step_00000020", "step_00000010"]


def test_a_single_checkpoint_can_be_named(tmp_path):
    run = choose_run_folder(tmp_path, "tiny", None).path
    for step in (10, 20):
        finish_checkpoint(run, step)
    named = run / "checkpoints/step_00000010"
    found = choose_run_folder(tmp_path, "other", str(named))
    assert (found.path, found.candidates) == (run, (named,))
    assert choose_run_folder(tmp_path, "other", str(run)).candidates[0].name == "step_00000020"
    with pytest.raises(CheckpointError, match=r"step_00000030 holds no complete checkpoint"):
        choose_run_folder(tmp_path, "other", str(run / "checkpoints/step_00000030"))


@pytest.mark.parametrize(
    ("restarted", "step"),
    [
        (Job("a"), 20),  # by torchrun
        (Job("b", "17", is_requeued=True), 20),  # by Slurm
        (Job("b", "17"), 10),  # a second launch in the same allocation
        (Job("b", "18", is_requeued=True), 10),
        (Job("b"), 10),
    ],
)
def test_a_named_checkpoint_is_taken_up_once_in_a_job(tmp_path, restarted, step):
    run = choose_run_folder(tmp_path, "tiny", None).path
    finish_checkpoint(run, 10)
    named = run / "checkpoints/step_00000010"
    job = Job("a", "17")
    assert choose_run_folder(tmp_path, "tiny", str(named), job=job).candidates == (named,)
    job.note_taken_up(named)
    finish_checkpoint(run, 20)
    found = choose_run_folder(tmp_path, "tiny", str(named), job=restarted)
    assert found.candidates[0].name == f"step_{step:08d}"
    finish_checkpoint(run, 5)
    other = choose_run_folder(tmp_path, "tiny", str(run / "checkpoints/step_00000005"), job=job)
    assert [path.name for path in other.candidates] == ["step_00000005"]


def test_a_folder_without_a_complete_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no complete checkpoint"):
        choose_run_folder(tmp_path, "tiny", str(tmp_path / "elsewhere"))
