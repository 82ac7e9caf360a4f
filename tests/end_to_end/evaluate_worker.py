"""One rank that evaluates a checkpoint in several layouts, one after the other, and writes each one's results.

Arguments: options as JSON, a folder for results, and layouts as JSON.
"""

import json
import sys
import warnings
from pathlib import Path


def main(options, output, layouts):
    warnings.filterwarnings("ignore")
    from gnmr_megatron.training.harness.environment import prepare_environment

    prepare_environment()
    from megatron.core import parallel_state

    from gnmr_megatron.distributed.layout import ParallelLayout
    from gnmr_megatron.training.harness.evaluate import evaluate, write_details
    from gnmr_megatron.training.harness.options import EvaluationOptions
    from gnmr_megatron.training.harness.subject import find_subject

    given = json.loads(options)
    paths = {key: Path(given.pop(key)) for key in ("checkpoint", "task_data", "text")}
    for name, layout in json.loads(layouts).items():
        asked = EvaluationOptions(
            **paths, **given | {"tasks": tuple(given["tasks"])}, layout=ParallelLayout(**layout)
        )
        result = evaluate(find_subject(asked, world_size=2), asked)
        if result is not None:
            write_details(result, Path(output) / name)
        parallel_state.destroy_model_parallel()  # the world stays: a second one cannot be joined


if __name__ == "__main__":
    main(*sys.argv[1:])
