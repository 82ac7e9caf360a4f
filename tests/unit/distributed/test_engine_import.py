"""Our processes import megatron-core without W&B, TensorBoard and the compiler, and have them all the same."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch
compiler = torch.compile
from gnmr_megatron.distributed.engine_import import import_engine_leanly
import_engine_leanly()
import_engine_leanly()
import gnmr_megatron.training.run
from megatron.core import timers
from megatron.core.fusions import fused_bias_swiglu
x = torch.linspace(-2, 2, 8)[None]
unneeded = ("wandb", "torch.utils.tensorboard", "torch._inductor.compile_fx")
found = {
    "imported": [name for name in unneeded if name in sys.modules],
    "seen": [timers.wandb, timers.SummaryWriter],
    "finders": [str(finder) for finder in sys.meta_path if "gnmr" in type(finder).__module__],
    "compiler_is_back": torch.compile is compiler,
    "swiglu": torch.equal(
        fused_bias_swiglu.swiglu(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:]
    ),
}
import wandb
found["wandb"] = wandb.__name__
print(json.dumps(found))
"""


def test_megatron_core_finds_nothing_that_it_does_not_need_and_others_find_everything():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(result.stdout) == {
        "imported": [],
        "seen": [None, None],
        "finders": [],
        "compiler_is_back": True,
        "swiglu": True,
        "wandb": "wandb",
    }
