"""Everything that is not training: ``serried export run.dir=runs/tiny out=my-model``."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, UserError, noted
from serried.configs.schema import RunConfig, TextRunConfig
from serried.configs.suggest import nearest
from serried.configs.words import byte_count, no_key, number_between, pairs, run_key, step_number, whole_number
from serried.runtime.early import print_any_text
from serried.runtime.ending import leave, report_mistake
from serried.runtime.program import check_surroundings
from serried.runtime.ranks import is_started, say

_OVERRIDES = "[recipe=RECIPE] [key=value ...]"
_COMMANDS = {  # what it takes, what it does, and more of that
    "recipes": ("", "what recipe=NAME can name", ""),
    "plan": (_OVERRIDES, "what a run would be, on any machine: as python train.py dry_run=true", ""),
    "prepare": (
        _OVERRIDES,
        "tokenise the data once, before training or on another machine:",
        """\
  trainer.workers    threads; one for each core when not given
  data.cache_dir  where to; give the same to train.py
""",
    ),
    "preflight": (
        "[key=value ...]",
        "are these nodes fit: alone, or on all nodes of a run, on each of them with torchrun's usual words:",
        """\
  torchrun --nnodes=2 --nproc_per_node=8 ... -m serried preflight run.dir=RUN
  serried preflight launch=slurm launch.nodes=2 ... run.dir=RUN    in a Slurm job: submits it, waits, prints its table
""",
    ),
    "submit": ("[key=value ...] [-m]", "a run to Slurm: as python train.py launch=slurm", ""),
    "status": ("[key=value ...]", "how a run or a sweep stands, and its job; without overrides, all in runs/", ""),
    "export": (
        "[run.dir=RUN] out=FOLDER [checkpoint=STEP] [dtype=fp32|bf16|fp16] [shard_size=5GB]",
        "a checkpoint as a plain model:",
        """\
  run.dir     run folder (or run.name=NAME for runs/NAME); runs/tiny when not given
  out         folder to write, which transformers opens: config, generation config, tokenizer, weights
  checkpoint  step of the checkpoint; the newest when not given
  dtype       of the weights; as saved (fp32) when not given
  shard_size  largest file, in bytes: 500MB, 5GB (the default); a tensor that is larger has its own
""",
    ),
    "report": (
        "RUN [RUN ...] [out=FILE]",
        "the curves of one run, or of several compared, as one HTML page that needs no network:",
        """\
  RUN         run folders: runs/tiny, or runs/sweep/*; run.dir=RUN and run.name=NAME do too
  out         file to write; when not given RUN/report.html, or report.html here for several
""",
    ),
    "send": (
        "[run.dir=RUN]",
        "the records of a run that has ended to its trackers, again: W&B, MLflow, TensorBoard:",
        """\
  run.dir     run folder (or run.name=NAME for runs/NAME); runs/tiny when not given
""",
    ),
    "generate": (
        "[run.dir=RUN] [prompt=TEXT] [tokens=200] [temperature=0.8] [top_p=1] [seed=1] [checkpoint=STEP]",
        "text from a checkpoint, as it is made; the prompt is a user's message where the run was data.format=chat:",
        """\
  prompt       what to go on from; without one a document is begun
  tokens       at most so many; it ends by itself at the end of the text
  temperature  0: always the likeliest token; 1: as the model weighs them
  top_p        of the likeliest tokens so many that their probabilities come to this
  device       cpu, or cuda; precision=bf16 is read too
""",
    ),
    "evaluate": (
        "[run.dir=RUN] [checkpoint=STEP] [json=true] [data=text data.path=FILES] [key=value ...]",
        "loss, perplexity and bits per byte of a checkpoint, on the run's validation sets or on data named here:",
        """\
  data, data.path, ...   other text, tokenised as the run's: all its whole sequences
  trainer.eval_batches   batches of trainer.global_batch sequences to evaluate on; the run's when not given
  parallel, precision    as in training; under torchrun on all its processes: torchrun ... -m serried evaluate ...
  json=true              a line of JSON for each set
""",
    ),
}


_OF_A_RUN = """\
  run.dir      run folder (or run.name=NAME for runs/NAME); runs/tiny when not given
  checkpoint   step of the checkpoint; the newest when not given
"""


_HELP = ("--help", "-h")


def _help(command: str | None) -> str:
    """The part of ``command``; of none, the whole page."""
    if command is None:
        lines = "\n       ".join(f"serried {name} {takes}".rstrip() for name, (takes, *_) in _COMMANDS.items())
        about = "\n".join(f"{name}, {does}\n{more}" for name, (_, does, more) in _COMMANDS.items())
        return f"""usage: {lines}

plan, prepare, preflight, submit and status take the overrides of train.py, which name the run.

{about}
One of them alone: serried COMMAND --help. Training is train.py's: python train.py --help"""
    takes, does, more = _COMMANDS[command]
    of_a_run = _OF_A_RUN if command in _ABOUT_A_RUN else ""
    overrides = "\nkey=value: overrides of train.py, which python train.py --help lists" if "key=value" in takes else ""
    usage = f"usage: serried {command} {takes}".rstrip()
    return f"{usage}\n\n{command}, {does}\n{of_a_run}{more}{overrides}\nAll commands: serried --help"


_EXPORT_KEYS = ("run.dir", "run.name", "out", "checkpoint", "dtype", "shard_size")
_ABOUT_A_RUN = ("generate", "evaluate")  # with _OF_A_RUN in their help
_REPORT_KEYS = ("run.dir", "run.name", "out")
_GENERATE_KEYS = (
    "run.dir", "run.name", "checkpoint", "prompt", "tokens", "temperature", "top_p", "seed", "device",
)  # fmt: skip
_GENERATE_READS = ("precision", "launch.device")
_EVALUATE_KEYS = ("run.dir", "run.name", "checkpoint", "json")
_EVALUATE_READS = (
    "data", "precision", "parallel", "launch.device", "launch.start_timeout_seconds", "launch.step_timeout_seconds",
    "trainer.eval_batches", "trainer.global_batch", "trainer.micro_batch",
)  # fmt: skip
"""Beginnings of the keys of train.py that these commands read too."""
_OTHER_DATA = (
    "data", "data.path", "data.subset", "data.split", "data.revision", "data.text_column", "data.messages_column",
)  # fmt: skip
"""Keys that name other documents than those of the run."""


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says and return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    command, *rest = words or ["--help"]
    print_any_text()
    try:
        check_surroundings(words)
        is_help = command in (*_HELP, "help")
        asked = next((word for word in rest if word not in _HELP), None) if is_help else command
        if asked is not None and asked not in _COMMANDS:
            close = nearest(asked, [*_COMMANDS])
            hint = f"did you mean: serried {' or '.join(close)}" if close else f"there are {', '.join(_COMMANDS)}"
            raise UserError(f"there is no command {asked!r}; {hint}; to train: python train.py")
        if is_help or {*_HELP} & {*rest}:
            say(_help(asked))
        elif command == "export":
            print(export(rest))
        elif command == "report":
            print(report(rest))
        elif command == "send":
            return send(rest)
        elif command == "generate":
            generate(rest)
        elif command == "evaluate":
            leave(evaluate(rest))
        elif command == "prepare":
            print(prepare(rest))
        elif command == "preflight":
            leave(preflight(rest))
        elif command == "submit":
            return submit(rest)
        elif command == "status":
            status(rest)
        elif command == "plan":
            return plan(rest)
        elif command == "recipes":
            say(recipes(rest))
    except UserError as error:
        return report_mistake(error)
    except KeyboardInterrupt:
        more = "; the same command goes on where this one was" if command == "prepare" else ""
        print(f"interrupted{more}", file=sys.stderr)
        return EXIT_STOPPED
    return EXIT_FINISHED


def prepare(overrides: list[str]) -> str:
    """Tokenise what ``overrides`` name. Returns what to tell the user.

    Raises:
        UserError: an override is wrong, or the data cannot be had.
    """
    from serried.configs.compose import compose
    from serried.recipes.causal_lm import CausalLM
    from serried.runtime.console import Console

    config = compose(overrides)
    threads = config.trainer.workers if "workers" in config.trainer.model_fields_set else None
    if threads == 0:
        raise UserError("trainer.workers=0 leaves no thread to prepare with; use trainer.workers=1, or leave it out")
    recipe = CausalLM(config)
    recipe.open_data(recipe.prepare(Console(speaks=True, rank=0).progress, threads))
    recipe.vocab_size()  # refuses a model that is too small for the tokenizer, while nothing else waits for it
    return recipe.summary()


def plan(words: list[str]) -> int:
    """``train.py dry_run=true`` under another name: what a run would be. Returns the exit code."""
    from serried.program import main as train

    return train([*words, *([] if "dry_run=true" in words else ["dry_run=true"])])


def recipes(words: list[str]) -> str:
    """What there is for ``recipe=``.

    Raises:
        UserError: there are ``words``; it takes none.
    """
    from serried.configs.help import recipes_text

    if words:
        raise UserError(
            f"serried recipes takes nothing, and got {' '.join(words)}; serried plan {words[0]} shows a run"
        )
    return f"{recipes_text()}\none of them: python train.py recipe=NAME; what it is made of: serried plan recipe=NAME"


def submit(words: list[str]) -> int:
    """``train.py launch=slurm`` under another name. Returns the exit code."""
    from serried.program import main as train

    return train([*words, *([] if "launch=slurm" in words else ["launch=slurm"])])


def status(words: list[str]) -> None:
    """Print how the run that ``words`` (overrides of train.py) name stands; without any, every run in ``runs``.

    Of a sweep that is named, the table and the report are written anew.

    Raises:
        UserError: an override is mistaken, or there is no such run.
    """
    from serried.configs.compose import compose
    from serried.launch.progress import describe_run, runs_in
    from serried.launch.sweep import write_anew
    from serried.records.page import write_report

    _refuse([no_key(word, key) for word in words if "=" not in word and (key := run_key(word))])
    if words:
        run_dir = compose(words).run.dir
        if not run_dir.is_dir():
            raise UserError(f"there is no run in {run_dir}; {_runs_near(run_dir, _is_run, 'run.dir=')}")
        print(describe_run(run_dir), flush=True)
        write_anew(run_dir, write_report)
        return
    folders = runs_in(Path("runs"))
    if not folders:
        raise UserError("there is no run in runs; use run.dir=FOLDER")
    print("\n\n".join(describe_run(folder) for folder in folders))


def preflight(words: list[str]) -> int:
    """Examine the nodes that a run as ``words`` (overrides of train.py) says would use. Returns the exit code.

    Raises:
        UserError: an override is mistaken.
    """
    from serried.configs.compose import compose
    from serried.launch.slurm import preflight_by_job

    config = compose(words)
    if config.launch.name == "slurm" and not is_started():
        return preflight_by_job(words, config)
    if (config.launch.nodes or 1) > 1 and not is_started():
        raise UserError(
            f"launch.nodes={config.launch.nodes}, and this is one process on one of them; use launch=slurm, which "
            "examines them in a job, torchrun on each of them, or leave launch.nodes out to examine this node alone"
        )
    return _preflight_here(config)


def _preflight_here(config: RunConfig) -> int:
    from serried.launch.preflight import preflight as examine
    from serried.recipes.causal_lm import CausalLM
    from serried.trainer.optimizer import state_bytes
    from serried.trainer.peak_flops import PEAK_FLOPS

    parameters = sum(parameter.numel() for parameter in CausalLM(config).build_model().parameters())
    needed_bytes = (config.checkpoint.keep + 1) * state_bytes(parameters)
    peaks = {name: peaks["bf16"] for name, peaks in PEAK_FLOPS.items() if "bf16" in peaks}  # what it measures
    return examine(config.launch, config.run.dir, needed_bytes, peaks, config.slurm.exclude)


def export(words: list[str]) -> str:
    """Export a checkpoint as ``words`` say. Returns what to tell the user.

    Raises:
        UserError: a key or value is wrong, or the export fails.
    """
    import torch

    from serried.configs.formats import size
    from serried.trainer.checkpoint.export import export as write

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    mistakes: list[str] = []
    given, _ = pairs(words, "export", _EXPORT_KEYS, mistakes)
    dtype = given.get("dtype")
    if dtype is not None and dtype not in dtypes:
        mistakes.append(f"dtype={dtype} is none of {', '.join(dtypes)}; use dtype=bf16")
    if "out" not in given:
        mistakes.append("out=FOLDER is missing: where the model goes; e.g. out=my-model")
    with noted(mistakes):
        shard_bytes = byte_count(given.get("shard_size", "5GB"))
    with noted(mistakes):
        checkpoint = _checkpoint(_saved(_run_of(given, "export")), given)
    _refuse(mistakes)
    out = Path(given["out"])
    files = write(checkpoint, out, dtype=dtypes[dtype] if dtype else None, shard_bytes=shard_bytes)
    return f"exported   {checkpoint} to {out}: {len(files)} files, {size(sum(f.stat().st_size for f in files))}"


def generate(words: list[str]) -> None:
    """Print what a checkpoint writes, as ``words`` say: the command's own keys, and overrides of the run's config.

    Raises:
        UserError: a key or value is wrong, or there is no such checkpoint.
    """
    from serried.configs.formats import printable
    from serried.recipes.causal_lm import CausalLM
    from serried.recipes.saved import as_saved
    from serried.runtime.ranks import choose_device, torchrun_says
    from serried.runtime.session import Session
    from serried.trainer.generation import Sampling, write_text

    mistakes: list[str] = []
    given, overrides = pairs(words, "generate", _GENERATE_KEYS, mistakes, reads_overrides=True)
    sampling = Sampling(
        tokens=whole_number(given, "tokens", 200, mistakes, lowest=1),
        temperature=number_between(given, "temperature", 0.8, 0, 1000, mistakes),
        top_p=number_between(given, "top_p", 1.0, 0, 1, mistakes),
        seed=whole_number(given, "seed", 1, mistakes, lowest=0),
    )
    if sampling.top_p == 0:
        mistakes.append("top_p=0 leaves no token to choose from; use temperature=0 for the likeliest")
    if torchrun_says()[2] > 1:
        mistakes.append("serried generate is the work of one process; leave torchrun out")
    device = [f"launch.device={given['device']}"] if "device" in given else []
    config, checkpoint = _opened(given, [*overrides, *device], _GENERATE_READS, "generate", mistakes)
    config = as_saved(config, checkpoint, world_size=1, is_cut_anew=True, is_other_data=True)
    session = Session(0, 0, 1, 1, choose_device(config.launch, 0, 1), config.launch)
    shown = printable if sys.stdout.isatty() else str
    with suppress(BrokenPipeError):  # whoever listened has heard enough
        write_text(
            config, CausalLM(config), session, checkpoint, given.get("prompt", ""), sampling,
            say=lambda text: print(shown(text), end="", flush=True),
            note=lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip


def evaluate(words: list[str]) -> int:
    """Print how well a checkpoint predicts its validation sets, or data that ``words`` name. Returns the exit code.

    Raises:
        UserError: a key or value is wrong, or there is no such checkpoint.
    """
    from serried.recipes.causal_lm import CausalLM
    from serried.recipes.saved import as_saved
    from serried.runtime.ranks import torchrun_says
    from serried.runtime.session import Session, run_in_session
    from serried.trainer.evaluation import print_evaluation

    mistakes: list[str] = []
    given, overrides = pairs(words, "evaluate", _EVALUATE_KEYS, mistakes, reads_overrides=True)
    if given.get("json", "false") not in ("true", "false"):
        mistakes.append(f"json={given['json']} is not true or false; use json=true")
    keys = [word.partition("=")[0].lstrip("+") for word in overrides]
    config, checkpoint = _opened(given, overrides, _EVALUATE_READS, "evaluate", mistakes)
    is_other_data = any(key in _OTHER_DATA for key in keys)
    if is_other_data and config.data.name == "mixture":
        raise UserError("data=mixture is several sources; evaluate them one by one, as in data=text data.path=FILES")
    is_cut_anew = not any(key.startswith("parallel") for key in keys)
    config = as_saved(
        config, checkpoint, world_size=torchrun_says()[2], is_cut_anew=is_cut_anew, is_other_data=is_other_data
    )
    batches = None if is_other_data and "trainer.eval_batches" not in keys else config.trainer.eval_batches

    def work(session: Session) -> int:
        session.same_everywhere("the config", config.model_dump_json())
        return print_evaluation(
            config, CausalLM(config), session, checkpoint, is_whole=is_other_data, batches=batches,
            as_json=given.get("json") == "true",
        )  # fmt: skip

    return run_in_session(config.launch, work)


def _refuse(mistakes: list[str]) -> None:
    if mistakes:
        raise UserError(*mistakes)


def _opened(
    given: dict[str, str], overrides: list[str], reads: tuple[str, ...], command: str, mistakes: list[str]
) -> tuple[TextRunConfig, Path]:
    """The config of the run that ``given`` names, with ``overrides`` whose keys begin as ``reads`` say, and the
    checkpoint that it names.

    Raises:
        UserError: there is no such run or checkpoint, an override is wrong, or there were ``mistakes`` before.
    """
    from serried.configs.compose import compose_saved, refuse_misread

    of_the_run: list[str] = []
    run: Path | None = None
    with noted(of_the_run):
        folder = _run_of(given, command)
        found = _saved(folder)
        run = folder
        checkpoint = _checkpoint(found, given)
    with noted(mistakes):
        if run is None:
            refuse_misread(overrides, reads)
        else:
            config = compose_saved(run / "config.yaml", overrides, reads)
    _refuse([*mistakes, *of_the_run])
    return config, checkpoint


def _run_of(given: dict[str, str], command: str, is_taken: Callable[[Path], bool] | None = None) -> Path:
    """The folder of the run that ``given`` names; the recipe tiny's where it names none and that is there.
    ``is_taken``: which ``command`` takes; when not given, those with a checkpoint.

    Raises:
        UserError: there is no such run, naming those that ``command`` takes.
    """
    if "run.dir" in given and "run.name" in given:
        raise UserError(f"run.dir={given['run.dir']} and run.name={given['run.name']} are both given; keep one")
    run = Path(given.get("run.dir", Path("runs") / given.get("run.name", "tiny")))
    if (run / "checkpoints").is_dir() or (is_taken is not None and is_taken(run)):
        return run
    is_taken = is_taken or _has_saved
    if not {"run.dir", "run.name"} & {*given}:
        raise UserError(f"serried {command} needs a run: run.dir=RUN; {_runs_there_are(Path('runs'), is_taken)}")
    return _run_folder(str(run), is_taken, "run.dir=")


def _saved(run: Path) -> dict[int, Path]:
    """The checkpoints of ``run`` by step, the newest last.

    Raises:
        UserError: there is none.
    """
    from serried.trainer.checkpoint.resume import CHECKPOINTS
    from serried.trainer.checkpoint.retention import committed, step_of

    try:
        found = {step: path for path in committed(run / CHECKPOINTS) if (step := step_of(path)) is not None}
    except OSError as error:
        raise UserError(f"cannot read {run / CHECKPOINTS}: {error.strerror}; use run.dir=FOLDER") from None
    if not found:
        raise UserError(
            f"the run in {run} has saved nothing: {run / CHECKPOINTS} holds no checkpoint; use run.dir=OTHER"
        )
    return found


def _checkpoint(found: dict[int, Path], given: dict[str, str]) -> Path:
    """The one of the checkpoints ``found`` that ``given`` names, or the newest.

    Raises:
        UserError: that one is not among them.
    """
    wanted = step_number(given["checkpoint"]) if "checkpoint" in given else max(found)
    if wanted not in found:
        have = ", ".join(str(step) for step in found)
        folder = next(iter(found.values())).parent
        raise UserError(f"checkpoint={given['checkpoint']} is not in {folder}; there are {have}")
    return found[wanted]


def report(words: list[str]) -> str:
    """Write the page of the runs in ``words``: folders, and ``_REPORT_KEYS``. Returns what to tell the user.

    Raises:
        UserError: there is no such run, a key or value is wrong, or the page cannot be written.
    """
    from serried.configs.formats import size
    from serried.records.page import write_report

    mistakes: list[str] = []
    # A word with a = is a key, unless a folder is called so.
    folders = [word for word in words if Path(word).is_dir() or not ("=" in word or word.startswith("-"))]
    given, _ = pairs([word for word in words if word not in folders], "report", _REPORT_KEYS, mistakes)
    folders += [given["run.dir"]] if "run.dir" in given else []
    folders += [f"runs/{given['run.name']}"] if "run.name" in given else []
    runs: list[Path] = []
    for folder in folders:
        with noted(mistakes):
            run = _run_folder(folder, _is_run)
            if run.resolve() in [other.resolve() for other in runs]:
                raise UserError(f"the run {run} is given twice; give it once")
            runs.append(run)
    if not folders:
        runs_there = _runs_there_are(Path("runs"), _is_run)
        mistakes.append(f"serried report needs a run folder: serried report RUN; {runs_there}")
    _refuse(mistakes)
    out = Path(given.get("out", runs[0] / "report.html" if len(runs) == 1 else "report.html"))
    if out.is_dir():
        raise UserError(f"out={out} is a folder; give a file, e.g. out={out / 'report.html'}")
    try:
        write_report(runs, out)
    except OSError as error:
        raise UserError(f"cannot write out={out}: {error.strerror}; use out=FILE in a folder that is there") from None
    what = f"{len(runs)} runs compared" if len(runs) > 1 else str(runs[0])
    return f"report     {what}: {out}, {size(out.stat().st_size)}; open it in a browser"


def send(words: list[str]) -> int:
    """Send the records of a run that has ended to its trackers. Return the exit code.

    Raises:
        UserError: there is no such run, it has no trackers, or one of them is not installed.
    """
    from serried.configs.compose import compose_saved
    from serried.configs.trackers import asked_for, missing_trackers
    from serried.records.run_folder import RunFolder
    from serried.records.trackers.processes import Trackers
    from serried.runtime.console import Console

    mistakes: list[str] = []
    given, _ = pairs(words, "send", ("run.dir", "run.name"), mistakes)
    _refuse(mistakes)
    run = _run_of(given, "send", _is_run)
    track = compose_saved(run / "config.yaml", (), ()).track
    if not asked_for(track):
        raise UserError(f"the run in {run} has no trackers: its config.yaml names none")
    missing, advice = missing_trackers(track)
    if missing:
        raise UserError(advice)
    if not (run / "metrics.jsonl").is_file():
        raise UserError(f"the run in {run} has not begun: it has no metrics.jsonl, so there is nothing to send")
    began_in: Path | None = None
    with suppress(OSError, ValueError, KeyError):
        began_in = Path(json.loads((run / "environment.json").read_text())["working_directory"])
    claimed = RunFolder(run)  # a run that is being trained has tracker processes already
    try:
        trackers = Trackers(run, track, Console(speaks=True, rank=0).say)
        has_sent = trackers.send(began_in if began_in and began_in.is_dir() else None)
        return EXIT_FINISHED if has_sent else EXIT_FAILED
    finally:
        claimed.close()


def _run_folder(word: str, is_taken: Callable[[Path], bool], key: str = "") -> Path:
    """The run folder that ``word`` names; ``key`` stands before it on the command line.

    Raises:
        UserError: there is no run in it, naming the ones that may be meant and that the command takes.
    """
    folder = Path(word)
    if _is_run(folder):
        return folder
    if not folder.is_dir():
        named = Path("runs") / word
        hint = f"did you mean {key}{named}?" if named.is_dir() else _runs_near(folder, is_taken, key)
        raise UserError(f"there is no folder {word}; {hint}")
    if runs := [run for run in _runs_of_a_sweep(folder) if is_taken(run)]:
        raise UserError(f"{word} is the folder of a sweep; its runs are {_listed(runs)}")
    hint = _runs_there_are(folder, is_taken)
    raise UserError(f"{word} holds no run: no metrics.jsonl, status.json or config.yaml; {hint}")


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("metrics.jsonl", "status.json", "config.yaml"))


def _has_saved(folder: Path) -> bool:
    """Whether a checkpoint of the run in ``folder`` can be opened."""
    with suppress(UserError):
        return (folder / "config.yaml").is_file() and bool(_saved(folder))
    return False


def _runs_of_a_sweep(folder: Path) -> list[Path]:
    from serried.launch.summary import read_summary

    return [outcome.run_dir for outcome in read_summary(folder)[1]]


def _runs_near(missing: Path, is_taken: Callable[[Path], bool], key: str) -> str:
    """What to type instead of a folder that is ``missing``: the run whose name is nearly that, or all there are."""
    folder = missing.parent if missing.parent.is_dir() and missing.parent != Path() else Path("runs")
    with suppress(OSError):
        names = [path.name for path in folder.iterdir() if is_taken(path)]
        if close := nearest(missing.name, names):
            return f"did you mean {key}{folder / close[0]}?"
        if names:
            return _runs_there_are(folder, is_taken)
    return _runs_there_are(Path("runs"), is_taken)


def _runs_there_are(folder: Path, is_taken: Callable[[Path], bool]) -> str:
    """What to type instead: the runs in ``folder`` that the command takes, with those of searches, which lie deeper."""
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        inside = []
    deeper = [run for path in inside for run in _runs_of_a_sweep(path)]
    runs = [run for run in dict.fromkeys([*inside, *deeper]) if is_taken(run)]
    if runs:
        return f"in {folder} there are: {_listed(runs)}"
    hint = "; python train.py makes runs/tiny" if folder == Path("runs") else ""
    return f"there is none in {folder}{' with a checkpoint' if is_taken is _has_saved else ''}{hint}"


def _listed(runs: list[Path]) -> str:
    more = f" and {len(runs) - 8} more" if len(runs) > 8 else ""
    return f"{' '.join(str(run) for run in runs[:8])}{more}"
