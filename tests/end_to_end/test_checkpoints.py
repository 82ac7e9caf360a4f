"""Checkpoints are whole or not there, are checked before they are loaded, and let training go on without them."""

import json
import os
import pickle
import shutil
import subprocess

import numpy as np
import pytest
import torch

from gnmr_megatron.observability.events import (
    CheckpointEvent,
    FaultEvent,
    StartEvent,
    StepEvent,
    read_events,
)
from gnmr_megatron.training.checkpoint_files import (
    CheckpointDescription,
    WrittenFile,
    complete_checkpoints,
    verify,
)
from tests.conftest import TINY, options, run_cli
from tests.end_to_end.kill_during_save import kill_loop

STEPS, INTERVAL = 8, 4


def settings(dataset, runs_dir, **changes):
    return options(
        {
            **TINY,
            "data.datasets": f"[{dataset}]",
            "runs_dir": runs_dir,
            "train.steps": STEPS,
            "checkpoint.interval": INTERVAL,
            **changes,
        }
    )


def events(run, kind):
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, kind)]


def losses(run):
    return [event.loss for event in events(run, StepEvent)]


def steps_of(run):
    return [
        int(path.name.removeprefix("step_")) for path in complete_checkpoints(run / "checkpoints")
    ]


@pytest.fixture(scope="module")
def saved(dataset, tmp_path_factory):
    """A run with checkpoints of steps 4 and 8."""
    runs_dir = tmp_path_factory.mktemp("saved")
    result = run_cli("train", *settings(dataset, runs_dir))
    assert result.returncode == 0, result.stderr
    assert steps_of(runs_dir / "run") == [4, 8]
    return runs_dir / "run"


@pytest.fixture
def run(saved, tmp_path):
    """A copy of it to do harm to."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def newest(run):
    return complete_checkpoints(run / "checkpoints")[-1]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


HARM = {
    "truncated": (truncate, "__0_0.distcp: has "),
    "flipped": (flip_a_bit, "__0_0.distcp: is damaged, its content has another checksum"),
    "missing": (os.unlink, "__0_0.distcp: cannot be read (No such file or directory)"),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_offered(dataset, run, harm):
    do_harm, message = HARM[harm]
    do_harm(newest(run) / "__0_0.distcp")
    result = run_cli("train", *settings(dataset, run.parent), "--resume", "latest")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert message in result.stderr
    offered = run / "checkpoints/step_00000004"
    assert f"the newest whole checkpoint before it: --resume {offered}" in result.stderr
    verified = run_cli("checkpoint", "verify", run)
    assert verified.returncode == 1
    assert message in verified.stdout
    assert f"{offered}: whole" in verified.stdout


def test_what_is_offered_can_be_resumed_and_later_checkpoints_are_put_aside(dataset, saved, run):
    flip_a_bit(newest(run) / "__0_0.distcp")
    result = run_cli(
        "train", *settings(dataset, run.parent), "--resume", run / "checkpoints/step_00000004"
    )
    assert result.returncode == 0, result.stderr
    assert losses(run) == losses(saved)
    assert steps_of(run) == [4, 8]
    assert not verify(newest(run))
    assert verify(run / "checkpoints/step_00000008.superseded")


def test_a_restart_that_nobody_watches_takes_the_newest_whole_checkpoint(dataset, saved, run):
    flip_a_bit(newest(run) / ".metadata")
    result = run_cli("train", *settings(dataset, run.parent), "--resume", "auto")
    assert result.returncode == 0, result.stderr
    assert losses(run) == losses(saved)
    (fault,) = (e for e in events(run, FaultEvent) if e.kind == "checkpoint_damaged")
    assert "step_00000008/.metadata: is damaged" in fault.message
    assert events(run, StartEvent)[-1].step == 5


def test_a_restart_before_the_first_checkpoint_begins_again_in_the_same_folder(dataset, saved, run):
    for path in complete_checkpoints(run / "checkpoints"):
        shutil.rmtree(path)
    result = run_cli("train", *settings(dataset, run.parent), "--resume", "auto")
    assert result.returncode == 0, result.stderr
    assert losses(run) == losses(saved)
    assert [event.step for event in events(run, StepEvent)] == list(range(1, STEPS + 1))
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]


def seal(checkpoint, name):
    """Make the checksums fit a file that was replaced, as whoever passes on a checkpoint can."""
    description = CheckpointDescription.read(checkpoint)
    files = {**description.files, name: WrittenFile.of(checkpoint / name)}
    CheckpointDescription(**{**vars(description), "files": files}).write(checkpoint)
    assert not verify(checkpoint)


class Attack:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_checkpoint_that_would_run_code_is_refused(dataset, run, tmp_path, name):
    attack = Attack(tmp_path / "attacked")
    if name == ".metadata":
        (newest(run) / name).write_bytes(pickle.dumps(attack))
    else:
        torch.save(attack, newest(run) / name)
    seal(newest(run), name)
    result = run_cli("train", *settings(dataset, run.parent), "--resume", "latest")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert f"step_00000008/{name}: " in result.stderr
    assert "posix.mkdir" in result.stderr
    assert not (tmp_path / "attacked").exists()


def test_only_the_newest_and_every_mth_are_kept(dataset, tmp_path):
    changes = {"checkpoint.interval": 1, "checkpoint.keep_last": 2, "checkpoint.keep_every": 3}
    result = run_cli("train", *settings(dataset, tmp_path, **changes))
    assert result.returncode == 0, result.stderr
    assert steps_of(tmp_path / "run") == [3, 6, 7, 8]
    saved = events(tmp_path / "run", CheckpointEvent)
    assert [event.step for event in saved] == list(range(1, STEPS + 1))
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == [
        f"step_{step:08d}" for step in (3, 6, 7, 8)
    ]


def test_saving_in_the_background_changes_nothing_and_waits_less(dataset, saved, tmp_path):
    result = run_cli("train", *settings(dataset, tmp_path, **{"checkpoint.asynchronous": "false"}))
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "run") == losses(saved)
    for event in events(tmp_path / "run", CheckpointEvent):
        assert event.blocked_seconds == pytest.approx(event.seconds, rel=0.05, abs=0.02)
    first = events(saved, CheckpointEvent)[0]
    assert first.step == INTERVAL
    assert first.blocked_seconds < first.seconds


def test_the_verbs_list_and_prune(run):
    listed = json.loads(run_cli("checkpoint", "ls", run, "--json").stdout)["checkpoints"]
    assert [row["step"] for row in listed] == [4, 8]
    files = [path for path in newest(run).iterdir() if path.name != "checkpoint.json"]
    assert listed[1]["bytes"] == sum(path.stat().st_size for path in files)
    assert "1 processes (TP 1 x PP 1)" in run_cli("checkpoint", "ls", run).stdout
    (run / "checkpoints/step_00000009.partial").mkdir()
    dry = run_cli("checkpoint", "prune", run, "--keep-last", 1, "--dry-run")
    assert [line.split("/")[-1] for line in dry.stdout.splitlines()] == [
        "step_00000009.partial",
        "step_00000004",
    ]
    assert steps_of(run) == [4, 8]
    assert run_cli("checkpoint", "prune", run, "--keep-last", 1).returncode == 0
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000008"]
    refused = run_cli("checkpoint", "prune", run, "--keep-last", 0)
    assert refused.returncode == 2
    assert "--keep-last: 0 must be at least 1" in refused.stderr
    missing = run_cli("checkpoint", "ls", run / "nowhere")
    assert missing.returncode == 2
    assert "nowhere: is no run folder" in missing.stderr


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 9 MB, on which a third checkpoint finds no room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", folder]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_training_on_the_checkpoint_before(dataset, saved, small_disk):
    result = run_cli("train", *settings(dataset, small_disk, **{"checkpoint.interval": 2}))
    run = small_disk / "run"
    assert losses(run) == losses(saved)
    failed = [event for event in events(run, FaultEvent) if event.kind == "checkpoint_failed"]
    assert failed
    assert "MB are free on the disk" in failed[0].message or "No space left" in failed[0].message
    whole = steps_of(run)
    assert whole
    assert not any(verify(path) for path in complete_checkpoints(run / "checkpoints"))
    assert f"the last checkpoint is that of step {whole[-1]}" in failed[-1].message
    assert not list((run / "checkpoints").glob("*.partial"))
    # the last step could not be saved: that is an error, not a footnote
    assert result.returncode == 1
    assert (
        f"step 8 could not be saved (see the fault above); the run goes on from step {whole[-1]}"
        in result.stderr
    )


def test_no_kill_leaves_a_checkpoint_that_looks_whole_and_is_not(dataset, tmp_path):
    outcomes = kill_loop(tmp_path, dataset, kills=4)
    assert not [line for outcome in outcomes for line in outcome["damages"]]
    assert any(outcome["killed while writing"] for outcome in outcomes)
    newest_steps = [outcome["complete"][-1] for outcome in outcomes]
    assert newest_steps == sorted(newest_steps)  # each went on from what the one before had left
    assert np.diff(newest_steps).max() > 0
