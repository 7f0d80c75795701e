"""Checks that the results of a run are the same on every layout, when repeated, and when resumed."""

from functools import partial
from pathlib import Path
from typing import Any

from serried.configs.errors import EXIT_STOPPED
from serried.verify.check import Bounds, Case, Found
from serried.verify.layouts import ALONE, BOUNDS, GRAD_NORM, Layout, layouts
from serried.verify.started_runs import RunFailed, Workplace, difference, newest_checkpoint, resumed_from, steps_of

COMPILED_LIMIT_SECONDS = 600.0
_STOPPED_AT, _STEPS = 4, 8
_ON_A_CPU = 1e-4
"""Bound of a run that starts on a GPU and ends on a CPU, which round matrix products differently."""
_UNWATCHED = (4, 7)
"""First and last step in which synchronization is an error. Earlier steps contain one-time work."""


def parity(workplace: Workplace, _: Bounds) -> list[Case]:
    """Every parallel layout gives the same loss curve as one process."""

    def alone(model: tuple[str, ...], precision: str) -> Path:
        words = ALONE._replace(model=model, precision=precision).overrides(workplace.global_batch)
        name = f"one process, {precision}{', experts' if model else ''}"
        return workplace.once(name, lambda: workplace.train(*words, processes=1))

    def compare(layout: Layout) -> Found:
        reference = alone(layout.model, layout.precision)
        limit = COMPILED_LIMIT_SECONDS if "compiled" in layout.name else None
        run = workplace.train(*layout.overrides(workplace.global_batch), limit_seconds=limit)
        return _within(run, reference, BOUNDS[layout.precision])

    return [
        Case(f"{layout.name}, {layout.precision}", partial(compare, layout))
        for layout in layouts(workplace.ranks, workplace.device)
    ]


def determinism(workplace: Workplace, _: Bounds) -> list[Case]:
    """Two runs of the same command are bitwise identical."""

    def compare() -> Found:
        one, other = _whole(workplace), workplace.train(*_words(workplace))
        return _bitwise(steps_of(other), steps_of(one), _different(other, one))

    return [Case("two runs of one command", compare)]


def host_waits(workplace: Workplace, _: Bounds) -> list[Case]:
    """The host does not wait for the GPU between log lines."""

    def train(layout: Layout) -> Found:
        workplace.train(*layout.overrides(workplace.global_batch), *refusing_waits(layout))
        return Found(True, f"none in steps {_UNWATCHED[0]} to {_UNWATCHED[1]}", "none")

    if workplace.device != "cuda":
        return [Case("between log lines", lambda: Found(True, ""), "only CUDA can detect it")]
    return [Case(layout.name, partial(train, layout)) for layout in unwatched(workplace.ranks)]


def unwatched(ranks: int) -> list[Layout]:
    """Return the layouts in which the host must not wait, one of each kind.

    Experts are excluded, since the host waits for their token counts.
    """
    found = layouts(ranks, "cpu")
    kinds = ("accumulated", "ddp", "fsdp", "hsdp", "tensor", "context", "pipeline")
    first = (next((layout for layout in found if layout.name.startswith(kind)), None) for kind in kinds)
    return [layout for layout in first if layout is not None]


def refusing_waits(layout: Layout) -> tuple[str, ...]:
    """Return overrides that make the training script fail if the host waits for the GPU."""
    first, end = (step * layout.accumulation + 1 for step in (_UNWATCHED[0] - 1, _UNWATCHED[1]))
    return (f"task.refuses_waits=[{first},{end}]", "trainer.log_every=0", "checkpoint.every=0")


def resume(workplace: Workplace, _: Bounds) -> list[Case]:
    """A resumed run matches an uninterrupted one, on the same layout, on another layout and on a CPU."""

    def resumed(*words: str, processes: int | None = None, device: str | None = None) -> tuple[Path, Path]:
        """Return the folders of a resumed run and of an uninterrupted run."""
        whole = _whole(workplace)
        stop = partial(workplace.train, *_words(workplace), f"trainer.stop_at={_STOPPED_AT}", code=EXIT_STOPPED)
        stopped = workplace.once("a run that stops", stop)
        again = (*_words(workplace), *words, f"checkpoint.resume={stopped}")
        run = workplace.train(*again, processes=processes, device=device)
        if (step := resumed_from(run)) != _STOPPED_AT:
            raise RunFailed(f"resumed from {'no checkpoint' if step is None else f'step {step}'}, not {_STOPPED_AT}")
        return run, whole

    def same() -> Found:
        run, whole = resumed()
        return _bitwise(steps_of(run), _later(whole), _different(run, whole))

    def other(layout: Layout) -> Found:
        run, whole = resumed(*layout.overrides(workplace.global_batch))
        return _within(run, whole, BOUNDS["fp32"])

    def on_a_cpu() -> Found:
        words = ALONE.overrides(workplace.global_batch)
        run, whole = resumed(*words, processes=1, device="cpu")
        return _within(run, whole, _ON_A_CPU if workplace.is_on_gpus else BOUNDS["fp32"])

    kinds = ("tensor", "pipeline") if workplace.is_on_gpus else ("tensor",)
    found = {
        kind: next((layout for layout in layouts(workplace.ranks, "cpu") if layout.name.startswith(kind)), None)
        for kind in kinds
    }
    return [
        Case(f"on the same layout ({_deterministic(workplace).name})", same),
        *(Case(f"on {layout.name}", partial(other, layout)) for layout in found.values() if layout),
        Case("on one process on a CPU", on_a_cpu),
    ]


def _deterministic(workplace: Workplace) -> Layout:
    """Return the layout for runs that are compared bitwise."""
    found = layouts(workplace.ranks, "cpu")
    return next((layout for layout in found if layout.name.startswith(("hsdp", "fsdp"))), found[0])


def _words(workplace: Workplace) -> tuple[str, ...]:
    words = _deterministic(workplace).overrides(workplace.global_batch)
    return (*words, "trainer.deterministic=true", f"trainer.steps={_STEPS}")


def _whole(workplace: Workplace) -> Path:
    """Return the folder of an uninterrupted run."""
    return workplace.once("a whole run", lambda: workplace.train(*_words(workplace)))


def _later(run: Path) -> list[dict[str, Any]]:
    return [step for step in steps_of(run) if step["step"] > _STOPPED_AT]


def _within(run: Path, reference: Path, bound: float) -> Found:
    """Compare two curves by their largest relative difference."""
    found = difference(steps_of(run), steps_of(reference))
    return Found(
        found.loss < bound and found.grad_norm < GRAD_NORM * bound,
        f"loss {found.loss:.1e}, gradient norm {found.grad_norm:.1e}", f"{bound:.0e}, {GRAD_NORM * bound:.0e}",
        {"loss": found.loss, "grad_norm": found.grad_norm, "loss_bound": bound, "grad_norm_bound": GRAD_NORM * bound},
    )  # fmt: skip


def _bitwise(steps: list[dict[str, Any]], reference: list[dict[str, Any]], different: list[str]) -> Found:
    """Compare two curves bitwise. ``different`` lists the checkpoint tensors that differ."""
    found = difference(steps, reference)
    is_same = not different and found == (0.0, 0.0)
    figure = "bitwise equal" if is_same else f"loss {found.loss:.1e}, {len(different)} tensors differ"
    values = {"loss": found.loss, "grad_norm": found.grad_norm, "different_tensors": len(different)}
    return Found(is_same, figure, "bitwise equal", values)


def _different(run: Path, reference: Path) -> list[str]:
    """Return the names of tensors that differ bitwise between the newest checkpoints of two runs.

    This includes tensors that are in only one of them.
    """
    ours, theirs = _tensors(run), _tensors(reference)
    same = {name for name in ours.keys() & theirs.keys() if ours[name].equal(theirs[name])}
    return sorted({*ours, *theirs} - same)


def _tensors(run: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {
        f"{file.name}/{name}": tensor
        for file in newest_checkpoint(run).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
