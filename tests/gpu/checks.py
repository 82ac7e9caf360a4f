"""What needs a GPU to be seen: the same numbers as on the CPU, and Transformer Engine's kernels under a switch.

`--device cpu` runs the checks that can on a CPU, so that the script itself is tested.
"""

import argparse
import importlib.util
import sys

import torch

from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.precision.fusion import use_fused_kernels
from gnmr_megatron.precision.linear import linear
from gnmr_megatron.precision.quantization import Quantization, pack, round_blocks, unpack
from gnmr_megatron.precision.registry import FORMATS, precision_path

BLOCKS = {
    "tensor": {"rows": None, "columns": None, "scale": "fp32"},
    "tile": {"rows": 1, "columns": 128, "scale": "fp32"},
    "group": {"rows": 1, "columns": 128, "scale": "bf16"},
    "block": {"rows": 128, "columns": 128, "scale": "fp32"},
    "mx": {"rows": 1, "columns": 32, "scale": "e8m0"},
}


def check_formats(device):
    """Codes, scales and values equal those of the CPU to the bit, eager and fused, for either rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 1024, generator=generator).bfloat16()
    x[0, :128], x[:, 3] = 0, x[:, 3] * 100
    noise = torch.rand(x.shape, generator=generator)
    for name, number_format in FORMATS.items():
        for block, fields in BLOCKS.items():
            for rounding in ("nearest", "stochastic"):
                how = Quantization(number_format, **fields, rounding=rounding)
                draw = noise if rounding == "stochastic" else None
                use_fused_kernels(enabled=False, device=torch.device("cpu"))
                expected = results(x, how, draw)
                for is_fused in (False, True):
                    use_fused_kernels(enabled=is_fused, device=device)
                    on_device = None if draw is None else draw.to(device)
                    for ours, reference in zip(
                        results(x.to(device), how, on_device), expected, strict=True
                    ):
                        assert torch.equal(ours.cpu(), reference), (name, block, rounding, is_fused)


def results(x, how, noise):
    values, scales = round_blocks(x, how, noise)
    if how.rows not in (1, None):
        return values, scales.float()
    packed = pack(x, how, noise)
    return values, scales.float(), packed.codes, packed.scales.float(), unpack(packed, x.dtype)


def check_fp8_gemms(device):
    """Real FP8 GEMMs equal the emulated ones to accumulation and to the rounding of BF16."""
    use_fused_kernels(enabled=False, device=device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 1, 1024, generator=generator).bfloat16().to(device).requires_grad_()
    weight = (
        (0.05 * torch.randn(768, 1024, generator=generator)).bfloat16().to(device).requires_grad_()
    )
    grad_output = torch.randn(512, 1, 768, generator=generator).bfloat16().to(device)

    def run(path):
        output = linear(x, weight, path)
        return output, *torch.autograd.grad(output, [x, weight], grad_output)

    for name, granularity in (("torch_fp8_tensorwise", "tensor"), ("torch_fp8_rowwise", "token")):
        real = run(precision_path(name, PrecisionConfig()))
        emulated = run(precision_path("fp8_e4m3", PrecisionConfig(granularity=granularity)))
        for what, ours, reference in zip(
            ("output", "grad_input", "grad_weight"), real, emulated, strict=True
        ):
            error = ((ours - reference).abs().max() / reference.abs().max()).item()
            assert error < 2**-7, (name, what, error)


def check_transformer_engine(device):
    """A round trip leaves no trace, a recovered unit is the BF16 unit, and no weight is stale after an update."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from gnmr_megatron.distributed import engine_compat
    from gnmr_megatron.distributed.layout import ParallelLayout
    from gnmr_megatron.models import te_adapter
    from gnmr_megatron.models.config import LlamaConfig
    from gnmr_megatron.models.discovery import local_linears
    from gnmr_megatron.models.llama import build_chunks, transformer_config
    from gnmr_megatron.models.precision_plan import plan_units

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    config = LlamaConfig(num_layers=1, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4)
    plans = plan_units(config, PrecisionConfig(low="te_fp8_tensorwise", recovery="te_bf16"))
    engine = transformer_config(
        config,
        {
            **ParallelLayout().engine_fields(),
            **engine_compat.device_fields("cuda"),
            **te_adapter.engine_fields(plans),
        },
    )
    (model,) = build_chunks(
        config, engine, vocab_size=128, sequence_length=64, seed=1, device=device, uses_te=True
    )
    name = plans[3].unit.id  # linear_fc2
    (module,) = local_linears([model], {name}).values()
    switch = te_adapter.TESwitch(module, plans[3])
    x = torch.randn(32, 2, 512, device=device, dtype=torch.bfloat16)

    def output(path):
        switch.select(path)
        module.is_first_microbatch = True
        with torch.no_grad(), get_fp8_context(engine, 0):
            return module(x)[0].clone()

    low = output("te_fp8_tensorwise")
    recovered = output("te_bf16")
    assert torch.equal(recovered, x @ module.weight.t())
    assert not torch.equal(low, recovered)
    assert torch.equal(output("te_fp8_tensorwise"), low)
    with torch.no_grad():
        module.weight.mul_(2)  # an update, exact in every format
    assert torch.equal(output("te_fp8_tensorwise"), 2 * low)
    output("te_bf16")
    with torch.no_grad():
        module.weight.mul_(0.5)
    assert torch.equal(output("te_fp8_tensorwise"), low)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    checks = [check_formats, check_fp8_gemms]
    if device.type == "cuda" and importlib.util.find_spec("transformer_engine"):
        checks.append(check_transformer_engine)
    else:
        print("transformer_engine is not installed (or there is no GPU): its checks are left out")
    failed = 0
    for check in checks:
        try:
            check(device)
            print(f"ok      {check.__name__}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"FAILED  {check.__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
