import os
import subprocess
import sys
from pathlib import Path


def test_a_rank_that_decided_otherwise_is_named_on_every_rank():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    result = subprocess.run(
        [*command, Path(__file__).with_name("disagreeing_worker.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert [line.split(":")[0] for line in lines] == ["rank 0", "rank 1", "rank 2"]
    for line in lines:
        assert "step 2: ranks [1] decided another recovery set than the other 2 ranks" in line
