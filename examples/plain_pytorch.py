"""Control in a loop of plain PyTorch: the five lines marked `# control` are all there is to add.

    python examples/plain_pytorch.py                                             one process
    torchrun --standalone --nproc-per-node 2 examples/plain_pytorch.py           two processes, sharded by FSDP2

A small model learns to predict the next byte of this file. In step 30 one weight's gradient is made 30 times larger.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from gnmr_megatron import ControlConfig  # control
from gnmr_megatron.integrations.torch_module import attach  # control
from gnmr_megatron.precision.config import PrecisionConfig  # control

STEPS, SHOCK, WIDTH, CONTEXT = 60, 30, 64, 8
PATHS = PrecisionConfig(low="saved_int4", recovery="saved_int8", group_size=32)
GNMR = ControlConfig(max_recovered=1, lock_steps=3, warmup_steps=10)


class Block(torch.nn.Module):
    """A residual MLP."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """[batch, WIDTH] to the same shape."""
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """The next byte from the CONTEXT bytes before it."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, WIDTH // CONTEXT)
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, bytes_before):
        """[batch, CONTEXT] to logits [batch, 256]."""
        x = self.embedding(bytes_before).flatten(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batches(rank):
    """Endless batches of (context, next byte)."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = text.unfold(0, CONTEXT + 1, 1)
    generator = torch.Generator().manual_seed(rank)
    while True:
        chosen = windows[torch.randint(len(windows), (128,), generator=generator)]
        yield chosen[:, :-1], chosen[:, -1]


def main():
    torch.manual_seed(0)
    model = Model()
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    folder = os.environ.get("RUN_FOLDER")
    control = attach(model, GNMR, PATHS, folder=folder, total_steps=STEPS)  # control
    for step, (context, target) in zip(range(1, STEPS + 1), batches(rank), strict=False):
        loss = F.cross_entropy(model(context), target)
        loss.backward()
        if step == SHOCK:
            model.layers[2].up.weight.grad *= 30
        control.step(loss=loss.item())  # control
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or control.recovered):
            norm = control.measured.global_norm
            recovered = ", ".join(control.recovered) or "none"
            print(f"step {step:2}  loss {loss:.3f}  norm {norm:.3f}  recovers next: {recovered}")
    control.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
