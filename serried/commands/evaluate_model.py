"""``serried evaluate``."""

from functools import partial
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.schema.data import DataSection
from serried.configs.schema.fields import AUTO
from serried.configs.subcommand_arguments import pairs
from serried.saved import as_saved, find_saved, open_saved, task_that_trained

_EVALUATE_READS = (
    "data", "task.path", "task.validation", "precision", "parallel", "launch.device",
    "launch.start_timeout_seconds", "launch.step_timeout_seconds", "trainer.eval_batches", "trainer.global_batch",
    "trainer.micro_batch",
)  # fmt: skip
"""Prefixes of the train.py keys that this command also reads."""


def evaluate(words: list[str]) -> int:
    """Print loss, perplexity and bits per byte, or the task's own metrics, on the run's validation sets or other data.

    data, data.path, ...   other data, used in full, with the run's tokenizer
    task.path              other samples for a classifier; task.validation=NAME: another split
    trainer.eval_batches   batches of trainer.global_batch sequences; the run's by default
    parallel, precision    as in training; on several processes: torchrun ... -m serried evaluate ...
    json=true              print one line of JSON per set
    """
    from serried.runtime.process import torchrun_says
    from serried.runtime.session import Session, run_in_session
    from serried.trainer.checkpoint.read_while_training import read_by_all, with_chosen
    from serried.trainer.evaluation.evaluate import print_evaluation

    given, overrides = pairs(words, "evaluate", ("run.dir", "run.name", "checkpoint", "json"), reads_overrides=True)
    if given.get("json", "false") not in ("true", "false"):
        raise UserError(f"json={given['json']} is not true or false; use json=true")
    keys = [word.partition("=")[0].lstrip("+") for word in overrides]
    config, checkpoint, new_task = open_saved(given, overrides, _EVALUATE_READS, "evaluate", task_that_trained)
    is_other_data = any(
        key in ("data", "task.path") or (key.startswith("data.") and key.split(".")[1] not in DataSection.model_fields)
        for key in keys
    )
    if not is_other_data and not (checkpoint.absolute().parent.parent / "config.yaml").is_file():
        raise UserError(f"{checkpoint} does not belong to a run, so give the data: data=text data.path=FILES")
    if is_other_data and isinstance(config.data, DataSection) and config.data.name == "mixture":
        raise UserError("data=mixture has several sources; evaluate one source at a time: data=text data.path=FILES")
    is_resharded = not any(key.startswith("parallel") for key in keys)
    if config.trainer.micro_batch == AUTO:
        raise UserError("trainer.micro_batch=auto is supported only in training; use trainer.micro_batch=8")
    batches = None if is_other_data and "trainer.eval_batches" not in keys else config.trainer.eval_batches

    def work(session: Session) -> int:
        def evaluated(checkpoint: Path) -> int:
            opens = partial(
                as_saved, config, checkpoint, world_size=torchrun_says()[2], is_resharded=is_resharded,
                is_other_data=is_other_data,
            )  # fmt: skip
            adapted = read_by_all(session, checkpoint, opens)
            session.same_everywhere("the config", adapted.model_dump_json())
            return print_evaluation(
                adapted, new_task(adapted), session, checkpoint, is_whole=is_other_data, batches=batches,
                as_json=given.get("json") == "true",
            )  # fmt: skip

        return with_chosen(lambda: Path(session.once(lambda: str(find_saved(given, "evaluate").folder))), evaluated)

    # The machine that evaluates may not be in a cloud.
    return run_in_session(config.launch.model_copy(update={"notice": None}), work)
