"""``serried generate`` and ``serried chat``."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from serried.configs.errors import EXIT_FINISHED, UserError
from serried.configs.subcommand_arguments import number, pairs
from serried.saved import (
    as_saved,
    find_saved,
    open_saved,
    task_of_text,
)

if TYPE_CHECKING:
    from serried.trainer.evaluation.generate_from_checkpoint import Writer

_GENERATE_READS = ("precision", "launch.device")
"""Prefixes of the train.py keys that these commands also read."""
_GENERATE_TAKES = ("run.dir", "run.name", "checkpoint", "tokens", "temperature", "top_p", "seed", "device")


def generate(words: list[str]) -> int:
    """Print text from a model; for a chat model the prompt is a user's message.

    prompt       text to continue; if missing, the model starts a new document
    tokens       largest number of tokens; stops earlier at the end of the text
    temperature  0: always the most likely token; 1: the model's own probabilities
    top_p        sample from the most likely tokens whose probabilities add up to this
    device       cpu or cuda; precision=bf16 also works
    """
    given, overrides = pairs(words, "generate", (*_GENERATE_TAKES, "prompt"), reads_overrides=True)
    prompt = given.get("prompt", "")
    with suppress(BrokenPipeError):  # the reader has closed the pipe
        _writer(given, overrides, "generate", prompt, tokens=200).write([prompt])
    return EXIT_FINISHED


def chat(words: list[str]) -> int:
    """Talk to a chat model: type one message per line; Ctrl-D ends.

    tokens       largest number of tokens in a reply; the other keys are the same as for serried generate
    """
    given, overrides = pairs(words, "chat", _GENERATE_TAKES, reads_overrides=True)
    writer = _writer(given, overrides, "chat", tokens=1000)
    with suppress(ImportError):
        import readline  # noqa: F401 -- line editing for input()
    said: list[str] = []
    asks = sys.stdin.isatty()
    with suppress(BrokenPipeError):
        while True:
            try:
                message = input("> " if asks else "")
                message.encode("utf-8")  # invalid UTF-8 bytes become surrogates
            except UnicodeError:
                raise UserError("the message is not UTF-8 text; set the terminal, or save the file, to UTF-8") from None
            except EOFError:
                print(end="\n" if asks else "")  # so that the shell prompt starts on a new line
                break
            if message.strip():
                said.append(message)
                said.append(writer.write(said, is_timed=False))
    return EXIT_FINISHED


def _writer(given: dict[str, str], overrides: list[str], command: str, prompt: str = "", *, tokens: int) -> "Writer":
    """Load the model and return a text writer.

    Args:
        given: Arguments of the command by key.
        overrides: Overrides of the config.
        command: Name of the command, for messages.
        prompt: The first prompt, if known.
        tokens: Default of the largest number of tokens to write.
    """
    from serried.configs.formats import printable
    from serried.runtime.process import choose_device, torchrun_says
    from serried.runtime.session import Session
    from serried.trainer.checkpoint.read_while_training import reading, with_chosen
    from serried.trainer.evaluation.generate_from_checkpoint import Sampling, Writer

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
                raise UserError("the model was trained on plain text, not on conversations; use serried generate")
            writer = Writer(
                config, task, session, checkpoint, sampling,
                say=lambda text: print(shown(text), end="", flush=True),
                note=lambda line: print(printable(line), file=sys.stderr, flush=True),
            )  # fmt: skip
            writer.load([prompt])
        return writer

    return with_chosen(lambda: find_saved(given, command).folder, loaded)
