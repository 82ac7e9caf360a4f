"""Write examples as two indexed datasets: tokens, and which of them the model is to write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

from gnmr_megatron.data.corpus import BadRecord, JsonRecord, read_json_lines
from gnmr_megatron.data.instruction.examples import (
    NO_COMPLETION,
    TOO_LONG,
    Example,
    ExampleEncoder,
    LeftOut,
)
from gnmr_megatron.data.instruction.options import InstructionOptions
from gnmr_megatron.data.manifest import MASK_PREFIX, PREFIX
from gnmr_megatron.data.tally import Tally, too_many_bad
from gnmr_megatron.data.tokenizer import Tokenizer, load_tokenizer
from gnmr_megatron.data.workers import map_batches
from gnmr_megatron.errors import DataError

INPUT_KINDS = (".jsonl",)


class _EncodeRecords:
    """Examples of records."""

    def __init__(self, tokenizer: Path, options: InstructionOptions) -> None:
        self._encoder = ExampleEncoder(load_tokenizer(tokenizer), options)

    def __call__(
        self, batch: list[JsonRecord | BadRecord], /
    ) -> list[Example | LeftOut | BadRecord]:
        return [
            record if isinstance(record, BadRecord) else self._encoder.encode(record)
            for record in batch
        ]


def write_examples(
    files: Sequence[Path | None],
    options: InstructionOptions,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    workers: int,
    max_bad: int,
    max_examples: int | None,
    on_progress: Callable[[int, int], None],
) -> Tally:
    """Read, encode and write; the template goes into the folder as well.

    Args:
        files: JSON lines; None for standard input.
        options: how examples become tokens.
        tokenizer: in the folder.
        folder: to write into.
        workers: processes that encode.
        max_bad: records that may be unreadable.
        max_examples: stop after so many examples; None for all.
        on_progress: told examples done, and bytes of text done, after each batch.

    Raises:
        DataError: a file or the template cannot be read, too many records are bad, or no example is left.
    """
    # imported here: megatron-core brings torch, which a refused request does not need
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    ExampleEncoder(tokenizer, options)  # a malformed template is refused at once
    options.write(folder)
    tally = Tally()
    builders = {
        name: IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=dtype)
        for name, dtype in (
            (PREFIX, DType.optimal_dtype(tokenizer.vocab_size)),
            (MASK_PREFIX, np.uint8),
        )
    }
    records = chain.from_iterable(read_json_lines(file) for file in files)
    batches = map_batches(records, _EncodeRecords, tokenizer.path, options, workers=workers)
    with closing(builders[PREFIX].data_file), closing(builders[MASK_PREFIX].data_file):
        for results in batches:
            for example in _counted(results, tally, max_bad, max_examples):
                builders[PREFIX].add_document(example.ids, [len(example.ids)])
                builders[MASK_PREFIX].add_document(example.is_completion, [len(example.ids)])
            on_progress(tally.documents, tally.text_bytes)
            if tally.documents == max_examples:
                break
    for name, builder in builders.items():
        builder.finalize(str(folder / f"{name}.idx"))
    if tally.documents == 0:
        raise DataError(
            f"no example is left: {len(tally.bad)} records cannot be read, {tally.too_long} are too long, "
            f"{tally.without_completion} have no completion within --sequence-length"
        )
    return tally


def _counted(
    results: Iterable[Example | LeftOut | BadRecord],
    tally: Tally,
    max_bad: int,
    max_examples: int | None,
) -> Iterator[Example]:
    """The examples up to their limit; everything is counted, bad records up to theirs."""
    for result in results:
        if isinstance(result, BadRecord):
            tally.bad.append(result)
            if len(tally.bad) > max_bad:
                raise too_many_bad(tally, max_bad)
        elif isinstance(result, LeftOut):
            tally.too_long += result == TOO_LONG
            tally.without_completion += result == NO_COMPLETION
        else:
            tally.documents += 1
            tally.tokens += len(result.ids)
            tally.text_bytes += result.text_bytes
            tally.completion_tokens += sum(result.is_completion[1:])
            tally.longest = max(tally.longest, len(result.ids) - 1)
            tally.truncated += result.is_truncated
            yield result
            if tally.documents == max_examples:
                return
