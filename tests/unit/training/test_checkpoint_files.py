import json

import pytest

from gnmr_megatron.errors import CheckpointError
from gnmr_megatron.training import checkpoint_files as files
from gnmr_megatron.training.checkpoint_files import CheckpointDescription, WrittenFile


def describe(step, written=None):
    return CheckpointDescription(
        step=step,
        layout={"world_size": 2},
        identity={"seed": 1},
        optimizer="fp32",
        state={"train": {"loss": 0.1 + 0.2}},
        files=written or {},
    )


def make(folder, step):
    path = files.checkpoint_path(folder, step)
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"abc" * step)
    describe(step, {"weights": WrittenFile.of(path / "weights")}).write(path)
    return path


def test_only_folders_with_a_description_and_a_plain_name_are_complete(tmp_path):
    paths = [make(tmp_path, step) for step in (100_000_000, 9, 10)]
    (tmp_path / "step_00000011").mkdir()
    for suffix in (".partial", ".superseded"):
        make(tmp_path, 12).rename(tmp_path / f"step_00000012{suffix}")
    assert files.complete_checkpoints(tmp_path) == [paths[1], paths[2], paths[0]]


def test_a_description_comes_back_to_the_bit(tmp_path):
    path = make(tmp_path, 3)
    assert CheckpointDescription.read(path) == describe(
        3, {"weights": WrittenFile.of(path / "weights")}
    )
    assert CheckpointDescription.read(path).num_bytes == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: {**content, "step": 4}, "is damaged, its content has another checksum"),
        (lambda content: {**content, "schema_version": 1}, "has schema 1, this version reads 2"),
        (lambda content: [content], "is no complete checkpoint"),
        (lambda content: {"step": 3}, "is no complete checkpoint"),
    ],
)
def test_a_changed_description_is_refused(tmp_path, change, message):
    path = make(tmp_path, 3)
    content = json.loads((path / files.DESCRIPTION).read_text())
    (path / files.DESCRIPTION).write_text(json.dumps(change(content)))
    with pytest.raises(CheckpointError, match=message):
        CheckpointDescription.read(path)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "gone"),
    [
        (None, None, []),
        (None, 2, []),
        (2, None, [2, 4, 5, 6]),
        (2, 4, [2, 5, 6]),
        (9, 4, []),
    ],
)
def test_the_newest_and_every_mth_stay(tmp_path, keep_last, keep_every, gone):
    paths = [files.checkpoint_path(tmp_path, step) for step in (2, 4, 5, 6, 8, 9)]
    going = files.expendable(paths, keep_last=keep_last, keep_every=keep_every)
    assert [files.step_of(path) for path in going] == gone


def test_readers_share_the_files_between_them(tmp_path):
    path = tmp_path / "step_00000001"
    path.mkdir()
    description = describe(1, {f"file{n}": WrittenFile(1, "") for n in range(5)})
    found = [list(files.damages(path, description, part=part, parts=3)) for part in range(3)]
    assert [len(lines) for lines in found] == [2, 2, 1]
    assert sorted(line for lines in found for line in lines) == list(
        files.damages(path, description)
    )


def test_a_run_or_one_of_its_checkpoints_can_be_named(tmp_path):
    run = tmp_path / "runs/mine"
    checkpoint = run / "checkpoints/step_00000020"
    assert files.split_resume(run) == (run, None)
    assert files.split_resume(checkpoint) == (run, checkpoint)


def test_later_checkpoints_are_put_aside_and_come_back_under_no_plain_name(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    files.put_aside(tmp_path, after_step=1)
    assert [files.step_of(path) for path in files.complete_checkpoints(tmp_path)] == [1]
    make(tmp_path, 2)
    files.put_aside(tmp_path, after_step=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_00000001",
        "step_00000002.superseded",
        "step_00000003.superseded",
    ]
