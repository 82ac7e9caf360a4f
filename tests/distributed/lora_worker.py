"""Trains and measures the cases of a JSON file, one after the other, in the processes that torchrun started.

Results go to OUTPUT as torch's file, written by rank 0: whole matrices, put together from the parts of all ranks.
"""

import json
import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gnmr_megatron.models.discovery import local_linears
from gnmr_megatron.models.lora import adapters_merged
from gnmr_megatron.models.precision_plan import model_units
from gnmr_megatron.models.recoverable_linear import RecoverableColumnLinear
from gnmr_megatron.training.config_files import parse_run, run_parser
from gnmr_megatron.training.setup import set_up


def random_b(name, shape):
    """A whole matrix B that is not zero, the same in every process."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator) * 0.05


def split_axis(name, matrix):
    """Along which axis tensor-parallel ranks split a matrix of a unit, or None."""
    if name.endswith(("linear_proj", "linear_fc2")):
        return {"weight": 1, "a": 1, "b": None}[matrix]
    return {"weight": 0, "a": None, "b": 0}[matrix]


def own_part(whole, name, matrix):
    axis = split_axis(name, matrix)
    if axis is None:
        return whole
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    halves = whole.chunk(2, axis) if name.endswith("linear_fc1") else [whole]
    return torch.cat([half.chunk(size, axis)[rank] for half in halves], axis)


def whole(part, name, matrix):
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    axis = split_axis(name, matrix)
    if axis is None:  # every rank holds it, so all have to hold the same
        assert all(torch.equal(other, part) for other in parts), (name, matrix)
        return part.clone()
    if not name.endswith("linear_fc1"):
        return torch.cat(parts, axis)
    halves = [torch.cat([p.chunk(2, axis)[half] for p in parts], axis) for half in (0, 1)]
    return torch.cat(halves, axis)


def everyone(found):
    """Results of all pipeline stages."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return {name: value for part in gathered for name, value in part.items()}


def weights(linears):
    return everyone({n: whole(linear.weight.data, n, "weight") for n, linear in linears.items()})


def measure(trainer, linears, case):
    """Gradients of one batch, and the norms of the units."""
    for name, linear in linears.items():
        if "weights" in case:
            linear.weight.data.copy_(case["weights"][name])
        if case.get("random_b"):
            shape = (linear.output_size, linear.lora.a.shape[0])
            linear.lora.b.data.copy_(own_part(random_b(name, shape), name, "b"))
    trainer.step.switchboard.try_out(case.get("recovered", ()), 1)
    trainer.step.model.zero_grad_buffers()
    trainer.step.optimizer.zero_grad()
    batches = trainer.batches.next_step()
    loss = trainer.step.model.forward_backward(batches).loss
    trainer.step.optimizer.prepare_grads()
    norms = trainer.step.consensus.unit_norms()
    tensors = {}
    for name, linear in linears.items():
        matrices = {"weight": linear.weight}
        if linear.lora is not None:
            matrices |= {"a": linear.lora.a, "b": linear.lora.b}
        for matrix, parameter in matrices.items():
            tensors[name, matrix] = whole(parameter.data, name, matrix)
            if parameter.requires_grad:
                tensors[name, matrix, "grad"] = whole(parameter.main_grad, name, matrix)
    return {
        "loss": loss,
        "norms": dict(zip(trainer.units.ids, norms.per_unit.tolist(), strict=True)),
        "global_norm": norms.global_norm,
        "tensors": everyone(tensors),
        **(outputs(trainer, linears, batches[0]) if dist.get_world_size() == 1 else {}),
    }


def outputs(trainer, linears, batch):
    """Logits; the same with merged weights, and the weights after that."""
    (chunk,) = trainer.step.model.chunks
    found = {}
    with torch.no_grad():
        found["logits"] = chunk(batch.tokens, batch.position_ids, None).clone()
        with adapters_merged(linears.values()):
            found["merged_logits"] = chunk(batch.tokens, batch.position_ids, None).clone()
            found["merged_weights"] = {n: w.clone() for n, w in weights(linears).items()}
    return found | {"weights_after": weights(linears)}


def adapters(linears):
    return everyone(
        {
            (name, matrix): whole(getattr(linear.lora, matrix).data, name, matrix)
            for name, linear in linears.items()
            if linear.lora is not None
            for matrix in "ab"
        }
    )


def survivors(linear, tokens):
    """How many inputs of a token dropout leaves to the adapter, for each of this rank's tokens."""
    adapter = linear.lora
    a, b = (torch.zeros_like(matrix.data) for matrix in (adapter.a, adapter.b))
    a[0], b[:, 0] = 1.0, 1.0
    adapter.a.data, adapter.b.data = a, b
    if linear.sequence_parallel and isinstance(linear, RecoverableColumnLinear):
        tokens //= linear.tp_group.size()
    with torch.no_grad():
        seen = adapter(torch.ones(tokens, 1, a.shape[1]), linear.path, None)[:, 0, 0]
    return seen / adapter.scale


def drop(linears, tokens):
    """What each process of a few projections finds, by name."""
    own = {name: survivors(linears[name], tokens) for name in sorted(linears)[:4]}
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def run_case(case):
    if "copied_from" in case:
        source, target = case["copied_from"]
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.copytree(source, target)
            shutil.rmtree(Path(target) / "checkpoints" / case["without"])
        if dist.is_initialized():
            dist.barrier()
    config, _ = parse_run(run_parser("worker", description="", epilog=""), case["arguments"])
    trainer = set_up(config)
    linears = local_linears(
        trainer.step.model.chunks, {unit.id for unit in model_units(config.model)}
    )
    if case["does"] == "drop":
        found = {"survivors": drop(linears, config.data.sequence_length)}
    elif case["does"] == "train":
        found = {"before": weights(linears)}
        trainer.train()
        found |= {"after": weights(linears), "adapters": adapters(linears)}
        if dist.get_world_size() == 1:
            batch = trainer.evaluation.batches[0]
            found |= {"tokens": batch.tokens, **outputs(trainer, linears, batch)}
    else:
        found = measure(trainer, linears, case)
    trainer.recorder.close()
    parallel_state.destroy_model_parallel()  # the world stays: a second one cannot be joined
    return found


def rounded(weight):
    """The slow way to INT8 with a scale for each output channel."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return torch.where(scale > 0, (weight / scale).round().clamp(-127, 127) * scale, 0)


def merged(tensors, scale, *, is_rounded):
    """W + scale B A in double precision."""
    names = {key[0] for key in tensors}
    return {
        name: (
            (rounded(tensors[name, "weight"]) if is_rounded else tensors[name, "weight"]).double()
            + scale * (tensors[name, "b"].double() @ tensors[name, "a"].double())
        ).float()
        for name in names
    }


def main(cases_file, output):
    warnings.filterwarnings("ignore")
    found = {}
    for case in json.loads(Path(cases_file).read_text()):
        if "merges" in case:
            case["weights"] = merged(
                found[case["merges"]]["tensors"], case["scale"], is_rounded=case["is_rounded"]
            )
        found[case["name"]] = run_case(case)
    if dist.get_rank() == 0:
        torch.save(found, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
