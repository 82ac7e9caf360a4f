"""What becomes of a checkpoint of adapters: merged with its base into whole weights, or written for PEFT."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.distributed.weight_files import Piece, WeightReader, write_weights
from gnmr_megatron.errors import CheckpointError, ConfigError
from gnmr_megatron.models.huggingface import PlacedWeight, weights_by_layer
from gnmr_megatron.models.huggingface_config import huggingface_config
from gnmr_megatron.models.lora import merged_weight
from gnmr_megatron.models.lora_config import LoraConfig
from gnmr_megatron.models.peft_format import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    peft_config,
    peft_tensors,
    unit_of,
)
from gnmr_megatron.training.checkpoint_files import CheckpointDescription, WrittenFile, verify
from gnmr_megatron.training.companions import FILES, companions_of, write_companions
from gnmr_megatron.training.conversion import (
    WEIGHTS_ONLY,
    new_folder,
    piece_of,
    write_settings,
)
from gnmr_megatron.training.identity import LORA_BASE, LORA_RANK, saved_model
from gnmr_megatron.training.initial_weights import find_checkpoint, fingerprint


@dataclass(frozen=True)
class AdapterResult:
    """What was written.

    Attributes:
        folder: where.
        units: projections with an adapter.
        parameters: values of the adapters.
    """

    folder: Path
    units: int
    parameters: int


class AdapterFiles:
    """A checkpoint of adapters.

    Args:
        source: its folder, or a run, whose newest one is taken.

    Raises:
        CheckpointError: it is damaged, or there is none.
        ConfigError: it holds whole weights.
    """

    def __init__(self, source: Path) -> None:
        self.path = find_checkpoint(source)
        self.description = _whole(self.path)
        self.identity = self.description.identity
        if not self.identity.get(LORA_RANK):
            raise ConfigError(f"{self.path}: holds whole weights and no adapters")
        self.lora = LoraConfig(
            rank=self.identity[LORA_RANK],
            alpha=self.identity["lora.alpha"],
            units=self.identity["lora.units"],
        )
        self.model = saved_model(self.identity)
        self._reader = WeightReader(self.path)

    @property
    def weights(self) -> list[list[PlacedWeight]]:
        """All weights of the model in groups."""
        return list(weights_by_layer(self.model, self.identity["vocab_size"]))

    @property
    def adapted(self) -> list[PlacedWeight]:
        """Those that have an adapter."""
        return [placed for group in self.weights for placed in group if self.adapts(placed)]

    def adapts(self, placed: PlacedWeight) -> bool:
        """Whether a weight has an adapter."""
        is_matrix = placed.layer is not None and len(placed.shape) > 1
        return is_matrix and self.lora.adapts(unit_of(placed))

    def read(self, placed: PlacedWeight) -> tuple[Tensor, Tensor]:
        """A and B of a weight that has an adapter."""
        rows, columns = placed.shape
        key, rank = f"{unit_of(placed)}.lora.", self.lora.rank
        return self._reader.read(Piece(f"{key}a", (rank, columns))), self._reader.read(
            Piece(f"{key}b", (rows, rank))
        )

    def base(self, given: Path | None) -> Path:
        """The checkpoint under the adapters, where it was in training or where it is now.

        Raises:
            CheckpointError: it is not there, damaged, or another one.
        """
        path = find_checkpoint(given or Path(self.description.state["base"]))
        if fingerprint(_whole(path)) != self.identity[LORA_BASE]:
            raise CheckpointError(
                f"{path}: is not the base that the adapters in {self.path} were trained on; name it with --base"
            )
        return path


def merge(
    source: Path, output: Path, *, base: Path | None = None, files_from: Path | None = None
) -> AdapterResult:
    """Write a checkpoint of whole weights, W + scale B A, each rounded once to the type of W.

    Args:
        source: a checkpoint of adapters, or a run, whose newest one is taken.
        output: folder to write; `init_from` and `convert` take it.
        base: where the base lies now; None for where it was in training.
        files_from: folder with config.json and tokenizer files to go along; None finds them by the checkpoint.

    Raises:
        GnmrError: a checkpoint is damaged or does not fit, or the output exists; nothing is written.
    """
    adapters = AdapterFiles(source)
    reader = WeightReader(adapters.base(base))
    config, identity = adapters.model, adapters.identity
    companions = companions_of(
        adapters.path, files_from=files_from, fingerprint=identity["tokenizer"]
    )
    groups = adapters.weights
    placed = {piece_of(item, config): item for group in groups for item in group}
    dtype = reader.dtype(groups[0][0].weight.megatron)

    def make(piece: Piece) -> Tensor:
        weight, item = reader.read(piece), placed[piece]
        if not adapters.adapts(item):
            return weight
        return merged_weight(weight, *adapters.read(item), adapters.lora.scale)

    with new_folder(output) as partial:
        files = [[piece_of(item, config) for item in group] for group in groups]
        names = write_weights(partial, files, make, dtype=dtype)
        beside = partial / FILES
        beside.mkdir()
        content = huggingface_config(
            config,
            vocab_size=identity["vocab_size"],
            dtype=str(dtype).removeprefix("torch."),
            other_fields=companions.fields,
        )
        tokenizer = write_companions(companions, content, beside)
        names += [f"{FILES}/{path.name}" for path in sorted(beside.iterdir())]
        tokenizer_path = None if tokenizer is None else output / FILES / tokenizer
        write_settings(config, tokenizer_path, output, partial)
        CheckpointDescription(
            step=0,
            layout={**dataclasses.asdict(ParallelLayout()), "world_size": 1},
            identity={
                key: value
                for key, value in identity.items()
                if key.startswith("model.") or key in ("tokenizer", "vocab_size")
            },
            optimizer=WEIGHTS_ONLY,
            state={},
            files={name: WrittenFile.of(partial / name) for name in names},
        ).write(partial)
    return _result(adapters, output)


def export_to_peft(source: Path, output: Path, *, base_model: str | None) -> AdapterResult:
    """Write a folder that PEFT's `from_pretrained` loads.

    Args:
        source: a checkpoint of adapters, or a run, whose newest one is taken.
        output: folder to write.
        base_model: name or folder of the base as Hugging Face's library knows it; None leaves it to the reader.

    Raises:
        GnmrError: the checkpoint is damaged, or the output exists; nothing is written.
    """
    adapters = AdapterFiles(source)
    tensors: dict[str, Tensor] = {}
    for placed in adapters.adapted:
        tensors |= peft_tensors(placed, *adapters.read(placed), adapters.model)
    with new_folder(output) as partial:
        save_file(tensors, partial / ADAPTER_MODEL, metadata={"format": "pt"})
        content = peft_config(tensors, adapters.lora, base_model=base_model)
        (partial / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2) + "\n")
    return _result(adapters, output)


def _result(adapters: AdapterFiles, output: Path) -> AdapterResult:
    adapted = adapters.adapted
    return AdapterResult(
        output, len(adapted), adapters.lora.rank * sum(sum(item.shape) for item in adapted)
    )


def _whole(path: Path) -> CheckpointDescription:
    damages = verify(path)
    if damages:
        raise CheckpointError("\n".join(damages))
    return CheckpointDescription.read(path)
