"""Loops written like Megatron-LM's, with control and without; each of four ranks writes what it saw to rank_R.json."""

import json
import queue
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.distributed.engine_compat import device_fields, gathered_parameters
from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.distributed.process_groups import start_process_groups
from gnmr_megatron.errors import GnmrError
from gnmr_megatron.integrations.megatron_lm import LAYER_SPEC, attach
from gnmr_megatron.models.discovery import local_linears, local_units, unwrap
from gnmr_megatron.precision.config import PrecisionConfig
from tests.distributed.megatron_lm_cases import (
    ACTIVE,
    ACTIVE_STEPS,
    CASES,
    CLIP_GRAD,
    SAVED_STEP,
    STEPS,
    Case,
)

SEQUENCE, MICRO_BATCH, MICROBATCHES = 16, 2, 2
MONITOR = ControlConfig(mode="monitor", check_interval=0)
PATHS = PrecisionConfig(low="saved_int4", recovery="saved_int8", group_size=16)


class CountCollectives(TorchDispatchMode):
    """Counts c10d operations and the bytes of their tensors, point-to-point ones apart.

    Its own, since the benchmark's comes with our trainer, which takes megatron-core's writer of checkpoints apart.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and not func._opname.startswith(("send", "recv", "barrier")):
            self.calls += 1
            self.bytes += sum(t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def join(layout):
    """Megatron's groups, which take long to make, so those of the last case stay where they fit."""
    sizes = (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size)
    sizes = (*sizes, layout.virtual_pipeline_model_parallel_size)
    if sizes != joined.get("sizes"):
        if joined:
            parallel_state.destroy_model_parallel()
        joined["sizes"] = sizes
        joined["device"] = start_process_groups(layout, seed=7, timeout=timedelta(minutes=1))
    tensor_parallel.random.get_cuda_rng_tracker().reset()
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    return joined["device"]


joined = {}


def build(case, spec):
    """Chunks and optimizer as Megatron-LM's setup makes them."""
    layout = ParallelLayout(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        use_distributed_optimizer=case.sharded,
        overlap_grad_reduce=case.chained,
        overlap_param_gather=case.chained,
    )
    device = join(layout)
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=case.bf16,
        **layout.engine_fields(),
        **device_fields(device.type),
    )
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=case.sharded,
        overlap_grad_reduce=case.chained,
        overlap_param_gather=case.chained,
    )
    chunks = []
    for stage in range(case.vpp or 1):
        place = {"ignore_virtual": False, "vp_stage": stage if case.vpp else None}
        model = GPTModel(
            config,
            spec,
            vocab_size=64,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=True,  # so that the embedding is on two stages
            vp_stage=place["vp_stage"],
        )
        typed = Float16Module(config, model) if case.bf16 else model
        chunks.append(DistributedDataParallel(config, ddp, typed, disable_bucketing=stage > 0))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=case.bf16,
            params_dtype=dtype,
            clip_grad=CLIP_GRAD,
            use_distributed_optimizer=case.sharded,
            overlap_param_gather=case.chained,
            overlap_param_gather_with_optimizer_step=case.chained,
        ),
        chunks,
    )
    assert len(optimizer.chained_optimizers) == (2 if case.chained else 1)
    if case.is_bare:
        (optimizer,) = optimizer.chained_optimizers
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if case.chained:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
        config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    return chunks, optimizer


def forward_step(data_iterator, model):
    tokens = next(data_iterator)
    positions = torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), diagonal=1)
    output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
    return output, lambda losses: (losses.float().mean(), {"loss": losses.detach().mean()})


def batch(step):
    """Microbatches of this replica in a step."""
    seed = 1000 * step + parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(seed)
    shape = (MICROBATCHES, MICRO_BATCH, SEQUENCE + 1)
    return list(torch.randint(64, shape, generator=generator))


def train_step(chunks, optimizer, step, *, before_update=lambda: None):
    """Megatron-LM's: (success, grad_norm, num_zeros), and what was counted of the whole step."""
    with CountCollectives() as counted:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        data = [iter(batch(step)) for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
    before_update()
    with counted:
        return optimizer.step(), counted


def whole_norms(chunks):
    """Norms of all units from whole gradients, in float64: parts are gathered as arrays from all ranks."""
    parts = {}
    linears = local_linears(chunks, {unit.id for unit in local_units(chunks)})
    speaks = parallel_state.get_data_parallel_rank() == 0
    if speaks:
        for name, linear in linears.items():
            parts[name] = float(np.sum(linear.weight.main_grad.double().numpy() ** 2))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, parts)
    total = {}
    for rank_parts in gathered:
        for name, square in rank_parts.items():
            total[name] = total.get(name, 0.0) + square
    return {name: square**0.5 for name, square in total.items()}


def weights(chunks):
    """A few values of each of this rank's weights."""
    with gathered_parameters(chunks):
        return [
            parameter.detach().float().flatten()[:5].tolist()
            for chunk in chunks
            for parameter in chunk.parameters()
        ]


def run(case, *, is_controlled):
    """Norms, weights and collectives of a few steps of megatron-core's own layers."""
    chunks, optimizer = build(case, get_gpt_layer_local_spec(normalization="RMSNorm"))
    control = attach(chunks, optimizer, MONITOR) if is_controlled else None
    found = {"norms": [], "whole": [], "units": [], "calls": [], "bytes": []}

    def look():
        if not case.sharded and not is_controlled:  # each rank holds whole gradients of its parts
            found["whole"].append(whole_norms(chunks))

    for step in range(1, STEPS + 1):
        (success, norm, _), counted = train_step(chunks, optimizer, step, before_update=look)
        assert success
        found["norms"].append(norm)
        found["calls"].append(counted.calls)
        found["bytes"].append(counted.bytes)
        if control is not None:
            found["units"].append(
                dict(zip(control.units.ids, control.norms.per_unit.tolist(), strict=True))
            )
    found["weights"] = weights(chunks)
    return found


def refusals():
    """Messages of what is asked wrongly."""
    chunks, optimizer = build(Case(tp=2, pp=2), get_gpt_layer_local_spec(normalization="RMSNorm"))
    bare = optimizer.chained_optimizers[0]
    asked = {
        "active": lambda: attach(chunks, optimizer, ACTIVE),
        "no_paths": lambda: attach(chunks, optimizer, ACTIVE, precision=PATHS),
        "disabled": lambda: attach(chunks, optimizer, ControlConfig(mode="disabled")),
        "unwrapped": lambda: attach(chunks[0].module, optimizer, MONITOR),
        "no_norm": lambda: attach(chunks, bare, MONITOR),
    }
    found = {}
    bare.config.clip_grad = 0.0
    for name, ask in asked.items():
        try:
            ask()
        except GnmrError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def paths_in_force(chunks):
    linears = local_linears(chunks, {unit.id for unit in local_units(chunks)})
    return {name: linear.path.name for name, linear in linears.items()}


def run_active(folder, case, *, loads=None):
    """Recovery sets and paths of a run under control, from its start, or from a checkpoint of the format `loads`."""
    chunks, optimizer = build(case, LAYER_SPEC)
    control = attach(
        chunks, optimizer, ACTIVE, precision=PATHS, folder=folder / "run", total_steps=ACTIVE_STEPS
    )
    found = {"recovered": [], "paths": [], "units": [], "norms": [], "controller": []}
    if loads is not None:
        load(folder, chunks, optimizer, loads)
    alone = Controller(ACTIVE, control.units)
    for step in range(1 if loads is None else SAVED_STEP + 1, ACTIVE_STEPS + 1):
        found["paths"].append(paths_in_force(chunks))
        (_, norm, _), _ = train_step(chunks, optimizer, step)
        found["norms"].append(norm.hex())
        found["recovered"].append(control.recovered)
        found["units"].append([value.hex() for value in control.norms.per_unit.tolist()])
        decided = alone.decide(control.norms.per_unit, step=step).recovery_set
        found["controller"].append([control.units.ids[index] for index in decided])
        if loads is None and step == SAVED_STEP:
            save(folder, chunks, optimizer)
    found["weights"] = weights(chunks)
    control.close()
    return found


# in place of a queue in a process of its own, which would import all this again on each rank
filesystem_async._results_queue = queue.Queue()
METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}


def save(folder, chunks, optimizer):
    """In both formats of Megatron-LM, torch_dist and torch."""
    saved = folder / "sharded"
    if dist.get_rank() == 0:
        saved.mkdir()
    dist.barrier()
    dist_checkpointing.save(sharded_state(chunks, optimizer), saved)
    state = {"model": [c.state_dict() for c in chunks], "optimizer": optimizer.state_dict()}
    torch.save(state, folder / f"whole.{dist.get_rank()}")


def load(folder, chunks, optimizer, how):
    if how == "sharded":
        template = sharded_state(chunks, optimizer, is_loading=True)
        state = dist_checkpointing.load(template, folder / "sharded")
        state["model"] = [state["model"]]
    else:
        state = torch.load(folder / f"whole.{dist.get_rank()}", weights_only=False)
    for chunk, values in zip(chunks, state["model"], strict=True):
        chunk.load_state_dict(values)
    optimizer.load_state_dict(state["optimizer"])


def sharded_state(chunks, optimizer, *, is_loading=False):
    (chunk,) = chunks
    model = unwrap(chunk).sharded_state_dict()
    optim = optimizer.sharded_state_dict({"model": model}, is_loading, metadata=METADATA)
    return {"model": model, "optimizer": optim}


def main(folder):
    warnings.filterwarnings("ignore")
    found = {"cases": {}, "active": {}}
    for name, case in CASES.items():
        plain = (
            found["cases"]["bf16_tp2_dp2"][0] if case.is_bare else run(case, is_controlled=False)
        )
        found["cases"][name] = [plain, run(case, is_controlled=True)]
        if name == "fp32_tp2_pp2":
            found["refusals"] = refusals()
            for loads in (None, "sharded", "whole"):
                found["active"][f"fp32.{loads}"] = run_active(folder / "fp32", case, loads=loads)
        if name == "sharded_tp2_dp2":
            for loads in (None, "sharded"):
                found["active"][f"dist_opt.{loads}"] = run_active(
                    folder / "dist_opt", case, loads=loads
                )
    (folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
