"""``serried generate`` and ``serried chat``."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serried.configs.errors import EXIT_FINISHED, UserError
from serried.configs.plain_data import NotPlainData, parse_json, read_bytes
from serried.configs.subcommand_arguments import number, pairs
from serried.saved import (
    as_saved,
    find_saved,
    open_saved,
    task_of_text,
)

if TYPE_CHECKING:
    from serried.runtime.session import Session
    from serried.trainer.evaluation.generate_from_checkpoint import Writer

_READS = ("precision", "launch.device")
"""Prefixes of the train.py keys that these commands also read."""
_TAKES = ("run.dir", "run.name", "checkpoint", "tokens", "temperature", "top_p", "seed", "device")


def generate(words: list[str]) -> int:
    """Print text from a model; for a chat model the prompt is a user's message.

    prompt       text to continue; if missing, the model starts a new document
    prompts      file with a prompt per line, or NAME.jsonl with {"prompt": "..."} per line; prints JSON, one line each
    rows         number of prompts that a process computes at a time; the texts do not depend on it
    tokens       largest number of tokens; stops earlier at the end of the text
    temperature  0: always the most likely token; 1: the model's own probabilities
    top_p        sample from the most likely tokens whose probabilities add up to this
    device       cpu or cuda; precision=bf16 also works
    parallel     as in training, on several processes: torchrun ... -m serried generate ...
    """
    given, overrides = pairs(words, "generate", (*_TAKES, "prompt", "prompts", "rows"), reads_overrides=True)
    rows = number(given, "rows", 16, 1, 10**6)
    if "prompts" not in given:
        if "rows" in given:
            raise UserError(f"rows={rows} has no effect on a single prompt; use prompts=FILE")
        prompt = given.get("prompt", "")
        return _with_writer(given, overrides, "generate", [prompt], lambda writer: writer.write([prompt]), tokens=200)
    if "prompt" in given:
        raise UserError(f"prompt={given['prompt']} and prompts={given['prompts']} are both given; keep one")
    prompts = _prompts_in(Path(given["prompts"]))

    def write(writer: "Writer") -> None:
        written = writer.write_all(prompts, rows)
        if writer.is_main:
            for prompt, text in zip(prompts, written, strict=True):
                print(json.dumps({"prompt": prompt, "text": text.text}, ensure_ascii=False))

    return _with_writer(given, overrides, "generate", prompts, write, tokens=200)


def _prompts_in(file: Path) -> list[str]:
    """Return the prompts in ``file``, one on each line that is not empty.

    Raises:
        UserError: The file cannot be read, or a line has no prompt.
    """
    try:
        # Not splitlines(): a line of JSON may contain other separators, such as U+2028.
        lines = read_bytes(file).decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except OSError as error:
        raise UserError(f"prompts={file}: {error.strerror}; use a file with a prompt on each line") from None
    except (NotPlainData, UnicodeDecodeError) as error:
        raise UserError(f"prompts={file}: {error}; use a text file with a prompt on each line") from None
    found = []
    for place, line in enumerate(lines, 1):
        prompt: Any = line
        if file.suffix == ".jsonl" and line.strip():
            row = None
            with suppress(NotPlainData):
                row = parse_json(line)
            prompt = row.get("prompt") if isinstance(row, dict) else row
            if not isinstance(prompt, str):
                raise UserError(f'prompts={file}: line {place} has no prompt; write {{"prompt": "..."}} on each line')
        if not line.strip():
            continue
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"prompts={file}: line {place} contains an unpaired surrogate (half a character); fix the line"
            ) from None
        found.append(prompt)
    if not found:
        raise UserError(f"prompts={file} has no prompt; write one on each line")
    return found


def chat(words: list[str]) -> int:
    """Talk to a chat model: type one message per line; Ctrl-D ends.

    tokens       largest number of tokens in a reply; the other keys are the same as for serried generate
    """
    from serried.runtime.process import torchrun_says

    given, overrides = pairs(words, "chat", _TAKES, reads_overrides=True)
    if torchrun_says()[2] > 1:
        raise UserError("serried chat runs in one process; start it without torchrun")
    return _with_writer(given, overrides, "chat", [""], _talk, tokens=1000)


def _talk(writer: "Writer") -> None:
    """Reply to each message on standard input."""
    with suppress(ImportError):
        import readline  # noqa: F401 -- line editing for input()
    said: list[str] = []
    asks = sys.stdin.isatty()
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


def _with_writer(
    given: dict[str, str], overrides: list[str], command: str, prompts: list[str], use: Callable[["Writer"], object], *,
    tokens: int,
) -> int:  # fmt: skip
    """Load the model, call ``use`` with a text writer, and return the exit code.

    Args:
        given: Arguments of the command by key.
        overrides: Overrides of the config.
        command: Name of the command, for messages.
        prompts: The first prompts, which are checked before the model is loaded.
        use: Generates the text.
        tokens: Default of the largest number of tokens to write.
    """
    from serried.configs.formats import printable
    from serried.runtime.process import choose_device, torchrun_says
    from serried.runtime.session import Session, run_in_session
    from serried.trainer.checkpoint.read_while_training import read_by_all, with_chosen
    from serried.trainer.evaluation.generate_from_checkpoint import Sampling, Writer

    sampling = Sampling(
        tokens=number(given, "tokens", tokens, 1, 10**9),
        temperature=number(given, "temperature", 0.8, 0, 1000),
        top_p=number(given, "top_p", 1.0, 0, 1),
        seed=number(given, "seed", 1, 0, 2**63 - 1),
    )
    if sampling.top_p == 0:
        raise UserError("top_p=0 leaves no token to choose from; use temperature=0 for the most likely one")
    device = [f"launch.device={given['device']}"] if "device" in given else []
    reads = (*_READS, "parallel") if command == "generate" else _READS
    saved, _, new_task = open_saved(given, [*overrides, *device], reads, command, task_of_text)
    is_resharded = not any(word.lstrip("+").startswith("parallel") for word in overrides)
    shown = printable if sys.stdout.isatty() else str

    def work(session: "Session") -> int:
        def loaded(checkpoint: Path) -> Writer:
            config = read_by_all(
                session, checkpoint,
                lambda: as_saved(
                    saved, checkpoint, world_size=session.world_size, is_resharded=is_resharded, is_other_data=True
                ),
            )  # fmt: skip
            task = new_task(config)
            read_by_all(session, checkpoint, lambda: task.open_saved(checkpoint))
            if command == "chat" and task.echoes_prompt():
                raise UserError("the model was trained on plain text, not on conversations; use serried generate")
            writer = Writer(
                config, task, session, checkpoint, sampling,
                say=lambda text: print(shown(text), end="", flush=True),
                note=lambda line: print(printable(line), file=sys.stderr, flush=True),
            )  # fmt: skip
            writer.load([[prompt] for prompt in prompts])
            return writer

        chosen = with_chosen(lambda: Path(session.once(lambda: str(find_saved(given, command).folder))), loaded)
        with suppress(BrokenPipeError):  # the reader has closed the pipe
            use(chosen)
        return EXIT_FINISHED

    if torchrun_says()[2] > 1:
        # The machine that generates may not be in a cloud.
        return run_in_session(saved.launch.model_copy(update={"notice": None}), work)
    return work(Session((0, 0, 1, 1), choose_device(saved.launch, 0, 1), saved.launch))
