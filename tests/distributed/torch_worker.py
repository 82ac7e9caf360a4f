"""Plain PyTorch on two processes: FSDP2, tensor parallelism, DDP under Hugging Face's Trainer, and the example.

Each rank writes what it saw to rank_R.json in the folder of the arguments.
"""

import json
import os
import runpy
import socket
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.errors import EngineError
from gnmr_megatron.integrations.torch_module import attach
from gnmr_megatron.precision.config import PrecisionConfig

PATHS = PrecisionConfig(low="saved_int4", recovery="saved_int8", group_size=8)
GNMR = ControlConfig(alpha=1.1, beta=1.1, delta=1, warmup_steps=1, max_recovered=1, lock_steps=0)
MONITOR = ControlConfig(mode="monitor")
STEPS = 6


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        # 33 rows, so that shards are uneven
        self.up, self.down = torch.nn.Linear(16, 33), torch.nn.Linear(33, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class EvenBlock(Block):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)


def build(block):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(block() for _ in range(2)), torch.nn.LayerNorm(16))


def backward(model, step, seed):
    generator = torch.Generator().manual_seed(100 * step + seed)
    x = torch.randn(8, 16, generator=generator) * (1 + step % 3)
    model(x).pow(2).mul(torch.arange(16.0)).mean().backward()


def whole_norms(model, names):
    """From gathered gradients, in float64."""
    whole = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        whole[name] = gradient.double().square().sum().item()
    return [whole[f"{name}.weight"] ** 0.5 for name in names], sum(whole.values()) ** 0.5


def run(model, control, *, seed):
    """Measured and expected norms, decisions, and all-reduces of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    found = {"measured": [], "expected": [], "recovered": [], "decided": [], "paths": []}
    alone = Controller(GNMR, control.units)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        found["paths"].append(
            {
                name: module.path.name
                for name, module in model.named_modules()
                if hasattr(module, "path")
            }
        )
        backward(model, step, seed)
        expected, total = whole_norms(model, control.units.ids)
        control.step()
        measured = control.measured
        found["measured"].append([*measured.norms.tolist(), measured.global_norm])
        found["expected"].append([*expected, total])
        found["recovered"].append(control.recovered)
        decided = alone.decide(measured.norms, step=step).recovery_set
        found["decided"].append([control.units.ids[index] for index in decided])
        optimizer.step()
    return found


def fsdp(rank, *, attach_first):
    """Shards of both ranks; attached before or after `fully_shard`, which also wraps single linears."""
    model = build(Block)
    paths = PrecisionConfig(low="saved_int8", recovery="fp32", group_size=8, granularity="token")
    control = attach(model, GNMR, paths) if attach_first else None
    for block in model[:-1]:
        fully_shard(block.up)
        fully_shard(block)
    fully_shard(model)
    control = control or attach(model, GNMR, paths)
    return run(model, control, seed=rank)


def parallelized(mesh):
    model = build(EvenBlock)
    for block in model[:-1]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tensor_parallel(mesh):
    """Shards of single weights, the others whole on each rank."""
    model = parallelized(mesh)
    return run(model, attach(model, MONITOR), seed=0)


def partial_gradients(mesh):
    """The norm of a gradient whose sum over the ranks is not taken yet, and that sum."""
    model = parallelized(mesh)
    control = attach(model, MONITOR)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight = model[0].up.weight
    whole = torch.full(weight.full_tensor().shape, 1.0 + dist.get_rank())
    weight.grad = DTensor.from_local(whole, mesh, [Partial()])
    control.step()
    return control.measured.norms.tolist()


def refusal(mesh):
    model = parallelized(mesh)
    attach(model, GNMR, PATHS)
    try:
        backward(model, 1, 0)
    except EngineError as error:
        return str(error)


def trainer_ddp(folder):
    """Norms of averaged gradients under the Trainer, and the all-reduces that control adds."""
    from gnmr_megatron.integrations.huggingface_trainer import attach as attach_trainer
    from tests.unit.integrations.tiny_trainer import RecordedNorms, tiny_trainer

    trainer = tiny_trainer(folder, max_steps=4, gradient_accumulation_steps=2)
    callback = attach_trainer(trainer, GNMR, PATHS)
    recorded = RecordedNorms(trainer, callback)
    trainer.train()
    return {
        "is_ddp": type(trainer.model_wrapped).__name__,
        "measured": recorded.measured,
        "expected": recorded.expected,
    }


def main(folder):
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    found = {
        "fsdp_first": fsdp(rank, attach_first=True),
        "fsdp_after": fsdp(rank, attach_first=False),
        "tensor_parallel": tensor_parallel(mesh),
        "partial": partial_gradients(mesh),
        "refusal": refusal(mesh),
        "needless": sorted({"megatron", "transformers"} & {n.split(".")[0] for n in sys.modules}),
        "trainer": trainer_ddp(folder / "trainer"),
    }
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    meet_again(rank)
    os.environ["RUN_FOLDER"] = str(folder / "example")
    example = Path(__file__).parents[2] / "examples/plain_pytorch.py"
    runpy.run_path(str(example), run_name="__main__")


def meet_again(rank):
    """Leave the group so that another can be joined: torchrun's own store serves only one."""
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port[0] = probe.getsockname()[1]
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port.item()),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
