"""A world of one process whose torch claims a Hopper GPU, so that Transformer Engine's modules can be built.

Runs against whichever `transformer_engine` is on the path: the real one (`make te-conformance`), or the double of its
Python surface in tests/doubles (from tests/unit, in a process of its own because torch is patched for good).
"""

import os
import types

import pytest
import torch
import torch.distributed as dist

from gnmr_megatron.distributed.cpu_adapter import enable_cpu

assert enable_cpu(), "these tests are for machines without a GPU"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(
    major=9, minor=0, name="none", multi_processor_count=132
)

import transformer_engine  # noqa: E402  # after the patches, which it looks at
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

IS_DOUBLE = getattr(transformer_engine, "is_double", False)


def pytest_report_header():
    return f"transformer_engine {transformer_engine.__version__} from {transformer_engine.__file__}"


@pytest.fixture(scope="session", autouse=True)
def world_of_one():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    yield
    dist.destroy_process_group()
