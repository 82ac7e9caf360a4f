"""Launch scripts on a tiny run."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from tests.conftest import ROOT, TINY


@pytest.fixture
def tiny(dataset, tmp_path):
    """Writes a configuration file of the tiny run, changed; runs go to tmp_path/runs."""

    def write(name="tiny.yaml", **changes):
        settings = {
            "data.datasets": [str(dataset)],
            "runs_dir": str(tmp_path / "runs"),
            **TINY,
            **changes,
        }
        nested = {}
        for key, value in settings.items():
            section, _, field = key.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[field] = value
        path = tmp_path / name
        path.write_text(yaml.safe_dump(nested))
        return path

    return write


@dataclass
class Script:
    """A launch script at work. Its output goes to a file: a process that outlives it would keep a pipe open."""

    process: subprocess.Popen
    path: Path

    @property
    def output(self):
        return self.path.read_text()

    def wait(self, seconds):
        return self.process.wait(timeout=seconds)


@pytest.fixture
def start(tmp_path):
    """Starts a launch script; what is still running at the end is killed."""
    scripts = []
    shared = {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}

    def run(script, *arguments, **environment):
        path = tmp_path / f"output_{len(scripts)}.txt"
        with path.open("w") as output:
            process = subprocess.Popen(
                [ROOT / "launch" / script, *map(str, arguments)],
                env={**os.environ, **shared, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=tmp_path,
            )
        scripts.append(Script(process, path))
        return scripts[-1]

    yield run
    for script in scripts:
        if script.process.poll() is None:  # torchrun's processes are in sessions of their own
            tree = psutil.Process(script.process.pid)
            for each in [*tree.children(recursive=True), tree]:
                each.kill()
            script.wait(10)


def wait_until(condition, script, *, seconds=120):
    """Poll until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert script.process.poll() is None, script.output
        assert time.monotonic() < deadline, script.output
        time.sleep(0.1)
