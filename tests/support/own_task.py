"""Tasks as a user writes them: a file of its own, which tests copy to a folder outside the checkout."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import serried


class Points(serried.Task):
    """Two losses, batches that are dicts, dropout; ``on_...`` hooks write down what they were called with."""

    class Config(serried.Section):
        """Keys ``task.dim`` and ``task.share``."""

        dim: int = 16
        share: float = 0.5

    defaults = {
        "trainer.steps": 8, "trainer.global_batch": 12, "trainer.micro_batch": 3, "trainer.eval_every": 4,
        "trainer.eval_batches": 2, "trainer.log_every": 1, "optim.lr": 1e-2, "checkpoint.every": 4,
    }  # fmt: skip

    def __init__(self) -> None:
        self.called: list[tuple] = []

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, self.config.dim), nn.Dropout(0.2), nn.ReLU(), nn.Linear(self.config.dim, 3))

    def dataset(self, split: str) -> list:
        x = torch.randn(48, 4, generator=torch.Generator().manual_seed(len(split)))
        return [{"x": row, "target": {"class": int(row[0] > 0), "size": row.sum()}} for row in x]

    def loss(self, model: nn.Module, batch: dict) -> serried.LossTerms:
        target, count = batch["target"], len(batch["x"])
        scores = model(batch["x"])
        kind = F.cross_entropy(scores[:, :2], target["class"], reduction="sum")
        size = F.mse_loss(scores[:, 2], target["size"], reduction="sum")
        correct = (scores[:, :2].argmax(1) == target["class"]).sum()
        share = self.config.share
        metrics = {"class_loss": (kind, count), "size_loss": (size, count), "accuracy": (correct, count)}
        return serried.LossTerms(share * kind + (1 - share) * size, torch.tensor(count), metrics)

    def on_start(self, event) -> None:
        self._write("start", event)

    def on_step(self, event) -> None:
        self._write("step", event)

    def on_evaluate(self, event) -> None:
        self._write(f"evaluate {event.split}", event)

    def on_save(self, event) -> None:
        self._write(f"save {event.path.name}", event)

    def on_end(self, event) -> None:
        self._write("end", event)

    def _write(self, what: str, event) -> None:
        self.called.append((what, event.step, sorted(event.metrics)))


class Named(NamedTuple):
    """A batch."""

    x: torch.Tensor
    y: torch.Tensor


class Tuples(Points):
    """Batches that are named tuples; ``Config`` of its own chooses plain tuples."""

    class Config(serried.Section):
        """Key ``task.named``."""

        named: bool = True

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def dataset(self, split: str) -> list | None:
        x = torch.randn(48, 4, generator=torch.Generator().manual_seed(3))
        return [(Named if self.config.named else lambda *each: each)(row, row.sum()) for row in x]

    def loss(self, model: nn.Module, batch) -> serried.LossTerms:
        x, y = (batch.x, batch.y) if self.config.named else batch
        return serried.LossTerms(F.mse_loss(model(x)[:, 0], y, reduction="sum"), len(y))


class Scores(Points):
    """An accuracy that rises and falls again, while the loss falls."""

    def loss(self, model: nn.Module, batch: dict) -> serried.LossTerms:
        terms = super().loss(model, batch)
        if not model.training:
            self.evaluations = getattr(self, "evaluations", 0) + 1
        best = {1: 0.2, 2: 0.9, 3: 0.8, 4: 0.7, 5: 0.6}.get(getattr(self, "evaluations", 0), 0.0)
        return terms._replace(metrics={"accuracy": (best * len(batch["x"]), len(batch["x"]))})


if __name__ == "__main__":
    serried.main(Points)
