"""Saved models: find the model for a command, compose its config, and build its task and model."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import ValidationError

from serried.configs.errors import UserError
from serried.configs.hugging_face.adapter_folder import ADAPTER_CONFIG, ENDINGS, base_of_adapters, described_adapters
from serried.configs.hugging_face.model_folder import CONFIG, embedded_tokens, family_of_any, keys_of_model
from serried.configs.messages.suggestions import nearest
from serried.configs.plain_data import NotPlainData, read_if_there, value_at
from serried.configs.renamed_keys import read_saved_config
from serried.configs.schema.data import TextRunConfig
from serried.configs.schema.declaration import BUILT_IN, Declaration, declared, declaring
from serried.configs.schema.fields import parse_count
from serried.configs.schema.registry import task_of_model, tasks
from serried.configs.schema.run_config import check
from serried.configs.schema.sections import ParallelSection, RunConfig
from serried.records.metrics import METRICS
from serried.records.status import STATUS
from serried.runtime.process import typed_command
from serried.task_class import installed, make_task, words

if TYPE_CHECKING:
    from torch import nn

    from serried.trainer.task import RunTask

IsTaken = Callable[[Path], bool]
"""Predicate: whether a command can use the run in a folder."""
_Config = TypeVar("_Config", bound=RunConfig)

# finding --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A saved model."""

    folder: Path
    """A checkpoint, or a model folder in the format of transformers."""
    run: Path | None
    """Folder of the run that trained it; None if it is not in a run folder."""


def find_saved(given: Mapping[str, str], command: str) -> Saved:
    """Return the checkpoint or model folder specified by ``given``.

    ``given`` specifies a run, optionally with ``checkpoint=STEP``, a checkpoint, an exported model or another Hugging
    Face folder.

    Raises:
        UserError: It does not exist.
    """
    from serried.trainer.checkpoint.manifest import MANIFEST

    folder = Path(given.get("run.dir", ""))
    is_model = any((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG))
    if "run.dir" in given and is_model and not (folder / "config.yaml").is_file():
        if "checkpoint" in given:
            raise UserError(
                f"checkpoint={given['checkpoint']} has no effect: {folder} is a single model, not a run; leave it out"
            )
        run = folder.absolute().parent.parent
        is_checkpoint = (folder / MANIFEST).is_file() and (run / "config.yaml").is_file()
        return Saved(folder, run if is_checkpoint else None)
    run = find_run(given, command)
    return Saved(choose_checkpoint(checkpoints_of(run), given), run)


def find_run(given: Mapping[str, str], command: str, is_taken: IsTaken | None = None) -> Path:
    """Return the run folder specified by ``given``. The default is ``runs/tiny``, if it exists.

    ``is_taken`` returns whether ``command`` can use a run. By default, a run needs a checkpoint.

    Raises:
        UserError: There is no such run. The message lists usable runs.
    """
    if "run.dir" in given and "run.name" in given:
        raise UserError(f"run.dir={given['run.dir']} and run.name={given['run.name']} are both given; keep one")
    run = Path(given.get("run.dir", Path("runs") / given.get("run.name", "tiny")))
    if run.name == "checkpoints" and is_run(run.parent):
        run = run.parent
    if (run / "checkpoints").is_dir() or (is_taken is not None and is_taken(run)):
        return run
    is_taken = is_taken or has_saved
    if "run.dir" in given or "run.name" in given:
        return run_folder(str(run), is_taken)
    raise UserError(f"serried {command} needs a run: serried {command} RUN; {existing_runs(Path('runs'), is_taken)}")


def run_folder(word: str, is_taken: IsTaken) -> Path:
    """Return ``word`` as the path of a run folder.

    Raises:
        UserError: The folder contains no run. The message suggests similar runs that the command can use.
    """
    folder = Path(word)
    if is_run(folder):
        return folder
    if not folder.is_dir():
        raise UserError(f"there is no folder {word}; {similar_runs(folder, is_taken)}")
    if runs := [run for run in runs_of_a_sweep(folder) if is_taken(run)]:
        raise UserError(f"{word} is the folder of a sweep; its runs are {_listed(runs)}")
    hint = existing_runs(folder, is_taken)
    raise UserError(f"{word} is not a run: found no metrics.jsonl, status.json or config.yaml; {hint}")


def checkpoints_of(run: Path) -> dict[int, Path]:
    """Return the checkpoints of ``run`` by step, newest last. Raises ``UserError`` if there is none."""
    from serried.trainer.checkpoint.checkpoints import CHECKPOINTS
    from serried.trainer.checkpoint.retention import committed, step_of

    try:
        found = {step: path for path in committed(run / CHECKPOINTS) if (step := step_of(path)) is not None}
    except OSError as error:
        raise UserError(f"cannot read {run / CHECKPOINTS}: {error.strerror}; use run.dir=FOLDER") from None
    if not found:
        raise UserError(f"the run in {run} has no checkpoint yet: {run / CHECKPOINTS} is empty; use run.dir=OTHER")
    return found


def choose_checkpoint(found: Mapping[int, Path], given: Mapping[str, str]) -> Path:
    """Return the checkpoint in ``found`` selected by ``checkpoint=STEP`` in ``given``, or the newest.

    Raises:
        UserError: There is no checkpoint of this step.
    """
    typed = given.get("checkpoint", str(max(found)))
    step = parse_count(typed)
    if not isinstance(step, int):
        raise UserError(f"checkpoint={typed} is not a step; use the number in the folder name, e.g. checkpoint=100")
    if step not in found:
        steps = " or ".join(f"checkpoint={saved}" for saved in [*found][-4:])
        raise UserError(f"checkpoint={typed}: there is no checkpoint of step {step}; use {steps}")
    return found[step]


def is_run(folder: Path) -> bool:
    """Return whether ``folder`` contains the records of a run."""
    return any((folder / name).is_file() for name in (METRICS, STATUS, "config.yaml"))


def has_saved(folder: Path) -> bool:
    """Return whether the run in ``folder`` has a config and a checkpoint."""
    with suppress(UserError):
        return (folder / "config.yaml").is_file() and bool(checkpoints_of(folder))
    return False


def runs_of_a_sweep(folder: Path) -> list[Path]:
    """Return the run folders of the sweep in ``folder``; empty if it is not a sweep."""
    from serried.launch.sweep.sweep_table import read_summary

    return [outcome.run_dir for outcome in read_summary(folder)[1]]


def similar_runs(missing: Path, is_taken: IsTaken) -> str:
    """Return a hint for a ``missing`` folder: a run with a similar name, or all existing runs."""
    if (Path("runs") / missing).is_dir():
        return f"did you mean {Path('runs') / missing}?"
    folder = missing.parent if missing.parent.is_dir() and missing.parent != Path() else Path("runs")
    with suppress(OSError):
        names = [path.name for path in folder.iterdir() if is_taken(path)]
        if close := nearest(missing.name, names):
            return f"did you mean {folder / close[0]}?"
        if names:
            return existing_runs(folder, is_taken)
    return existing_runs(Path("runs"), is_taken)


def existing_runs(folder: Path, is_taken: IsTaken) -> str:
    """Return a hint that lists the usable runs in ``folder``, including the runs of sweeps."""
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        inside = []
    deeper = [run for path in inside for run in runs_of_a_sweep(path)]
    runs = [run for run in dict.fromkeys([*inside, *deeper]) if is_taken(run)]
    if runs:
        return f"runs in {folder}: {_listed(runs)}"
    hint = f"; python {typed_command()} creates runs/tiny" if folder == Path("runs") else ""
    return f"there is no run{' with a checkpoint' if is_taken is has_saved else ''} in {folder}{hint}"


def _listed(runs: list[Path]) -> str:
    more = f" and {len(runs) - 8} more" if len(runs) > 8 else ""
    return f"{' '.join(str(run) for run in runs[:8])}{more}"


# config and task ------------------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """A saved model with its composed config."""

    config: Any
    folder: Path
    """A checkpoint, or a model folder in the format of transformers."""
    new_task: Callable[[Any], Any]
    """Build the task for a config, which may differ from ``config``."""


def open_saved(
    given: Mapping[str, str],
    overrides: list[str],
    reads: tuple[str, ...],
    command: str,
    task_of: Callable[[Path, str], Declaration],
) -> Opened:
    """Open the saved model specified by ``given``.

    Args:
        given: Arguments of the command by key; see ``find_saved``.
        overrides: Overrides of the config.
        reads: Allowed prefixes of the keys in ``overrides``.
        command: Name of the command, for messages.
        task_of: Returns the task of a run folder for ``command``.

    Raises:
        UserError: There is no such model, ``task_of`` refuses its task, or an override is invalid.
    """
    from serried.configs.compose import refuse_misread
    from serried.recipes.text.causal_lm import CausalLM

    saved = find_saved(given, command)
    if saved.run is None:
        refuse_misread(overrides, reads)
        return Opened(config_of_model(saved.folder, overrides), saved.folder, CausalLM)
    return open_run(saved.run, task_of(saved.run, command), overrides, reads)._replace(folder=saved.folder)


def open_run(run: Path, declaration: Declaration, overrides: Sequence[str] = (), reads: tuple[str, ...] = ()) -> Opened:
    """Compose the config of the run in folder ``run``, trained by the declared task. ``reads``: see ``open_saved``."""
    from serried.configs.compose import compose_saved

    with declaring(declaration._replace(config_dirs=declared().config_dirs)):
        config = compose_saved(run / "config.yaml", overrides, reads)
    return Opened(config, run, lambda config: _task_of(config, declaration))


def _task_of(config: RunConfig, declaration: Declaration) -> "RunTask":
    return make_task(config, declaration.task or task_of_model(config.task.name))


def task_of_text(run: Path, command: str) -> Declaration:
    """Return the declaration of the text task that trained ``run``.

    Raises:
        UserError: The task belongs to a script, or is not a text task.
    """
    from serried.trainer.task import TextTask

    found = task_that_trained(run, command)
    if found.task is None or (issubclass(found.task, TextTask) and found.sections == BUILT_IN.sections):
        return found
    why = "which is not a text task (a serried.TextTask with the sections model and data)"
    raise UserError(f'{_cannot_open(run, found.name, why, command)}: serried.load_model("{run}")')


def task_that_trained(run: Path, command: str) -> Declaration:
    """Return the declaration of the task that trained ``run``. Raises ``UserError`` if the task belongs to a script."""
    name = _recorded_task(run)
    if name is None:
        return BUILT_IN
    if name in tasks.names():
        return installed(name)
    why = "which is not installed"
    if command == "plan":
        instead = "plan the run with its script: python SCRIPT dry_run=true plan.mode=trace"
        raise UserError(f"{run} was trained by the task {name}, {why}; {instead}")
    raise UserError(f'{_cannot_open(run, name, why, command)}: serried.load_model("{run}", task=CLASS)')


def _cannot_open(run: Path, name: str, why: str, command: str) -> str:
    other = "use format=hf, or load it in Python" if command.startswith("export format") else "load it in Python"
    return f"{run} was trained by the task {name}, {why}, so serried {command} cannot open it; {other}"


def _recorded_task(run: Path) -> str | None:
    """Return the name of the task in the config of ``run``. None if the config is invalid; ``compose`` reports that."""
    name = value_at("task.name", read_if_there(run / "config.yaml"))
    return None if name is None else str(name)


def config_of_model(folder: Path, overrides: list[str]) -> TextRunConfig:
    """Return a config for the model and tokenizer in ``folder``, in the format of transformers.

    Raises:
        UserError: The family of the model is not supported, or the folder cannot be read.
    """
    from serried.configs.compose import compose

    keys: dict[str, dict[str, Any]] = {"model": {"path": folder.absolute()}}
    if not (folder / CONFIG).is_file():
        keys = _keys_of_adapters(folder)
    path = str(keys["model"]["path"])
    family = family_of_any(path)
    longest = keys_of_model(path, family).get("max_sequence_length", 2048)
    choice = [f"model={family}"] if family else []
    config = compose([*choice, *words(keys), f"data.sequence_length={longest}", *overrides])
    is_chosen = any(word.startswith("data.format=") for word in overrides)
    if (folder / "chat_template.jinja").is_file() and not is_chosen:
        config = config.model_copy(update={"data": config.data.model_copy(update={"format": "chat"})})
    return config


def _keys_of_adapters(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the config keys, by section, of a model with the adapters in ``folder``, in the format of PEFT.

    Raises:
        UserError: The adapters cannot be read, or are not of a supported kind.
    """
    from serried.records.safetensors_files import TensorFolder

    described_adapters(folder, TensorFolder(folder, "adapter_model").specs)
    return {"model": {"path": base_of_adapters(folder)}, "adapter": {"path": folder.absolute()}}


def as_saved(config: _Config, checkpoint: Path, *, world_size: int, is_resharded: bool, is_other_data: bool) -> _Config:
    """Return the ``config`` of a run, adapted to the model in ``checkpoint``, in particular its vocabulary size.

    Args:
        config: Config of the run.
        checkpoint: The checkpoint to open.
        world_size: Number of processes.
        is_resharded: Choose a layout for these processes instead of the run's layout.
        is_other_data: The data differs from the run's. Use the model's tokenizer, since the run's tokenizer may have
            been trained on its data.

    Raises:
        UserError: The checkpoint has no config.
    """
    if is_resharded:
        config = config.model_copy(update={"parallel": _for_processes(config.parallel, world_size)})
    if not isinstance(config, TextRunConfig):
        return config
    rows = config.model.vocab_size
    if (checkpoint / CONFIG).exists() or not (checkpoint / ADAPTER_CONFIG).exists():
        rows = embedded_tokens(checkpoint)
    elif rows is not None:
        rows = max(rows, _rows_beside_adapters(checkpoint))
    model, data = config.model.model_copy(update={"vocab_size": rows}), config.data
    if is_other_data:
        update: dict[str, Any] = {"validation_fraction": 0.0, "validation": {}}
        has_tokenizer = (checkpoint / "tokenizer.json").exists() or not (checkpoint / ADAPTER_CONFIG).exists()
        if data.tokenizer != "bytes" and not getattr(data, "is_prepared", False) and has_tokenizer:
            update["tokenizer"] = str(checkpoint.absolute())
        if (template := checkpoint / "chat_template.jinja").exists() and data.chat_template != "none":
            text = template.read_text("utf-8")  # read now, since the checkpoint may be deleted during generation
            update["chat_template"] = text if "{" in text else str(template)
        data = data.model_copy(update=update)
    return config.model_copy(update={"model": model, "data": data})


def _rows_beside_adapters(folder: Path) -> int:
    """Return the number of rows that the tokenizer and the saved modules in a PEFT folder need in the embedding."""
    from serried.recipes.data.tokenizers.hugging_face_tokenizer import find_tokenizer
    from serried.records.safetensors_files import TensorFolder

    ids = find_tokenizer(str(folder)).vocab_size if (folder / "tokenizer.json").exists() else 0
    specs = TensorFolder(folder, "adapter_model").specs.values()
    return max([ids, *(spec.shape[0] for spec in specs if len(spec.shape) == 2 and not spec.name.endswith(ENDINGS))])


def _for_processes(before: ParallelSection, world_size: int) -> ParallelSection:
    strategy = "single" if world_size == 1 else "ddp" if before.strategy in ("single", "ddp") else "fsdp"
    degrees = {"replicate": -1 if strategy == "ddp" else 1, "shard": -1 if strategy == "fsdp" else 1}
    return ParallelSection.model_validate({"strategy": strategy, **degrees})


# model ----------------------------------------------------------------------------------------------------------------


def open_model(path: Path, declaration: Declaration | None) -> "nn.Module":
    """Load the model of a checkpoint, or of the newest checkpoint of a run folder, on the CPU, in evaluation mode.

    ``declaration`` declares the task that trained it. None means a built-in task, or a task of an installed package.

    Raises:
        UserError: There is no checkpoint, it is damaged, or it belongs to another model or task.
    """
    from serried.trainer.checkpoint.checkpoints import CHECKPOINTS
    from serried.trainer.checkpoint.read_while_training import with_chosen
    from serried.trainer.checkpoint.retention import committed

    if not path.exists():
        raise UserError(f"{path} does not exist (looked in {Path.cwd()}); give a run folder or a checkpoint in one")
    return with_chosen(lambda: (committed(path / CHECKPOINTS) or [path])[-1], partial(_open, path, declaration))


def _open(path: Path, declaration: Declaration | None, checkpoint: Path) -> "nn.Module":
    """Load the model in ``checkpoint``. ``path`` is the path given by the user, for messages."""
    import torch

    from serried.parallel.layout.checks import with_values
    from serried.parallel.layout.mesh import Layout
    from serried.trainer.checkpoint.read_while_training import reading
    from serried.trainer.evaluation.evaluate import check_weights, load_model

    saved = checkpoint.parent.parent / "config.yaml"
    try:
        plain = read_saved_config(saved)
    except (OSError, NotPlainData) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} is neither a run folder nor a checkpoint in one: {saved}: {reason}") from None
    name = value_at("task.name", plain)
    if declaration is None:
        if name not in tasks.names():
            raise UserError(
                f"{path} was trained by the task {name}; give its class: serried.load_model(path, task=...)"
            )
        declaration = installed(name)
    try:
        with declaring(declaration):
            config = check(plain)
    except ValidationError as error:
        first, given = error.errors()[0], declaration.name or name
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(f"{path} was trained by the task {name}, which {given} does not match: {why}") from None
    # With fp32 the frozen weights below adapters are fp32 too, and the model needs no autocast.
    config = with_values(config, {"precision.name": "fp32"})
    task = _task_of(config, declaration)
    with reading(checkpoint):
        task.open_saved(checkpoint)
        check_weights(checkpoint)
        return load_model(config, task, Layout("single"), torch.device("cpu"), checkpoint).module
