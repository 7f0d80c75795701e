"""Text from a checkpoint, as it is made."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.schema import RunConfig
from serried.parallel.mesh import resolve_layout
from serried.runtime.session import Session
from serried.trainer.evaluation import check_weights, load_model
from serried.trainer.task import TextTask


@dataclass(frozen=True)
class Sampling:
    """How text is made."""

    tokens: int
    """At most so many."""
    temperature: float
    """0: always the likeliest token."""
    top_p: float
    """Probability of the tokens that are drawn from, the likeliest ones."""
    seed: int


def write_text(
    config: RunConfig,
    task: TextTask,
    session: Session,
    checkpoint: Path,
    prompt: str,
    sampling: Sampling,
    *,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Pass ``prompt`` and the text that the model in ``checkpoint`` generates after it to ``say``, piece by piece; of a
    chat only the reply. ``note`` takes the lines about it.

    Raises:
        UserError: the prompt is too long for the model, or the checkpoint is damaged.
    """
    prompt_tokens = len(task.prompt_ids(prompt))
    trained, longest = task.lengths()
    if prompt_tokens >= longest:
        raise UserError(
            f"the prompt has {prompt_tokens:,} tokens, and model.max_sequence_length={longest} is as far as the model "
            "goes; use a shorter one"
        )
    check_weights(checkpoint)
    note(f"model      {checkpoint}, {config.precision.name} on {session.device}")
    model = load_model(config, task, resolve_layout(config.parallel, 1), session.device, checkpoint)
    tokens = min(sampling.tokens, longest - prompt_tokens)
    if prompt_tokens + tokens > trained:
        note(f"note       it was trained on {trained:,} tokens at a time; what comes after these may be worse")
    started, made = time.perf_counter(), 0
    if task.echoes_prompt():
        say(prompt)
    with model.autocast():
        for piece in task.write(
            model.model, prompt, tokens=tokens, temperature=sampling.temperature, top_p=sampling.top_p,
            seed=sampling.seed, device=session.device,
        ):  # fmt: skip
            made += piece.tokens
            say(piece.text)
    say("\n")
    ending = "the end of the text" if made < tokens else f"tokens={sampling.tokens}"
    if made == tokens < sampling.tokens:
        ending = f"model.max_sequence_length={longest}"
    seconds = time.perf_counter() - started
    note(f"ended      after {made:,} tokens, {made / seconds:.1f} a second: {ending}")
