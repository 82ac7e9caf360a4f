"""`gnmr-megatron doctor` as it is started: alone, on a broken machine, by torchrun; and its needs against real runs."""

import json
import os
import shlex
import socket
import subprocess
import sys

import jsonschema
import pytest

from gnmr_megatron.cli.main import main
from gnmr_megatron.precision.catalog import PATHS
from gnmr_megatron.training.checkup.disk_need import checkpoint_bytes
from gnmr_megatron.training.checkup.memory_need import memory_need
from gnmr_megatron.training.config_files import parse_run, run_parser
from gnmr_megatron.training.launch_plan import LaunchPlan
from tests.conftest import ROOT, TINY, options

TEXT = {"type": "string"}
FINDING = {
    "type": "object",
    "additionalProperties": False,
    "required": ["topic", "check", "status", "detail", "advice", "node"],
    "properties": {
        "topic": {
            "enum": [
                "versions", "devices", "precision", "memory and disk", "network", "run", "nodes",
            ]
        },
        "check": {"type": "string", "minLength": 1},
        "status": {"enum": ["ok", "warning", "problem", "not applicable"]},
        "detail": {"type": "string", "minLength": 1},
        "advice": TEXT,
        "node": TEXT,
    },
    # whoever is told of a problem is told what to do
    "if": {"properties": {"status": {"enum": ["warning", "problem"]}}},
    "then": {"properties": {"advice": {"minLength": 1}}},
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["ready", "sentence", "nodes", "processes", "counts", "findings"],
    "properties": {
        "ready": {"type": "boolean"},
        "sentence": TEXT,
        "nodes": {"type": "array", "items": TEXT, "minItems": 1},
        "processes": {"type": "integer", "minimum": 1},
        "counts": {
            "type": "object",
            "additionalProperties": False,
            "required": ["ok", "warning", "problem", "not applicable"],
            "properties": {
                status: {"type": "integer"}
                for status in ("ok", "warning", "problem", "not applicable")
            },
        },
        "findings": {"type": "array", "items": FINDING},
    },
}


def checked(text):
    """A report that keeps to its schema."""
    report = json.loads(text)
    jsonschema.validate(report, SCHEMA)
    statuses = [finding["status"] for finding in report["findings"]]
    assert report["counts"] == {status: statuses.count(status) for status in report["counts"]}
    return report


def with_status(report, status):
    return {f["check"]: f for f in report["findings"] if f["status"] == status}


@pytest.fixture
def tiny(dataset, tmp_path):
    def arguments(**changes):
        folders = {"data.datasets": f"[{dataset}]", "runs_dir": tmp_path / "runs"}
        return options({**TINY, **folders, **changes})

    return arguments


@pytest.fixture
def doctor(capsys, monkeypatch):
    """Runs the verb in this process; returns exit code and what it printed."""
    monkeypatch.delenv("RANK", raising=False)

    def run(*arguments):
        code = main(["doctor", *map(str, arguments)])
        return code, capsys.readouterr().out

    return run


@pytest.mark.filterwarnings("ignore")  # of the engine's import
def test_a_run_that_fits_is_ready_and_nothing_is_written(doctor, tiny, tmp_path):
    code, text = doctor(*tiny(), "--json")
    report = checked(text)
    assert (code, report["ready"]) == (0, True), with_status(report, "problem")
    checks = {finding["check"] for finding in report["findings"]}
    assert set(PATHS) < checks
    assert {"python", "megatron-core", "memory for the run", "disk for the run folder"} < checks
    assert {"settings", "data", "runs_dir", "port 29500"} < checks
    assert report["sentence"].startswith("Ready: ")
    assert not (tmp_path / "runs").exists()

    code, text = doctor(*tiny())
    lines = text.splitlines()
    assert (code, lines[-1]) == (0, report["sentence"])
    assert "\x1b" not in text
    assert max(map(len, lines)) <= 140


@pytest.mark.filterwarnings("ignore")
def test_whatever_is_broken_is_found_at_once_and_ends_with_1(doctor, tiny, tmp_path):
    (tmp_path / "file").write_text("")
    changes = {
        "runs_dir": tmp_path / "file/runs",
        "train.global_batch_size": 7,
        "data.datasets": "[nowhere]",
    }
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, text = doctor(*tiny(**changes), "--rdzv-endpoint", f"localhost:{port}", "--json")
    report = checked(text)
    problems = with_status(report, "problem")
    assert code == 1
    assert set(problems) == {f"port {port}", "runs_dir", "settings", "data"}
    assert "nearest that are: 6, 8" in problems["settings"]["advice"]
    assert report["sentence"].startswith("Not ready: 4 problems (")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--config", "none.yaml"], "none.yaml: cannot be read"),
        (["--gnmr.alhpa=3"], "--gnmr.alhpa"),
    ],
)
def test_settings_that_cannot_be_read_end_with_2_and_the_machine_is_looked_at(
    doctor, arguments, part
):
    code, text = doctor(*arguments, "--json")
    report = checked(text)
    assert code == 2
    assert part in with_status(report, "problem")["settings cannot be read"]["detail"]
    assert "torch" in {finding["check"] for finding in report["findings"]}


def test_wrong_use_ends_with_2_and_help_teaches(doctor, capsys):
    assert doctor("--nodes", "0") == (2, "")
    with pytest.raises(SystemExit) as ended:
        doctor("--help")
    assert ended.value.code == 0
    assert "Exit codes: 0 nothing that is required is broken" in capsys.readouterr().out


REASON = "libcudart.so.12: cannot open shared object file"


def break_package(folder, name):
    """Puts a package that cannot be imported before the real one; returns the PYTHONPATH that finds it."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(f"raise OSError({REASON!r})\n")
    return os.pathsep.join([str(folder), str(ROOT)])


def test_a_broken_torch_is_a_finding_and_all_else_is_still_looked_at(tiny, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "gnmr_megatron", "doctor", *tiny(), "--json"],
        env={**os.environ, "PYTHONPATH": break_package(tmp_path / "broken", "torch")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stderr) == (1, "")
    report = checked(result.stdout)
    torch = with_status(report, "problem")["torch"]
    assert torch["detail"].endswith(f"cannot be imported: OSError: {REASON}")
    assert "pip install --force-reinstall" in torch["advice"]
    fine = with_status(report, "ok")
    assert {"numpy", "data", "runs_dir", "settings", "disk for the run folder"} < set(fine)


# the second process: other settings, a broken megatron-core and, where root can, a host name of its own
NODE = """
export LOCAL_WORLD_SIZE=1
if [ "$RANK" = 1 ]; then
  export LOCAL_RANK=0 PYTHONPATH="$BROKEN"
  set -- "$@" --optimizer.lr=1e-3
  if unshare --uts true 2>/dev/null; then
    exec unshare --uts sh -c 'hostname node-b && exec "$@"' sh "$@"
  fi
fi
exec "$@"
"""


def test_torchrun_compares_two_nodes_and_measures_their_clocks(tiny, tmp_path):
    command = [sys.executable, "-m", "gnmr_megatron", "doctor", *tiny(), "--json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    meet = ["--local-addr=127.0.0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    result = subprocess.run(
        [*torchrun, *meet, "--no-python", "sh", "-c", f"set -- {shlex.join(command)}; {NODE}"],
        env={
            **os.environ,
            "BROKEN": break_package(tmp_path / "broken", "megatron"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    report = checked(result.stdout)  # of the first process alone
    assert report["processes"] == 2
    fine = with_status(report, "ok")
    assert fine["same hardware"]["detail"]
    assert "2 ranks: " in fine["all-reduce over gloo"]["detail"]
    problems = with_status(report, "problem")
    assert set(problems) == {"same everywhere", "megatron-core"}
    assert problems["same everywhere"]["detail"].startswith("optimizer.lr: 0.0003 on ")
    assert problems["megatron-core"]["detail"].endswith(f"OSError: {REASON}")
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a second host name takes root: clocks of two nodes were not compared")
    assert report["nodes"] == [socket.gethostname(), "node-b"]
    assert problems["megatron-core"]["node"] == "node-b"
    # one machine has one clock, so the offset is no larger than what messages take
    words = fine["clock of node-b"]["detail"].split()
    offset, within = abs(float(words[0])), float(words[-2])
    assert offset <= within + 0.01


CASES = {
    "fp32, packed inputs": {},
    "bf16, exact inputs, sharded state": {
        "model.dtype": "bf16",
        "precision.low": "bf16",
        "precision.recovery": "bf16",
        "parallel.use_distributed_optimizer": "true",
    },
}


def test_what_a_run_needs_is_what_its_tensors_and_its_checkpoint_take(dataset, tmp_path):
    """Weights, gradients and optimizer state but for padding and counters; activations and checkpoint within 3 %."""
    shared = {
        "data.datasets": f"[{dataset}]",
        "train.steps": 1,
        "train.global_batch_size": 2,  # one microbatch
        "optimizer.warmup_steps": 0,
        "optimizer.decay_steps": 9,
    }
    cases = {
        name: options({**TINY, **shared, **changes, "runs_dir": tmp_path / name.split(",")[0]})
        for name, changes in CASES.items()
    }
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = [sys.executable, ROOT / "tests/end_to_end/measure_needs.py", tmp_path / "cases.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        script, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    for name, measured in json.loads(result.stdout.splitlines()[-1]).items():
        config, _ = parse_run(run_parser("test", description="", epilog=""), cases[name])
        need = memory_need(LaunchPlan(config, 1, 1, ()), vocab_size=500, on_gpu=False)
        padding = 64 * 4 if config.parallel.use_distributed_optimizer else 0  # of a buffer
        counters = 4 * 31  # of updates, of each parameter tensor
        for part, more in (("weights", 0), ("gradients", 0), ("optimizer", counters)):
            assert 0 <= measured[part] - getattr(need, part) <= padding + more, (name, part)
        assert need.activations == pytest.approx(measured["activations"], rel=0.03)
        (saved,) = (tmp_path / name.split(",")[0]).glob("run/checkpoints/step_*")
        size = sum(file.stat().st_size for file in saved.iterdir())
        assert checkpoint_bytes(config, vocab_size=500, world_size=1) == pytest.approx(
            size, rel=0.03
        )
