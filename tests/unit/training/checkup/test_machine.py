"""Versions, devices, precision paths and folders of this machine."""

import shutil
import sys

import pytest
from packaging.requirements import Requirement

from gnmr_megatron.precision.catalog import PATHS
from gnmr_megatron.training.checkup.checkup import guarded
from gnmr_megatron.training.checkup.devices import (
    driver_version,
    enough_devices,
    gpu_finding,
    why_no_gpu,
)
from gnmr_megatron.training.checkup.precision import check_precision
from gnmr_megatron.training.checkup.run_settings import check_data, umask, writable
from gnmr_megatron.training.checkup.versions import check_requirement


@pytest.mark.parametrize(
    ("requirement", "status", "part"),
    [
        ("numpy>=1.26", "ok", "needs >=1.26"),
        ("numpy<1", "problem", "; <1 is needed"),
        ("no-such-package[extra]>=3", "problem", "is not installed"),
    ],
)
def test_a_requirement_is_compared_with_what_is_installed(requirement, status, part):
    found = check_requirement(Requirement(requirement))
    assert found.status == status
    assert part in found.detail
    if status == "problem":
        assert found.advice == f"pip install '{requirement}'"


def test_a_package_that_is_installed_but_broken_is_told_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "broken_wheel.py").write_text("raise OSError('libcudart.so.12: no such file')\n")
    info = tmp_path / "broken_wheel-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-wheel\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = check_requirement(Requirement("broken-wheel>=1"))
    assert found.status == "problem"
    assert found.detail.endswith("cannot be imported: OSError: libcudart.so.12: no such file")
    assert "broken_wheel" not in sys.modules


def test_reasons_for_no_gpu_are_told_apart():
    (none,) = why_no_gpu(has_driver=False, torch_cuda=None)
    (other_torch,) = why_no_gpu(has_driver=True, torch_cuda=None)
    (unseen,) = why_no_gpu(has_driver=True, torch_cuda="12.9")
    assert [f.status for f in (none, other_torch, unseen)] == [
        "not applicable",
        "problem",
        "problem",
    ]
    assert "built without CUDA" in other_torch.detail
    assert "CUDA_VISIBLE_DEVICES" in unseen.advice


def test_a_gpu_is_told_with_memory_and_fp8_and_one_in_use_is_a_warning():
    free = gpu_finding(0, "H200", capability=(9, 0), total=150 * 10**9, free=149 * 10**9)
    assert (free.status, free.check) == ("ok", "gpu 0")
    assert free.detail == "H200, compute capability 9.0 (FP8 GEMMs), 149.0 of 150.0 GB free"
    used = gpu_finding(1, "A100", capability=(8, 0), total=80 * 10**9, free=40 * 10**9)
    assert used.status == "warning"
    assert "no FP8 GEMMs" in used.detail


def test_more_processes_than_gpus_fail_and_than_cores_wait():
    found = [enough_devices(8, 8, "GPU"), enough_devices(9, 8, "GPU"), enough_devices(4, 2, "core")]
    assert [finding.status for finding in found] == ["ok", "problem", "warning"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n", "535.104.05"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release\n",
            "570.86.10",
        ),
        ("nothing of that kind", None),
    ],
)
def test_the_drivers_version_is_read_from_its_file(text, version):
    assert driver_version(text) == version


@pytest.mark.filterwarnings("ignore")  # of the engine's import
def test_every_path_is_tried_and_one_that_the_run_takes_is_required():
    found = {f.check: f for f in check_precision({"te_mxfp8"}, fuse=None)}
    assert [name for name in found if name in PATHS] == list(PATHS)
    for name, info in PATHS.items():
        if info.family != "te":
            assert found[name].status == "ok", found[name]
    import torch

    if not torch.cuda.is_available():
        assert found["te_mxfp8"].status == "problem"
        assert found["te_nvfp4"].status == "not applicable"
        assert found["te_nvfp4"].detail == "needs a GPU, and there is none"
        has_compiler = any(map(shutil.which, ("g++", "clang++")))
        assert (found["fused quantisation"].status == "ok") == has_compiler


def test_a_folder_that_cannot_be_written_is_found_and_nothing_is_left_in_one_that_can(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/runs"):
        found = writable("runs_dir", folder, "take another")
        assert found.status == "problem"
        assert "Not a directory" in found.detail
    assert writable("runs_dir", tmp_path / "new/runs", "").status == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    if sys.platform == "linux":
        assert writable("runs_dir", "/proc" / tmp_path.relative_to("/"), "").status == "problem"


def test_a_umask_that_opens_files_to_all_is_a_warning():
    assert [umask(mask).status for mask in (0o022, 0o077, 0o000, 0o777)] == [
        "ok", "ok", "warning", "problem",
    ]  # fmt: skip


def test_data_that_is_not_as_it_was_prepared_is_found(tiny_config, dataset, tmp_path):
    copy = tmp_path / "data"
    shutil.copytree(dataset, copy)
    config = tiny_config(**{"data.datasets": f"[{copy}]"})
    whole = check_data(config)
    assert [finding.status for finding in whole.findings] == ["ok", "ok"]
    assert whole.vocab_size == 500

    tokenizer = copy / "tokenizer.model"
    content = bytearray(tokenizer.read_bytes())
    content[-1] ^= 1  # of the same size
    tokenizer.write_bytes(content)
    (found,) = check_data(config).findings
    assert "tokenizer.model: is not the tokenizer that" in found.detail

    with (copy / "text.bin").open("r+b") as file:
        file.truncate(100)
    (found,) = check_data(config).findings
    assert found.status == "problem"
    assert "text.bin: has 100 bytes instead of" in found.detail
    assert "prepare-data" in found.advice


def test_a_check_that_breaks_is_a_line_and_the_next_one_goes_on():
    def breaks():
        yield umask(0o022)
        raise RuntimeError("no such device")

    first, second = guarded("devices", breaks)
    assert first.status == "ok"
    assert (second.topic, second.status) == ("devices", "warning")
    assert second.detail == "a check of devices broke: RuntimeError: no such device"
