"""Control in a loop written like Megatron-LM's: the four lines marked `# control` are all there is to add.

    python examples/megatron_lm_pretrain.py                                      one process
    torchrun --standalone --nproc-per-node 4 examples/megatron_lm_pretrain.py    tensor parallel 2 x pipeline parallel 2

`train_step` does what that of megatron/training/training.py does: zero the buffers, forward and backward of all
microbatches by megatron-core's schedule, `optimizer.step()`. The model is megatron-core's GPTModel, as `--spec
gnmr_megatron.integrations.megatron_lm LAYER_SPEC` makes it, and it learns the bytes of this file. In step 20 one
weight's gradient is made 30 times larger.
"""

import os
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from gnmr_megatron import ControlConfig  # control
from gnmr_megatron.distributed.engine_compat import device_fields
from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.distributed.process_groups import start_process_groups, stop_process_groups
from gnmr_megatron.integrations.megatron_lm import LAYER_SPEC, attach  # control
from gnmr_megatron.models.discovery import local_linears
from gnmr_megatron.precision.config import PrecisionConfig  # control

STEPS, SHOCK, SEQUENCE, MICRO_BATCH, MICROBATCHES = 40, 20, 32, 8, 2
SHOCKED = "decoder.layers.2.mlp.linear_fc1"
PATHS = PrecisionConfig(low="saved_int4", recovery="saved_int8", group_size=32)
GNMR = ControlConfig(alpha=6, beta=6, max_recovered=1, lock_steps=3, warmup_steps=10)


def setup_model_and_optimizer(layout, device):
    """The names of Megatron-LM's function of this name, for a small LLaMA."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
        **layout.engine_fields(),
        **device_fields(device.type),
    )
    model = GPTModel(
        config,
        LAYER_SPEC,
        vocab_size=256,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(device)
    chunks = [
        DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, params_dtype=torch.float32), chunks
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    return chunks, optimizer


def forward_step(data_iterator, model):
    """Loss of a microbatch."""
    text = next(data_iterator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE, device=text.device).expand_as(tokens)
    output = model(tokens, positions, None, labels=labels)
    return output, lambda losses: (losses.mean(), {"lm loss": losses.mean().detach()})


def train_step(data_iterator, chunks, optimizer):
    """One step; the loss is known on the last pipeline stage."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=chunks[0],
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
    )
    if next(train_step.count) == SHOCK:
        for linear in local_linears(chunks, {SHOCKED}).values():
            linear.weight.main_grad *= 30
    successful, grad_norm, _ = optimizer.step()
    return sum(each["lm loss"] for each in losses) / MICROBATCHES, successful, grad_norm


def batches(device):
    """Endless microbatches, the same on all ranks of a replica."""
    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
    windows = text.unfold(0, SEQUENCE + 1, 1)
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    while True:
        chosen = torch.randint(len(windows), (MICRO_BATCH,), generator=generator)
        yield windows[chosen.to(device)]


def main():
    warnings.filterwarnings("ignore")
    is_parallel = int(os.environ.get("WORLD_SIZE", "1")) >= 4
    layout = ParallelLayout(
        tensor_model_parallel_size=2 if is_parallel else 1,
        pipeline_model_parallel_size=2 if is_parallel else 1,
    )
    device = start_process_groups(layout, seed=1, timeout=timedelta(minutes=1))
    chunks, optimizer = setup_model_and_optimizer(layout, device)
    folder = os.environ.get("RUN_FOLDER")
    control = attach(chunks, optimizer, GNMR, precision=PATHS, folder=folder)  # control
    train_step.count = iter(range(1, STEPS + 1))
    data_iterator = batches(device)
    speaks = (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
    for step in range(1, STEPS + 1):
        loss, _, grad_norm = train_step(data_iterator, chunks, optimizer)
        if speaks and (step % 10 == 0 or control.recovered):
            recovered = ", ".join(control.recovered) or "none"
            print(
                f"step {step:2}  loss {loss:.3f}  norm {grad_norm:.3f}  recovers next: {recovered}"
            )
    control.close()
    stop_process_groups()


if __name__ == "__main__":
    main()
