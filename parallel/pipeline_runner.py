"""The pipeline runner: each rank runs its stages for every micro-batch.

The schedules come from torch.distributed.pipelining. They use its public interface with static shapes, so no shapes are
inferred or pickled. Evaluation does not use schedules: it passes one batch at a time from stage to stage.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from serried.configs.errors import UserError
from serried.parallel.layout.local_shards import evaluating
from serried.parallel.layout.mesh import ONE_STAGE_SCHEDULES, Layout
from serried.parallel.layout.process_groups import Groups
from serried.parallel.loss_checks import check_terms
from serried.parallel.plan import Inputs, LossTerms, Objective
from serried.parallel.random_seed import seed_random_numbers
from serried.parallel.step_phases import BACKWARD, FORWARD, PIPELINE, Phases
from serried.parallel.sync.fsdp import Sharded

_SCHEDULES: Mapping[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}

logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # torch logs the schedule at every error


class Pipeline:
    """Runner of this rank's pipeline stages."""

    divisor = 1

    def __init__(
        self,
        stages: Mapping[int, Sharded],
        layout: Layout,
        groups: Groups,
        device: torch.device,
        phases: Phases,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """``stages``: the stages of this rank, by number."""
        self._stages, self._layout, self._groups = dict(sorted(stages.items())), layout, groups
        self._device, self.phases, self.autocast = device, phases, autocast
        self._last = layout.stages - 1
        self.borders: dict[tuple[int, torch.Size], Tensor] = {}
        """Stage inputs on meta, by stage and shape of the first stage's input. The last entry is the model's output.

        Known shapes are not exchanged again.
        """
        self._schedules: dict[tuple[int, torch.Size], _Schedule] = {}
        """Schedules by number and shape of micro-batches."""
        self._shapes: dict[torch.Size, None] = {}
        """Shapes of the micro-batches in the last step."""

    def train(
        self, batches: Sequence[Any], objective: Objective, scale: float | Tensor, seeds: Sequence[int],
        before: Callable[[int], None] | None = None,
    ) -> Iterator[LossTerms]:  # fmt: skip
        """Run forward and backward of all ``batches``, then yield their losses on the ranks of the last stage.

        Stage i draws the random numbers of a micro-batch from the micro-batch's seed + i.
        """
        if before is not None:
            before(0)  # a running schedule cannot be interrupted
        inputs = [objective.inputs(batch) for batch in batches]
        # Data ranks may meet a new shape at different steps, but determining the shapes between stages needs all ranks.
        known = self._shapes if self._layout.data_ranks > 1 else {}
        shapes = known | {micro_batch.stream.shape: None for micro_batch in inputs}
        if len(shapes) > 1:
            raise UserError(
                f"parallel.pipeline={self._layout.pipeline} needs micro-batches of one shape, but they have "
                f"{' and '.join(str(list(shape)) for shape in shapes)}; pad them in collate(), or use "
                "parallel.pipeline=1"
            )
        self._shapes = shapes

        def begin(index: int, stage: int) -> Inputs:
            if seeds:
                seed_random_numbers(seeds[index] + stage)
            return inputs[index]

        key = (len(batches), inputs[0].stream.shape)
        if key not in self._schedules:
            self._schedules[key] = self._schedule(len(batches), inputs[0])
        losses: list[LossTerms] = []

        def scaled_loss(index: int, output: Tensor) -> Tensor:
            terms = check_terms(objective.terms(output, batches[index]))
            losses.append(terms.detach())
            return terms.loss_sum * scale

        self._schedules[key].step(begin, scaled_loss)
        for sync in self._stages.values():
            sync.sum_whole_gradients()
        yield from losses

    def predict(self, batch: Any, objective: Objective) -> LossTerms | None:
        """Run the forward only. Return the loss on the ranks of the last stage, None on others."""
        output = self._forward(objective.inputs(batch))
        return None if output is None else check_terms(objective.terms(output, batch))

    def logits(self, ids: Tensor, index: int) -> Tensor:
        """Return the logits of token ``index`` of ``ids`` [B, S], on every rank: [B, 1, V]."""
        output = self._forward(Inputs(ids))
        if output is not None:
            output = output[:, index : index + 1].contiguous()
        group, source = self._groups.pipeline, self._layout.pipeline_of(self._last)
        form = self._groups.share_form(output, source)
        found = torch.empty_like(form, device=self._device) if output is None else output
        dist.broadcast(found, group=group, group_src=source)
        return found

    def reshard(self) -> None:
        """Free parameters that a forward without a backward left gathered."""
        for sync in self._stages.values():
            sync.reshard()

    def _forward(self, inputs: Inputs) -> Tensor | None:
        """Pass ``inputs`` through all stages. Return the output on the ranks of the last stage, None on others."""
        output: Tensor | None = None
        for stage, sync in self._stages.items():
            if stage == 0:
                output = inputs.stream
            elif stage - 1 not in self._stages:
                output = self._receive(stage, inputs.stream.shape)
            with self.autocast():
                output = sync.root(nn.Module.__call__, output, **inputs.named)
            assert output is not None
            if stage < self._last:
                self._send(stage + 1, inputs.stream.shape, output)
            else:
                self.borders[stage + 1, inputs.stream.shape] = torch.empty_like(output, device="meta")
        return output if self._last in self._stages else None

    def _send(self, stage: int, stream: torch.Size, hidden: Tensor) -> None:
        """Send ``hidden`` to ``stage``.

        Its shape and dtype are sent first if the shape ``stream`` of the model input is new.
        """
        is_new = (stage, stream) not in self.borders
        self.borders[stage, stream] = torch.empty_like(hidden, device="meta")
        if stage in self._stages:
            return
        group, to = self._groups.pipeline, self._layout.pipeline_of(stage)
        with self._waiting_for(to):
            if is_new:
                self._groups.send_form(self.borders[stage, stream], to)
            dist.send(hidden.contiguous(), group=group, group_dst=to)

    def _receive(self, stage: int, stream: torch.Size) -> Tensor:
        group, source = self._groups.pipeline, self._layout.pipeline_of(stage - 1)
        with self._waiting_for(source):
            if (stage, stream) not in self.borders:
                self.borders[stage, stream] = self._groups.receive_form(source)
            hidden = torch.empty_like(self.borders[stage, stream], device=self._device)
            dist.recv(hidden, group=group, group_src=source)
        return hidden

    @contextmanager
    def _waiting_for(self, coordinate: int) -> Iterator[None]:
        assert self._groups.pipeline is not None
        self.phases.peers = (dist.get_global_rank(self._groups.pipeline, coordinate),)
        yield
        self.phases.peers = ()

    def _schedule(self, micro_batches: int, inputs: Inputs) -> "_Schedule":
        """Create the schedule for micro-batches shaped like ``inputs``.

        One forward of ``inputs`` determines the shapes between stages.
        """
        with torch.no_grad(), evaluating(sync.root for sync in self._stages.values()):
            self._forward(inputs)
        self.reshard()
        # NCCL may create the communicator of a group only in a call of all its ranks.
        dist.all_reduce(torch.zeros(1, device=self._device), group=self._groups.pipeline)
        stages, marks = [], _Marks(self.phases)
        for number, sync in self._stages.items():
            stage = _Stage(
                sync.root, number, self._layout.stages, self._device,
                input_args=self._border(number, inputs), output_args=self._border(number + 1, inputs),
                group=self._groups.pipeline,
            )  # fmt: skip
            stage.marks, stage.autocast = marks, self.autocast
            stages.append(stage)
        return _Schedule(self._layout.schedule, stages, marks, micro_batches)

    def _border(self, stage: int, inputs: Inputs) -> Tensor:
        """Return an input of ``stage`` on meta."""
        if stage == 0:
            stream = inputs.stream  # torch 2.11 also compares strides, which empty_like changes for a slice
            return torch.empty_strided(stream.shape, stream.stride(), dtype=stream.dtype, device="meta")
        return torch.empty_like(self.borders[stage, inputs.stream.shape], requires_grad=True)


class _Marks:
    """Recorder of the phases of this rank's stages. Time between forwards and backwards counts as waiting."""

    def __init__(self, phases: Phases) -> None:
        self.phases = phases
        self._awaited: dict[tuple[str, int, int], int] = {}
        """Sending rank of each awaited message, by kind, stage and micro-batch."""
        self._sent_to: tuple[int, ...] = ()

    def expect(self, kind: str, stage: int, index: int, receives: list[dist.P2POp]) -> list[dist.P2POp]:
        """Record the messages that a forward or backward waits for, and return them."""
        for message in receives:
            self._awaited[kind, stage, index] = message.peer
        self._wait()
        return receives

    def send(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        """Record the receivers of this rank's messages, and return the messages."""
        self._sent_to = tuple(message.peer for message in sends) or self._sent_to
        self._wait()
        return sends

    @contextmanager
    def work(self, phase: str, stage: int, index: int = -1) -> Iterator[None]:
        """Record a forward or backward."""
        self._awaited.pop((phase, stage, index), None)
        self.phases.peers = ()
        self.phases.enter(phase)
        yield
        self.phases.enter(PIPELINE)
        self._wait()

    def _wait(self) -> None:
        """Record the ranks that this rank waits for until its next forward or backward."""
        self.phases.peers = tuple(dict.fromkeys(self._awaited.values())) or self._sent_to

    def end(self) -> None:
        """End the step."""
        self._awaited.clear()
        self._sent_to = self.phases.peers = ()


class _Stage(pipelining.PipelineStage):
    """A pipeline stage that gets its inputs from ``begin`` and records its phases."""

    marks: _Marks
    autocast: Callable[[], AbstractContextManager[Any]]
    begin: Callable[[int, int], Inputs]
    current: int
    """Micro-batch of the last forward."""
    _named: Mapping[str, Any]

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *rest: Any, **more: Any) -> Any:
        del args, kwargs  # empty: the schedule gets no inputs
        with self.marks.work(FORWARD, self.stage_index, fwd_chunk_id):
            self.current = fwd_chunk_id
            inputs = self.begin(fwd_chunk_id, self.stage_index)
            self._named = inputs.named
            try:
                return super().forward_one_chunk(fwd_chunk_id, (inputs.stream,), {}, *rest, **more)
            except RuntimeError as error:
                raise error.__cause__ or error from None  # the error of the model

    def forward_maybe_with_nosync(self, *args: Any, **_: Any) -> Any:
        # Named inputs are not passed through the schedule, since torch would look for their gradients.
        with self.autocast():
            return self.submod(nn.Module.__call__, *args, **self._named)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.marks.work(BACKWARD, self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self.marks.work(BACKWARD, self.stage_index):
            super().backward_weight_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, *args: Any) -> None:
        with self.marks.work(BACKWARD, self.stage_index):
            super().perform_reduce_grad(*args)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self.marks.expect(FORWARD, self.stage_index, fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self.marks.expect(BACKWARD, self.stage_index, bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self.marks.send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self.marks.send(super().get_bwd_send_ops(bwd_chunk_id))


class _Schedule:
    """A schedule of torch for a fixed number of micro-batches."""

    def __init__(self, name: str, stages: Sequence[_Stage], marks: _Marks, micro_batches: int) -> None:
        self._stages, self._marks, self._micro_batches = stages, marks, micro_batches
        self._scaled_loss: Callable[[int, Tensor], Tensor] | None = None
        self._schedule = _SCHEDULES[name](
            stages[0] if name in ONE_STAGE_SCHEDULES else stages,
            n_microbatches=micro_batches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def step(self, begin: Callable[[int, int], Inputs], scaled_loss: Callable[[int, Tensor], Tensor]) -> None:
        """Run forward and backward of all micro-batches.

        Args:
            begin: Returns the inputs, given the indices of a micro-batch and of a stage.
            scaled_loss: Returns the loss to run backward on, given the index of a micro-batch and the model's output.
        """
        self._scaled_loss = scaled_loss
        for stage in self._stages:
            stage.begin = begin
        # Targets are not used. Returned outputs would be concatenated, which fails for a scalar loss.
        self._schedule.step(target=torch.empty(self._micro_batches), return_outputs=False)
        self._marks.end()

    def _loss(self, output: Tensor, _: Tensor) -> Tensor:
        assert self._scaled_loss is not None
        return self._scaled_loss(self._stages[-1].current, output)
