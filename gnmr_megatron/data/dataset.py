"""Training and held-out sequences through megatron-core's blended datasets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.utils.data
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from gnmr_megatron.data.config import DataConfig
from gnmr_megatron.data.manifest import DatasetInfo
from gnmr_megatron.data.tokenizer import DatasetTokenizer
from gnmr_megatron.errors import DataError

CACHE = "index_cache"


@dataclass(frozen=True)
class Datasets:
    """Sequences in their planned order."""

    train: torch.utils.data.Dataset[Any]
    valid: torch.utils.data.Dataset[Any]


def open_datasets(
    config: DataConfig, info: DatasetInfo, *, train_samples: int, valid_samples: int, seed: int
) -> Datasets:
    """Build or load the order of samples; all ranks take part where there are several.

    Args:
        config: blend, split and sequence length.
        info: from `describe_datasets`.
        train_samples: training sequences to plan; another number is another order.
        valid_samples: held-out sequences to plan.
        seed: seed of the order.

    Raises:
        DataError: a split holds too few documents for one sequence.
    """
    prefixes = [str(prefix) for prefix in info.prefixes]
    settings = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=config.sequence_length,
        blend=(prefixes, config.weights),
        split=config.split,
        path_to_cache=str(Path(prefixes[0]).parent / CACHE),
        tokenizer=DatasetTokenizer(
            vocab_size=info.vocab_size, eod=info.eod, fingerprint=info.tokenizer_fingerprint
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train, valid, _ = BlendedMegatronDatasetBuilder(
        GPTDataset, [train_samples, valid_samples, None], lambda: True, settings
    ).build()
    for name, dataset in (("training", train), ("held-out", valid)):
        if dataset is None or len(dataset) == 0:
            raise DataError(
                f"data.split: '{config.split}' leaves no {name} sequence of {config.sequence_length} tokens; "
                "give it a larger share, add text, or lower data.sequence_length"
            )
    return Datasets(train, valid)
