"""Console and metrics.jsonl output of a run."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from serried.configs.errors import EXIT_FINISHED, EXIT_STOPPED
from serried.configs.formats import duration, short, size
from serried.parallel.layout.mesh import AXES, Layout
from serried.records.run_folder import PROFILES
from serried.runtime.accelerator import device_name
from serried.trainer.checkpoint.checkpoints import checkpoints_of
from serried.trainer.checkpoint.resume import Start
from serried.trainer.checkpoint.save import Saved
from serried.trainer.metrics.meter import peak_memory_bytes
from serried.trainer.progress import MANY_SKIPPED, Progress
from serried.trainer.run_context import Context
from serried.trainer.step import StepResult

_IDS_SHOWN = 8


def _expert_tokens(loads: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the entries of metrics.jsonl about tokens sent to experts.

    These are the minimum, the maximum and the sum per layer, and the ratio of the maximum to the mean.
    """
    if not loads:
        return {}
    ratios = [max(layer) * len(layer) / max(1, sum(layer)) for layer in loads]
    return {
        "expert_tokens": [[min(layer), max(layer), sum(layer)] for layer in loads],
        "expert_load": {"worst layer": max(ratios), "mean of layers": sum(ratios) / len(ratios)},
    }


class RunLog:
    """Console and metrics.jsonl output of a run. Every rank has one; only rank 0 prints and records."""

    def __init__(self, context: Context, start: Start, progress: Progress) -> None:
        config = context.config
        self._config = config
        self._session = context.session
        self._folder = context.folder
        self._console, self._task = context.console, context.task
        self._callbacks = context.callbacks
        self._first_step = start.step if start.first_step is None else start.first_step
        self._progress = progress

    def started(
        self,
        layout: Layout,
        parameters: int,
        start: Start,
        *,
        flops_per_sample: float | None,
        peak_flops: float | None,
        hosts: Sequence[str],
        tracker_run_id: str,
        earlier_seconds: float = 0.0,
    ) -> None:
        """Record the start of the run.

        ``hosts``: host name of each rank. ``peak_flops``: peak FLOP/s of one device, None if not known.
        ``earlier_seconds``: duration of the starts that ended before their first checkpoint.
        """
        self._record(
            "start",
            unit=self._task.unit,
            world_size=self._session.world_size,
            mesh={axis: getattr(layout, axis) for axis in (*AXES, "expert")},
            parameters=parameters,
            resumed_from=start.step if start.checkpoint is not None else None,
            device=device_name(self._session.device),
            hosts=list(hosts),
            peak_flops_per_device=peak_flops,
            flops_per_sample=flops_per_sample,
            memory_bytes=peak_memory_bytes(self._session.device)[0],
            tracker_run_id=tracker_run_id,
            since_process_seconds=round(time.monotonic() - self._session.started, 3),
            **({"earlier_seconds": round(earlier_seconds, 3)} if earlier_seconds else {}),
        )
        self._callbacks.call("on_start", start.step)
        self._callbacks.raise_failure()

    def step(
        self, step: int, result: StepResult, lr: Mapping[str, float], samples: int, rates: dict[str, Any],
        sample_ids: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Report a step.

        Args:
            lr: Learning rate by parameter group.
            rates: Values of ``RATES``, None between two log lines.
            sample_ids: Samples of a step that was skipped because its loss or gradient was not finite.
        """
        metrics = result.metrics
        values = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": next(iter(lr.values())),
            "lr_by_group": dict(lr),
            "samples": samples,
            "tokens": self._progress.counts.tokens,
            **({"source_tokens": dict(self._progress.counts.source_tokens)} if result.by_source else {}),
            **metrics,
            **rates,
            **_expert_tokens(result.loads),
            "skipped": bool(result.skipped),
            **({"sample_ids": list(sample_ids)} if sample_ids else {}),
            "scale": result.scale if self._config.precision.name == "fp16" else None,
        }
        self._record("step", **values)
        self._console.last_step = {**values, "is_first": step == self._first_step + 1, "unit": self._task.unit}
        self._console.say(step_line(values, metrics, self._config.trainer.steps, self._task.unit))
        if step == self._first_step + 1:
            self._expect_best_metric(metrics)
        self._callbacks.call("on_step", step, {"loss": result.loss, **metrics})

    def _expect_best_metric(self, metrics: Mapping[str, float]) -> None:
        """Warn early if ``checkpoint.best_metric`` is not a training metric. Evaluations may not have it either."""
        metric, trainer = self._config.checkpoint.best_metric, self._config.trainer
        if metric not in {"loss", *metrics} and trainer.evaluates_every and not trainer.evaluate:
            known = ", ".join(["loss", *metrics])
            self._console.say(
                f"WARNING    checkpoint.best_metric={metric} is not a training metric ({known}); if it is not an "
                "evaluation metric either, the first evaluation ends the run"
            )

    def spiked(self, step: int, result: StepResult, text: str) -> None:
        """Report a step with a loss or gradient spike."""
        self._record(
            "spike", step=step, loss=result.loss, grad_norm=result.grad_norm, loss_limit=result.loss_limit,
            norm_limit=result.norm_limit, skipped=bool(result.skipped),
        )  # fmt: skip
        self._console.say(f"WARNING    {text}")

    def slow(self, rank: int, host: str, share: float) -> None:
        """Report a rank whose device is slower than the others and delays all ranks."""
        self._console.say(
            f"WARNING    rank {rank} on {host} is slow: the same computation takes {share:.2f}x the median of all "
            "ranks, and all ranks wait for it. Its device may be hot, or shared"
        )

    def rolled_back(self, start: Start, from_step: int, samples: int, reason: str) -> None:
        """Report a rollback to the checkpoint ``start``. Training continues with sample number ``samples``."""
        if self._folder is not None:
            self._folder.go_back(start.step)
        left_out = samples - int(start.state["samples"])
        self._record(
            "rollback", step=start.step, from_step=from_step, samples=samples, left_out=left_out, reason=reason
        )
        self._console.say(
            f"WARNING    {reason}. Rolled back to {self._config.run.shown(start.checkpoint)}; the {left_out} samples "
            "since then are skipped"
        )

    def running(self, step: int) -> None:
        """Record the current step in ``status.json``."""
        if self._folder is not None:
            self._folder.status("running", step=step)

    def evaluated(
        self, step: int, name: str, means: Mapping[str, float], weight: int, seconds: float,
        by_source: Mapping[str, float],
    ) -> None:  # fmt: skip
        """Report an evaluation on the dataset ``name``.

        ``means``: loss and other metrics by name. ``by_source``: losses of the sources of a mixture.
        """
        loss = means["loss"]
        finite = {source: value if math.isfinite(value) else None for source, value in by_source.items()}
        more: dict[str, Any] = {"source_losses": finite} if finite else {}
        self._record("eval", step=step, set=name, tokens=weight, seconds=round(seconds, 3), **means, **more)
        parts = ", ".join(f"{source} {each:.4f}" for source, each in by_source.items())
        self._console.say(
            f"eval {step:>{len(str(self._config.trainer.steps))}}/{self._config.trainer.steps}  {name} loss "
            f"{loss:.4f}{f' ({parts})' if parts else ''}{_named(means)}  over {short(weight)} {self._task.unit} in "
            f"{duration(seconds)}"
        )
        if not self._callbacks.call("on_evaluate", step, dict(means), split=name):
            self._callbacks.raise_failure()  # all ranks save this step, and repeat the evaluation on resume

    def not_evaluated(self, step: int, name: str) -> None:
        """Report an evaluation on the dataset ``name`` that has no loss, because there were no targets."""
        self._record("eval", step=step, set=name, loss=None, tokens=0)
        self._console.say(
            f"WARNING    the evaluation on {name} has no loss, as its sequences have nothing to predict; use more "
            "documents, longer sequences (data.sequence_length) or more sequences "
            f"(trainer.eval_batches={self._config.trainer.eval_batches})"
        )

    def saved(self, saved: Saved) -> None:
        """Report a completed checkpoint."""
        for note in saved.notes:
            self._console.say(f"WARNING    {note}")
        self._console.say(
            f"saved      {saved.where}: {size(saved.nbytes)} in {saved.seconds:.1f} s, "
            f"training waited {saved.stall_seconds:.2f} s"
        )
        self._record(
            "checkpoint", step=saved.step, path=saved.where, seconds=saved.seconds,
            stall_seconds=saved.stall_seconds, bytes=saved.nbytes,
        )  # fmt: skip
        is_in_bucket = self._config.run.url is not None
        self._callbacks.call("on_save", saved.step, checkpoint=saved.where if is_in_bucket else saved.path)

    def not_saved(self, step: int, problem: str, newest: str) -> None:
        """Report a failed save. ``newest``: a clause about the newest checkpoint."""
        self._console.say(f"WARNING    no checkpoint of step {step}: {problem}. Training continues; {newest}")

    def interrupted(self, step: int, saved_step: int) -> None:
        """Report that an error ended the run at ``step``, and that the newest checkpoint is at ``saved_step``."""
        self._console.say(
            f"ended      at step {step}; the newest checkpoint is from step {saved_step}; run the same command to "
            "resume from it"
        )

    def ended(self, step: int, seconds: float, sample: str | None, request: str | None) -> None:
        """Report the end at ``step`` after ``seconds``.

        ``sample``: text generated by the trained model. ``request``: reason for a requested stop, None if none was
        requested.
        """
        config, progress = self._config, self._progress
        counts, is_finished = progress.counts, progress.is_finished(step, config)
        validation = f", validation {_loss(progress.validation_loss)}" if progress.validated_step else ""
        validation += "" if progress.validated_step == step or not validation else f" (step {progress.validated_step})"
        since = f" since step {self._first_step}" if self._first_step else ""
        tokens = f"{short(counts.tokens)} {self._task.unit}"
        members = self._folder.members if self._folder is not None else None
        if members is not None and members.replicas < members.total_replicas:
            since += f", on {members}"
        if progress.early_stop is not None:
            self._console.say(f"early stop {progress.early_stop}")
        self._console.say(
            f"{'finished' if is_finished else 'stopped':<10} {step} steps, {tokens}, "
            f"{duration(seconds)}{since}; loss {_loss(counts.first_loss)} -> {_loss(counts.last_loss)}{validation}"
        )
        state, code = ("finished", EXIT_FINISHED) if is_finished else ("stopped", EXIT_STOPPED)
        reason = (
            progress.finished_because(step) if is_finished else request or f"trainer.stop_at={config.trainer.stop_at}"
        )
        if self._folder is not None:  # before on_end, during which the process may be killed
            self._folder.status(state, step=step, reason=reason, exit_code=code)
            if (goodput := self._folder.record_stop(step, state, reason)) is not None:
                self._console.say(f"goodput    {goodput.line()}")
        if sample is not None:
            self._console.say("sample     unconditional text from the trained model:")
            self._console.say("\n".join(f"  | {line}" for line in sample.splitlines()))
        checkpoints = checkpoints_of(config, self._session, self._folder)
        opens_in = self._task.opens_in
        if config.adapter.method != "none":
            opens_in = opens_in and "PEFT"
        asked = {"wandb": config.track.wandb != "off", "tensorboard": config.track.tensorboard, PROFILES: False}
        # A tracker's process may not have created its folder yet.
        more = "".join(f", {name}/" for name, is_asked in asked.items() if is_asked or (config.run.dir / name).is_dir())
        checkpoint = of_best = ""
        if self._folder is not None:
            start = f"{config.run.place}/"
            checkpoint = checkpoints.where(step).removeprefix(start)
            if best := checkpoints.best():
                where = checkpoints.where(best[0]).removeprefix(start)
                of_best = f"; the best: {where} ({config.checkpoint.best_metric} {best[1]:.4g})"
        self._console.say(
            f"files      {config.run.place}: report.html, metrics.jsonl, config.yaml, status.json{more}; the model"
            f"{opens_in and f', opens in {opens_in}'}: {checkpoint}{of_best}"
        )
        self._console.say(f"next       {self._next(step, request)}")
        if is_finished and counts.skipped >= MANY_SKIPPED * step:
            self._console.say(
                f"WARNING    {counts.skipped:,} of {step:,} steps ({counts.skipped / step:.0%}) were skipped and did "
                "not change the weights; the lines with SKIPPED give the reasons, and the samples of steps that were "
                "not finite"
            )
        self._callbacks.call("on_end", step, progress.validation)
        self._callbacks.raise_failure()

    def _next(self, step: int, request: str | None) -> str:
        config = self._config
        same = "run the same command"
        if config.checkpoint.resume == "never":
            same += ", but checkpoint.resume=auto,"
        if self._progress.early_stop is not None:
            return self._task.next_command(self._session.command())
        if self._progress.missed and step == config.trainer.steps:
            return f"{same} for the evaluation after step {step}"
        if step < config.trainer.steps and request is not None:
            return f"{same} to resume ({step} of {config.trainer.steps} steps done)"
        if step < config.trainer.steps:
            return (
                f"{same} without trainer.stop_at, or with a higher value, to resume; up to step {config.trainer.steps}"
            )
        return self._task.next_command(self._session.command())

    def _record(self, event: str, **values: Any) -> None:
        if self._folder is not None:
            self._folder.record(event, **values)


def _named(means: Mapping[str, float]) -> str:
    return "".join(f"  {name} {value:.4g}" for name, value in means.items() if name != "loss")


def step_line(values: dict[str, Any], metrics: Mapping[str, float], steps: int, unit: str) -> str:
    """Return the console line of a step. A step that was skipped between two log lines has no rates."""
    parts = [
        f"step {values['step']:>{len(str(steps))}}/{steps}",
        f"loss {values['loss']:.4f}",
        *([_named(metrics).strip()] if metrics else []),
        f"grad {values['grad_norm']:.2f}",
        f"lr {values['lr']:.1e}",
    ]
    rate = values["tokens_per_second"]
    if rate is not None:
        per_device = values["tokens_per_second_per_device"]
        each = f" ({short(per_device)}/rank)" if per_device < rate else ""
        parts.append(f"{'tok' if unit == 'tokens' else unit}/s {short(rate)}{each}")
    if values["mfu"] is not None:
        parts.append(f"mfu {values['mfu']:.1%}")
    if values["scale"] is not None:
        parts.append(f"scale {values['scale']:g}")
    if rate is not None:
        parts += [
            f"mem {size(values['memory_bytes'])}",
            f"data {values['data_seconds'] / values['step_seconds']:.1%}",
            f"eta {duration(values['eta_seconds'])}",
        ]
    if values["skipped"]:
        is_finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        parts.append(f"SKIPPED: {'a spike' if is_finite else 'not finite'}, nothing changed{_of_samples(values)}")
    return "  ".join(parts)


def _of_samples(values: Mapping[str, Any]) -> str:
    ids = values.get("sample_ids", ())
    shown = ", ".join(map(str, ids[:_IDS_SHOWN])) + f", ... ({len(ids)} in metrics.jsonl)" * (len(ids) > _IDS_SHOWN)
    return f"; its samples: {shown}" if ids else ""


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"
