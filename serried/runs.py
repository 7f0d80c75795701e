"""Finding the runs, checkpoints and model folders that the words of a command name."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.messages.suggestions import nearest
from serried.configs.schema.sections import parse_count
from serried.records.metrics import METRICS
from serried.records.status import STATUS
from serried.runtime.command import typed_command

IsTaken = Callable[[Path], bool]
"""Whether a command can use the run in a folder."""


@dataclass(frozen=True)
class Saved:
    """A saved model."""

    folder: Path
    """A checkpoint, or a folder that transformers opens."""
    run: Path | None
    """Folder of the run it belongs to."""


def find_saved(given: Mapping[str, str], command: str) -> Saved:
    """The checkpoint or model folder that ``given`` names: a run with or without ``checkpoint=STEP``, a checkpoint, an
    exported model or another Hugging Face folder. Raises ``UserError`` if there is none."""
    from serried.trainer.checkpoint.manifest import MANIFEST

    folder = Path(given.get("run.dir", ""))
    is_model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if "run.dir" in given and is_model and not (folder / "config.yaml").is_file():
        if "checkpoint" in given:
            raise UserError(
                f"{folder} is a saved model, so checkpoint={given['checkpoint']} has no meaning; leave it out"
            )
        run = folder.absolute().parent.parent
        is_checkpoint = (folder / MANIFEST).is_file() and (run / "config.yaml").is_file()
        return Saved(folder, run if is_checkpoint else None)
    run = find_run(given, command)
    return Saved(choose_checkpoint(checkpoints_of(run), given), run)


def find_run(given: Mapping[str, str], command: str, is_taken: IsTaken | None = None) -> Path:
    """Return the folder of the run that ``given`` names; without a name, of the run of recipe tiny if it exists.

    ``is_taken``: which runs ``command`` can use; by default those with a checkpoint.

    Raises ``UserError`` if there is no such run; names those that ``command`` can use.
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
    """Return the run folder that ``word`` names. Raises ``UserError`` if it holds no run; names similar ones that the
    command can use."""
    folder = Path(word)
    if is_run(folder):
        return folder
    if not folder.is_dir():
        raise UserError(f"there is no folder {word}; {similar_runs(folder, is_taken)}")
    if runs := [run for run in runs_of_a_sweep(folder) if is_taken(run)]:
        raise UserError(f"{word} is the folder of a sweep; its runs are {_listed(runs)}")
    hint = existing_runs(folder, is_taken)
    raise UserError(f"{word} holds no run: no metrics.jsonl, status.json or config.yaml; {hint}")


def checkpoints_of(run: Path) -> dict[int, Path]:
    """The checkpoints of ``run`` by step, the newest last. Raises ``UserError`` if there is none."""
    from serried.trainer.checkpoint.resume import CHECKPOINTS
    from serried.trainer.checkpoint.retention import committed, step_of

    try:
        found = {step: path for path in committed(run / CHECKPOINTS) if (step := step_of(path)) is not None}
    except OSError as error:
        raise UserError(f"cannot read {run / CHECKPOINTS}: {error.strerror}; use run.dir=FOLDER") from None
    if not found:
        raise UserError(f"the run in {run} has no checkpoint yet: {run / CHECKPOINTS} is empty; use run.dir=OTHER")
    return found


def choose_checkpoint(found: Mapping[int, Path], given: Mapping[str, str]) -> Path:
    """Return the checkpoint among ``found`` that ``given`` names, or the newest. Raises ``UserError`` if it is not
    among them."""
    typed = given.get("checkpoint", str(max(found)))
    step = parse_count(typed)
    if not isinstance(step, int):
        raise UserError(f"checkpoint={typed} is not a step; give the number in its name, e.g. checkpoint=100")
    if step not in found:
        steps = " or ".join(f"checkpoint={each}" for each in [*found][-4:])
        raise UserError(f"checkpoint={typed}: {next(iter(found.values())).parent} has no step {step}; use {steps}")
    return found[step]


def is_run(folder: Path) -> bool:
    """Whether a run has left records in ``folder``."""
    return any((folder / name).is_file() for name in (METRICS, STATUS, "config.yaml"))


def has_saved(folder: Path) -> bool:
    """Whether a checkpoint of the run in ``folder`` can be opened."""
    with suppress(UserError):
        return (folder / "config.yaml").is_file() and bool(checkpoints_of(folder))
    return False


def runs_of_a_sweep(folder: Path) -> list[Path]:
    """The run folders of the sweep in ``folder``; empty if it is none."""
    from serried.launch.sweep.summary import read_summary

    return [outcome.run_dir for outcome in read_summary(folder)[1]]


def similar_runs(missing: Path, is_taken: IsTaken) -> str:
    """Return what to type instead of a ``missing`` folder: a run with a similar name, or all existing runs."""
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
    """Return what to type: the runs in ``folder`` that the command can use, and the runs of sweeps in it."""
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        inside = []
    deeper = [run for path in inside for run in runs_of_a_sweep(path)]
    runs = [run for run in dict.fromkeys([*inside, *deeper]) if is_taken(run)]
    if runs:
        return f"{folder} holds: {_listed(runs)}"
    hint = f"; python {typed_command()} makes runs/tiny" if folder == Path("runs") else ""
    return f"{folder} holds none{' with a checkpoint' if is_taken is has_saved else ''}{hint}"


def _listed(runs: list[Path]) -> str:
    more = f" and {len(runs) - 8} more" if len(runs) > 8 else ""
    return f"{' '.join(str(run) for run in runs[:8])}{more}"
