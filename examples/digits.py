"""Classify scikit-learn's digits with a small vision transformer: ``python examples/digits.py``."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import serried


class ViT(nn.Module):
    """A vision transformer for 8x8 grey images, in patches of 2x2."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, kernel_size=2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, dim))
        block = nn.TransformerEncoderLayer(dim, 4, 4 * dim, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Flatten(), nn.Linear(16 * dim, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return class scores [batch, 10] of images [batch, 1, 8, 8]."""
        patches = self.patches(images).flatten(2).transpose(1, 2)  # [batch, 16, dim]
        return self.head(self.blocks(patches + self.positions))


class Digits(serried.Task):
    """Images of handwritten digits and their classes."""

    class Config(serried.Section):
        """Keys ``task.dim`` and ``task.layers``."""

        dim: int = 64
        layers: int = 2

    defaults = {
        "trainer.steps": 150, "trainer.global_batch": 96, "trainer.micro_batch": 48, "trainer.eval_every": 50,
        "trainer.eval_batches": 4, "trainer.log_every": 10, "optim.lr": 2e-3, "schedule.warmup_steps": 15,
    }  # fmt: skip

    def build_model(self) -> nn.Module:
        return ViT(self.config.dim, self.config.layers)

    def dataset(self, split: str) -> list[tuple[torch.Tensor, int]]:
        images, labels = load_digits(return_X_y=True)
        samples = [(torch.tensor(x).float().view(1, 8, 8) / 16, int(y)) for x, y in zip(images, labels, strict=True)]
        return [sample for i, sample in enumerate(samples) if (i % 6 == 0) == (split == "validation")]

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> serried.LossTerms:
        images, labels = batch
        scores, count = model(images), torch.tensor(len(labels))
        correct = (scores.argmax(-1) == labels).sum()
        loss_sum = F.cross_entropy(scores, labels, reduction="sum")
        return serried.LossTerms(loss_sum, count, metrics={"accuracy": (correct, count)})


if __name__ == "__main__":
    serried.main(Digits)
