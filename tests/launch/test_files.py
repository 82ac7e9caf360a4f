"""Scripts, images and the compose file, by the tools that know them."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT

SCRIPTS = [
    *sorted((ROOT / "launch").rglob("*.sh")),
    ROOT / "launch/slurm.sbatch",
    ROOT / "docker/entrypoint.sh",
]
IMAGES = [ROOT / "docker/Dockerfile", ROOT / "docker/Dockerfile.cpu"]
TOOLS = Path(sys.executable).parent


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_shellcheck_finds_nothing_in_the_scripts():
    result = run(TOOLS / "shellcheck", "--external-sources", *SCRIPTS)
    assert result.returncode == 0, result.stdout


def test_hadolint_finds_nothing_in_the_images():
    result = run(TOOLS / "hadolint", *IMAGES)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("script", ["torchrun_single_node.sh", "torchrun_multi_node.sh"])
def test_help_names_every_environment_variable_that_a_script_reads(script):
    path = ROOT / "launch" / script
    result = run(path, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith(f"usage: launch/{script} --config FILE")
    code = path.read_text() + (ROOT / "launch/supervise.sh").read_text()
    code = "\n".join(line for line in code.splitlines() if not line.startswith("#"))
    read = set(re.findall(r"\$\{([A-Z][A-Z_]+):-", code))
    assert {"MAX_RESTARTS", "NPROC_PER_NODE", "PYTHON"} <= read
    assert read <= set(re.findall(r"[A-Z][A-Z_]+", result.stdout))


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_images_are_pinned_run_as_a_user_and_install_dependencies_before_sources(image):
    text = image.read_text()
    (base,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", text, re.MULTILINE)
    assert re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", base)
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    assert re.search(r"pip install -c \S+ \.", text).start() < text.index("COPY . .")
    assert not re.search(r"(?i)(api.?key|token|password|secret)\s*=", text)


def test_what_a_base_image_brings_stays_and_our_pins_hold_for_the_rest(tmp_path):
    pins = tmp_path / "constraints.txt"
    pins.write_text("torch==0.7.7\nPyYAML==0.7.7\nnot_here==3.2  # a note\n# a comment\n")
    result = run(sys.executable, "docker/constraints_over_base.py", pins)
    lines = result.stdout.splitlines()
    assert f"torch=={version('torch')}" in lines
    assert f"pyyaml=={version('pyyaml')}" in lines
    assert "not_here==3.2" in lines
    assert not [line for line in lines if line.endswith("==0.7.7")]


def test_the_compose_file_keeps_data_and_runs_and_starts_as_many_processes_as_the_layout_needs():
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    service = compose["services"]["quickstart"]
    assert service["volumes"] == ["data:/opt/gnmr_megatron/data", "runs:/opt/gnmr_megatron/runs"]
    assert set(compose["volumes"]) == {"data", "runs"}
    parallel = yaml.safe_load((ROOT / "configs/runs/quickstart.yaml").read_text())["parallel"]
    needed = parallel["tensor_model_parallel_size"] * parallel["pipeline_model_parallel_size"]
    assert int(service["environment"]["NPROC_PER_NODE"]) == needed


def test_the_entrypoint_trains_on_options_and_runs_verbs_and_commands():
    entrypoint = ROOT / "docker/entrypoint.sh"
    assert run(entrypoint, "--help").stdout.startswith("usage: launch/torchrun_single_node.sh")
    many = run("env", "PET_NNODES=2", entrypoint, "--help")
    assert many.stdout.startswith("usage: launch/torchrun_multi_node.sh")
    assert run(entrypoint, "echo", "hello").stdout == "hello\n"
