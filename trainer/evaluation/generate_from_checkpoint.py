"""Text from a checkpoint, as it is made."""

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
    """How text is made."""

    tokens: int
    """Largest number of tokens to generate."""
    temperature: float
    """Sampling temperature. 0: always the most likely token."""
    top_p: float
    """Probability of the tokens that are drawn from, the likeliest ones."""
    seed: int


class Writer:
    """Writes text with the model in a checkpoint."""

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
        """Read all of the checkpoint that writing needs. Raises as ``write`` does for ``said``."""
        with reading(self._checkpoint):
            self._count(said)  # reads the tokenizer
            self._model = self._load()

    def write(self, said: Sequence[str], *, is_timed: bool = True) -> str:
        """Write what follows ``said``: the text to continue; or of a chat the messages so far, the user's and the
        model's in turn, of which the reply is returned.

        ``is_timed``: note how long it took, and not only what cut it off.

        Raises ``UserError`` if it is too long for the model, or the checkpoint is damaged.
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
            self._note(f"note       it was trained on {trained:,} tokens at a time; text beyond that may be worse")
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
            self._note(f"ended      after {made:,} tokens, {made / seconds:.1f} a second: {ending}")
        return text

    def _count(self, said: Sequence[str]) -> int:
        """Return the number of tokens of ``said``. Raises ``UserError`` if they are too many for the model."""
        tokens, longest = len(self._task.prompt_ids(said)), self._task.lengths()[1]
        if tokens >= longest:
            raise UserError(
                f"the {'prompt' if len(said) == 1 else 'conversation'} has {tokens:,} tokens, and "
                f"model.max_sequence_length={longest} is the limit of the model; use a shorter one"
            )
        return tokens

    def _load(self) -> DistributedModel:
        config, device = self._config, self._session.device
        check_weights(self._checkpoint)
        self._note(f"model      {self._checkpoint}, {config.precision.name} on {device}")
        return load_model(config, self._task, resolve_layout(config.parallel, 1), device, self._checkpoint)
