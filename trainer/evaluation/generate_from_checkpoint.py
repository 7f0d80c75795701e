"""Text generation from a checkpoint, with streamed output."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.schema.sections import RunConfig
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.mesh import resolve_layout
from serried.runtime.session import Session
from serried.trainer.checkpoint.read_while_training import reading
from serried.trainer.evaluation.evaluate import check_weights, load_model
from serried.trainer.task import TextTask


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of text generation."""

    tokens: int
    """Maximum number of tokens to generate."""
    temperature: float
    """Sampling temperature. 0 always selects the most likely token."""
    top_p: float
    """Total probability of the most likely tokens from which the next token is drawn."""
    seed: int


class Writer:
    """Generate text with the model in a checkpoint."""

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
        """``say``: callback for generated text. ``note``: callback for status lines."""
        self._config, self._task, self._session, self._checkpoint = config, task, session, checkpoint
        self._sampling, self._say, self._note = sampling, say, note
        self._model: DistributedModel | None = None

    def load(self, said: Sequence[str]) -> None:
        """Load the tokenizer and the model. Raises the same errors as ``write``."""
        with reading(self._checkpoint):
            self._count(said)  # reads the tokenizer
            self._model = self._load()

    def write(self, said: Sequence[str], *, is_timed: bool = True) -> str:
        """Generate the continuation of ``said``.

        ``said``: a text, or the messages of a chat so far, alternating between user and model. For a chat, the reply is
        returned. ``is_timed``: report the speed even if the text is not cut off.

        Raises ``UserError`` if the text is too long for the model, or the checkpoint is damaged.
        """
        task, sampling = self._task, self._sampling
        prompt_tokens = self._count(said)
        trained, longest = task.lengths()
        if self._model is None:
            self.load(said)
        model = self._model
        assert model is not None
        tokens = min(sampling.tokens, longest - prompt_tokens)
        if prompt_tokens + tokens > trained and len(said) == 1:
            self._note(f"note       the model was trained on {trained:,} tokens at a time; longer text may be worse")
        started, made, text = time.perf_counter(), 0, ""
        if task.echoes_prompt():
            self._say(said[-1])
        with model.autocast():
            for piece in task.write(
                model.model, said, tokens=tokens, temperature=sampling.temperature, top_p=sampling.top_p,
                seed=sampling.seed, device=self._session.device,
            ):  # fmt: skip
                made, text = made + piece.tokens, text + piece.text
                self._say(piece.text)
        self._say("\n")
        ending = "the end of the text" if made < tokens else f"tokens={sampling.tokens}"
        if made == tokens < sampling.tokens:
            ending = f"model.max_sequence_length={longest}"
        seconds = time.perf_counter() - started
        if is_timed or made == tokens:
            self._note(f"ended      after {made:,} tokens, {made / seconds:.1f} tokens/s: {ending}")
        return text

    def _count(self, said: Sequence[str]) -> int:
        """Return the number of tokens in ``said``. Raises ``UserError`` if the model does not support that many."""
        tokens, longest = len(self._task.prompt_ids(said)), self._task.lengths()[1]
        if tokens >= longest:
            what = "prompt" if len(said) == 1 else "conversation"
            raise UserError(
                f"the {what} has {tokens:,} tokens and leaves no room within model.max_sequence_length={longest}; use "
                f"a shorter {what}"
            )
        return tokens

    def _load(self) -> DistributedModel:
        config, device = self._config, self._session.device
        check_weights(self._checkpoint)
        self._note(f"model      {self._checkpoint}, {config.precision.name} on {device}")
        return load_model(config, self._task, resolve_layout(config.parallel, 1), device, self._checkpoint)
