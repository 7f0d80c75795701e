"""A rank that holds the others up is named, with what it does and where, and the run ends resumably."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from serried.configs.schema.launch_plan_track import LaunchSection
from serried.parallel import collectives
from serried.program import main
from serried.recipes.models.families.llama import Transformer
from serried.runtime.console import Console
from serried.runtime.exit import leave
from serried.runtime.peer_sockets import PeerSockets
from serried.runtime.session import Session, open_session
from serried.trainer.data.loader import BatchLoader
from serried.trainer.loop import Loop
from serried.trainer.monitor import rank_report
from serried.trainer.monitor.diagnosis import Beat, diagnose, judge_silent_by_others
from serried.trainer.monitor.first_node import FirstNodeWatch
from serried.trainer.monitor.heartbeat import DATA, END, LOG, SAVE, SET_UP, TRAIN, Patience, Pulse
from serried.trainer.monitor.rank_report import RankReport, last_collectives, queued_collectives
from serried.trainer.monitor.watchdog import Watchdog, _Neighbours
from testing.forked_runs import typed
from testing.rank_pool import ROOT, Cluster
from testing.runs import metrics, status, steps_saved, tiny_overrides

SUM = ("gloo/0", 8, "all_reduce of 2 numbers", False)
BARRIER = ("gloo/0", 8, "barrier", False)
BEFORE = ("gloo/0", 7, "all_reduce of 9 numbers", True)


HSDP = ["parallel=hsdp", "parallel.replicate=2", "parallel.shard=2", "trainer.global_batch=8"]

PIPELINE = ["parallel=fsdp", "parallel.pipeline=3", "model.layers=3"]
TENSOR = ["parallel=fsdp", "parallel.tensor=2", "parallel.shard=2"]
EXPERTS = ["parallel=fsdp", "parallel.expert=2", "model=moe_tiny", "model.layers=2", "trainer.global_batch=8"]


def beat(rank: int, phase: str = TRAIN, step: int = 812, age: float = 61, **more: Any) -> Beat:
    return Beat(rank, f"n{rank // 4}", 1, phase, step, age, 300.0, 60.0, **more)


def test_rank_missing_from_the_collective_of_the_others_is_named() -> None:
    beats = [beat(rank, collectives=[BEFORE, SUM]) for rank in range(8)]
    beats[5] = beat(5, DATA, collectives=[BEFORE])
    assert str(diagnose(beats)) == (
        "rank 5 on n1 in data.next of step 812 for 61 s; the others wait in all_reduce of 2 numbers of step 812"
    )


def test_callback_of_rank_0_is_named_if_the_others_wait_for_it() -> None:
    beats = [beat(0, "callback Upload.on_save", 811, age=70), beat(1, LOG, 811, waits_for="rank 0"), beat(2)]
    assert str(diagnose(beats)).startswith("rank 0 on n0 in callback Upload.on_save of step 811 for 70 s; the others")


def test_rank_in_another_collective_than_most_is_named_although_it_is_ahead() -> None:
    beats = [beat(0, LOG, 811, collectives=[BEFORE, BARRIER]), beat(1, collectives=[BEFORE, SUM])]
    beats += [beat(2, LOG, 811, collectives=[BEFORE, BARRIER])]
    verdict = diagnose(beats)
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert "rank 1 is in all_reduce of 2 numbers where the others are in barrier" in str(verdict)
    assert [culprit.rank for culprit in diagnose(beats[:2]).culprits] == [0, 1], "of two, either may be wrong"


def test_rank_that_waits_in_one_group_is_not_blamed_for_being_late_in_another() -> None:
    """A mesh of 2x2: rank 3 is missing from its shard group; rank 2 waits for it there and rank 0 waits for rank 2."""
    rows, columns = [("gloo/r0", 4, "x", True)], [("gloo/c0", 4, "x", True)]
    beats = [
        beat(0, collectives=[*rows, ("gloo/c0", 5, "x", False)]),
        beat(2, collectives=[*columns, ("gloo/r1", 5, "x", False)]),
        beat(3, collectives=[("gloo/r1", 4, "x", True)]),
    ]
    assert [culprit.rank for culprit in diagnose(beats).culprits] == [3]


def test_rank_that_awaits_a_message_is_not_blamed_but_the_end_of_the_chain() -> None:
    """A pipeline of 3 stages x tensor 2: rank 4 hangs in its forward, rank 5 waits for it in a collective."""
    beats = [beat(0, peers=[2]), beat(1, peers=[3]), beat(2, peers=[4]), beat(3, peers=[5])]
    tensor = [("gloo/t", 4, "x", True)]
    beats += [beat(4, collectives=tensor), beat(5, collectives=[*tensor, ("gloo/t", 5, "x", False)])]
    assert [culprit.rank for culprit in diagnose(beats).culprits] == [4]
    # Without tensor ranks nobody waits in a collective.
    verdict = diagnose([beat(0, peers=[1]), beat(1, peers=[2]), beat(2)])
    assert str(verdict) == (
        "rank 2 on n0 in forward, backward and update of step 812 for 61 s; the others wait for messages of the "
        "pipeline of step 812"
    )
    # Rank 1 is late for a collective because it awaits a message of rank 3.
    beats = [
        beat(0, collectives=[("gloo/f", 5, "x", False)]),
        beat(1, collectives=[("gloo/f", 4, "x", True)], peers=[3]),
    ]
    beats += [beat(3)]
    assert [culprit.rank for culprit in diagnose(beats).culprits] == [3]
    verdict = diagnose([beat(0, peers=[1]), beat(1, peers=[0])])
    assert [culprit.rank for culprit in verdict.culprits] == [0, 1]


def test_silent_rank_has_the_time_limit_of_the_waiting_ranks() -> None:
    """Whatever it told last: it may have gone on from there."""
    saving = beat(1, SAVE, 811, age=1, silent_seconds=60)
    saving.limit_seconds = 1800.0
    beats = [beat(0), saving]
    judge_silent_by_others(beats)
    assert diagnose(beats).limit_seconds == 300.0


def test_rank_that_ended_has_a_shorter_time_limit_than_a_first_step() -> None:
    """On a GPU, where NCCL does not tell the others. While one of them only tidies up, nobody waits for it."""
    for phase, limit in ((TRAIN, 60.0), (LOG, 60.0), (SAVE, 1800.0), (END, 1800.0)):
        first, left = beat(0, phase, 1), beat(1, END, 1, age=1, silent_seconds=60)
        first.limit_seconds = left.limit_seconds = 1800.0
        judge_silent_by_others([first, left])
        assert diagnose([first, left]).limit_seconds == limit


def test_silent_rank_is_named() -> None:
    beats = [beat(0), beat(1, age=1, silent_seconds=60)]
    assert str(diagnose(beats)) == (
        "rank 1 on n0 in forward, backward and update of step 812 when its heartbeat stopped 60 s ago; "
        "the others are in forward, backward and update of step 812"
    )


def test_without_a_record_of_collectives_the_last_rank_is_named_and_waiting_ones_are_not() -> None:
    beats = [beat(0, SET_UP, 0), beat(1, SET_UP, 0, waits_for="the first process of the world")]
    assert [culprit.rank for culprit in diagnose(beats).culprits] == [0]
    assert [culprit.rank for culprit in diagnose([beat(0, SAVE, 4), beat(1, DATA, 5)]).culprits] == [0]


def test_all_ranks_are_named_if_none_is_missing() -> None:
    verdict = diagnose([beat(rank, collectives=[SUM]) for rank in range(8)])
    assert len(verdict.culprits) == 8
    assert "and 5 more; all wait in all_reduce" in str(verdict)


def test_rank_whose_gpu_has_not_begun_what_the_others_wait_in_is_named() -> None:
    """All ranks have entered the collective, as hosts run ahead of their GPUs; in one of them a kernel hangs."""
    total, gather = ("nccl/0", 8, "all_reduce of 2 numbers", False), ("nccl/3", 5, "all_gather of 64 numbers", False)
    beats = [beat(rank, collectives=[total]) for rank in range(4)]
    beats[2].not_started = [("nccl/0", 8)]
    verdict = diagnose(beats)
    assert [culprit.rank for culprit in verdict.culprits] == [2]
    waits = "the others wait in all_reduce of 2 numbers of step 812"
    assert str(verdict).endswith(f"; {waits}, which its GPU has not started: an earlier kernel hangs")
    # Rank 1 has not begun the total because it waits for rank 2 in another group.
    beats[1].collectives, beats[1].not_started = [gather, total], [("nccl/0", 8)]
    beats[2].collectives, beats[2].not_started = [gather, total], [("nccl/3", 5), ("nccl/0", 8)]
    assert [culprit.rank for culprit in diagnose(beats).culprits] == [2]
    for each in beats:
        each.collectives, each.not_started = [total], [("nccl/0", 8)]
    assert "no rank is missing" in str(diagnose(beats))


def test_only_collectives_of_nccl_count_as_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others record no start. Records are in the form that the test below guards."""
    entry = {"process_group": ["0", "default"], "collective_seq_id": 8, "retired": False, "is_p2p": False}
    entries = [
        entry | {"profiling_name": f"{backend}:all_reduce", "state": state, "process_group": [group, ""]}
        for backend, state, group in (("nccl", "scheduled", "0"), ("nccl", "started", "1"), ("gloo", "scheduled", "2"),
            ("nccl", "scheduled", "3"))
    ]  # fmt: skip
    monkeypatch.setattr(rank_report, "flight_records", lambda: [{"entries": entries}, {}])
    assert queued_collectives(["3"]) == [("nccl/0", 8)]


def test_time_limit_depends_on_the_phase_of_the_slowest_rank() -> None:
    slow = Beat(0, "n", 1, SAVE, 4, 400.0, 1800.0, 360.0)
    assert diagnose([slow, beat(1, DATA, 5, 400)]).limit_seconds == 1800


def test_first_time_of_a_phase_is_known() -> None:
    pulse = Pulse()
    told = []
    for phase in (DATA, TRAIN, DATA, END):
        pulse.enter(phase, 1)
        told.append(pulse.now.is_first)
    assert told == [True, True, False, True]


def test_slow_run_is_not_ended() -> None:
    """Steps of 400 s with a limit of 300: the first one, under the long limit, shows that they are so."""
    patience = Patience(LaunchSection(start_timeout_seconds=1800, step_timeout_seconds=300), is_alone=False)
    pulse = Pulse()
    assert patience.measure(pulse.now, 1.0) == (1.0, 1800, 360)
    for step in range(1, 4):
        pulse.enter(TRAIN, step)
        age, limit, warn = patience.measure(pulse.now, 400.0)
        assert age == 400
        assert limit == (1800 if step == 1 else 800)
        assert warn == (360 if step == 1 else 600)
    pulse.enter(DATA, 4)
    patience.measure(pulse.now, 1.0)
    pulse.enter(DATA, 5)
    assert patience.measure(pulse.now, 1.0) == (1.0, 300, 60)
    assert patience.measure(pulse.now, 300.0)[0] == 301


def test_single_process_has_no_time_limit_for_setup_and_saving() -> None:
    patience, pulse = Patience(LaunchSection(), is_alone=True), Pulse()
    assert patience.measure(pulse.now, 9000.0) == (9000.0, None, 0.0)
    pulse.enter(SAVE, 1)
    assert patience.measure(pulse.now, 9000.0)[1] is None


def enter_collectives() -> list[Any]:
    with open_session(LaunchSection()) as session:
        dist.all_reduce(torch.ones(1013))  # sizes that nothing else has: the record holds earlier tests of these ranks
        background = session.background_group([range(2)])
        dist.all_reduce(torch.ones(1019), group=background)
        if session.rank == 0:
            waiting = dist.all_reduce(torch.ones(2, 557), async_op=True)
            seen = last_collectives(session.background_names())
            session.gather(None)
            waiting.wait()
        else:
            session.gather(None)
            seen = last_collectives(session.background_names())
            dist.all_reduce(torch.ones(2, 557))
        return [entry for entry in seen if any(f"of {size} " in entry[2] for size in (1013, 1019, 1114))]


def test_collectives_are_reported_with_size_and_state(cluster: Cluster) -> None:
    """Guards the private record that is read; groups of background work are left out."""
    first, second = (answer.value for answer in cluster.run(2, "tests.runs.test_watchdog:enter_collectives"))
    assert [entry[2:] for entry in first] == [
        ["all_reduce of 1013 numbers", True],
        ["all_reduce of 1114 numbers", False],
    ]
    assert [entry[2:] for entry in second] == [["all_reduce of 1013 numbers", True]]
    assert first[0] == second[0]


def watch_for_a_moment(run_dir: str) -> bool:
    with open_session(LaunchSection()) as session:
        console = Console(session.is_main, session.rank)
        Watchdog(LaunchSection(), session, Path(run_dir), console, None).close()
        is_known = session.own_connection("watchdog").check([f"beat/{rank}" for rank in range(2)])
        session.gather(None)
        console.close()
        return is_known


def test_each_rank_reports_at_once_so_that_a_network_that_breaks_early_is_noticed(
    cluster: Cluster, tmp_path: Path
) -> None:
    answers = cluster.run(2, "tests.runs.test_watchdog:watch_for_a_moment", run_dir=str(tmp_path))
    assert any(answer.value for answer in answers)  # the slower one sees both


def report_nothing(run_dir: str) -> bool:
    """Stand still, on a rank that takes itself for one of another node and whose reports fail."""
    section = LaunchSection(step_timeout_seconds=0.5)
    with (
        open_session(LaunchSection()) as session,
        patch.object(RankReport, "beat", side_effect=RuntimeError("here")),
        patch(f"{FirstNodeWatch.__module__}._ANSWERS_WITHIN_SECONDS", 60.0),  # of a busy machine
    ):
        session.local_rank = 0
        console = Console(session.is_main, session.rank)
        watchdog = Watchdog(section, session, Path(run_dir), console, None)
        session.gather(None)
        time.sleep(1.5)
        session.gather(None)
        watchdog.close()
        console.close()
        return True


def test_rank_is_not_ended_for_a_first_node_that_answers_while_its_reports_fail(
    cluster: Cluster, tmp_path: Path
) -> None:
    answers = cluster.run(2, "tests.runs.test_watchdog:report_nothing", run_dir=str(tmp_path))
    assert [answer.value for answer in answers] == [True, True]


@contextmanager
def hanging(how: str, rank: int, step: int) -> Iterator[None]:
    """On ``rank``, in ``step``: sleep in the data loader, in a forward, or before an exchange of tensor ranks or
    experts, skip a collective, be stopped, be killed, or fail or be killed while the others sleep."""
    mine = int(os.environ["RANK"]) == rank
    train, read, forward = Loop._train, BatchLoader._read, Transformer.forward
    scattered_sum, exchanged = collectives._scattered_sum, collectives.exchange
    step_now = 0

    def maybe_sleep(where: str) -> None:
        if step_now == step and how == where and mine:
            time.sleep(1000)

    def faulty_train(self: Loop, number: int, batches: list[Any]) -> None:
        if number == step and how == "skip" and not mine:
            dist.barrier()
        if number == step and how == "stop" and mine:
            os.kill(os.getpid(), signal.SIGSTOP)
        if number == step and how.startswith("killed") and mine:
            os.kill(os.getpid(), signal.SIGKILL)
        nonlocal step_now
        step_now = number
        train(self, number, batches)

    def faulty_read(self: BatchLoader, number: int, *samples: Any) -> Any:
        if number + 1 == step and (how, mine) in (("sleep", True), ("fail", False), ("killed unheard", False)):
            time.sleep(1000)
        if number + 1 == step and how == "fail":
            raise ZeroDivisionError("here")
        return read(self, number, *samples)

    def faulty_forward(self: Transformer, *arguments: Any, **named: Any) -> Any:
        maybe_sleep("forward")
        return forward(self, *arguments, **named)

    def faulty_scattered_sum(*arguments: Any, **named: Any) -> Any:
        maybe_sleep("tensor")
        return scattered_sum(*arguments, **named)

    def faulty_exchanged(*arguments: Any, **named: Any) -> Any:
        maybe_sleep("experts")
        return exchanged(*arguments, **named)

    with (
        patch.object(Loop, "_train", faulty_train),
        patch.object(BatchLoader, "_read", faulty_read),
        patch.object(Transformer, "forward", faulty_forward),
        patch.object(collectives, "_scattered_sum", faulty_scattered_sum),
        patch.object(collectives, "exchange", faulty_exchanged),
    ):
        yield


def train_hanging(argv: list[str], how: str, rank: int, step: int) -> int:
    with hanging(how, rank, step):
        return main(argv)


def short(text: Path, run_dir: Path, *more: str, step_timeout_seconds: int = 2) -> list[str]:
    batch = ["trainer.global_batch=6", "trainer.micro_batch=1"]
    return tiny_overrides(text, run_dir, *batch, f"launch.step_timeout_seconds={step_timeout_seconds}", *more)


def check_ended(run_dir: Path) -> str:
    now = status(run_dir)
    assert (now["state"], now["exit_code"]) == ("stopped", 75), now
    assert metrics(run_dir, "stop")[-1]["state"] == "stopped"
    return str(now["reason"])


@pytest.mark.parametrize(
    ("how", "says"),
    [
        pytest.param("sleep", "in data.next of step 5 for", marks=pytest.mark.slow),
        ("skip", "is in all_reduce of 4 numbers where the others are in barrier: a collective was skipped"),
        pytest.param("forward", "the others wait for messages of the pipeline", marks=pytest.mark.slow),
        # Most others wait for FSDP, of each other; that of rank 1 waits in the exchange.
        pytest.param("tensor", "the others wait in all_gather of", marks=pytest.mark.slow),
        pytest.param("experts", "the others wait in all_gather of", marks=pytest.mark.slow),
    ],
)
def test_hanging_rank_is_named_and_the_run_ends_and_resumes(
    how: str, says: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    ranks, layout, *stands = {
        "sleep": (4, HSDP, "trainer/data/loader.py"),
        "skip": (3, [], "parallel/"),
        "forward": (3, PIPELINE, "parallel/pipeline_runner.py"),
        "tensor": (4, TENSOR, "parallel/axes/tensor.py", "waits: all_reduce of "),  # as Gloo sums parts
        "experts": (4, EXPERTS, "parallel/axes/expert.py", "waits: all_to_all of "),
    }[how]
    argv = short(text, tmp_path, *layout)
    with pytest.raises(AssertionError) as ended:
        cluster.run(ranks, "tests.runs.test_watchdog:train_hanging", argv=argv, how=how, rank=1, step=5)
    printed = str(ended.value)
    assert printed.count("the process ended with 75") == ranks
    assert "Traceback" not in printed
    assert "WARNING    no progress: rank 1 on " in printed
    reason = check_ended(tmp_path)
    assert says in reason
    assert f"rank 1 on {os.uname().nodename} " in reason
    told = (tmp_path / "log" / "hang.txt").read_text()
    assert all(f"  rank {rank} on " in told for rank in range(ranks))
    assert all(words in told for words in stands)
    assert how != "sleep" or "waits for data. Its disk may be slow, or data.workers too small" in printed
    assert json.loads((tmp_path / "log" / "collectives-2.json").read_text())
    if how not in ("sleep", "skip"):
        return
    answers = cluster.run(ranks, "testing.runs:train_small", argv=argv)
    assert metrics(tmp_path, "start")[-1]["resumed_from"] >= 2
    assert [answer.value["code"] for answer in answers] == [0] * ranks
    assert steps_saved(tmp_path)[-1] == 6


def test_ranks_that_do_not_notice_a_failure_end_and_it_stays_the_reason(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """As on a GPU, where who waits for a rank on another node hears nothing of its end."""
    with pytest.raises(AssertionError, match="the process ended with 75"):
        cluster.run(2, "tests.runs.test_watchdog:train_hanging", argv=short(text, tmp_path), how="fail", rank=1, step=5)
    now = status(tmp_path)
    assert (now["state"], now["reason"], now["exit_code"]) == ("failed", "ZeroDivisionError: here", 70)


def train_on_nodes(argv: list[str], how: str, rank: int, step: int) -> int:
    """Train as if every rank were on a node of its own."""
    patience = 0.5 if how == "killed unheard" else 60.0
    with (
        patch.dict(os.environ, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"),
        patch("serried.trainer.monitor.watchdog._LEAVES_WITHIN_SECONDS", patience),
    ):
        return train_hanging(argv, how, rank, step)


@pytest.mark.parametrize(
    ("phase", "beats", "is_lost"), [(TRAIN, False, True), (TRAIN, True, False), (END, False, False)]
)
def test_rank_without_connections_is_gone_only_if_its_heartbeat_has_stopped_before_the_end(
    phase: str, beats: bool, is_lost: bool
) -> None:
    """A network may close connections that are not in use."""
    store = dist.HashStore()
    session = Session((0, 0, 2, 1), torch.device("cpu"), LaunchSection())
    neighbours = _Neighbours(session)
    neighbours._sockets = SimpleNamespace(closed=lambda _: [1])
    for look in range(9):
        store.set("beat/1", json.dumps(vars(beat(1, phase)) | {"number": 1 + look * beats}))
        assert (neighbours.lost(store) is not None) == (is_lost and look >= 3)
    assert session.cause.hears_of_losses


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "killed unheard"])
def test_killed_rank_of_another_node_is_named_at_once_and_the_run_resumes(
    how: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """Also if the training threads do not notice its end, as on a GPU. The time limit of a step is ten minutes."""
    argv = short(text, tmp_path, step_timeout_seconds=600)
    with pytest.raises(AssertionError) as ended:
        cluster.run(3, "tests.runs.test_watchdog:train_on_nodes", 120, 60, argv=argv, how=how, rank=1, step=5)
    printed = str(ended.value)
    assert "Traceback" not in printed
    assert printed.count("the process ended with 75") == (2 if how == "killed unheard" else 0), printed
    now = status(tmp_path)
    ended_with = ("stopped", 75) if how == "killed unheard" else ("failed", 70)
    assert (now["state"], now["exit_code"]) == ended_with, now
    named = f"rank 1 on {os.uname().nodename} is gone without an error message; its last heartbeat was in "
    assert named in str(now["reason"])
    answers = cluster.run(3, "testing.runs:train_small", argv=argv)
    assert [answer.value["code"] for answer in answers] == [0, 0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_peer_is_gone_once_all_connections_to_it_are_closed() -> None:
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pairs = []
        for _ in range(2):
            far = socket.create_connection(listener.getsockname())
            pairs.append((listener.accept()[0], far))
        store.set("sockets/1", json.dumps([":".join(map(str, far.getsockname())) for _, far in pairs]))
        peers = PeerSockets(store, 0, [1, 2])
        for near, far in pairs:
            assert peers.closed(store) == [], "a connection is open; and nothing is known of rank 2"
            far.close()
            assert near.recv(1) == b""
        assert peers.closed(store) == [1]
        for near, _ in pairs:
            near.close()
        assert peers.closed(store) == [1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stopped_rank_is_named_and_torchrun_leaves_nothing_behind(text: Path, tmp_path: Path) -> None:
    """Rank 0 is the one: its neighbour speaks for it. On a busy machine, steps and heartbeats take seconds."""
    argv = short(text, tmp_path, step_timeout_seconds=20)
    code = f"from tests.runs.test_watchdog import *; leave(train_hanging({argv}, 'stop', 0, 5))"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--shutdown-timeout=1",
        "--no-python", sys.executable, "-c", code,
    ]  # fmt: skip
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"PYTHONPATH": "."},
    )  # fmt: skip
    assert ended.returncode == 1
    now = status(tmp_path)
    assert (now["state"], now["exit_code"]) == ("stopped", 75), now
    assert "rank 0 on " in now["reason"]
    assert "when its heartbeat stopped" in now["reason"]
    assert f"stopped    {now['reason']}" in ended.stderr
    assert "exitcode  : 75" in ended.stderr
    assert "exitcode  : -9" in ended.stderr
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in _read(path)]
    assert not left
    again = typed("train.py", *argv)
    assert again.returncode == 0, again.stderr


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


__all__ = ["leave", "train_hanging"]
