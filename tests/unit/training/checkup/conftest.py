"""Settings of the tiny run, changed."""

import pytest

from gnmr_megatron.training.config_files import parse_run, run_parser
from gnmr_megatron.training.launch_plan import LaunchPlan
from tests.conftest import TINY, options


@pytest.fixture(scope="session")
def tiny_config():
    def make(**changes):
        config, _ = parse_run(
            run_parser("test", description="", epilog=""), options({**TINY, **changes})
        )
        return config

    return make


@pytest.fixture(scope="session")
def tiny_plan(tiny_config):
    def make(nodes=1, **changes):
        config = tiny_config(**changes)
        return LaunchPlan(config, nodes, config.parallel.default_world_size // nodes, ())

    return make
