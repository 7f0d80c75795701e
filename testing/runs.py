"""Complete training runs, as functions that a rank of a ``Cluster`` can call."""

import io
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import serried.trainer.training_state
from serried.configs.compose import compose, config_yaml
from serried.configs.errors import EXIT_MISTAKE
from serried.configs.schema.declaration import BUILT_IN
from serried.parallel.layout.local_shards import local
from serried.parallel.layout.mesh import resolve_layout
from serried.parallel.plan import LossTerms
from serried.parallel.sum_table import SumTable
from serried.program import main
from serried.recipes.data.samples.token_dataset import Batch, Sample
from serried.recipes.models.layers.lm_head import IGNORE
from serried.recipes.text.causal_lm import CausalLM
from serried.records.run_folder import RunFolder
from serried.runtime.console import Console
from serried.runtime.session import Session, open_session
from serried.trainer.callbacks import Callbacks
from serried.trainer.checkpoint.resume import find_start
from serried.trainer.checkpoint.retention import committed
from serried.trainer.monitor.heartbeat import Pulse
from serried.trainer.run import train
from serried.trainer.run_context import Context
from serried.trainer.step import TrainStep
from serried.trainer.trainer import Trainer


def write_text(folder: Path) -> Path:
    """Write thirty text files with enough structure for the loss to fall. Return ``folder``, created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)
    words = ["lorem", "ipsum", "dolor", "sit", "amet", "consectetur", "adipiscing", "elit", "sed", "do"]
    for number in range(30):
        chosen = random.choice(words, size=300, p=[0.3, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05, 0.04, 0.03, 0.03])
        (folder / f"{number:02d}.txt").write_text(" ".join(chosen))
    return folder


def overrides(text: Path, run_dir: Path, *more: str) -> list[str]:
    """Return the overrides of a small run: 3 layers, untied embeddings, 36 sequences of 32 tokens per step.

    The vocabulary size of 257 is not divisible by any number of ranks in the tests. Keys in ``more`` replace the
    defaults.
    """
    small = [
        "data=text", f"data.path={text}", f"data.cache_dir={text.parent / 'cache'}", "data.sequence_length=32",
        f"run.dir={run_dir}", "model.dim=32", "model.layers=3", "model.heads=4", "model.kv_heads=2",
        "model.hidden_dim=48", "model.tie_embeddings=false", "trainer.steps=20", "trainer.global_batch=36",
        "trainer.micro_batch=3", "trainer.log_every=1", "trainer.eval_every=0", "trainer.sample_tokens=0",
        "schedule.warmup_steps=3", "optim.lr=0.003",
    ]  # fmt: skip
    given = dict(argument.split("=", 1) for argument in (*small, *more))
    if given.get("model", "").startswith("gpt2"):
        del given["model.kv_heads"]  # GPT-2 has no grouped-query attention
    if given.get("parallel") in ("fsdp", "hsdp") and "parallel.pipeline" not in given:
        given.setdefault("parallel.reshard_after_forward", "true")  # several FSDP2 units, as on a GPU
    return [f"{key}={value}" for key, value in given.items()]


def train_small(
    argv: list[str],
    ragged: bool = False,
    fault: dict[str, Any] | None = None,
    acts: Mapping[int, Callable[[], object]] | None = None,
    end: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train with the overrides ``argv`` on this rank. Return the exit code and the sample ids of each micro-batch.

    ``end`` ends the run after a step: ``how`` is ``kill`` (SIGKILL on the last rank) or ``crash`` (an exception on all
    ranks).
    """
    config = compose(argv)
    recipe = ObservedRecipe(config, ragged=ragged, fault=fault, acts=acts)
    with open_session(config.launch) as session, _dying(session, **end) if end else nullcontext():
        recipe.rank = session.rank
        try:
            code = train(config, recipe, session, config_yaml(config))
        except _Crash:
            code = 70
    place = resolve_layout(config.parallel, session.world_size).coordinates(session.rank)
    counts = place.owns_loss and place.context == 0  # one of the ranks that saw the same samples
    return {"code": code, "sample_ids": recipe.sample_ids if counts else []}


class _Crash(Exception):
    pass


@contextmanager
def _dying(session: Session, how: str, after_step: int) -> Iterator[None]:
    steps = Trainer.steps

    def until(self: Trainer) -> Iterator[int]:
        for step in steps(self):
            yield step
            if step == after_step and how == "crash":
                raise _Crash
            if step == after_step and session.rank == session.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(Trainer, "steps", until):
        yield


def save_again(argv: list[str], run_dir: str) -> None:
    """Resume with the overrides ``argv``, and save the state to the run folder ``run_dir`` without training a step."""
    config = compose(argv)
    with open_session(config.launch) as session, patch.object(Trainer, "steps", lambda _: iter(())):
        recipe = CausalLM(config)
        start = find_start(config, session)
        folder = RunFolder(Path(run_dir)) if session.is_main else None
        console = Console(False, session.rank)
        copied = config.model_copy(update={"run": config.run.model_copy(update={"dir": Path(run_dir)})})
        hooks = Callbacks(copied, folder, pulse := Pulse(), console.log)
        trainer = Trainer(Context(copied, recipe, session, console, folder, pulse, hooks), config_yaml(config), start)
        trainer.saver.checkpointer.begin(start.step, start.state)
        trainer.saver.checkpointer.finish()
        saved = trainer.saver.checkpointer.wait()
        assert saved is not None
        assert saved.problem is None


def metrics(run_dir: Path, event: str = "step") -> list[dict[str, Any]]:
    """Return the records of an ``event`` in ``metrics.jsonl``."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def losses(run_dir: Path, event: str = "step") -> list[float]:
    """Return the losses in ``metrics.jsonl``."""
    return [line["loss"] for line in metrics(run_dir, event)]


def status(run_dir: Path) -> dict[str, Any]:
    """Return the content of ``status.json``."""
    return dict(json.loads((run_dir / "status.json").read_text()))


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below ``folder``, except locks, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def checkpoint(run_dir: Path) -> Path:
    """Return the newest checkpoint."""
    return committed(run_dir / "checkpoints")[-1]


def weights(run_dir: Path, stem: str = "model") -> dict[str, Tensor]:
    """Return all tensors of the newest checkpoint, read by the safetensors library. ``stem`` is model or optimizer."""
    files = sorted(checkpoint(run_dir).glob(f"{stem}*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def different_tensors(one: Path, other: Path, *stems: str) -> list[str]:
    """Return the names of tensors that differ bitwise between the newest checkpoints of two runs.

    This includes tensors that are in only one of them.
    """
    found = []
    for stem in stems or ("model", "optimizer"):
        ours, theirs = weights(one, stem), weights(other, stem)
        assert ours, f"{one} has saved no {stem}"
        same = (name for name in ours.keys() & theirs.keys() if ours[name].equal(theirs[name]))
        found += sorted({*ours, *theirs} - {*same})
    return found


class ObservedRecipe(CausalLM):
    """``CausalLM`` that records its sample ids, with optional ragged masks and an optional fault.

    ``acts`` contains functions that this rank calls, by number of the training micro-batch, counted from 1.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        ragged: bool = False,
        fault: dict[str, Any] | None = None,
        acts: Mapping[int, Callable[[], object]] | None = None,
    ) -> None:
        super().__init__(config)
        self._ragged, self._fault, self._acts = ragged, fault or {}, acts or {}
        self.sample_ids: list[list[int]] = []
        self.rank = 0
        self._forwards = 0
        self._first_block: nn.Module | None = None

    def collate_numbered(self, samples: Sequence[Sample], ids: np.ndarray) -> Batch:
        batch = super().collate_numbered(samples, ids)
        if self._ragged:
            for row, sample in enumerate(ids.tolist()):
                batch.targets[row, sample * 7919 % batch.targets.shape[1] + 1 :] = IGNORE
        return batch

    def terms(self, output: Tensor, batch: Batch) -> LossTerms:
        terms = super().terms(output, batch)
        if torch.is_grad_enabled() and batch.sample_ids.max() >= 0:  # not in evaluation or a warm-up with dummy samples
            self.sample_ids.append(batch.sample_ids.tolist())
            if act := self._acts.get(len(self.sample_ids)):
                act()
            if not self._fault.get("in_block"):
                terms = terms._replace(loss_sum=self._poisoned(terms.loss_sum))
        return terms

    def build_model(self) -> nn.Module:
        """Build the model. With ``in_block``, the fault is in the first block of the rank instead of the loss."""
        model = super().build_model()
        if self._fault.get("in_block"):
            for block in model.get_submodule("layers").children():
                block.register_forward_hook(self._block_done)
        return model

    def _block_done(self, block: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        del arguments
        self._first_block = self._first_block or block
        is_counted = block is self._first_block and torch.is_grad_enabled()
        return self._poisoned(output) if is_counted else output

    def _poisoned(self, value: Tensor) -> Tensor:
        self._forwards += 1
        if self.rank == self._fault.get("rank") and self._forwards in self._fault["forwards"]:
            return _Poison.apply(value, float(self._fault["value"]))
        return value


class _Poison(torch.autograd.Function):
    """Identity that multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def train_reported(argv: list[str], **observed: Any) -> int:
    """Train like ``train.py``: print failures and return the exit code."""
    return main(argv, BUILT_IN._replace(task=lambda: ObservedRecipe(**observed)))


def tiny_overrides(text: Path, run_dir: Path, *more: str) -> list[str]:
    """Return overrides like ``overrides`` for a smaller run.

    It has one layer, 4 sequences per step and 6 steps, with a checkpoint of 110 KiB every 2 steps.
    """
    tiny = ["model.layers=1", "model.dim=16", "trainer.steps=6", "trainer.global_batch=4", "trainer.micro_batch=2"]
    return overrides(text, run_dir, *tiny, "checkpoint.every=2", "schedule.warmup_steps=1", *more)


@contextmanager
def kept_batches(task: type, method: str = "terms") -> Iterator[list[Any]]:
    """Context manager that collects in a list each batch on which ``task`` trains in this process, in order."""
    batches: list[Any] = []
    original = getattr(task, method)

    def kept(self: Any, of_model: Any, batch: Any) -> Any:
        if torch.is_grad_enabled():
            batches.append(batch)
        return original(self, of_model, batch)

    with patch.object(task, method, kept):
        yield batches


class Ended(NamedTuple):
    """A run that has ended."""

    code: int
    printed: str
    """Output on stdout and stderr."""
    sample_ids: list[int]
    """Sample ids in the order of training."""

    @property
    def error(self) -> str:
        """The error line of a command that was refused."""
        assert self.code == EXIT_MISTAKE, self.printed
        assert "Traceback" not in self.printed
        (line,) = (line for line in self.printed.splitlines() if line.startswith("error: "))
        return line


def run_here(argv: list[str], after_step: Callable[[Trainer, int], None] | None = None) -> Ended:
    """Train like ``train.py`` in this process, on one thread, since other tests may run at the same time."""
    made: list[ObservedRecipe] = []
    steps, printed = Trainer.steps, io.StringIO()

    def make() -> ObservedRecipe:
        made.append(ObservedRecipe())
        return made[-1]

    def watched(self: Trainer) -> Iterator[int]:
        for step in steps(self):
            if after_step is not None:
                after_step(self, step)
            yield step

    with (
        patch.object(Trainer, "steps", watched),
        patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}),
        redirect_stdout(printed),
        redirect_stderr(printed),
    ):
        code = main(argv, BUILT_IN._replace(task=make))
    return Ended(code, printed.getvalue(), [sample for recipe in made for ids in recipe.sample_ids for sample in ids])


def steps_saved(run_dir: Path) -> list[int]:
    """Return the steps of the committed checkpoints."""
    return [int(path.name[5:]) for path in committed(run_dir / "checkpoints")]


def changes_by_step(argv: list[str], fault: dict[str, Any]) -> list[str]:
    """Return, for each step, how much of this rank's parameters and optimizer state changed.

    The values are ``everything``, ``something`` and ``nothing``.
    """
    config = compose(argv)
    changes = []

    def snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        state = [value for p in tensors for value in optimizer.state.get(p, {}).values()]
        tensors += [torch.as_tensor(value) for value in state if value is not None]
        return [local(tensor).detach().clone() for tensor in tensors]

    class Watched(TrainStep):
        def __call__(self, *arguments: Any, **named: Any) -> SumTable:
            before = snapshot(self._optimizer)
            result = super().__call__(*arguments, **named)
            after = snapshot(self._optimizer)
            before += [torch.empty(0)] * (len(after) - len(before))  # the first step creates the state
            same = [old.equal(new) for old, new in zip(before, after, strict=True) if new.numel()]
            changes.append("nothing" if all(same) else "something" if any(same) else "everything")
            return result

    with patch.object(serried.trainer.training_state, "TrainStep", Watched), open_session(config.launch) as session:
        recipe = ObservedRecipe(config, ragged=False, fault=fault)
        recipe.rank = session.rank
        train(config, recipe, session, config_yaml(config))
    return changes
