"""The conformance tests against the double of Transformer Engine, in a process whose torch they may patch."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_adapter_conforms_to_the_double():
    path = [str(ROOT / "tests/doubles"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/conformance",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "-v",
    ]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "tests/doubles/transformer_engine/__init__.py" in result.stdout
    assert "24 passed" in result.stdout
