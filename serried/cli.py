"""The command ``serried``: everything that is not training. ``serried export runs/tiny out=my-model``."""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import getdoc
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, NamedTuple

import serried.runtime.import_signals  # noqa: F401 -- first: from here on imports do not look for garbage
from serried.configs.command_arguments import number, pairs, run_key
from serried.configs.command_line import config_dirs
from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, UserError
from serried.configs.formats import columns
from serried.configs.messages.suggestions import nearest
from serried.configs.plain_data import read_if_there
from serried.configs.schema.data import DataSection
from serried.configs.schema.declaration import BUILT_IN, declaring
from serried.configs.schema.sections import AUTO, RunConfig
from serried.planning import calibrate, plan_run
from serried.records.metrics import METRICS
from serried.runtime.command import check_surroundings, typed_command
from serried.runtime.exit import leave, note_repeated, report_mistake
from serried.runtime.import_signals import check_temporary_folder, print_any_text
from serried.runtime.process import is_started, say
from serried.saved import (
    as_saved,
    existing_runs,
    find_run,
    find_saved,
    is_run,
    open_saved,
    run_folder,
    runs_of_a_sweep,
    similar_runs,
    task_of_text,
    task_that_trained,
)

if TYPE_CHECKING:
    from serried.trainer.evaluation.generation import Writer

_GENERATE_READS = ("precision", "launch.device")
_EVALUATE_READS = (
    "data", "task.path", "task.validation", "precision", "parallel", "launch.device",
    "launch.start_timeout_seconds", "launch.step_timeout_seconds", "trainer.eval_batches", "trainer.global_batch",
    "trainer.micro_batch",
)  # fmt: skip
"""Beginnings of the keys of train.py that these commands read too."""
_HELP = ("--help", "-h")
_TRAINS = ("plan", "submit")
"""Commands that pass their words, flags too, on to train.py."""
_OVERRIDES = "[recipe=RECIPE] [key=value ...]"
_A_SAVED_MODEL = """\
  RUN          run folder, checkpoint, exported model or Hugging Face folder; run.dir=RUN and run.name=NAME (for
               runs/NAME) do the same; runs/tiny by default
  checkpoint   step of the checkpoint; the newest by default
"""


class _Command(NamedTuple):
    run: Callable[[list[str]], int]
    """Takes the words after the command's name and returns the exit code. Mistakes raise ``UserError``. Its docstring
    is the command's help."""
    takes: str


_COMMANDS: dict[str, _Command] = {}


def _command(takes: str) -> Callable[[Callable[[list[str]], int]], Callable[[list[str]], int]]:
    """Make the decorated function a command that ``takes`` these words."""

    def add(run: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
        _COMMANDS[run.__name__] = _Command(run, takes)
        return run

    return add


def main(arguments: list[str] | None = None) -> int:
    """Run the command that ``arguments`` name and return the exit code; without them, that of this process, and end it.

    It ends at once: threads of torch.distributed may outlive their work, and taking torch apart takes half a second.
    """
    if arguments is None:
        leave(_run(sys.argv[1:]))
    return _run(arguments)


def _run(words: list[str]) -> int:
    name, *rest = words or ["--help"]
    print_any_text()
    try:
        check_surroundings(words)
        is_help = name in (*_HELP, "help")
        asked = next((word for word in rest if word not in _HELP), None) if is_help else name
        if asked is not None and asked not in _COMMANDS:
            close = nearest(asked, [*_COMMANDS])
            hint = f"did you mean: serried {' or '.join(close)}" if close else f"commands: {', '.join(_COMMANDS)}"
            raise UserError(f"there is no command {asked!r}; {hint}; to train: python {typed_command()}")
        if is_help or {*_HELP} & {*rest}:
            return say(_help(asked))
        note_repeated(rest)
        overrides, folders = ([], ()) if name in _TRAINS else config_dirs(rest)
        with declaring(BUILT_IN._replace(config_dirs=folders)):
            return _COMMANDS[name].run(rest if name in _TRAINS else overrides)
    except UserError as error:
        return report_mistake(error)
    except FileNotFoundError:  # what imports torch may have found no folder for temporary files
        try:
            check_temporary_folder()
        except UserError as error:
            return report_mistake(error)
        raise
    except KeyboardInterrupt:
        more = "; run the same command to continue" if name == "prepare" else ""
        print(f"interrupted{more}", file=sys.stderr)
        return EXIT_STOPPED


@_command("")
def recipes(words: list[str]) -> int:
    """List the recipes."""
    from serried.configs.help import recipes_text

    if words:
        raise UserError(
            f"serried recipes takes no arguments, and got {' '.join(words)}; serried plan {words[0]} shows a run"
        )
    return say(
        f"{recipes_text()}\nTrain one: python {typed_command()} recipe=NAME. Show its plan: serried plan recipe=NAME"
    )


_PARTS_OF_PLAN = ("search", "compare", "calibrate")


@_command(f"[search|compare|calibrate] [RUN] {_OVERRIDES}")
def plan(words: list[str]) -> int:
    """Print the plan of a run, on any machine: whether it fits, what ranks send, how long it takes, what would help.

    RUN          a run folder: its own config, on as many processes; overrides come on top
    plan.mode    trace (default): a step on tensors without data; formula: from sizes alone, sooner
    plan.device  h100, a100, ...: the GPU to plan for; plan.tokens=15T and plan.price=2.5: what the time adds up to
    plan.rates   file of rates of another machine, as serried plan calibrate writes it
    json=true    print one JSON object
    search       as the first word: the fastest of all valid layouts, with the overrides for each, instead;
                 out=layouts.html: as a page too
    compare RUN  the plan against what the run measured
    calibrate    measure the rates of this machine with launch.processes=N (or under torchrun), or of a cluster with
                 launch=slurm launch.nodes=N, for the shapes of a recipe, and write them to out=rates.json
    """
    from serried.program import main as train

    part = words[0] if words and words[0] in _PARTS_OF_PLAN else ""
    words = words[bool(part) :]
    if part == "calibrate":
        return calibrate(words)
    if "json=true" in words:
        words = [word for word in words if word != "json=true"] + ["plan.as_json=true"]
    if part == "search":
        words = [f"plan.{word}" if word.startswith("out=") else word for word in words] + ["plan.search=true"]
    elif not any(word.startswith("plan.mode=") for word in words):
        words = [*words, "plan.mode=trace"]
    run = next((word for word in words if "=" not in word and not word.startswith("-")), None)
    if run is not None and not Path(run).exists() and (close := nearest(run, _PARTS_OF_PLAN)):
        raise UserError(f"there is no folder {run}; did you mean serried plan {close[0]}?")
    if run is not None and run.endswith(".py"):
        why = "serried plan search compares layouts of built-in models; " if part == "search" else ""
        raise UserError(f"{run} is a script; {why}plan its task with: python {run} dry_run=true plan.mode=trace")
    if run is not None or part == "compare":
        return plan_run(run, [word for word in words if word != run], is_compared=part == "compare")
    return train([*words, *([] if "dry_run=true" in words else ["dry_run=true"])])


@_command(_OVERRIDES)
def prepare(words: list[str]) -> int:
    """Tokenize the data once, before training or on another machine.

    data.workers    threads; one per core by default
    data.cache_dir  where to write; give the same to train.py
    """
    from serried.configs.compose import compose
    from serried.recipes.text.causal_lm import CausalLM
    from serried.runtime.console import Console

    config = compose(words)
    threads = config.data.workers if "workers" in config.data.model_fields_set else None
    if threads == 0:
        raise UserError("data.workers=0 leaves no thread to prepare with; use data.workers=1, or leave it out")
    recipe = CausalLM(config)
    recipe.open_data(recipe.prepare(Console(speaks=True, rank=0).progress, threads))
    recipe.vocab_size()  # refuses a model that is too small for the tokenizer
    return say(recipe.summary())


@_command("[key=value ...]")
def preflight(words: list[str]) -> int:
    """Test one node, or all nodes of a run under torchrun or in a Slurm job.

    torchrun --nnodes=2 --nproc_per_node=8 ... -m serried preflight run.dir=RUN
    serried preflight launch=slurm launch.nodes=2 ... run.dir=RUN    submits a job, waits for it and prints its table
    """
    from serried.configs.compose import compose
    from serried.launch.slurm.batch_script import measure_by_job

    config = compose(words)
    if config.launch.name == "slurm" and not is_started():
        return measure_by_job("preflight", words, config)
    if (config.launch.nodes or 1) > 1 and not is_started():
        raise UserError(
            f"launch.nodes={config.launch.nodes}, but this is one process on one node; use launch=slurm to test them "
            "in a job, torchrun on each of them, or leave launch.nodes out to test this node alone"
        )
    return _preflight_here(config)


def _preflight_here(config: RunConfig) -> int:
    from serried.launch.preflight import preflight as examine
    from serried.trainer.metrics.peak_flops import PEAK_FLOPS

    peaks = {name: peaks["bf16"] for name, peaks in PEAK_FLOPS.items() if "bf16" in peaks}  # what it measures
    return examine(config.launch, config.run.dir, checkpoints_bytes(config), peaks, config.slurm.exclude)


def checkpoints_bytes(config: RunConfig) -> int:
    """Return the bytes of the checkpoints that a run keeps, and of one being written."""
    from serried.recipes.text.causal_lm import CausalLM
    from serried.trainer.checkpoint.checkpoint_size import saved_bytes
    from serried.trainer.model import build_model

    built = build_model(config, CausalLM(config))
    return (config.checkpoint.keep + 1) * saved_bytes(config, built.module, built.plan)


@_command("[key=value ...] [-m]")
def submit(words: list[str]) -> int:
    """Submit a run to Slurm; same as python train.py launch=slurm."""
    from serried.program import main as train

    return train([*words, *([] if "launch=slurm" in words else ["launch=slurm"])])


@_command("[RUN] [key=value ...]")
def status(words: list[str]) -> int:
    """Show the state of a run or sweep and of its job; by default, of all in runs/."""
    from serried.configs.compose import compose
    from serried.launch.status import describe_run, runs_in
    from serried.launch.sweep.train_sweep import update_summary
    from serried.records.report import write_report

    words = [f"{run_key(word)}={word}" if "=" not in word and run_key(word) else word for word in words]
    if words:
        run_dir = compose(words).run.dir
        if not run_dir.is_dir():
            raise UserError(f"there is no run in {run_dir}; {similar_runs(run_dir, is_run)}")
        say(describe_run(run_dir))
        update_summary(run_dir, write_report)
        return EXIT_FINISHED
    folders = runs_in(Path("runs"))
    if not folders:
        raise UserError("there is no run in runs; use run.dir=FOLDER")
    return say("\n\n".join(describe_run(folder) for folder in folders))


@_command("RUN out=PLACE [format=hf] [checkpoint=STEP] [dtype=bf16] [shard_size=5GB] [merge=true]")
def export(words: list[str]) -> int:
    """Write a checkpoint in a format that other software opens.

    format       hf (default): a model folder for transformers, or of adapters for PEFT; gguf: for llama.cpp; onnx;
                 torch_export; executorch; torchao: a folder of quantized weights for transformers. All but the first
                 are run, and their logits compared with the checkpoint's
    out          folder to write with format=hf, else the file
    dtype        of the weights. hf: fp32, bf16 or fp16, as saved by default; gguf: fp16 (default), fp32, bf16, q8_0 or
                 q4_0; onnx: fp32 (default) or int8; torch_export: fp32 (default) or bf16; torchao: int8_dynamic_int4 or
                 int4_weight_only, what the model was trained for by default
    shard_size   largest file of format=hf: 500MB, 5GB (default); a larger tensor has its own file
    merge        true: add the adapters (LoRA) to their base model, and write that; other formats always do
    """
    from serried.exporting import export_model

    return export_model(words)


@_command("RUN checkpoint=STEPS out=FOLDER [dtype=fp32|bf16|fp16] [shard_size=5GB]")
def merge(words: list[str]) -> int:
    """Write the mean of the weights of several checkpoints of a run as a plain model folder.

    RUN          run folder; run.dir=RUN and run.name=NAME do the same
    checkpoint   their steps: checkpoint=200,250,300
    out          folder to write; dtype and shard_size are those of serried export
    """
    from serried.exporting import merge_checkpoints

    return merge_checkpoints(words)


@_command("RUN [RUN ...] [out=FILE]")
def report(words: list[str]) -> int:
    """Write one HTML page with the curves of one run, or of several compared.

    RUN          run folders: runs/tiny, or runs/sweep/*; a sweep's own folder among them is skipped
    out          file to write; RUN/report.html by default, or report.html here for several runs
    """
    from serried.configs.formats import size
    from serried.records.files import output_file
    from serried.records.report import write_report

    # A word with "=" is a key, unless there is a folder of that name.
    folders = [word for word in words if Path(word).is_dir() or not ("=" in word or word.startswith("-"))]
    given, _ = pairs([word for word in words if word not in folders], "report", ("run.dir", "run.name", "out"))
    if len(folders) > 1:  # runs/sweep-* matches the sweep's own folder too
        folders = [folder for folder in folders if is_run(Path(folder)) or not runs_of_a_sweep(Path(folder))] or folders
    folders += [given["run.dir"]] if "run.dir" in given else []
    folders += [f"runs/{given['run.name']}"] if "run.name" in given else []
    if not folders:
        raise UserError(f"serried report needs a run folder: serried report RUN; {existing_runs(Path('runs'), is_run)}")
    runs = list({run.resolve(): run for run in (run_folder(folder, is_run) for folder in folders)}.values())
    out = Path(given.get("out", runs[0] / "report.html" if len(runs) == 1 else "report.html"))
    if out.is_dir():
        raise UserError(f"out={out} is a folder; give a file, e.g. out={out / 'report.html'}")
    try:
        write_report(runs, output_file(out) if "out" in given else out)
    except OSError as error:
        raise UserError(f"cannot write out={out}: {error.strerror}; use out=FILE in a folder that exists") from None
    what = f"{len(runs)} runs compared" if len(runs) > 1 else str(runs[0])
    return say(f"report     {what}: {out}, {size(out.stat().st_size)}; open it in a browser")


@_command("RUN")
def send(words: list[str]) -> int:
    """Send the records of a run that has ended to its trackers again."""
    from serried.configs.compose import saved_trackers
    from serried.configs.requirements.tracker_packages import asked_for, missing_trackers
    from serried.records.run_folder import RunFolder
    from serried.records.trackers.processes import Trackers
    from serried.runtime.console import Console

    given, _ = pairs(words, "send", ("run.dir", "run.name"))
    run = find_run(given, "send", is_run)
    track = saved_trackers(run / "config.yaml")
    if not asked_for(track):
        raise UserError(f"the run in {run} has no trackers: its config.yaml names none")
    missing, advice = missing_trackers(track)
    if missing:
        raise UserError(advice)
    if not (run / METRICS).is_file():
        raise UserError(f"the run in {run} has not started: it has no metrics.jsonl, so there is nothing to send")
    began_in = Path(str(read_if_there(run / "environment.json").get("working_directory", "")))
    claimed = RunFolder(run)  # a run that is being trained has tracker processes already
    try:
        trackers = Trackers(run, track, Console(speaks=True, rank=0).say)
        has_sent = trackers.send(began_in if began_in.is_dir() else None)
        return EXIT_FINISHED if has_sent else EXIT_FAILED
    finally:
        claimed.close()


@_command("RUN [prompt=TEXT] [tokens=200] [temperature=0.8] [top_p=1] [seed=1] [checkpoint=STEP]")
def generate(words: list[str]) -> int:
    """Print text from a model; for a chat model the prompt is a user's message.

    prompt       text to continue; without one, a new document
    tokens       at most this many; ends earlier at the end of the text
    temperature  0: always the most likely token; 1: the model's own probabilities
    top_p        sample from the most likely tokens whose probabilities add up to this
    device       cpu or cuda; precision=bf16 is read too
    """
    given, overrides = pairs(words, "generate", (*_GENERATE_TAKES, "prompt"), reads_overrides=True)
    prompt = given.get("prompt", "")
    with suppress(BrokenPipeError):  # the reader has closed the pipe
        _writer(given, overrides, "generate", prompt, tokens=200).write([prompt])
    return EXIT_FINISHED


@_command("RUN [tokens=1000] [temperature=0.8] [top_p=1] [seed=1] [checkpoint=STEP]")
def chat(words: list[str]) -> int:
    """Talk to a chat model: type a message a line; Ctrl-D ends.

    tokens       of a reply, at most; the other keys are those of serried generate
    """
    given, overrides = pairs(words, "chat", _GENERATE_TAKES, reads_overrides=True)
    writer = _writer(given, overrides, "chat", tokens=1000)
    with suppress(ImportError):
        import readline  # noqa: F401 -- edits the line that input() reads
    said: list[str] = []
    asks = sys.stdin.isatty()
    with suppress(BrokenPipeError):
        while True:
            try:
                message = input("> " if asks else "")
                message.encode("utf-8")  # bytes of another encoding may have become surrogates
            except UnicodeError:
                raise UserError("the message is not UTF-8 text; type it, or write the file, in UTF-8") from None
            except EOFError:
                print(end="\n" if asks else "")  # the next line of the shell begins at the left
                break
            if message.strip():
                said.append(message)
                said.append(writer.write(said, is_timed=False))
    return EXIT_FINISHED


_GENERATE_TAKES = ("run.dir", "run.name", "checkpoint", "tokens", "temperature", "top_p", "seed", "device")


def _writer(given: dict[str, str], overrides: list[str], command: str, prompt: str = "", *, tokens: int) -> "Writer":
    """Return what writes text as ``given`` says, ``tokens`` at most by default, with the model loaded. ``prompt``: what
    it will be asked first, if that is known."""
    from serried.configs.formats import printable
    from serried.runtime.process import choose_device, torchrun_says
    from serried.runtime.session import Session
    from serried.trainer.checkpoint.read_while_training import reading, with_chosen
    from serried.trainer.evaluation.generation import Sampling, Writer

    sampling = Sampling(
        tokens=number(given, "tokens", tokens, 1, 10**9),
        temperature=number(given, "temperature", 0.8, 0, 1000),
        top_p=number(given, "top_p", 1.0, 0, 1),
        seed=number(given, "seed", 1, 0, 2**63 - 1),
    )
    if sampling.top_p == 0:
        raise UserError("top_p=0 leaves no token to choose from; use temperature=0 for the most likely one")
    if torchrun_says()[2] > 1:
        raise UserError(f"serried {command} runs in one process; start it without torchrun")
    device = [f"launch.device={given['device']}"] if "device" in given else []
    saved, _, new_task = open_saved(given, [*overrides, *device], _GENERATE_READS, command, task_of_text)
    session = Session((0, 0, 1, 1), choose_device(saved.launch, 0, 1), saved.launch)
    shown = printable if sys.stdout.isatty() else str

    def loaded(checkpoint: Path) -> Writer:
        with reading(checkpoint):
            config = as_saved(saved, checkpoint, world_size=1, is_resharded=True, is_other_data=True)
            task = new_task(config)
            task.open_saved(checkpoint)
            if command == "chat" and task.echoes_prompt():
                raise UserError("the model was trained on text and not on conversations; use serried generate")
            writer = Writer(
                config, task, session, checkpoint, sampling,
                say=lambda text: print(shown(text), end="", flush=True),
                note=lambda line: print(printable(line), file=sys.stderr, flush=True),
            )  # fmt: skip
            writer.load([prompt])
        return writer

    return with_chosen(lambda: find_saved(given, command).folder, loaded)


@_command("RUN [checkpoint=STEP] [json=true] [data=text data.path=FILES] [key=value ...]")
def evaluate(words: list[str]) -> int:
    """Print loss, perplexity and bits per byte, or the task's own metrics, on the run's validation sets or other data.

    data, data.path, ...   other data, all of it, tokenized as the run's
    task.path              other samples of a classifier; task.validation=NAME: another split
    trainer.eval_batches   batches of trainer.global_batch sequences; the run's by default
    parallel, precision    as in training; under torchrun on all its processes: torchrun ... -m serried evaluate ...
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
        raise UserError(f"{checkpoint} is a model without a run, so name the data: data=text data.path=FILES")
    if is_other_data and isinstance(config.data, DataSection) and config.data.name == "mixture":
        raise UserError("data=mixture is several sources; evaluate them one at a time: data=text data.path=FILES")
    is_resharded = not any(key.startswith("parallel") for key in keys)
    if config.trainer.micro_batch == AUTO:
        raise UserError("trainer.micro_batch=auto is chosen for training; use trainer.micro_batch=8")
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

    return run_in_session(config.launch, work)


def _help(name: str | None) -> str:
    """The help text of the command ``name``, or of all commands."""
    does = {each: (getdoc(command.run) or "").partition("\n") for each, command in _COMMANDS.items()}
    if name is None:
        rows = [(each, first[0].lower() + first[1:-1]) for each, (first, _, _) in does.items()]
        return "\n".join(
            [
                "usage: serried COMMAND [RUN] [key=value ...]",
                "",
                *(f"  {line}" for line in columns(rows)),
                "",
                f"Details and keys of one command: serried COMMAND --help. To train: python {typed_command()} --help",
                "plan, prepare, preflight, submit and status take the overrides of train.py.",
            ]
        )
    takes, (first, _, keys) = _COMMANDS[name].takes, does[name]
    keys = (_A_SAVED_MODEL if "checkpoint=STEP]" in takes else "") + indent(keys.strip("\n"), "  ")
    overrides = "key=value: overrides of train.py, listed by python train.py --help\n" if "key=value" in takes else ""
    usage = f"usage: serried {name} {takes}".rstrip()
    return f"{usage}\n\n{first}\n{keys}\n\n{overrides}All commands: serried --help"
