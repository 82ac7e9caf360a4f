"""Training on packed examples: each as if it were alone, each completion token counted alike.

Its layouts are in tests/distributed.
"""

import json
import random

import pytest
import torch
import torch.nn.functional as F

from gnmr_megatron.data.batches import Batch
from gnmr_megatron.data.instruction.options import InstructionOptions
from gnmr_megatron.data.prepare import PrepareRequest, prepare
from gnmr_megatron.distributed.process_groups import stop_process_groups
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.training.config_files import parse_run, run_parser
from gnmr_megatron.training.setup import set_up
from tests.conftest import TINY
from tests.distributed.layout_matrix import case

SETTINGS = TINY | {
    "model.num_layers": 2,
    "data.sequence_length": 64,
    "data.split": "90,10,0",
    "precision.low": "fp32",
    "precision.recovery": "fp32",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An instruction dataset whose completions differ much in length."""
    folder = tmp_path_factory.mktemp("instruction")
    draw = random.Random(0)
    texts, lines = [], []
    for _ in range(150):
        a, b = draw.randrange(99), draw.randrange(99)
        prompt, completion = f"{a} + {b} " * draw.randint(1, 3), f"= {a + b}" * draw.randint(1, 4)
        texts.append(prompt + completion)
        lines.append(json.dumps({"prompt": prompt, "completion": completion}))
    (folder / "text.txt").write_text("\n".join(texts))
    (folder / "chat.jsonl").write_text("\n".join(lines))
    prepare(
        PrepareRequest(inputs=(str(folder / "text.txt"),), output=folder / "text", vocab_size=300)
    )
    prepare(
        PrepareRequest(
            inputs=(str(folder / "chat.jsonl"),),
            output=folder / "chat",
            tokenizer=folder / "text/tokenizer.model",
            instruction=InstructionOptions(sequence_length=64),
        )
    )
    return folder


def parsed(name, folder, **changes):
    arguments = case(name, SETTINGS | changes, folder / "runs", folder / "chat")
    return parse_run(run_parser("test", description="", epilog=""), arguments)[0]


@pytest.fixture(scope="module")
def trainer(folder):
    """A run of one process, set up."""
    trainer = set_up(parsed("one", folder))
    yield trainer
    trainer.recorder.close()
    stop_process_groups()


@pytest.fixture(scope="module")
def step_batches(trainer):
    return trainer.batches.next_step()


def chunk_of(trainer):
    (chunk,) = trainer.step.model.chunks
    return chunk


def examples_of(batch):
    """Row and places of each example of a batch."""
    for row, segments in enumerate(batch.segments):
        for segment in range(1, int(segments.max()) + 1):
            yield row, segments == segment


def test_logits_of_an_example_are_the_same_alone_and_packed(trainer, step_batches):
    model = chunk_of(trainer).module
    batch = step_batches[0]
    assert int(batch.segments.max()) > 1  # the comparison is about something
    with torch.no_grad():
        packed = model(batch.tokens, batch.position_ids, batch.attention_mask(0, 1))
        for row, here in examples_of(batch):
            tokens = batch.tokens[row][here][None]
            alone = model(tokens, torch.arange(tokens.shape[1])[None], None)
            torch.testing.assert_close(packed[row][here], alone[0], rtol=1e-5, atol=1e-5)
        crossing = model(batch.tokens, batch.position_ids, None)
        assert (crossing - packed).abs().max() > 1e-3


def reference(model, batches):
    """Loss and gradients of all examples alone, by torch: the mean over all completion tokens."""
    losses = []
    for batch in batches:
        for row, here in examples_of(batch):
            tokens = batch.tokens[row][here][None]
            logits = model(tokens, torch.arange(tokens.shape[1])[None], None)[0]
            labels = batch.labels[row][here].masked_fill(batch.loss_mask[row][here] == 0, -100)
            losses.append(F.cross_entropy(logits, labels, ignore_index=-100, reduction="none"))
    tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
    loss = torch.cat(losses).sum() / tokens
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def test_loss_and_gradients_are_those_of_one_mean_over_all_completion_tokens(trainer, step_batches):
    counts = {int(batch.loss_mask.sum()) for batch in step_batches}
    assert len(counts) > 1  # else a mean of means would do
    nothing = Batch(
        *(
            step_batches[0].tokens,
            step_batches[0].labels,
            torch.zeros_like(step_batches[0].loss_mask),
        ),
        step_batches[0].position_ids,
        step_batches[0].segments,
    )
    batches = [*step_batches, nothing]
    expected, gradients = reference(chunk_of(trainer).module, step_batches)
    trainer.step.model.zero_grad_buffers()
    result = trainer.step.model.forward_backward(batches)
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.tokens == sum(int(batch.loss_mask.sum()) for batch in step_batches)
    named = list(chunk_of(trainer).module.named_parameters())
    for (name, parameter), gradient in zip(named, gradients, strict=True):
        torch.testing.assert_close(
            parameter.main_grad,
            gradient,
            rtol=1e-4,
            atol=1e-7,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def test_transformer_engines_attention_is_refused(folder):
    with pytest.raises(ConfigError, match=r"te_\* paths would see across examples"):
        set_up(
            parsed(
                "te",
                folder,
                **{"precision.low": "te_fp8_tensorwise", "precision.recovery": "te_bf16"},
            )
        )
