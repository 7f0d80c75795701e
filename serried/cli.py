"""The command ``serried``: everything except training. Example: ``serried export runs/tiny out=my-model``."""

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import getdoc
from textwrap import indent
from typing import NamedTuple

import serried.runtime.import_signals  # noqa: F401 -- first, so that no garbage collection runs during imports
from serried.configs.errors import EXIT_STOPPED, TrainingFailed, UserError
from serried.configs.formats import columns
from serried.configs.messages.suggestions import nearest
from serried.configs.override_parser import config_dirs
from serried.configs.schema.declaration import BUILT_IN, declaring
from serried.runtime.exit import leave, note_repeated, report_alone, report_mistake
from serried.runtime.import_signals import check_temporary_folder, print_any_text
from serried.runtime.process import check_surroundings, say, speaks, typed_command

_HELP = ("--help", "-h")
_TRAINS = ("plan", "submit")
"""Commands that pass their arguments, including flags, to train.py."""
_OVERRIDES = "[recipe=RECIPE] [key=value ...]"
_A_SAVED_MODEL = """\
  RUN          run folder, run in a bucket (s3://BUCKET/PATH), checkpoint, exported model or Hugging Face folder;
               run.dir=RUN and run.name=NAME (for runs/NAME) do the same; runs/tiny by default
  checkpoint   step of the checkpoint; the newest by default
"""


class _Command(NamedTuple):
    """A command of ``serried``."""

    module: str
    """Module in ``serried.commands`` that has a function with the name of the command."""
    takes: str
    """Arguments, for the usage line."""

    def function(self, name: str) -> Callable[[list[str]], int]:
        """Import the function of the command.

        It takes the arguments after the command name and returns the exit code. Mistakes raise ``UserError``. Its
        docstring is the help of the command.
        """
        function: Callable[[list[str]], int] = getattr(import_module(f"serried.commands.{self.module}"), name)
        return function


_COMMANDS = {
    "recipes": _Command("plan_runs", ""),
    "convert": _Command("convert_config", "FILE [FILE ...] [gpus=N] [steps=N] [recipe=RECIPE]"),
    "plan": _Command("plan_runs", f"[search|compare|calibrate] [RUN] {_OVERRIDES}"),
    "prepare": _Command("prepare_data", _OVERRIDES),
    "preflight": _Command("slurm_jobs", "[key=value ...]"),
    "verify": _Command("verify_machine", "[list] [only=CHECKS] [out=FILE] [launch.device=cpu] [launch.processes=N]"),
    "submit": _Command("slurm_jobs", "[key=value ...] [-m]"),
    "status": _Command("slurm_jobs", "[RUN] [key=value ...]"),
    "stop": _Command("bucket_runs", "RUN"),
    "save": _Command("bucket_runs", "RUN"),
    "logs": _Command("bucket_runs", "RUN [rank=0]"),
    "fetch": _Command("bucket_runs", "URL out=FOLDER [checkpoint=STEPS]"),
    "repair": _Command("bucket_runs", "URL [yes=true]"),
    "clean": _Command("bucket_runs", "[URL] [downloads=DAYS] [prepared=DAYS data.cache_dir=URL]"),
    "export": _Command(
        "export_models", "RUN out=PLACE [format=hf] [checkpoint=STEP] [dtype=bf16] [shard_size=5GB] [merge=true]"
    ),
    "merge": _Command(
        "export_models", "RUN checkpoint=STEPS|adapters=FOLDERS out=FOLDER [dtype=fp32|bf16|fp16] [shard_size=5GB]"
    ),
    "report": _Command("run_reports", "RUN [RUN ...] [out=FILE]"),
    "send": _Command("run_reports", "RUN"),
    "generate": _Command(
        "generate_text",
        "RUN [prompt=TEXT|prompts=FILE] [tokens=200] [temperature=0.8] [top_p=1] [seed=1] [checkpoint=STEP]",
    ),
    "chat": _Command("generate_text", "RUN [tokens=1000] [temperature=0.8] [top_p=1] [seed=1] [checkpoint=STEP]"),
    "evaluate": _Command(
        "evaluate_model", "RUN [checkpoint=STEP] [json=true] [data=text data.path=FILES] [key=value ...]"
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command in ``arguments`` and return the exit code. Without ``arguments``, run ``sys.argv`` and exit.

    The process exits without cleanup: threads of torch.distributed may still run, and unloading torch takes half a
    second.
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
        arguments = rest if name in _TRAINS else overrides
        if any("://" in word for word in arguments):
            from serried.bucket_copies import with_local_copies

            arguments = with_local_copies(name, arguments)
        with declaring(BUILT_IN._replace(config_dirs=folders)):
            return _COMMANDS[name].function(name)(arguments)
    except UserError as error:
        return report_mistake(error)
    except TrainingFailed as error:  # a bucket does not answer
        return report_alone(error, is_heard=speaks())
    except FileNotFoundError:  # importing torch fails without a folder for temporary files
        try:
            check_temporary_folder()
        except UserError as error:
            return report_mistake(error)
        raise
    except KeyboardInterrupt:
        more = "; run the same command to continue" if name == "prepare" else ""
        print(f"interrupted{more}", file=sys.stderr)
        return EXIT_STOPPED


def _help(name: str | None) -> str:
    """Return the help text of the command ``name``, or of all commands."""
    does = {each: (getdoc(command.function(each)) or "").partition("\n") for each, command in _COMMANDS.items()}
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
