"""``trainer.micro_batch=auto``: the largest micro-batch that fits, by the plan."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from serried.configs.errors import UserError
from serried.configs.formats import size
from serried.configs.plain_data import flatten
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.checks import allowed_micro_batches, with_micro_batch, with_values
from serried.parallel.layout.mesh import Layout, gradient_accumulation, resolve_layout
from serried.parallel.step_phases import BACKWARD, FORWARD
from serried.planner.advice import KEEPS_LESS, Planned, advice
from serried.planner.memory_formula import formula_memory
from serried.planner.plan_terms import Fits
from serried.planner.step_plan import RESERVED_BYTES, with_unused
from serried.planner.trace.traced_step import CannotTrace, memory_of, trace_step
from serried.runtime.accelerator import memory_bytes
from serried.runtime.session import Session
from serried.trainer.checkpoint.resume import Start, changes
from serried.trainer.memory.host_memory import tensor_bytes
from serried.trainer.task import RunTask


def for_run(config: RunConfig, task: RunTask, session: Session, start: Start) -> tuple[RunConfig, str]:
    """Return ``config`` with the chosen ``trainer.micro_batch``, and a line that reports it. This is a collective call.

    Rank 0 chooses for the rank with the least memory. A run that resumes with the same settings keeps its value. Raises
    ``UserError`` if no value fits.
    """
    layout = resolve_layout(config.parallel, session.world_size)
    device = session.device.type
    if device != "cpu":
        here = memory_bytes(session.device)[1] - RESERVED_BYTES
    else:
        here = tensor_bytes(processes=session.local_world_size)
    usable, earlier = min(session.gather(here)), 0
    if start.checkpoint is not None and not changes(start.state, config, session.world_size):
        earlier = flatten(start.state["config"]).get("trainer.micro_batch", 0)
    samples, line = session.once(partial(choose, config, task, layout, usable, device, earlier=earlier, is_open=True))
    return with_micro_batch(config, samples), line


def choose(
    config: RunConfig,
    task: RunTask,
    layout: Layout,
    usable: int,
    device: str,
    *,
    earlier: int = 0,
    is_open: bool = False,
) -> tuple[int, str]:
    """Return the largest micro-batch that leaves a tenth of ``usable`` bytes on each rank, and a line that reports it.

    Args:
        device: type of the devices.
        earlier: micro-batch to keep if it fits; 0: none.
        is_open: whether the data of ``task`` is open.

    Raises:
        UserError: no micro-batch fits.
    """
    allowed = allowed_micro_batches(config, layout)
    planned = Planned(with_micro_batch(config, allowed[-1]), task, layout.world, device)
    on_host = planned.memory.on_host if device == "cpu" else 0

    def fits(samples: int, mode: str = config.trainer.activation_checkpoint) -> Fits:
        changed = with_values(planned.config, {"trainer.activation_checkpoint": mode, "trainer.micro_batch": samples})
        return Fits(on_host + _needed(changed, task, layout, planned, is_open=is_open), usable)

    kept = next((samples for samples in allowed if samples == earlier), 0)
    found = kept if kept and fits(kept).answer == "yes" else _largest(allowed, fits)
    if not found:
        raise UserError(_refusal(planned, fits(allowed[-1]), [*_others(planned, allowed, fits)]))
    others = [f"{samples} with {override}" for override, samples in _others(planned, allowed, fits) if samples > found]
    why = "as before" if found == kept else "all samples of a rank" if found == allowed[0] else "the most that fit"
    rank = f"{size(fits(found).needed)} of {size(usable)} usable per rank"
    return (
        found,
        f"{'chosen':<10} trainer.micro_batch={found}, {why}: {rank}{''.join(f'; {other}' for other in others)}",
    )


def _largest(allowed: list[int], fits: Callable[[int], Fits]) -> int:
    """Return the first of ``allowed`` that fits; 0 if none does."""
    return next((samples for samples in allowed if fits(samples).answer == "yes"), 0)


def _others(planned: Planned, allowed: list[int], fits: Callable[..., Fits]) -> Iterator[tuple[str, int]]:
    """Yield overrides with which blocks keep less, each with the largest micro-batch that fits with it, if any."""
    trainer = planned.config.trainer
    has_others = planned.memory.activations and trainer.activation_memory_budget == 1
    for mode in KEEPS_LESS.get(trainer.activation_checkpoint, ()) if has_others else ():
        with suppress(UserError):  # the mode conflicts with another setting
            if samples := _largest(allowed, partial(fits, mode=mode)):
                yield f"trainer.activation_checkpoint={mode}", samples


def _needed(config: RunConfig, task: RunTask, layout: Layout, planned: Planned, *, is_open: bool) -> int:
    """Return the bytes of the rank that needs the most: by formula, or with traced activations without a formula."""
    found = planned.of(config, layout.world)
    if found.activations:
        return with_unused(formula_memory(found)).peak
    # Tracing several ranks needs a process group, and the run has its own. Shards are computed, and the rest is traced
    # on one rank.
    accumulation = 1 if layout.is_sharded else gradient_accumulation(config.trainer, layout)
    alone = Layout("single") if layout.is_sharded else layout
    try:
        memory = memory_of(trace_step(config, task, alone, accumulation, is_open=is_open))
    except CannotTrace as error:
        raise UserError(
            f"trainer.micro_batch=auto with a model whose step cannot be traced: {error}; use trainer.micro_batch=1"
        ) from None
    if alone is layout:
        return with_unused(memory).peak
    held = sum(part for kind, part in memory.parts.items() if kind in ("parameters", "optimizer state"))
    return found.total + max(memory.by_phase[FORWARD], memory.by_phase[BACKWARD]) - int(held)


def _refusal(planned: Planned, fits: Fits, others: list[tuple[str, int]]) -> str:
    least = planned.config.trainer.micro_batch
    remedies = [f"{override} ({samples} fit)" for override, samples in others]
    if not remedies:
        most = 0.9 * fits.usable
        found = advice(planned, BACKWARD, most)
        remedies = [remedy.override for remedy in found if fits.needed - remedy.saved <= most][:1]
        remedies = remedies or [f"{remedy.override} (not enough on its own)" for remedy in found[:1]]
    choices = " or ".join([*remedies, f"trainer.micro_batch={least} to try"])
    return (
        f"trainer.micro_batch=auto: a micro-batch of {least} needs {size(fits.needed)}, but a rank can use "
        f"{size(max(0, fits.usable))}, less a tenth in reserve; use {choices}"
    )
