"""A small matrix of real runs: taken, resumed where it stopped, with equal budgets, told in a table."""

import csv
import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from gnmr_megatron.observability.events import FinishEvent, StepEvent, read_events
from tests.conftest import ROOT, TINY, run_cli

LOW = {"precision.low": "saved_int2", "precision.recovery": "saved_int8"}


@pytest.fixture(scope="module")
def taken(dataset, tmp_path_factory):
    """Two arms that need nothing of each other, and one with the budget of the second."""
    folder = tmp_path_factory.mktemp("experiment")
    (folder / "base.yaml").write_text("name: base\n")
    settings = {
        **TINY,
        "data.datasets": [str(dataset)],
        "train.steps": 14,
        "train.eval_interval": 1000,
    }
    suite = {
        "question": "Which units?",
        "low": "int2",
        "high": "bf16",
        "settings": settings,
        "arms": {
            "bf16": {"settings": {"precision.low": "bf16", "precision.recovery": "bf16", "gnmr.mode": "disabled"}},
            "int2": {"settings": LOW},
            "random": {"settings": {**LOW, "gnmr.policy": "random"}, "budget_of": "int2"},
        },
        "sizes": {"small": {"base": "base.yaml", "seeds": [3]}},
    }  # fmt: skip
    (folder / "trial.yaml").write_text(yaml.safe_dump(suite))
    result = experiment(folder)
    assert result.returncode == 0, result.stderr
    return folder, result


def experiment(folder, *arguments):
    return run_cli(
        "experiment", folder / "trial.yaml", "--output", folder / "out", "--jobs", 2, "--json", *arguments
    )  # fmt: skip


def steps(folder, run):
    return [
        e for e in read_events(folder / "out" / run / "events.jsonl") if isinstance(e, StepEvent)
    ]


def test_a_control_arm_recovers_as_many_units_in_each_step(taken):
    folder, _ = taken
    ours, random = (
        [len(event.recovered) for event in steps(folder, run)] for run in ("int2-s3", "random-s3")
    )
    assert ours[1:] == random[1:]  # the first set of an open-loop policy is chosen before any step
    assert sum(ours) > 5


def test_the_figures_are_those_of_the_runs(taken):
    folder, result = taken
    told = json.loads(result.stdout)
    rows = {
        row["arm"]: row
        for row in csv.DictReader((folder / "out/results.csv").read_text().splitlines())
    }
    assert rows.keys() == told["arms"].keys() == {"bf16", "int2", "random"}
    for arm, row in rows.items():
        summary = json.loads(run_cli("summary", folder / f"out/{arm}-s3", "--json").stdout)
        assert float(row["held_out_loss"]) == summary["held_out_loss"]
        assert int(row["recovered_unit_steps"]) == summary["recovered_unit_steps"]
        assert told["arms"][arm]["held_out_loss"] == summary["held_out_loss"]
    assert "bf16-s3" in (folder / "out/report.html").read_text()
    assert float(rows["int2"]["kept_bytes"]) < float(rows["bf16"]["kept_bytes"])


def test_what_is_done_stays_and_what_is_missing_is_taken(taken):
    folder, first = taken
    before = (folder / "out/int2-s3/events.jsonl").read_bytes()
    shutil.rmtree(folder / "out/bf16-s3")
    again = experiment(folder)
    assert again.returncode == 0, again.stderr
    assert [line.split() for line in again.stderr.splitlines()].count(["started", "bf16-s3"]) == 1
    assert "was done int2-s3" in again.stderr
    assert (folder / "out/int2-s3/events.jsonl").read_bytes() == before
    told, anew = (
        json.loads(result.stdout)["arms"]["bf16"]["held_out_loss"] for result in (first, again)
    )
    assert told == anew


def refused(result):
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    return line


def changed(taken, tmp_path, base="name: base\n", **arms):
    """The suite beside a copy of its runs, with changes of its base or its arms."""
    suite = yaml.safe_load((taken[0] / "trial.yaml").read_text())
    for arm, changes in arms.items():
        suite["arms"][arm] |= changes
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(suite))
    (tmp_path / "base.yaml").write_text(base)
    shutil.copytree(taken[0] / "out", tmp_path / "out")
    return tmp_path


def test_a_run_that_ends_before_its_last_step_is_not_done_and_nothing_follows_from_it(
    taken, tmp_path
):
    folder = changed(taken, tmp_path)
    shutil.rmtree(folder / "out")
    launch = tmp_path / "launch.sh"
    # what trains may end with 0 without having trained to the end: it does after SIGTERM
    launch.write_text(
        'case "$*" in *" int2-s3 "*) exit 0 ;; esac\n'
        f'echo "$@" >> {tmp_path}/launched\nexec {sys.executable} -m gnmr_megatron train "$@"\n'
    )
    result = experiment(folder, "--launch", f"bash {launch}")
    assert result.returncode == 1
    assert "int2-s3: was stopped before its end; start the suite again" in result.stderr
    assert "random-s3: needs int2-s3" in result.stderr
    launched = (tmp_path / "launched").read_text().splitlines()
    assert [" --name bf16-s3 " in line for line in launched] == [True]
    again = experiment(folder)
    assert again.returncode == 0, again.stderr
    told, first = (json.loads(text)["arms"] for text in (again.stdout, taken[1].stdout))
    for arm in first:
        assert told[arm]["held_out_loss"] == first[arm]["held_out_loss"]


def test_a_suite_that_is_ended_ends_its_runs_first(taken, tmp_path):
    folder = changed(taken, tmp_path)
    shutil.rmtree(folder / "out")
    command = [
        sys.executable, "-m", "gnmr_megatron", "experiment", folder / "trial.yaml", "--output", folder / "out",
        "--jobs", "1", "--set", "train.steps=4000", "--set", "data.train_samples=40000",
    ]  # fmt: skip
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as suite,
    ):
        events = folder / "out/bf16-s3/events.jsonl"
        deadline = time.monotonic() + 120
        while not (events.exists() and len(steps(folder, "bf16-s3")) > 3):
            assert time.monotonic() < deadline
            assert suite.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
        suite.terminate()
        assert suite.wait(timeout=60) == 128 + signal.SIGTERM
    finishes = [e for e in read_events(events) if isinstance(e, FinishEvent)]
    assert [finish.reason for finish in finishes] == [
        "signal"
    ]  # it saved, and nothing writes any more
    assert not (folder / "out/int2-s3").exists()


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("seed=3", "seeds are those of the suite's size"),
        ("name=mine", "runs are named by their arms and seeds"),
        ("runs_dir=/tmp", "give another --output"),
        ("resume=runs/a", "runs go on by themselves"),
    ],
)
def test_settings_of_the_suite_itself_are_refused(taken, setting, told):
    assert told in refused(experiment(taken[0], "--set", setting))


def test_a_dry_run_checks_settings_and_tells_what_its_commands_lack(taken):
    line = refused(experiment(taken[0], "--set", "gnmr.alpha=-1", "--dry-run"))
    assert "gnmr.alpha: -1.0 must be positive" in line
    result = experiment(taken[0], "--dry-run", "--launch", "srun run.sh")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[2] == "# random-s3: without the budget that int2-s3 gives it"
    assert [line.split()[:2] for line in lines if line[0] != "#"] == [["srun", "run.sh"]] * 3


def test_a_run_that_the_suite_did_not_start_is_refused(taken, tmp_path):
    folder = changed(taken, tmp_path)
    (folder / "out/int2-s3.settings.yaml").unlink()
    assert "int2-s3: was not started by this suite (" in refused(experiment(folder))


def test_a_run_with_other_settings_is_refused(taken):
    line = refused(experiment(taken[0], "--set", "optimizer.lr=0.01"))
    assert "bf16-s3: was started with other settings (optimizer.lr; see " in line


@pytest.mark.parametrize("section", ["{weight_decay: 0.05}", "adam.yaml"])
def test_a_run_on_another_base_is_refused(taken, tmp_path, section):
    (tmp_path / "adam.yaml").write_text("weight_decay: 0.05\n")
    folder = changed(taken, tmp_path, base=f"name: base\noptimizer: {section}\n")
    line = refused(experiment(folder))
    assert "bf16-s3: was started with other settings (optimizer.weight_decay; see " in line


def test_a_run_whose_budget_was_another_arms_is_refused(taken, tmp_path):
    line = refused(experiment(changed(taken, tmp_path, random={"budget_of": "bf16"})))
    # its fixed budget counts, and the run it comes from
    assert (
        "random-s3: was started with other settings (budget_of, run bf16-s3, run int2-s3;" in line
    )


def test_a_run_whose_budget_comes_from_a_changed_run_is_refused(taken, tmp_path):
    settings = {**LOW, "gnmr.alpha": 3.5}
    folder = changed(taken, tmp_path, int2={"settings": settings})
    assert "int2-s3: was started with other settings (gnmr.alpha;" in refused(experiment(folder))
    for path in (folder / "out").glob("int2-s3*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    line = refused(experiment(folder))
    assert "random-s3: was started with other settings (run int2-s3;" in line


def test_a_run_that_fails_is_told_with_its_message_and_others_go_on(taken, tmp_path):
    folder, _ = taken
    result = run_cli(
        "experiment", folder / "trial.yaml", "--output", tmp_path, "--jobs", 2,
        "--set", "train.steps=3", "--set", "init_from=missing",
    )  # fmt: skip
    assert result.returncode == 1
    assert "init_from: missing" in result.stderr
    assert "random-s3: needs int2-s3" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gnmr.alpha": -1}, "int2: gnmr.alpha: -1.0 must be positive and finite"),
        ({"gnmr.lock_step": 2}, "did you mean `gnmr.lock_steps`?"),
        ({"train.eval_samples": 7}, "int2: train.eval_samples: 7 is not divisible by"),
    ],
)
def test_settings_of_all_arms_are_checked_before_the_first_run(taken, tmp_path, change, told):
    suite = yaml.safe_load((taken[0] / "trial.yaml").read_text())
    suite["arms"]["int2"]["settings"] |= change
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(suite))
    (tmp_path / "base.yaml").write_text("name: base\n")
    result = experiment(tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert told in line
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def prepared(dataset, tmp_path_factory):
    """Adapters on a base of the suite's own, trained on a text that the suite prepares."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "base.yaml").write_text("name: base\n")
    (folder / "text").mkdir()
    for name in ("corpus", "prepare"):
        shutil.copy(ROOT / f"gnmr_megatron/data/{name}.py", folder / "text")
    run = {**TINY, "train.steps": 4, "train.eval_interval": 4, "data.split": "50,50,0"}
    suite = {
        "question": "Do adapters cost less in INT8?",
        "low": "int8",
        "high": "exact",
        "datasets": {"more": {"inputs": [str(folder / "text")], "tokenizer_from": str(dataset)}},
        "preparation": {"start": {**run, "data.datasets": [str(dataset)], "train.steps": 5}},
        "settings": {
            **run, "data.datasets": ["{output}/more"], "lora.rank": 2, "lora.base": "{output}/start",
            "precision.recovery": "fp32", "gnmr.mode": "disabled",
        },
        "arms": {
            "exact": {"settings": {"precision.low": "fp32"}},
            "int8": {"settings": {"precision.low": "frozen_int8"}},
        },
        "sizes": {
            "small": {
                "base": "base.yaml", "seeds": [3],
                "preparation": {"start": {"precision.low": "fp32", "precision.recovery": "fp32", "train.steps": 6}},
            }
        },
    }  # fmt: skip
    (folder / "trial.yaml").write_text(yaml.safe_dump(suite))
    result = experiment(folder)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_what_is_prepared_comes_before_all_arms_and_is_no_arm(prepared):
    folder, result = prepared
    told = [line.split() for line in result.stderr.splitlines()]
    assert told[:2] == [["started", "start"], ["done", "start"]]
    assert json.loads(result.stdout)["arms"].keys() == {"exact", "int8"}
    assert len(steps(folder, "start")) == 6  # the size wins
    base = (folder / "out/start/checkpoints/step_00000006").resolve()
    for run in ("exact-s3", "int8-s3"):
        config = yaml.safe_load((folder / f"out/{run}/config.yaml").read_text())
        assert config["data"]["datasets"] == [str(folder / "out/more")]
        saved = json.loads(
            (folder / f"out/{run}/checkpoints/step_00000004/checkpoint.json").read_text()
        )
        assert saved["state"]["base"] == str(base)


def test_what_is_prepared_is_not_prepared_again(prepared):
    folder, _ = prepared
    kept = [folder / "out/start/events.jsonl", folder / "out/more/text.bin"]
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in kept]
    shutil.rmtree(folder / "out/int8-s3")
    (folder / "text/corpus.py").unlink()
    again = experiment(folder)
    assert again.returncode == 0, again.stderr
    told = {tuple(line.split()) for line in again.stderr.splitlines()}
    assert {("was", "done", "start"), ("was", "done", "exact-s3"), ("done", "int8-s3")} <= told
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in kept] == before


def test_a_run_on_text_that_was_prepared_anew_is_refused(prepared, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(prepared[0], folder)
    shutil.rmtree(folder / "out/more")
    suite = yaml.safe_load((folder / "trial.yaml").read_text())
    suite["datasets"]["more"]["inputs"] = [str(folder / "text/prepare.py")]
    (folder / "trial.yaml").write_text(yaml.safe_dump(suite))
    # the base does not read that text
    assert "start: was started with other settings (text of more;" in refused(experiment(folder))


def test_text_is_prepared_anew_as_long_as_no_run_was_started(prepared, tmp_path):
    folder = tmp_path
    shutil.copytree(prepared[0], folder, dirs_exist_ok=True)
    before = (folder / "out/more/manifest.json").read_bytes()
    for path in (folder / "out").glob("*.settings.yaml"):
        path.unlink()
    suite = yaml.safe_load((folder / "trial.yaml").read_text())
    suite["datasets"]["more"]["inputs"] = [str(folder / "text/prepare.py")]
    suite["arms"]["int8"]["settings"]["gnmr.alpha"] = -1  # so that no run starts
    (folder / "trial.yaml").write_text(yaml.safe_dump(suite))
    assert "int8: gnmr.alpha" in refused(experiment(folder))
    assert (folder / "out/more/manifest.json").read_bytes() != before


def test_where_the_preparation_fails_nothing_else_starts(prepared, tmp_path):
    suite = yaml.safe_load((prepared[0] / "trial.yaml").read_text())
    suite["preparation"]["start"]["init_from"] = "missing"
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(suite))
    (tmp_path / "base.yaml").write_text("name: base\n")
    result = experiment(tmp_path)
    assert result.returncode == 1
    assert "init_from: missing" in result.stderr
    assert "int8-s3: needs start" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out/int8-s3").exists()


def test_text_that_is_not_there_is_told_in_one_line(prepared, tmp_path):
    suite = yaml.safe_load((prepared[0] / "trial.yaml").read_text())
    suite["datasets"]["more"]["inputs"] = ["missing.txt"]
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(suite))
    result = experiment(tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "more: " in line
    assert "missing.txt: does not exist" in line
