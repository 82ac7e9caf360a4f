"""Our model as a language model of the harness, equal in all it does to the harness's own `hf`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from gnmr_megatron.distributed.process_groups import gather_from_all
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.training.harness.scoring import Prompt, ScoringModel

MAX_GENERATED = 256
"""Tokens to generate where a task does not say."""

GREEDY = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
}
"""What generation may ask for besides the end of a text: values with which each next token is the likeliest one."""

_HANDLED = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k")

Encoded = tuple[Any, list[int], list[int]]
"""A request, its context and its continuation."""


class MegatronLM(TemplateLM):
    """Answers the harness's requests; all ranks are asked the same, and all learn all answers.

    Args:
        model: runs the prompts.
        tokenizer: the checkpoint's, as transformers loads it.
        max_length: longest prompt in tokens; longer ones lose their first tokens.
        batch_size: prompts of a forward pass.
        generation: fields of the checkpoint's generation_config.json.
    """

    def __init__(
        self,
        model: ScoringModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        batch_size: int,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._generation = dict(generation or {})
        self._model, self.tokenizer = model, tokenizer
        self.max_length, self._batch_size = max_length, batch_size
        self.truncated = 0
        """Prompts that lost their first tokens."""

    @property
    def eot_token_id(self) -> int:
        """Id of the end of a text."""
        found: int | None = self.tokenizer.eos_token_id
        if found is None:
            raise ConfigError(
                "the checkpoint's tokenizer names no end of a text; give a folder whose tokenizer_config.json has an "
                "eos_token: --files-from FOLDER"
            )
        return found

    @property
    def prefix_token_id(self) -> int:
        """What stands before the first token of a text: the token of its begin, or that of its end."""
        begin: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(
        self, string: str, *, add_special_tokens: bool | None = None, **_kwargs: Any
    ) -> list[int]:
        """Ids of a text, with a begin where the tokenizer is set so, and where the text has none of its own."""
        if add_special_tokens is None and has_bos_prefix(
            string, self.tokenizer.decode(self.prefix_token_id)
        ):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(string, **options)
        return ids

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Log-probability of continuations, and whether they are the greedy ones."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], **_kwargs: Any
    ) -> list[tuple[float, bool]]:
        # prompts that differ in the last token alone, such as the letters of multiple choice, are one
        grouped: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise ConfigError(
                    f"--max-length: a continuation of {len(continuation)} tokens does not fit in {self.max_length}"
                )
            whole = (*context, *continuation)
            self.truncated += len(whole) > self.max_length + 1
            kept = whole[-(self.max_length + 1) :]
            grouped.setdefault((kept[:-1], len(continuation)), []).append(index)
        prompts = [
            Prompt(tokens, [requests[index][2] for index in indices])
            for (tokens, _), indices in grouped.items()
        ]
        answers: dict[int, tuple[float, bool]] = {}
        scores = self._model.scores(prompts)
        for indices, found in zip(grouped.values(), scores, strict=True):
            for index, score in zip(indices, found, strict=True):
                answers[index] = (score.log_probability, score.is_greedy)
        return [answers[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Log-probability of whole texts, each token given those before it in its window."""
        windows: list[Encoded] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            found = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in found:
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows)
        for owner, (log_probability, _) in zip(owners, scores, strict=True):
            totals[owner] += log_probability
        return totals

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Greedy continuations up to a stop sequence, computing each prompt anew for each token.

        Raises:
            ConfigError: a task asks for sampling, or for more tokens than fit.
        """
        by_settings: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(index)
        batches: list[list[int]] = []
        for indices in by_settings.values():
            # all replicas find what is wrong, those that answer none of these requests, too
            self._generation_settings(requests[indices[0]])
            ordered = sorted(indices, key=lambda index: -len(requests[index].args[0]))
            batches += [
                ordered[start : start + self._batch_size]
                for start in range(0, len(ordered), self._batch_size)
            ]
        own: dict[int, tuple[str, bool]] = {}
        for batch in tqdm(batches[self._model.replica :: self._model.num_replicas]):
            found = self._generate([requests[index] for index in batch])
            own |= dict(zip(batch, found, strict=True))
        merged = {index: pair for part in gather_from_all(own) for index, pair in part.items()}
        self.truncated += sum(is_cut for _, is_cut in merged.values())
        return [merged[index][0] for index in range(len(requests))]

    def _generate(self, requests: Sequence[Instance]) -> list[tuple[str, bool]]:
        """Texts of requests with the same settings, and whether their prompts were cut."""
        until, wanted = self._generation_settings(requests[0])
        room = self.max_length - wanted
        prompts = [
            self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests
        ]
        inputs = [tokens[-room:] for tokens in prompts]
        starts = [len(tokens) for tokens in inputs]
        running = list(range(len(inputs)))
        for _ in range(wanted):
            if not running:
                break
            found = self._model.next_tokens([inputs[row] for row in running])
            for row, token in zip(running, found, strict=True):
                inputs[row] = [*inputs[row], token]
            running = [
                row for row in running if not self._is_done(inputs[row][starts[row] :], until)
            ]
        return [
            (postprocess_generated_text(self._text(row[start:]), until, None), len(prompt) > room)
            for row, start, prompt in zip(inputs, starts, prompts, strict=True)
        ]

    def _generation_settings(self, request: Instance) -> tuple[list[str], int]:
        """What ends a text, and the most tokens of it."""
        settings = dict(normalize_gen_kwargs(request.args[1], MAX_GENERATED))
        if settings.get("do_sample"):
            raise ConfigError(
                f"{request.task_name}: asks for sampling (do_sample), but only greedy decoding is implemented"
            )
        asked = {key: value for key, value in settings.items() if key not in _HANDLED}
        asked |= {key: self._generation[key] for key in GREEDY.keys() & self._generation.keys()}
        for key, value in sorted(asked.items()):
            if value is not None and value != GREEDY.get(key):
                raise ConfigError(
                    f"{request.task_name}: asks for {key} {value}, but only greedy decoding is implemented"
                )
        end = self.tokenizer.decode(self.eot_token_id)
        until: list[str] = handle_stop_sequences(settings["until"], eos=end)
        wanted: int = settings["max_gen_toks"]
        if wanted >= self.max_length:
            raise ConfigError(
                f"--max-length: {request.task_name} generates {wanted} tokens, which leaves no room for a prompt in "
                f"{self.max_length}"
            )
        return until, wanted

    def _is_done(self, tokens: Sequence[int], until: Sequence[str]) -> bool:
        # a stop sequence may be a special token, or text that one interrupts
        texts = (self._text(tokens), str(self.tokenizer.decode(list(tokens))))
        return tokens[-1] in self._ends or any(
            stop and stop in text for stop in until for text in texts
        )

    @property
    def _ends(self) -> set[int]:
        """Ids after which a text ends: the tokenizer's, and those of the generation's settings."""
        others = self._generation.get("eos_token_id") or []
        return {self.eot_token_id, *(others if isinstance(others, list) else [others])}

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
