"""Text generation from a checkpoint."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.schema.sections import RunConfig
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.mesh import resolve_layout
from serried.runtime.session import Session
from serried.trainer.checkpoint.read_while_training import read_by_all
from serried.trainer.evaluation.evaluate import check_weights, load_model
from serried.trainer.task import Prompt, Sampling, TextTask, Written


class Writer:
    """Generate text with the model in a checkpoint, on all ranks together."""

    def __init__(
        self,
        config: RunConfig,
        task: TextTask,
        session: Session,
        checkpoint: Path,
        sampling: Sampling,
        *,
        say: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        """``say``: callback for generated text. ``note``: callback for status lines. Both are called on the main rank
        only."""
        self._config, self._task, self._session, self._checkpoint = config, task, session, checkpoint
        self._sampling, self._say, self._note = sampling, say, note
        self._model: DistributedModel | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank shows the text."""
        return self._session.is_main

    def load(self, conversations: Sequence[Sequence[str]]) -> None:
        """Load the tokenizer and the model. Raises the same errors as ``write`` and ``write_all``."""
        config, device, read = self._config, self._session.device, partial(read_by_all, self._session, self._checkpoint)
        read(partial(self._prompts, conversations))  # reads the tokenizer
        read(partial(self._session.once, partial(check_weights, self._checkpoint)))
        layout = resolve_layout(config.parallel, self._session.world_size)
        place = str(device) if layout.world == 1 else f"{layout.world} processes, {layout.describe()}"
        self._tell(f"model      {self._checkpoint}, {config.precision.name} on {place}")
        self._model = read(partial(load_model, config, self._task, layout, device, self._checkpoint))

    def write(self, said: Sequence[str], *, is_timed: bool = True) -> str:
        """Generate the continuation of ``said`` and show it, piece by piece if there is one process.

        ``said``: a text, or the messages of a chat so far, alternating between user and model. For a chat, the reply is
        returned. ``is_timed``: report the speed even if the text is not cut off.

        Raises ``UserError`` if the text is too long for the model.
        """
        task, sampling, longest = self._task, self._sampling, self._task.lengths()[1]
        (prompt,) = self._prompts([said])
        tokens = min(sampling.tokens, longest - len(prompt.ids))
        if len(said) == 1:
            self._warn([prompt])
        started = time.perf_counter()
        shows_pieces = self._session.world_size == 1
        if task.echoes_prompt() and self.is_main:
            self._say(said[-1])
        (written,) = task.write(self._loaded(), [prompt], sampling, show=self._say if shows_pieces else None)
        if self.is_main:
            self._say("\n" if shows_pieces else f"{written.text}\n")
        ending = "the end of the text" if written.is_ended else f"tokens={sampling.tokens}"
        if written.tokens == tokens < sampling.tokens:
            ending = f"model.max_sequence_length={longest}"
        if is_timed or not written.is_ended:
            self._tell(f"ended      after {_speed([written], started)}: {ending}")
        return written.text

    def write_all(self, prompts: Sequence[str], rows: int) -> list[Written]:
        """Generate the continuation of each of ``prompts``; ranks compute ``rows`` prompts at a time.

        Raises ``UserError`` if a prompt is too long for the model.
        """
        encoded = self._prompts([[prompt] for prompt in prompts])
        self._warn(encoded)
        started = time.perf_counter()
        written = self._task.write(self._loaded(), encoded, self._sampling, rows=rows)
        self._tell(f"ended      {len(written):,} texts of {_speed(written, started)}")
        return written

    def _loaded(self) -> DistributedModel:
        assert self._model is not None, "load() comes first"
        return self._model

    def _prompts(self, conversations: Sequence[Sequence[str]]) -> list[Prompt]:
        """Return the encoded prompts. Raises ``UserError`` if the model does not support that many tokens."""
        prompts, longest = [self._task.prompt(said) for said in conversations], self._task.lengths()[1]
        for number, (prompt, said) in enumerate(zip(prompts, conversations, strict=True), 1):
            if len(prompt.ids) >= longest:
                what = "prompt" if len(said) == 1 else "conversation"
                which = what if len(prompts) == 1 else f"{what} {number}"
                raise UserError(
                    f"the {which} has {len(prompt.ids):,} tokens and leaves no room within "
                    f"model.max_sequence_length={longest}; use a shorter {what}"
                )
        return prompts

    def _warn(self, prompts: Sequence[Prompt]) -> None:
        trained, longest = self._task.lengths()
        tokens = max(min(len(prompt.ids) + self._sampling.tokens, longest) for prompt in prompts)
        if tokens > trained:
            self._tell(f"note       the model was trained on {trained:,} tokens at a time; longer text may be worse")

    def _tell(self, line: str) -> None:
        if self.is_main:
            self._note(line)


def _speed(written: Sequence[Written], started: float) -> str:
    tokens = sum(text.tokens for text in written)
    return f"{tokens:,} tokens, {tokens / (time.perf_counter() - started):.1f} tokens/s"
