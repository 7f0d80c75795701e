"""The configuration of a run as its saved model is to be opened."""

from pathlib import Path
from typing import Any

from serried.configs.data_section import TextRunConfig
from serried.configs.errors import UserError
from serried.configs.plain_data import read_json
from serried.configs.schema import ParallelSection


def as_saved(
    config: TextRunConfig, checkpoint: Path, *, world_size: int, is_resharded: bool, is_other_data: bool
) -> TextRunConfig:
    """Return ``config`` of a run, changed to open the model in ``checkpoint``: with its vocabulary.

    ``is_resharded``: for the processes of this start. ``is_other_data``: for other data than the run's, tokenized with
    the model's tokenizer, since the run's may be made from its data.

    Raises:
        UserError: the checkpoint lacks its config.
    """
    try:
        rows = read_json(checkpoint / "config.json")["vocab_size"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{checkpoint / 'config.json'} cannot be read: {error}; use another checkpoint") from None
    model, data, parallel = config.model.model_copy(update={"vocab_size": rows}), config.data, config.parallel
    if is_resharded:
        strategy = "single" if world_size == 1 else "ddp" if parallel.strategy in ("single", "ddp") else "fsdp"
        degrees = {"replicate": -1 if strategy == "ddp" else 1, "shard": -1 if strategy == "fsdp" else 1}
        parallel = ParallelSection.model_validate({"strategy": strategy, **degrees})
    if is_other_data:
        update: dict[str, Any] = {"validation_fraction": 0.0, "validation": {}}
        if data.tokenizer != "bytes" and not getattr(data, "is_prepared", False):
            update["tokenizer"] = str(checkpoint.absolute())
        if (checkpoint / "chat_template.jinja").exists():
            update["chat_template"] = str(checkpoint / "chat_template.jinja")
        data = data.model_copy(update=update)
    return config.model_copy(update={"model": model, "data": data, "parallel": parallel})
