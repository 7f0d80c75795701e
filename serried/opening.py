"""Opening the saved model that the words of a command name."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serried.configs.errors import UserError
from serried.configs.plain_data import read_if_there, value_at
from serried.configs.schema.data import TextRunConfig
from serried.configs.schema.declaration import BUILT_IN, Declaration, declared, declaring
from serried.configs.schema.registry import task_of_model, tasks
from serried.runs import find_saved
from serried.task_class import installed


def opened(
    given: dict[str, str],
    overrides: list[str],
    reads: tuple[str, ...],
    command: str,
    task_of: Callable[[Path, str], Declaration],
) -> tuple[Any, Path, Callable[[Any], Any]]:
    """Return the config and folder of the saved model that ``given`` names, and what makes its task, which ``task_of``
    finds in a run folder for ``command``. ``overrides`` of the config may have keys that begin as ``reads`` say. Raises
    ``UserError`` if there is no such model, ``task_of`` refuses its task, or an override is wrong."""
    from serried.configs.compose import refuse_misread
    from serried.recipes.text.causal_lm import CausalLM

    saved = find_saved(given, command)
    if saved.run is None:
        refuse_misread(overrides, reads)
        return config_of_model(saved.folder, overrides), saved.folder, CausalLM
    config, new_task = opened_run(saved.run, task_of(saved.run, command), overrides, reads)
    return config, saved.folder, new_task


def opened_run(
    run: Path, declaration: Declaration, overrides: Sequence[str] = (), reads: tuple[str, ...] = ()
) -> tuple[Any, Callable[[Any], Any]]:
    """Return the config of ``run``, with ``overrides`` of keys that begin as ``reads`` say, and what makes its task, of
    which the ``declaration`` is given."""
    from serried.configs.compose import compose_saved

    with declaring(declaration._replace(config_dirs=declared().config_dirs)):
        config = compose_saved(run / "config.yaml", overrides, reads)

    def new_task(config: Any) -> Any:
        task = (declaration.task or task_of_model(config.task.name))()
        task.configure(config)
        return task

    return config, new_task


def task_of_text(run: Path, command: str) -> Declaration:
    """Return the declaration of the task that trained ``run``. Raises ``UserError`` if it is a script's, or has no
    text."""
    from serried.trainer.task import TextTask

    found = task_that_trained(run, command)
    if found.task is None or (issubclass(found.task, TextTask) and found.sections == BUILT_IN.sections):
        return found
    why = "which trains no language model (a serried.TextTask with the sections model and data)"
    raise UserError(f'{_cannot_open(run, found.name, why, command)}: serried.load_model("{run}")')


def task_that_trained(run: Path, command: str) -> Declaration:
    """Return the declaration of the task that trained ``run``, of any kind. Raises ``UserError`` if it is a
    script's."""
    name = _recorded_task(run)
    if name is None:
        return BUILT_IN
    if name in tasks.names():
        return installed(name)
    why = "which is not installed"
    if command == "plan":
        instead = "plan it in its script: python SCRIPT dry_run=true plan.mode=trace"
        raise UserError(f"{run} was trained by the task {name}, {why}; {instead}")
    raise UserError(f'{_cannot_open(run, name, why, command)}: serried.load_model("{run}", task=CLASS)')


def _cannot_open(run: Path, name: str, why: str, command: str) -> str:
    other = "use format=hf, or in Python" if command.startswith("export format") else "in Python"
    return f"{run} was trained by the task {name}, {why}, so serried {command} cannot open it; {other}"


def _recorded_task(run: Path) -> str | None:
    """Return the name of the task in the config of ``run``; None: a mistake in it, which composing reports."""
    name = value_at("task.name", read_if_there(run / "config.yaml"))
    return None if name is None else str(name)


def config_of_model(folder: Path, overrides: list[str]) -> TextRunConfig:
    """Return the config of a run with the model and tokenizer of ``folder``, which transformers opens. Raises
    ``UserError`` if it holds a model of another family, or cannot be read."""
    from serried.configs.compose import compose
    from serried.configs.hugging_face.model_folder import family_of_any, keys_of_model
    from serried.recipes.saved import keys_of_adapters
    from serried.task_class import words

    keys: dict[str, dict[str, Any]] = {"model": {"path": folder.absolute()}}
    if not (folder / "config.json").is_file():  # adapters alone
        keys = keys_of_adapters(folder)
    path = str(keys["model"]["path"])
    family = family_of_any(path)
    longest = keys_of_model(path, family).get("max_sequence_length", 2048)
    choice = [f"model={family}"] if family else []
    config = compose([*choice, *words(keys), f"data.sequence_length={longest}", *overrides])
    is_chosen = any(word.startswith("data.format=") for word in overrides)
    if (folder / "chat_template.jinja").is_file() and not is_chosen:
        config = config.model_copy(update={"data": config.data.model_copy(update={"format": "chat"})})
    return config
