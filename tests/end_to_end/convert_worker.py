"""One rank of runs that start from a converted checkpoint.

The first one writes logits of its first tokens and saves before it trains; the options after `--` are those of a
second run, which only trains.
"""

import sys
import warnings
from pathlib import Path


def main(output, *arguments):
    warnings.filterwarnings("ignore")
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from gnmr_megatron.training.config_files import parse_run, run_parser
    from gnmr_megatron.training.setup import set_up

    def trainer_of(options):
        return set_up(parse_run(run_parser("worker", description="", epilog=""), options)[0])

    end = arguments.index("--")
    trainer = trainer_of(arguments[:end])
    chunks = trainer.step.model.chunks
    length = 32
    tokens = torch.arange(2 * length).view(2, length) * 7 % 250
    positions = torch.arange(length).repeat(2, 1)

    def forward(_iterator, model):
        return model(tokens, positions, None), lambda logits, **_: logits

    with torch.no_grad():
        results = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=chunks,
            num_microbatches=1,
            seq_length=length,
            micro_batch_size=2,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if parallel_state.is_pipeline_last_stage():
        logits = gather_from_tensor_model_parallel_region(results[0])
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            torch.save({"tokens": tokens, "logits": logits}, Path(output))
    trainer.saving.checkpointer.save(trainer.state)
    trainer.train()
    trainer.recorder.close()
    parallel_state.destroy_model_parallel()  # the world stays: a second one cannot be joined
    trainer = trainer_of(arguments[end + 1 :])
    trainer.train()
    trainer.recorder.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
