"""``serried convert``."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.subcommand_arguments import number, pairs
from serried.runtime.process import say, typed_command


def convert(words: list[str]) -> int:
    """Print the command that trains as another framework's config does, and what has no counterpart.

    FILE         YAML or JSON file of axolotl, LLaMA-Factory, torchtune, TRL, Unsloth, DeepSpeed or accelerate, or a
                 shell script (.sh) that starts one; several files of one run are joined, as in sft.yaml zero3.json
    gpus         GPUs of the run, if the file does not name them; the global batch is counted over them
    steps        optimizer steps of the run, to convert what the file counts in epochs
    recipe       recipe to use instead of the one that the file implies

    The output is a shell script: what is not the command is a comment. Nothing in the file is run.
    """
    from serried.conversion.foreign_config import read
    from serried.conversion.overrides_of_facts import converted

    after = dict(zip(words[1:], words, strict=False))  # the number in "--gpus 8" is not a file
    files = [
        word
        for word in words
        if Path(word).is_file() or not ("=" in word or word.startswith("-") or after.get(word, "").startswith("--"))
    ]
    given, _ = pairs([word for word in words if word not in files], "convert", ("gpus", "steps", "recipe"))
    if not files:
        raise UserError("serried convert needs a file: serried convert FILE [gpus=N]")
    gpus = number(given, "gpus", 1, 1, 1_000_000) if "gpus" in given else None
    steps = number(given, "steps", 1, 1, 10_000_000_000) if "steps" in given else None
    config = read([Path(file) for file in files])
    result = converted(config, gpus, steps, given.get("recipe"))
    if result.nodes > 1:
        result.decide.append(
            "run the command on each node, with the address of the first node for HOST; or use launch=slurm"
        )
    if result.nodes == 1 and result.processes > 8:
        nodes = -(-result.processes // 8)
        result.decide.append(
            f"launch.processes={result.processes} is for one node; for nodes of 8 GPUs use launch=slurm "
            f"launch.nodes={nodes} launch.processes=8"
        )
    refused = _refused(dict(zip(result.overrides, result.words, strict=True)))
    lines = [f"# {' and '.join(files)} ({config.title})"]
    lines += _command(result.processes, result.nodes, result.words)
    for title, sentences in (
        ("Refused by train.py", refused), ("Computed", result.explained), ("To decide", result.decide),
        ("Without a counterpart", result.lacking),
    ):  # fmt: skip
        if sentences:
            lines += ["#", f"# {title}:", *(f"#   {sentence}" for sentence in dict.fromkeys(sentences))]
    return say("\n".join(lines))


def _refused(words: Mapping[str, str]) -> tuple[str, ...]:
    """Return the mistakes that train.py would report for the overrides in ``words``, by key.

    Models are not opened, since they may be on another machine. Keys that cannot be checked without a model are left
    out.
    """
    from serried.configs.compose import compose

    data = ("data.add_tokens", "data.add_special_tokens", "data.sequence_length")
    elsewhere = ("model.path", "task.teacher", "adapter.path", *data)
    try:
        compose([shlex.split(word)[0] for key, word in words.items() if key not in elsewhere])
    except UserError as error:
        return error.args
    return ()


def _command(processes: int, nodes: int, words: list[str]) -> list[str]:
    """Return the lines of the command. Several processes on one node are started by the run itself."""
    start = f"python {typed_command()}"
    if nodes > 1:
        meeting = "--rdzv_backend=c10d --rdzv_endpoint=HOST:29500"
        start = f"torchrun --nnodes={nodes} --nproc_per_node={processes} {meeting} {typed_command()}"
    elif processes > 1:
        start += f" launch=local launch.processes={processes}"
    lines = [start]
    for word in words:
        if len(lines[-1]) + len(word) + 3 > 110:
            lines.append("   ")
        lines[-1] += f" {word}"
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
