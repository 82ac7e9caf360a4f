"""The torchrun scripts, run for real: stop, restart, resume; nodes that agree and nodes that do not."""

import contextlib
import signal
import socket
import time

import psutil
import pytest

from gnmr_megatron.observability.events import FinishEvent, StartEvent, StepEvent, read_events
from tests.conftest import run_cli
from tests.launch.conftest import wait_until


def events(run, kind):
    path = run / "events.jsonl"
    return (
        [event for event in read_events(path) if isinstance(event, kind)] if path.exists() else []
    )


def trainers(process):
    """The training processes that a script has started."""
    found = {}
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone, or a zombie
            if "torch.distributed.run" not in each.cmdline() and "train" in each.cmdline():
                found[each.pid] = each
    # a process that writes a checkpoint is a child of its trainer
    return [each for each in found.values() if each.ppid() not in found]


def two_nodes(start, script, first, second):
    """The script as two nodes on this machine; exit codes, output and seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "NNODES": "2",
        "NPROC_PER_NODE": "1",
        "HEAD_ADDR": "127.0.0.1",
        "RDZV_PORT": str(port),
    }
    started = time.monotonic()
    nodes = [
        start(script, *arguments, NODE_RANK=str(rank), LOG_DIR="logs", **shared)
        for rank, arguments in enumerate((first, second))
    ]
    codes = [node.wait(150) for node in nodes]
    return codes, [node.output for node in nodes], time.monotonic() - started


def test_a_killed_process_restarts_from_its_checkpoint_and_sigusr1_saves_and_ends_with_0(
    tiny, start, tmp_path
):
    config = tiny(**{"train.steps": 5000, "checkpoint.interval": 3})
    run = tmp_path / "runs/run"
    script = start("torchrun_single_node.sh", "--config", config, NPROC_PER_NODE="2")
    wait_until(lambda: list(run.glob("checkpoints/step_*/checkpoint.json")), script)
    trainers(script.process)[0].kill()
    wait_until(lambda: len(events(run, StartEvent)) == 2, script)
    restarted = events(run, StartEvent)[1].step
    assert restarted > 3
    wait_until(lambda: events(run, StepEvent)[-1].step > restarted, script)
    script.process.send_signal(signal.SIGUSR1)
    assert script.wait(120) == 0, script.output
    (finish,) = events(run, FinishEvent)
    assert finish.reason == "signal"
    assert (run / f"checkpoints/step_{finish.step:08d}/checkpoint.json").exists()
    assert [event.step for event in events(run, StepEvent)] == list(range(1, finish.step + 1))
    assert not list(tmp_path.glob("runs/run-2"))
    assert run_cli("launch", config, "--status").stdout == "signal\n"


def test_wrong_settings_end_with_2_before_torchrun_starts(tiny, start):
    script = start("torchrun_single_node.sh", "--config", tiny(), "--train.global_batch_size", 7)
    assert script.wait(60) == 2
    assert "train.global_batch_size: 7 is not divisible by" in script.output
    assert "torch" not in script.output


def test_two_nodes_that_agree_train_one_run_to_the_end(tiny, start, tmp_path):
    arguments = ("--config", tiny())
    codes, output, _ = two_nodes(start, "kubernetes/run_in_pod.sh", arguments, arguments)
    assert codes == [0, 0], output
    assert all("run completed" in text for text in output)
    (started,) = events(tmp_path / "runs/run", StartEvent)
    assert started.world_size == 2
    assert len(events(tmp_path / "runs/run", StepEvent)) == 12
    assert len(list(tmp_path.glob("logs/*-[01]/**/stderr.log"))) == 2


def test_two_nodes_with_differing_settings_are_refused_on_both_within_30_seconds(
    tiny, start, tmp_path
):
    codes, output, seconds = two_nodes(
        start,
        "torchrun_multi_node.sh",
        ("--config", tiny()),
        ("--config", tiny("other.yaml", **{"optimizer.lr": 1e-3})),
    )
    assert codes == [2, 2], output
    assert seconds < 30
    host = socket.gethostname()
    for text in output:
        message, line = text.splitlines()
        assert message.startswith("gnmr-megatron launch: nodes differ, so none starts")
        assert line.count(f" on {host} (process ") == 2
        assert line.strip().startswith("optimizer.lr: ")
        assert {"0.0003", "0.001"} <= set(line.split())
    assert not (tmp_path / "runs").exists()


def test_a_node_that_cannot_start_stops_the_other_one_with_its_reason(tiny, start, tmp_path):
    codes, output, _ = two_nodes(
        start, "torchrun_multi_node.sh", ("--config", tiny()), ("--config", tmp_path / "none.yaml")
    )
    assert codes == [2, 2], output
    assert all("none.yaml: cannot be read" in text for text in output)


@pytest.mark.parametrize(
    ("environment", "message"),
    [({}, "NNODES: is not set"), ({"NNODES": "2"}, "HEAD_ADDR: is not set")],
)
def test_nodes_that_cannot_know_where_to_meet_say_what_to_set(start, environment, message):
    script = start("torchrun_multi_node.sh", **environment)
    assert script.wait(60) == 2
    assert message in script.output
