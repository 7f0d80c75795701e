"""Losses of TRL's trainers in a few steps on one batch, recorded in ``trl_losses.json``.

``python -m tests.support.trl_losses`` records them again, with trl 1.16 installed beside this package. TRL's own
trainers compute losses and gradients; the sequences are those of our data sets.
"""

import importlib
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

STEPS = 4
LEARNING_RATE = 0.003
RECORDED = Path(__file__).with_suffix(".json")

PAIRS = [
    {"prompt": f"{'Please say' if n % 2 else 'Say'} {n}.", "chosen": f"{n}, yes.", "rejected": f"N{'o' * n}."}
    for n in range(8)
]
"""Chosen answers have equal lengths, since TRL's CPO takes the mean of the cross entropy over all tokens of a batch."""
ANSWERS = [
    {"prompt": f"{'Please say' if n % 2 else 'Say'} {n}.", "completion": f"{n}{'!' * (n % 4)}", "label": n % 3 > 0}
    for n in range(8)
]
SETTINGS: dict[str, list[str]] = {
    "ipo": ["task.loss=ipo"],
    "cpo": ["task.loss=cpo"],
    "simpo": ["task.loss=simpo", "task.margin=0.5"],
    "kto": ["task.loss=kto", "task.desirable_weight=1.25", "task.undesirable_weight=0.8", "task.beta=0.3"],
}
"""Overrides of each recorded loss."""


def write_inputs(folder: Path) -> None:
    """Write a model folder with weights that do not depend on random numbers, and the rows."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:
                waves = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * 1.7 + number)
                parameter.copy_(0.2 * waves.view_as(parameter))
    model.save_pretrained(folder / "llama")
    for name, rows in (("dpo", PAIRS), ("kto", ANSWERS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(folder: Path, loss: str) -> list[str]:
    """Return the arguments of a run in which each step has all rows."""
    recipe = "kto" if loss == "kto" else "dpo"
    return [
        f"recipe={recipe}", f"model.path={folder / 'llama'}", f"data.path={folder / f'{recipe}.jsonl'}",
        "data.tokenizer=bytes",
        f"data.cache_dir={folder / 'cache'}", "precision=fp32", "data.sequence_length=128",
        "data.validation_fraction=0", f"trainer.steps={STEPS}", f"trainer.global_batch={len(PAIRS)}",
        f"trainer.micro_batch={len(PAIRS)}", "trainer.eval_every=0", "trainer.log_every=1", "trainer.max_grad_norm=0",
        "data.workers=0", f"optim.lr={LEARNING_RATE}", "schedule=constant", "schedule.warmup_steps=0", *SETTINGS[loss],
    ]  # fmt: skip


def _sequences(folder: Path, loss: str) -> Any:
    """Return the pairs of our data set."""
    from serried.configs.compose import compose
    from serried.recipes.text.preference import Preference

    task = Preference(compose(arguments(folder, loss)))
    task.open_data(task.prepare())
    dataset = task.dataset("train")
    return [pair for sample in map(dataset.__getitem__, range(len(dataset))) for pair in sample]


def _padded(pairs: Any, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return input ids, attention mask and completion mask, [pairs, S]."""
    width = 1 + max(len(tokens) for pair in pairs for tokens in pair.tokens)
    ids, attention, completion = (np.zeros((len(pairs), width), np.int64) for _ in range(3))
    for row, pair in enumerate(pairs):
        tokens, is_target = pair.tokens[side], pair.targets[side] >= 0
        ids[row, : len(tokens)] = tokens
        ids[row, 1 : len(tokens) + 1][is_target] = pair.targets[side][is_target]
        completion[row, 1 : len(tokens) + 1] = is_target
        attention[row, : 1 + int(np.flatnonzero(completion[row])[-1])] = 1
    return tuple(map(torch.from_numpy, (ids, attention, completion)))  # type: ignore[return-value]


def _losses(folder: Path, loss: str) -> list[float]:
    from tokenizers import Tokenizer, models
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    trl, cpo, datasets = map(importlib.import_module, ("trl", "trl.experimental.cpo", "datasets"))

    plain = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", pad_token="<eos>")
    model, reference = (LlamaForCausalLM.from_pretrained(folder / "llama") for _ in range(2))
    common: dict[str, Any] = {
        "output_dir": str(folder / "trl"), "report_to": [], "use_cpu": True, "bf16": False, "max_length": None,
        "per_device_train_batch_size": 8, "gradient_checkpointing": False,
    }  # fmt: skip
    rows = [{"prompt": "a", "chosen": "a", "rejected": "a a", "completion": "a", "label": n > 3} for n in range(8)]

    def trainer_of(trainer: Any, config: Any, columns: list[str], **more: Any) -> Any:
        dataset = datasets.Dataset.from_list([{name: row[name] for name in columns} for row in rows])
        return trainer(model=model, args=config, train_dataset=dataset, processing_class=tokenizer, **more)

    pairs, batch = _sequences(folder, loss), dict[str, torch.Tensor]()
    paired = ["prompt", "chosen", "rejected"]
    if loss == "kto":
        config = trl.KTOConfig(**common, beta=0.3, desirable_weight=1.25, undesirable_weight=0.8)
        trainer = trainer_of(trl.KTOTrainer, config, ["prompt", "completion", "label"], ref_model=reference)
        for side, prefix in enumerate(("", "KL_")):
            names = [prefix + name for name in ("input_ids", "attention_mask", "completion_mask")]
            batch |= dict(zip(names, _padded(pairs, side), strict=True))
        batch["label"] = torch.tensor([pair.is_desired for pair in pairs])
        compute = lambda: trainer._compute_loss(model, batch, False)  # noqa: E731
    elif loss == "ipo":
        config = trl.DPOConfig(**common, loss_type="ipo", beta=0.1)
        trainer = trainer_of(trl.DPOTrainer, config, paired, ref_model=reference)
        sides = [_padded(pairs, side) for side in (0, 1)]
        names = ("input_ids", "attention_mask", "completion_mask")
        batch = {name: torch.cat(both) for name, *both in zip(names, *sides, strict=True)}
        compute = lambda: trainer._compute_loss(model, batch, False)  # noqa: E731
    else:
        options = {"simpo": {"beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}, "cpo": {"beta": 0.1}}[loss]
        kind = {"cpo": "sigmoid"}.get(loss, loss)
        trainer = trainer_of(cpo.CPOTrainer, cpo.CPOConfig(**common, loss_type=kind, **options), paired)
        for side, name in enumerate(("chosen", "rejected")):
            ids, attention, completion = _padded(pairs, side)
            batch |= {f"{name}_input_ids": ids, f"{name}_attention_mask": attention}
            batch[f"{name}_labels"] = ids.masked_fill(completion == 0, -100)
        compute = lambda: trainer.get_batch_loss_metrics(model, batch)[0]  # noqa: E731
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    found = []
    for _ in range(STEPS):
        value = compute()
        found.append(value.item())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(math.isfinite, found))
    return found


def main() -> None:
    """Record the losses of all settings."""
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        found = {loss: _losses(Path(folder), loss) for loss in SETTINGS}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(RECORDED.read_text())


if __name__ == "__main__":
    main()
