"""A Trainer over a LLaMA of two layers, and an independent look at the gradients that it clips."""

import numpy as np
import torch
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def collate(examples):
    tokens = torch.stack([tokens for (tokens,) in examples])
    return {"input_ids": tokens, "labels": tokens}


def tiny_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


def tiny_trainer(folder, *, model=None, **settings):
    data = torch.randint(32, (64, 9), generator=torch.Generator().manual_seed(0))
    arguments = {
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.1,  # so that every step is clipped
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **settings,
    }
    return Trainer(
        model or tiny_model(),
        TrainingArguments(str(folder), **arguments),
        train_dataset=TensorDataset(data),
        data_collator=collate,
    )


class RecordedNorms:
    """Norms in float64 of what the Trainer gives to be clipped, beside what control measured of it."""

    def __init__(self, trainer, callback):
        self.expected, self.measured = [], []
        clip = trainer.accelerator.clip_grad_norm_

        def look(parameters, max_norm, **kwargs):
            gradients = {
                name: parameter.grad.double().numpy()
                for name, parameter in trainer.model.named_parameters()
            }
            names = callback.module.units.ids
            norms = [float(np.linalg.norm(gradients[f"{name}.weight"])) for name in names]
            total = float(np.sqrt(sum((gradient**2).sum() for gradient in gradients.values())))
            measured = callback.module.measured
            self.expected.append([*norms, total])
            self.measured.append([*measured.norms.tolist(), measured.global_norm])
            return clip(parameters, max_norm, **kwargs)

        trainer.accelerator.clip_grad_norm_ = look  # control measures in front of it
