"""Control in Hugging Face's Trainer: the four lines marked `# control` are all there is to add.

    python examples/huggingface_trainer.py

A LLaMA of 100,000 parameters, made from its configuration, learns the bytes of this file; nothing is downloaded. In
step 20 one weight's gradient is made 30 times larger.
"""

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gnmr_megatron import ControlConfig  # control
from gnmr_megatron.integrations.huggingface_trainer import attach  # control
from gnmr_megatron.precision.config import PrecisionConfig  # control

STEPS, SHOCK, SEQUENCE = 40, 20, 32
PATHS = PrecisionConfig(low="saved_int4", recovery="saved_int8", group_size=32)
GNMR = ControlConfig(alpha=6, beta=6, max_recovered=1, lock_steps=3, warmup_steps=10)


def tokens_of_this_file():
    """Overlapping sequences of bytes."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return TensorDataset(text.unfold(0, SEQUENCE, 4))


def collate(examples):
    """Tokens are their own labels; the model shifts them."""
    tokens = torch.stack([tokens for (tokens,) in examples])
    return {"input_ids": tokens, "labels": tokens}


def main(output):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            output,
            max_steps=STEPS,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=tokens_of_this_file(),
        data_collator=collate,
    )
    model.model.layers[1].mlp.up_proj.weight.register_hook(
        lambda gradient: gradient * 30 if trainer.state.global_step + 1 == SHOCK else gradient
    )
    attach(trainer, GNMR, PATHS, folder=os.environ.get("RUN_FOLDER"))  # control
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/huggingface_trainer")
