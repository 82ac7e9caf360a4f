"""The examples run as they are, recover the unit that was shocked, and learn; what they add is five lines at most."""

import os
import subprocess
import sys

import pytest

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.observability.events import StepEvent
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"
# the unit whose gradient is made larger, and in which step
SHOCKS = {
    "plain_pytorch": ("layers.2.up", 30),
    "huggingface_trainer": ("model.layers.1.mlp.up_proj", 20),
    "megatron_lm_pretrain": ("decoder.layers.2.mlp.linear_fc1", 20),
}
# all in one process, since importing their libraries takes longer than they do
RUN_ALL = """
import os, runpy, sys
from pathlib import Path
folder = Path(sys.argv.pop(1))
sys.argv = ["example", str(folder / "output")]
for example in %r:
    print("example", example, flush=True)
    os.environ["RUN_FOLDER"] = str(folder / example)
    runpy.run_path(os.path.join("examples", example + ".py"), run_name="__main__")
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Folder of the runs, and what each example printed."""
    folder = tmp_path_factory.mktemp("examples")
    result = subprocess.run(
        [sys.executable, "-c", RUN_ALL % list(SHOCKS), folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    printed = {}
    for part in result.stdout.split("example ")[1:]:
        name, _, text = part.partition("\n")
        printed[name] = text
    return folder, printed


@pytest.mark.parametrize("example", SHOCKS)
def test_the_shocked_unit_recovers_in_the_next_step_within_the_budget(ran, example):
    run = RecordedRun(ran[0] / example)
    unit, shock = SHOCKS[example]
    steps = list(run.events_of(StepEvent))
    assert steps[shock].step == shock + 1
    assert unit in steps[shock].recovered
    assert unit not in steps[shock - 1].recovered
    budget = run.starts[0].max_recovered
    assert max(len(step.recovered) for step in steps) == budget


@pytest.mark.parametrize("example", ["plain_pytorch", "huggingface_trainer"])
def test_the_loss_falls(ran, example):
    losses = [step.loss for step in RecordedRun(ran[0] / example).events_of(StepEvent)]
    assert losses[-1] < 0.65 * losses[0]


def test_the_loss_falls_in_the_loop_of_megatron_lm(ran):
    lines = ran[1]["megatron_lm_pretrain"].splitlines()
    losses = [float(line.split()[3]) for line in lines if line.startswith("step")]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("example", SHOCKS)
def test_what_a_user_adds_is_marked_and_at_most_five_lines(example):
    lines = (EXAMPLES / f"{example}.py").read_text().splitlines()
    added = [line for line in lines if line.endswith("# control")]
    others = [line for line in lines if line not in added]
    assert 4 <= len(added) <= 5
    assert any("attach(" in line for line in added)
    assert not any("attach" in line for line in others if not line.lstrip().startswith(('"', "`")))
    spelled = {4: "four", 5: "five"}[len(added)]
    assert f"the {spelled} lines marked `# control`" in "\n".join(others)


def test_the_readme_names_every_example_and_its_command():
    text = (EXAMPLES / "README.md").read_text()
    for example in SHOCKS:
        assert f"python examples/{example}.py" in text
