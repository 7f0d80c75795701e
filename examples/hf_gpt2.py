"""Train transformers' GPT-2 from random weights on its own text generator: ``python examples/hf_gpt2.py``."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import serried

CONFIG = GPT2Config(vocab_size=257, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)


class GPT2(serried.Task):
    """Next-token prediction with a model from transformers, whose input and output embeddings are tied."""

    unit = "tokens"
    defaults = {"trainer.steps": 100, "trainer.global_batch": 12, "trainer.micro_batch": 2, "optim.lr": 1e-3}

    def build_model(self) -> nn.Module:
        return GPT2LMHeadModel(CONFIG)

    def dataset(self, split: str) -> list[torch.Tensor]:
        numbers = torch.Generator().manual_seed(0 if split == "train" else 1)
        starts = torch.randint(257, (512, 1), generator=numbers)
        return list((starts + torch.arange(65) ** 2) % 257)  # sequences [65] with a rule to be learned

    def loss(self, model: nn.Module, batch: torch.Tensor) -> serried.LossTerms:
        logits = model(input_ids=batch[:, :-1]).logits
        targets = batch[:, 1:].reshape(-1)
        return serried.LossTerms(F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), targets.numel())

    def weight_per_sample(self) -> int:
        return 64

    def export_files(self, folder) -> None:
        CONFIG.save_pretrained(folder)


if __name__ == "__main__":
    serried.main(GPT2)
