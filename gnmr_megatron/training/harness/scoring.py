"""Log-probabilities and greedy tokens of a model under tensor, pipeline and data parallelism.

Logits stay where they are: ranks of a tensor-parallel group exchange a few numbers for each scored place, and all
ranks learn two numbers for each continuation, or one token for each prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor
from tqdm import tqdm

from gnmr_megatron.training.harness.model import LoadedModel


@dataclass(frozen=True)
class Prompt:
    """Tokens that go into the model, and what may follow its last ones.

    Attributes:
        tokens: input, which ends one token before its continuations do.
        continuations: of equal length, and equal but for their last token.
    """

    tokens: Sequence[int]
    continuations: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Score:
    """Of a continuation: sum of log-probabilities in nats, and whether each token is the likeliest one."""

    log_probability: float
    is_greedy: bool


class ScoringModel:
    """Runs prompts; all ranks of the model call it with the same ones.

    Args:
        model: chunks of this rank, on their paths.
        batch_size: prompts of a forward pass.
        length_multiple: prompts are padded to a multiple of it.
    """

    def __init__(self, model: LoadedModel, *, batch_size: int, length_multiple: int = 1) -> None:
        self._chunks, self._device = list(model.chunks), model.device
        self._batch_size, self._multiple = batch_size, length_multiple
        self._schedule = get_forward_backward_func()
        self._stages = parallel_state.get_pipeline_model_parallel_world_size()
        self.replica = parallel_state.get_data_parallel_rank()
        self.num_replicas = parallel_state.get_data_parallel_world_size()

    @torch.no_grad()
    def scores(self, prompts: Sequence[Prompt]) -> list[list[Score]]:
        """Scores of each prompt's continuations; replicas share the prompts, all ranks learn all scores."""
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index].tokens))
        firsts = list(accumulate((len(each.continuations) for each in prompts), initial=0))
        sums = torch.zeros(firsts[-1], 2, dtype=torch.float64, device=self._device)
        size = self._batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        mine = batches[self.replica :: self.num_replicas]
        for start in tqdm(range(0, len(mine), self._stages), desc="Scoring"):
            a_round = mine[start : start + self._stages]
            found = self._run([[prompts[index] for index in batch] for batch in a_round])
            for batch, logits in zip(a_round, found, strict=False):
                places = _Places.of([prompts[index] for index in batch], logits.device)
                owners = [
                    firsts[index] + number
                    for index in batch
                    for number in range(len(prompts[index].continuations))
                ]
                scores = places.scores(logits)
                if parallel_state.get_tensor_model_parallel_rank() == 0:
                    sums[owners] = scores
        dist.all_reduce(sums)  # each is of one rank
        flat = [Score(total, missed == 0) for total, missed in sums.tolist()]
        return [flat[firsts[index] : firsts[index + 1]] for index in range(len(prompts))]

    @torch.no_grad()
    def next_tokens(self, inputs: Sequence[Sequence[int]]) -> list[int]:
        """The likeliest token after each input; all ranks of a replica take part and learn it."""
        tokens = torch.zeros(len(inputs), dtype=torch.int64, device=self._device)
        for logits in self._run([[Prompt(each, ()) for each in inputs]]):
            rows = torch.arange(len(inputs), device=logits.device)
            ends = torch.tensor([len(each) - 1 for each in inputs], device=logits.device)
            tokens = vocab_parallel_argmax(logits[rows, ends].float())
        if self._stages > 1:
            dist.broadcast(
                tokens,
                parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        found: list[int] = tokens.tolist()
        return found

    def _run(self, batches: Sequence[Sequence[Prompt]]) -> list[Tensor]:
        """Logits [prompts, places, part of the vocabulary] of each batch on the last stage; none on others."""
        longest = max(len(prompt.tokens) for batch in batches for prompt in batch)
        length = -(-longest // self._multiple) * self._multiple
        rows = max(len(batch) for batch in batches)
        # padded on the right, where causal attention does not look
        inputs = torch.zeros(len(batches), rows, length, dtype=torch.int64)
        for number, batch in enumerate(batches):
            for row, prompt in enumerate(batch):
                inputs[number, row, : len(prompt.tokens)] = torch.tensor(prompt.tokens)
        iterators = [iter(inputs.to(self._device)) for _ in self._chunks]
        logits: list[Tensor] = self._schedule(
            forward_step_func=_forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=True,
            collect_non_loss_data=True,
        )
        return logits


def _forward(iterator: Iterator[Tensor], model: torch.nn.Module) -> tuple[Tensor, Any]:
    tokens = next(iterator)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None), lambda logits, **_: logits


@dataclass(frozen=True)
class _Places:
    """What is scored of a batch: one entry for each token of each continuation.

    Attributes:
        rows: prompt within the batch.
        columns: place whose logits tell the token.
        tokens: the token.
        owners: continuation within the batch.
        num_owners: continuations of the batch.
    """

    rows: Tensor
    columns: Tensor
    tokens: Tensor
    owners: Tensor
    num_owners: int

    @classmethod
    def of(cls, batch: Sequence[Prompt], device: torch.device) -> _Places:
        entries: list[tuple[int, int, int, int]] = []
        owner = 0
        for row, prompt in enumerate(batch):
            for continuation in prompt.continuations:
                first = len(prompt.tokens) - len(continuation)
                entries += [
                    (row, first + place, token, owner) for place, token in enumerate(continuation)
                ]
                owner += 1
        rows, columns, tokens, owners = torch.tensor(entries, device=device).unbind(1)
        return cls(rows, columns, tokens, owners, owner)

    def scores(self, logits: Tensor) -> Tensor:
        """float64 [owners, 2]: sums of log-probabilities, and how many tokens are not the likeliest."""
        picked = logits[self.rows, self.columns].float()
        missed = vocab_parallel_argmax(picked) != self.tokens
        losses = vocab_parallel_cross_entropy(picked, self.tokens)  # writes into `picked`
        found = torch.stack([-losses.double(), missed.double()], dim=1)
        sums = torch.zeros(self.num_owners, 2, dtype=torch.float64, device=logits.device)
        return sums.index_add_(0, self.owners, found)


def vocab_parallel_argmax(logits: Tensor) -> Tensor:
    """The likeliest token, the first of equal ones; alike on all ranks of the tensor-parallel group.

    Args:
        logits: float32 [places, part of the vocabulary], of this rank.

    Returns:
        int64 [places].
    """
    group = parallel_state.get_tensor_model_parallel_group()
    own, tokens = logits.max(dim=1)
    best = own.clone()
    dist.all_reduce(best, dist.ReduceOp.MAX, group=group)
    width = logits.shape[1]
    tokens = tokens + parallel_state.get_tensor_model_parallel_rank() * width
    tokens = torch.where(own == best, tokens, torch.iinfo(torch.int64).max)
    dist.all_reduce(tokens, dist.ReduceOp.MIN, group=group)
    return tokens
