"""Two hosts, made of network namespaces joined by a cable: TP 2 inside each, PP 2 across."""

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest

from gnmr_megatron.observability.events import FaultEvent, StepEvent, read_events
from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from tests.conftest import TINY, options, run_cli

STEPS = 24
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
LAYOUT = {
    "parallel.tensor_model_parallel_size": 2,
    "parallel.pipeline_model_parallel_size": 2,
    "optimizer.decay_steps": STEPS,
    "data.train_samples": 4000,
}


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


class Hosts:
    """Names of the namespaces; `eth-a` and `eth-b` are the ends of the cable."""

    def __init__(self):
        self.names = {side: f"gnmr-{os.getpid()}-{side}" for side in ADDRESSES}

    def connect(self):
        for name in self.names.values():
            if shutil.which("ip") is None or ip("netns", "add", name).returncode:
                pytest.skip("network namespaces can only be made by root, with iproute2")
        ends = [["eth-a", "netns", self.names["a"]], ["eth-b", "netns", self.names["b"]]]
        assert ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1]).returncode == 0
        for side, name in self.names.items():
            ip("-n", name, "addr", "add", f"{ADDRESSES[side]}/24", "dev", f"eth-{side}")
            ip("-n", name, "link", "set", "lo", "up")
            self.cable(side, "up")

    def cable(self, side, state):
        assert ip("-n", self.names[side], "link", "set", f"eth-{side}", state).returncode == 0

    def disconnect(self):
        for name in self.names.values() if shutil.which("ip") else ():
            for pid in ip("netns", "pids", name).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            ip("netns", "del", name)

    def slow_down(self):
        """Delay packets where the kernel can; else let so few bytes through that they wait."""
        for rule in (
            ["netem", "delay", "20ms"],
            ["tbf", "rate", "2mbit", "burst", "16kb", "latency", "2s"],
        ):
            command = ["tc", "qdisc", "add", "dev", "eth-a", "root", *rule]
            if ip("netns", "exec", self.names["a"], *command).returncode == 0:
                return
        pytest.skip("the kernel has no queueing discipline that slows a link")

    def start(self, side, logs, arguments):
        """torchrun on one host."""
        launcher = [
            "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=hosts",
            f"--rdzv-endpoint={ADDRESSES['a']}:29400", f"--rdzv-conf=is_host={int(side == 'a')}",
            f"--local-addr={ADDRESSES[side]}", "--monitor-interval=0.3", "-m", "gnmr_megatron", "train",
        ]  # fmt: skip
        with (logs / f"{side}.log").open("w") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[side], sys.executable, "-m",
                 "torch.distributed.run", *launcher, *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"eth-{side}"},
            )  # fmt: skip


@pytest.fixture(scope="module")
def hosts():
    found = Hosts()
    try:
        found.connect()
        yield found
    finally:
        found.disconnect()


def settings(dataset, runs_dir, **changes):
    return options(
        {
            **TINY,
            **LAYOUT,
            "data.datasets": f"[{dataset}]",
            "runs_dir": runs_dir,
            "train.steps": STEPS,
            "checkpoint.interval": 6,
            "train.hang_timeout_seconds": 8,
            "resume": "auto",
            **changes,
        }
    )


def steps(run):
    path = run / "events.jsonl"
    if not path.exists():
        return []
    return [event for event in read_events(path) if isinstance(event, StepEvent)]


def wait_for_step(run, step, processes):
    deadline = time.monotonic() + 120
    while not steps(run) or steps(run)[-1].step < step:
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)


@pytest.fixture(scope="module")
def one_host(dataset, tmp_path_factory):
    runs_dir = tmp_path_factory.mktemp("one_host")
    result = run_cli("train", *settings(dataset, runs_dir))
    assert result.returncode == 0, result.stderr
    return runs_dir / "run"


def assert_same_run(run, reference):
    assert [event.step for event in steps(run)] == list(range(1, STEPS + 1))
    assert [event.loss for event in steps(run)] == [event.loss for event in steps(reference)]
    ours, theirs = read_risk_matrix(run), read_risk_matrix(reference)
    np.testing.assert_array_equal(ours.norms, theirs.norms)
    np.testing.assert_array_equal(ours.selected, theirs.selected)
    assert theirs.selected.any()


def test_a_cut_cable_is_a_clear_failure_on_both_and_the_restart_is_the_run_of_one_host(
    dataset, tmp_path, hosts, one_host
):
    run, arguments = tmp_path / "run", settings(dataset, tmp_path)
    # so slow from step 14 on that the cable is cut in mid-run
    drill = [*arguments, "--faults=[{kind: slow_rank, step: 14, rank: 3, seconds: 4}]"]
    processes = [hosts.start(side, tmp_path, drill) for side in ADDRESSES]
    wait_for_step(run, 13, processes)
    hosts.cable("a", "down")
    try:
        assert processes[0].wait(timeout=60) != 0
        deadline = time.monotonic() + 60
        while "does not answer" not in (tmp_path / "b.log").read_text(errors="replace"):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        hosts.cable("a", "up")
        for process in processes:
            process.kill()
            process.wait()
    told = (tmp_path / "a.log").read_text(errors="replace")
    assert "no progress for 8 s (train.hang_timeout_seconds), waiting for ranks 2, 3" in told
    faults = [event for event in read_events(run / "events.jsonl") if isinstance(event, FaultEvent)]
    assert "hang" in [event.kind for event in faults]

    processes = [hosts.start(side, tmp_path, arguments) for side in ADDRESSES]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert_same_run(run, one_host)


def test_a_slow_link_slows_the_step_and_not_the_control(dataset, tmp_path, hosts):
    run = tmp_path / "run"
    processes = [hosts.start(side, tmp_path, settings(dataset, tmp_path)) for side in ADDRESSES]
    wait_for_step(run, 10, processes)
    hosts.slow_down()
    changed_after = steps(run)[-1].step
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    before = [event for event in steps(run) if 3 <= event.step <= changed_after]
    after = [event for event in steps(run) if event.step > changed_after + 1]
    seconds = [statistics.median(e.step_seconds for e in part) for part in (before, after)]
    share = [
        statistics.median(e.control_seconds / e.step_seconds for e in part)
        for part in (before, after)
    ]
    assert seconds[1] > 1.5 * seconds[0]
    assert share[1] < share[0]
