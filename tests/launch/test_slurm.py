"""launch/slurm.sbatch on a real Slurm of one host: a signal saves and queues again, a completed run ends."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from gnmr_megatron.observability.events import FinishEvent, StartEvent, StepEvent, read_events
from tests.conftest import ROOT, run_cli

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: no {', '.join(MISSING)}"),
    pytest.mark.skipif(os.getuid() != 0, reason="slurmd has to run as root"),
]

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SchedulerParameters=sched_interval=1
SlurmctldPort={port}
SlurmdPort={other_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition, *, seconds=100):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def slurm(tmp_path):
    """Runs a Slurm command in a cluster of this host, which lives as long as the test."""
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(host=host, folder=folder, port=free_port(), other_port=free_port())
    )
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1",
                   "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "NPROC_PER_NODE": "2",
                   "RDZV_PORT": str(free_port()), "LOG_DIR": str(tmp_path / "logs")}  # fmt: skip

    def run(*command):
        result = subprocess.run(
            [str(word) for word in command], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )  # fmt: skip
        return result.stdout.strip()

    run("munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock", f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed")  # fmt: skip
    run("slurmctld")
    run("slurmd")
    wait_until(lambda: run("sinfo", "-h", "-o", "%t") == "idle", seconds=20)
    yield run
    run("scancel", "--user=root", "--signal=KILL", "--full")
    run("scancel", "--user=root")
    wait_until(lambda: not run("squeue", "--noheader"))
    for name in ("slurmd", "slurmctld", "munged"):
        os.kill(int((folder / f"{name}.pid").read_text()), signal.SIGTERM)


@pytest.mark.timeout(300)
def test_a_signal_saves_and_queues_the_job_again_and_a_completed_run_ends(slurm, tiny, tmp_path):
    config, run, output = tiny(**{"train.steps": 60}), tmp_path / "runs/run", tmp_path / "job.txt"

    def events(kind):
        path = run / "events.jsonl"
        return (
            [event for event in read_events(path) if isinstance(event, kind)]
            if path.exists()
            else []
        )

    def state():
        fields = slurm("scontrol", "--oneliner", "show", "job", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    job = slurm(
        "sbatch", "--parsable", f"--output={output}", "launch/slurm.sbatch", "--config", config
    )
    wait_until(lambda: len(events(StepEvent)) > 3)
    slurm("scancel", "--signal=USR1", "--batch", job)
    wait_until(lambda: state()["Restarts"] == "1")
    (stopped,) = events(FinishEvent)
    assert stopped.reason == "signal"
    assert f"job {job}: asked to stop, exit code 0, run signal" in output.read_text()

    wait_until(lambda: events(FinishEvent)[-1].reason == "completed")
    slurm("scancel", "--signal=USR1", "--batch", job)
    wait_until(lambda: state()["JobState"] == "COMPLETED")
    assert state()["Restarts"] == "1"
    assert f"job {job}: asked to stop, exit code 0, run completed" in output.read_text()
    assert [event.step for event in events(StartEvent)] == [1, stopped.step + 1]
    assert [event.step for event in events(StepEvent)] == list(range(1, 61))
    assert len(list(tmp_path.glob(f"logs/*-{job}-[01].log"))) == 2
    assert run_cli("launch", config, "--status").stdout == "completed\n"
