"""The adapter changes this process, so each test runs in one of its own."""

import subprocess
import sys
import textwrap

import pytest


def run(code):
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_it_is_idempotent_and_leaves_torch_as_it_was_for_everybody_else():
    run(
        """
        import torch
        from gnmr_megatron.distributed.cpu_adapter import enable_cpu
        assert enable_cpu()
        zeros, kind = torch.zeros, torch.Tensor.type
        assert enable_cpu()
        assert torch.zeros is zeros and torch.Tensor.type is kind
        assert torch.zeros(2, device="cuda").device.type == "cpu"  # what the engine asks for
        assert torch.ones(1).type() == "torch.FloatTensor"  # but only the engine is told otherwise
        assert torch.tensor([1.5], device="meta").device.type == "meta"
        assert torch.equal(torch.ones(2).type(torch.int32), torch.ones(2, dtype=torch.int32))
        """
    )


def test_it_does_nothing_where_cuda_exists():
    run(
        """
        import torch
        before = {name: getattr(torch, name) for name in ("zeros", "tensor", "empty")}
        kind, current = torch.Tensor.type, torch.cuda.current_device
        torch.cuda.is_available = lambda: True
        from gnmr_megatron.distributed.cpu_adapter import enable_cpu
        assert not enable_cpu()
        assert all(getattr(torch, name) is function for name, function in before.items())
        assert torch.Tensor.type is kind and torch.cuda.current_device is current
        """
    )


@pytest.mark.parametrize(
    "module", ["gnmr_megatron", "gnmr_megatron.cli.main", "gnmr_megatron.cli.summary"]
)
def test_what_needs_no_torch_imports_none(module):
    assert run(f"import sys, {module}; print('torch' in sys.modules)").strip() == "False"


def test_settings_are_checked_without_torch():
    code = "import sys, gnmr_megatron.cli.train, gnmr_megatron.cli.prepare_data; print('torch' in sys.modules)"
    assert run(code).strip() == "False"


def test_a_device_context_still_places_what_factories_make():
    """As transformers' from_pretrained needs it; in a process in which nobody has asked torch before."""
    program = (
        "import torch\n"
        "from gnmr_megatron.distributed.cpu_adapter import enable_cpu\n"
        "assert enable_cpu()\n"
        "with torch.device('meta'):\n"
        "    made = torch.empty(2), torch.zeros(2), torch.arange(2), torch.tensor([2])\n"
        "print({tensor.device.type for tensor in made})\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert result.stdout == "{'meta'}\n", result.stderr
