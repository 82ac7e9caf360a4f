"""Trains the cases of a JSON file one after the other in the processes that torchrun started.

One launch a world size, because starting processes costs more than running a small case.
"""

import json
import sys
import warnings
from pathlib import Path

from gnmr_megatron.training.config_files import parse_run, run_parser


def main(cases_file):
    warnings.filterwarnings("ignore")
    from gnmr_megatron.training.run import train

    for arguments in json.loads(Path(cases_file).read_text()):
        config, _ = parse_run(run_parser("worker", description="", epilog=""), arguments)
        train(config)


if __name__ == "__main__":
    main(sys.argv[1])
