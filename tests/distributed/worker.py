"""Trains the cases of a JSON file one after the other in the processes that torchrun started.

One launch a world size, because starting processes costs more than running a small case. A case that begins with
`resave` only loads its checkpoint and saves it again in its own layout.
"""

import json
import sys
import warnings
from pathlib import Path

from gnmr_megatron.distributed.engine_import import import_engine_leanly
from gnmr_megatron.training.config_files import parse_run, run_parser


def main(cases_file):
    warnings.filterwarnings("ignore")
    import_engine_leanly()
    from megatron.core import parallel_state

    from gnmr_megatron.training.setup import set_up

    for arguments in json.loads(Path(cases_file).read_text()):
        resaves = arguments[0] == "resave"
        config, _ = parse_run(
            run_parser("worker", description="", epilog=""), arguments[1:] if resaves else arguments
        )
        trainer = set_up(config)
        if resaves:
            trainer.saving.checkpointer.save(trainer.state)
        else:
            trainer.train()
        trainer.recorder.close()
        parallel_state.destroy_model_parallel()  # the world stays: a second one cannot be joined


if __name__ == "__main__":
    main(sys.argv[1])
