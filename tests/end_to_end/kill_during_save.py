"""Kill a process while it saves, again and again, and look at what is left.

python -m tests.end_to_end.kill_during_save --kills 20
"""

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gnmr_megatron.training.checkpoint_files import (
    FOLDER,
    PARTIAL,
    complete_checkpoints,
    leftovers,
    step_of,
    verify,
)
from tests.conftest import TINY, options, prepare_tiny_dataset

READY = "ready"


def save_for_ever(arguments):
    """Set up a run and save one step after the other, until killed."""
    import warnings

    warnings.filterwarnings("ignore")
    from gnmr_megatron.training.config_files import parse_run, run_parser
    from gnmr_megatron.training.setup import set_up

    config, _ = parse_run(run_parser("worker", description="", epilog=""), arguments)
    trainer = set_up(config)
    trainer.train()  # so that there are moments to save
    print(READY, flush=True)
    while True:
        trainer.state.step += 1
        trainer.saving.checkpointer.save(trainer.state)


def kill_once(runs_dir, dataset, delay):
    """Start a run that saves, kill it after `delay` seconds of saving, and count what is there."""
    settings = {
        **TINY,
        "train.steps": 3,
        "checkpoint.keep_last": 3,
        "resume": "auto",
        "data.train_samples": 10_000,
        "data.datasets": f"[{dataset}]",
        "runs_dir": runs_dir,
    }
    command = [sys.executable, "-m", "tests.end_to_end.kill_during_save", "--save"]
    process = subprocess.Popen(
        [*command, *options(settings)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline().strip() == READY
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)  # its writing child has to go by itself
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while group_lives(process.pid):
        assert time.monotonic() < deadline, "a writer outlived its process"
        time.sleep(0.01)
    folder = runs_dir / "run" / FOLDER
    complete = complete_checkpoints(folder)
    return {
        "killed while writing": bool(leftovers(folder, PARTIAL)),
        "complete": [step_of(path) for path in complete],
        "damages": [line for path in complete for line in verify(path)],
    }


def group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def kill_loop(runs_dir, dataset, kills, seed=0):
    """Outcomes of so many kills at random moments; each run goes on from what the last one left."""
    draw = random.Random(seed)
    return [kill_once(runs_dir, dataset, draw.uniform(0.0, 0.6)) for _ in range(kills)]


def main(arguments):
    if arguments[:1] == ["--save"]:
        save_for_ever(arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    kills = parser.parse_args(arguments).kills
    with tempfile.TemporaryDirectory() as folder:
        dataset = prepare_tiny_dataset(Path(folder) / "data")
        outcomes = kill_loop(Path(folder), dataset, kills)
    count = collections.Counter()
    for outcome in outcomes:
        count["kills"] += 1
        count["killed while writing"] += outcome["killed while writing"]
        count["complete checkpoints found"] += len(outcome["complete"])
        count["of them damaged"] += len(outcome["damages"])
    print(*(f"{name}: {number}" for name, number in count.items()), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
