"""The time reserved before Slurm ends a job, by a model of time: nothing is lost but the step under way."""

import random
import time
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from serried.configs.schema.sections import CheckpointSection
from serried.parallel.runner import StepDropped
from serried.runtime.signals import Deadline
from serried.trainer.monitor import shutdown
from serried.trainer.monitor.shutdown import Action, Shutdown
from serried.trainer.monitor.time_to_stop import micro_batches_per_look, seconds_to_stop

_VARIES = 0.05
"""Steps and saves take so much more or less than the typical one."""
_LOG_EVERY = 10
_SURELY_LONG = 8.0


class _Clock:
    """A clock that the test sets, for the modules that ask ``time``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.computed = 0.0
        """When a GPU has done the work that the host has given it."""

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


CLOCK = _Clock()


class _Vote:
    """A vote on its way from a GPU that has summed it at ``arrives``."""

    def __init__(self, vote: Any) -> None:
        self.vote, self.arrives = vote

    @property
    def has_arrived(self) -> bool:
        return self.arrives <= CLOCK.now

    def tolist(self) -> list[float]:
        CLOCK.now = max(CLOCK.now, self.arrives)
        return list(self.vote)


class _Sum(NamedTuple):
    """What ``count`` gets on a GPU."""

    vote: tuple[float, float]
    arrives: float

    device = torch.device("meta")


class _Event:
    """An event of a GPU."""

    def __init__(self, device_type: str) -> None:
        assert device_type == "cuda"

    def record(self) -> None:
        self._done = CLOCK.computed

    def synchronize(self) -> None:
        CLOCK.now = max(CLOCK.now, self._done)


class Job(NamedTuple):
    """What a run is like."""

    step: float
    save: float
    guessed: float
    """For the first save."""
    limit: float
    every: int
    votes_at: float
    """Share of the last micro-batch that is past at the vote; on a GPU of the time in which the host hands it out."""
    hands_out: float
    """Share of a step that the host of a GPU takes to hand it out."""
    micro_batches: int = 1
    update: float = 0.0
    """Share of a step that its update takes."""

    def most_seconds_to_stop(self, *, on_gpu: bool) -> float:
        """Return the time that is reserved at most."""
        waits, save = max(0.0, self.save - self.every * self.step), max(self.save, self.guessed)
        step = (1 + _VARIES) * (self.step + waits)
        per_look = micro_batches_per_look(self.step, self.micro_batches)
        # Some shorter steps count as short, as votes come before the end of a step.
        per_look = per_look if per_look and self.step > _SURELY_LONG else self.micro_batches
        look = (1 + _VARIES) * (self.step * (per_look / self.micro_batches + self.update) + waits)
        look *= 2 if on_gpu else 1  # the host is ahead at one look, and not at the next
        of_looks = seconds_to_stop(step, save, self.every, look_seconds=look, is_delayed=on_gpu)
        of_steps = seconds_to_stop(step, save, self.every, is_delayed=on_gpu, is_behind=True)
        return of_looks if self.step > _SURELY_LONG else max(of_looks, of_steps)

    @classmethod
    def draw(cls, chance: random.Random, steps: int) -> "Job":
        step, save = 10 ** chance.uniform(-2, 2.2), 10 ** chance.uniform(-1, 2.3)
        least = (1 + _VARIES) * (steps * step + 2 * save)  # of which a run knows too little before its first step
        return cls(
            step, save, save * chance.choice([1.05, 2, 5]), least + chance.uniform(0, 9) * step,
            chance.choice([2, 5, 99]), chance.random(), chance.choice([0.0, chance.random(), 1.0]),
            chance.choice([1, 3, 8, 64]), chance.uniform(0, 0.3),
        )  # fmt: skip


class _Run:
    """Steps and saves of ``job`` until the run stops, or has had more steps than its job has time for."""

    def __init__(self, job: Job, chance: random.Random, device: str, minutes_between: int = 0) -> None:
        self.job, self.chance = job, chance
        never = SimpleNamespace(is_set=lambda: False)
        deadline = Deadline(job.limit, min(60.0, job.limit / 4))
        signals = SimpleNamespace(received=None, deadline=deadline, asks_to_save=never)
        session = SimpleNamespace(device=torch.device(device), signals=signals, started=0.0, world_size=1)
        checkpoint = SimpleNamespace(every=job.every, minutes_between=minutes_between)
        config = SimpleNamespace(trainer=SimpleNamespace(max_minutes=None), checkpoint=checkpoint)
        self.save_seconds = self.next_save_seconds = self.written_at = 0.0
        self.steps_done = self.step_saved = 0
        make: Any = Shutdown
        self.shutdown = make(
            config, session, SimpleNamespace(say=lambda _: None), None, lambda: self.save_seconds or job.guessed
        )
        self.shutdown._control = SimpleNamespace(has_lost_folder=False, asks_to_stop=False, asks_to_save=never)

    def about(self, seconds: float) -> float:
        return seconds * self.chance.uniform(1 - _VARIES, 1 + _VARIES)

    def save(self) -> None:
        """As the background thread does, after the save before it and what the GPU is at."""
        CLOCK.now = max(CLOCK.now, self.written_at, CLOCK.computed)
        self.step_saved = self.steps_done
        took = self.about(self.job.save)
        self.written_at = CLOCK.now + took
        self.next_save_seconds = took

    def poll(self) -> None:
        if 0 < self.written_at <= CLOCK.now:
            self.save_seconds = self.next_save_seconds

    def steps(self) -> Iterator[int]:
        """Yield steps as they are done, until one is dropped."""
        for step in range(1, 10**6):
            try:
                self._step(step)
            except StepDropped:
                return
            self.steps_done = step
            yield step

    def _step(self, step: int) -> None:
        job, count, on_gpu = self.job, self.job.micro_batches, self.shutdown._session.device.type != "cpu"
        took = self.about(job.step)
        of_micro_batch = took * (1 - job.update) / count
        of_host = job.hands_out * of_micro_batch if on_gpu else of_micro_batch
        before = self.shutdown.before_micro_batches(step, count, count)
        for index in range(count):
            if before is not None:
                before(index)
            CLOCK.computed = max(CLOCK.now, CLOCK.computed) + of_micro_batch
            CLOCK.now += of_host * (job.votes_at if index == count - 1 else 1)
        vote = self.shutdown.vote(-step % job.every)
        CLOCK.now += of_host * (1 - job.votes_at)
        CLOCK.computed = max(CLOCK.computed, CLOCK.now) + took * job.update
        if not on_gpu:
            CLOCK.now = CLOCK.computed
        self.shutdown.count(_Sum(vote, CLOCK.computed) if on_gpu else torch.tensor(vote))
        is_read = self.shutdown.stops or step % job.every == 0 or step == 1 or step % _LOG_EVERY == 0
        if is_read:
            CLOCK.now = max(CLOCK.now, CLOCK.computed)

    def until_stopped(self) -> float:
        """Return when the last step that is done is saved, and no further one is computed."""
        CLOCK.now = CLOCK.computed = 0.0
        for step in self.steps():
            self.poll()
            if self.shutdown.stops or CLOCK.now > self.job.limit:
                break
            if step % self.job.every == 0:
                self.save()
        if self.step_saved != self.steps_done:
            self.save()
        return max(self.written_at, CLOCK.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    monkeypatch.setattr("serried.trainer.monitor.shutdown.time", CLOCK)
    monkeypatch.setattr("serried.trainer.monitor.step_clock.time", CLOCK)
    monkeypatch.setattr("serried.runtime.signals.time", CLOCK)
    monkeypatch.setattr(shutdown, "_Votes", _Vote)
    monkeypatch.setattr(torch, "Event", _Event)
    CLOCK.now = CLOCK.computed = 0.0
    return CLOCK


@pytest.mark.parametrize("runs", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_run_that_stops_before_the_end_of_its_job_loses_no_finished_step(device: str, runs: int, clock: _Clock) -> None:
    chance = random.Random(7)
    for _ in range(runs):
        job = Job.draw(chance, steps=2 if device == "cpu" else 4)
        clock.now = 0.0
        run = _Run(job, chance, device)
        saved = run.until_stopped()
        assert saved <= job.limit, job
        assert run.shutdown.reason == str(run.shutdown._session.signals.deadline)
        most = job.most_seconds_to_stop(on_gpu=device != "cpu")
        assert job.limit - saved < min(60.0, job.limit / 4) + (1 + _VARIES) * most, job


def test_a_gpu_stops_for_the_end_of_its_job_a_step_before_a_cpu_does() -> None:
    assert seconds_to_stop(90, 25) == 90 * 2 + 25
    assert seconds_to_stop(90, 25, is_delayed=True) == 90 * 3 + 25
    assert seconds_to_stop(90, 25, is_delayed=True, is_behind=True) == 90 * 4 + 25
    assert seconds_to_stop(5, 25) == 5 * 2 + 25 + 20, "a save that is under way ends first"


def test_ranks_poll_about_every_second_in_long_steps_and_never_in_short_ones() -> None:
    assert micro_batches_per_look(1.9, 64) is None
    assert [micro_batches_per_look(10, count) for count in (1, 8, 64)] == [1, 1, 6]
    assert micro_batches_per_look(90, 64) == 1
    assert micro_batches_per_look(None, 64) == 1, "a first step may compile for minutes"


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("device", "known_after"), [("cpu", 1), ("cuda", 2)])
def test_ranks_poll_within_steps_until_steps_are_known_to_be_short(device: str, known_after: int) -> None:
    job = Job(step=1.0, save=5.0, guessed=5.0, limit=1e9, every=99, votes_at=0.5, hands_out=0.5, micro_batches=8)
    run, looked_into = _Run(job, random.Random(7), device), set[int]()

    def go_on(_: float) -> bool:
        looked_into.add(run.steps_done + 1)
        return False

    with patch.object(run.shutdown, "_agreed", go_on):
        for step in run.steps():
            if step == 20:
                break
    assert looked_into == set(range(1, known_after + 1))


@pytest.mark.parametrize("every", [10**6, 150])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_run_saves_every_minutes_after_the_previous_save(device: str, every: int, clock: _Clock) -> None:
    job = Job(step=10.0, save=5.0, guessed=5.0, limit=1e9, every=every, votes_at=0.5, hands_out=0.5)
    run, saves = _Run(job, random.Random(7), device, minutes_between=30), [0.0]
    for step in run.steps():
        if run.shutdown.action is Action.SAVE or step % every == 0:
            run.shutdown.saves()
            saves.append(clock.now)
        if len(saves) == 9:
            break
    gaps = [later - earlier for earlier, later in pairwise(saves)]
    if every == 150:  # after 25 minutes
        assert 1400 < min(gaps) < max(gaps) < 1600
    else:
        assert 1800 <= min(gaps) < max(gaps) < 1840


@pytest.mark.usefixtures("clock")
def test_timed_save_is_skipped_if_a_regular_save_is_due_soon() -> None:
    job = Job(step=10.0, save=5.0, guessed=5.0, limit=1e9, every=180, votes_at=0.5, hands_out=0.5)
    run, saves = _Run(job, random.Random(7), "cpu", minutes_between=29), []
    for step in run.steps():
        if run.shutdown.action is Action.SAVE or step % 180 == 0:
            run.shutdown.saves()
            saves.append(step)
        if step == 720:
            break
    assert saves == [180, 360, 540, 720]


def test_run_that_saves_only_at_the_end_has_no_timed_saves_by_default() -> None:
    assert CheckpointSection().minutes_between == 30
    assert CheckpointSection(every=0).minutes_between == 0
    assert CheckpointSection(every=0, every_minutes=5).minutes_between == 5
    assert CheckpointSection(every_minutes=0).minutes_between == 0
