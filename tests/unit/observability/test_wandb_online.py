"""W&B's real client against a server that answers as far as it must, and dies."""

import json
import os
import subprocess
import sys
import time

import pytest

from gnmr_megatron.observability.dashboards.wandb_file import logged_steps
from tests.conftest import ROOT
from tests.unit.observability.test_wandb_tracker import in_a_process

KEY = "0123456789abcdef0123456789abcdef01234567"
LAST = 20


class Server:
    """A W&B that keeps its runs in a file; it may be killed and started again."""

    def __init__(self, folder):
        self._port, self.state = folder / "port", folder / "state.json"

    def __enter__(self):
        script = ROOT / "tests/doubles/wandb_server.py"
        self.process = subprocess.Popen([sys.executable, script, self._port, self.state])
        while not self._port.exists() or not self._port.read_text():
            assert self.process.poll() is None
            time.sleep(0.05)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self._port.unlink()

    @property
    def environment(self):
        url = f"http://127.0.0.1:{self._port.read_text()}"
        return {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url}

    def run(self):
        (run,) = json.loads(self.state.read_text()).values()
        return run


def online(server, folder, first, last, *, cut=None, **environment):
    return in_a_process(
        folder,
        first,
        last,
        "error",
        environment=server.environment | environment,
        wandb_mode="online",
        wandb_table_interval=100,
        wandb_report=False,
        cut=cut,
    )


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Steps 1 to 6; 5 to 20 from a checkpoint, while the server dies; what is left is synced to its successor."""
    place = tmp_path_factory.mktemp("online")
    folder, server = place / "tiny", Server(place)
    with server:
        results = [online(server, folder, 1, 6)]
        cut = [server.process.pid, str(server.state)]
        began = time.monotonic()
        # a second for an answer that W&B asks for, 19 by default
        results.append(online(server, folder, 5, LAST, cut=cut, WANDB_HTTP_TIMEOUT="1"))
        seconds = time.monotonic() - began
        before = server.run()
    part = max((folder / "wandb").glob("run-*"))
    with server:
        command = ["wandb", "sync", "--include-online", part]
        subprocess.run(
            [sys.executable, "-m", *command],
            cwd=place,
            env={**os.environ, **server.environment},
            capture_output=True,
            timeout=60,
            check=True,
        )
        after = server.run()
    return results, seconds, before, after, part


def steps(run):
    return [row["_step"] for row in run["history"]]


def test_a_network_that_dies_ends_neither_training_nor_the_waiting_for_it(story):
    results, seconds, *_ = story
    assert [result.returncode for result in results] == [0, 0]
    assert results[0].stderr == results[0].stdout == results[1].stdout == ""
    assert seconds < 100


def test_it_is_told_in_a_line_each_with_the_command_that_sends_the_rest(story):
    results, *_, part = story
    *media, last = results[1].stderr.splitlines()
    assert all(line.startswith("W&B did not take the table and pictures of") for line in media)
    assert len(media) <= 1
    assert last.startswith("W&B did not take everything within 2 s of the end")
    assert last.endswith(f"wandb sync --include-online {part}")


def test_the_key_is_nowhere_in_what_is_said_or_written(story):
    results, *_, part = story
    assert KEY not in "".join(result.stderr + result.stdout for result in results)
    files = [path for path in part.parents[1].rglob("*") if path.is_file()]
    assert {".wandb", ".jsonl", ".bin", ".log"} <= {path.suffix for path in files}
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_resumed_run_is_one_run_on_the_server_and_each_step_is_there_once(story):
    _, _, before, after, part = story
    taken = steps(before)
    assert taken[:6] == [1, 2, 3, 4, 5, 6]
    assert taken == list(range(1, len(taken) + 1))
    assert logged_steps(part / f"run-{part.name[-8:]}.wandb", "train/loss")[1] == list(
        range(7, LAST + 1)
    )
    assert steps(after) == list(range(1, LAST + 1))
    assert after["tags"] == ["small"]
    assert after["config"]["seed"] == {"value": 7}


def test_pictures_and_tables_arrive(story):
    _, _, before, _, _ = story
    for key in ("images/control/heat_map_6", "table/control/recovery_set_6"):
        assert any(name.startswith(f"media/{key}_") for name in before["files"])
    kinds = {kind for kind, _ in before["artifacts"]}
    assert kinds >= {"wandb-run-incremental-table", "run_table"}


def test_a_server_that_is_not_there_makes_the_run_an_offline_one(tmp_path):
    nowhere = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    folder = tmp_path / "tiny"
    result = in_a_process(
        folder, 1, 3, "error", environment=nowhere, wandb_mode="online", init_seconds=2
    )
    assert (result.returncode, result.stdout) == (0, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("W&B cannot be used online (CommError: ")
    assert line.endswith(f"the run is written offline: wandb sync {folder}/wandb/offline-run-*")
    (part,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    assert logged_steps(part, "train/loss") == (3, [1, 2, 3])
