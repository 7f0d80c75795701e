"""The time reserved before Slurm ends a job, by a model of time: no step that was done is lost."""

import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from serried.runtime.deadline import Deadline
from serried.trainer import shutdown
from serried.trainer.shutdown import Shutdown, seconds_to_stop

RUNS = 10_000
_VARIES = 0.05
"""Steps and saves take so much more or less than the typical one."""
_LOG_EVERY = 10


class _Clock:
    """A clock that the test sets, for the modules that ask ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

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

    def read(self) -> float:
        CLOCK.now = max(CLOCK.now, self.arrives)
        return float(self.vote)


class _Sum(NamedTuple):
    """What ``count`` gets on a GPU."""

    vote: float
    arrives: float

    device = torch.device("meta")


class Job(NamedTuple):
    """What a run is like."""

    step: float
    save: float
    guessed: float
    """For the first save."""
    limit: float
    every: int
    votes_at: float
    """Share of a step that is past at its vote; on a GPU of the time in which the host hands it out."""
    hands_out: float
    """Share of a step that the host of a GPU takes to hand it out."""

    @classmethod
    def draw(cls, chance: random.Random, steps: int) -> "Job":
        step, save = 10 ** chance.uniform(-2, 2.2), 10 ** chance.uniform(-1, 2.3)
        least = (1 + _VARIES) * (steps * step + 2 * save)  # of which a run knows too little before its first step
        return cls(
            step, save, save * chance.choice([1.05, 2, 5]), least + chance.uniform(0, 9) * step,
            chance.choice([2, 5, 99]), chance.random(), chance.choice([0.0, chance.random(), 1.0]),
        )  # fmt: skip


class _Run:
    """Steps and saves of ``job`` until the run stops, or has had more steps than its job has time for."""

    def __init__(self, job: Job, chance: random.Random, device: str) -> None:
        self.job, self.chance = job, chance
        signals = SimpleNamespace(received=None, deadline=Deadline(job.limit, min(60.0, job.limit / 4)))
        session = SimpleNamespace(device=torch.device(device), signals=signals, started=0.0)
        config = SimpleNamespace(trainer=SimpleNamespace(max_minutes=None), checkpoint=SimpleNamespace(every=job.every))
        self.save_seconds = self.next_save_seconds = self.written_at = 0.0
        make: Any = Shutdown
        self.shutdown = make(
            config, session, SimpleNamespace(say=lambda _: None), None, lambda: self.save_seconds or job.guessed
        )
        never = SimpleNamespace(is_set=lambda: False)
        self.shutdown._control = SimpleNamespace(has_lost_folder=False, asks_to_stop=False, asks_to_save=never)

    def about(self, seconds: float) -> float:
        return seconds * self.chance.uniform(1 - _VARIES, 1 + _VARIES)

    def save(self) -> None:
        """As the background thread does, after the save before it."""
        CLOCK.now = max(CLOCK.now, self.written_at)
        took = self.about(self.job.save)
        self.written_at = CLOCK.now + took
        self.next_save_seconds = took

    def poll(self) -> None:
        if 0 < self.written_at <= CLOCK.now:
            self.save_seconds = self.next_save_seconds

    def on_cpu(self) -> Iterator[int]:
        for step in range(1, 10**6):
            took = self.about(self.job.step)
            CLOCK.now += self.job.votes_at * took
            vote = self.shutdown.vote()
            CLOCK.now += (1 - self.job.votes_at) * took
            self.shutdown.count(torch.tensor(vote))
            yield step

    def on_gpu(self) -> Iterator[int]:
        computed = 0.0
        for step in range(1, 10**6):
            took = self.about(self.job.step)
            begins, hands_out = max(CLOCK.now, computed), self.job.hands_out * took
            CLOCK.now += self.job.votes_at * hands_out
            vote = self.shutdown.vote()
            CLOCK.now += (1 - self.job.votes_at) * hands_out
            computed = max(begins + took, CLOCK.now)
            self.shutdown.count(_Sum(vote, computed))
            if self.shutdown.stops or step % self.job.every == 0 or step == 1 or step % _LOG_EVERY == 0:
                CLOCK.now = max(CLOCK.now, computed)
            yield step

    def until_stopped(self, steps: Iterator[int]) -> float:
        """Return when the last step is saved."""
        CLOCK.now = 0.0
        for step in steps:
            self.poll()
            if self.shutdown.stops or CLOCK.now > self.job.limit:
                break
            if step % self.job.every == 0:
                self.save()
        self.save()
        return self.written_at


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_run_that_stops_before_the_end_of_its_job_loses_a_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serried.trainer.shutdown.time", CLOCK)
    monkeypatch.setattr("serried.runtime.deadline.time", CLOCK)
    monkeypatch.setattr(shutdown, "_Votes", _Vote)
    chance = random.Random(7)
    for _ in range(RUNS):
        job = Job.draw(chance, steps=2 if device == "cpu" else 4)
        CLOCK.now = 0.0
        run = _Run(job, chance, device)
        saved = run.until_stopped(run.on_cpu() if device == "cpu" else run.on_gpu())
        assert saved <= job.limit, job
        assert run.shutdown.reason == str(run.shutdown._session.signals.deadline)
        longest = (1 + _VARIES) * (job.step + max(0.0, job.save - job.every * job.step))
        most = seconds_to_stop(
            longest, max(job.save, job.guessed), job.every, is_delayed=device != "cpu", is_behind=True
        )
        assert job.limit - saved < min(60.0, job.limit / 4) + (1 + _VARIES) * most, job


def test_a_gpu_stops_for_the_end_of_its_job_a_step_before_a_cpu_does() -> None:
    assert seconds_to_stop(90, 25) == 90 * 2 + 25
    assert seconds_to_stop(90, 25, is_delayed=True) == 90 * 3 + 25
    assert seconds_to_stop(90, 25, is_delayed=True, is_behind=True) == 90 * 4 + 25
    assert seconds_to_stop(5, 25) == 5 * 2 + 25 + 20, "a save that is under way ends first"
