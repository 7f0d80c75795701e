"""What a survivor of a loss keeps, and who reports for the others."""

import errno
import fcntl
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serried.launch.local.launcher import _Rank, _Reports, _Survivors
from serried.records import lock as lock_module
from serried.records.generations import claim
from serried.records.metrics import METRICS
from serried.records.run_folder import RunFolder
from serried.records.status import read_status
from serried.runtime.agreement import NotRecoverable
from serried.trainer.monitor.shutdown import Shutdown
from serried.trainer.recovery.recovery import Recovery
from serried.trainer.trainer import Trainer


@pytest.mark.parametrize(
    ("is_loading", "is_committing", "why"),
    [(True, False, "was going back to a checkpoint"), (False, True, "the update of step 7 failed halfway")],
)
def test_state_that_is_of_no_step_is_not_kept(is_loading: bool, is_committing: bool, why: str) -> None:
    """A loss while a rollback loads a checkpoint, or with an error in the middle of an update."""
    step = SimpleNamespace(transaction=SimpleNamespace(is_committing=is_committing))
    trainer: Any = SimpleNamespace(
        _rollback=SimpleNamespace(is_loading=is_loading), loop=SimpleNamespace(step=7, steps_done=6),
        state=SimpleNamespace(step=step),
    )  # fmt: skip
    with pytest.raises(NotRecoverable, match=why):
        Trainer.keep(trainer, 6)


def test_request_in_the_file_control_outlives_a_loss(tmp_path: Path) -> None:
    """The file is removed when it is read."""
    folder = RunFolder(tmp_path)
    config: Any = SimpleNamespace(run=SimpleNamespace(dir=tmp_path))
    session: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    console: Any = SimpleNamespace(say=print)
    before, after = (Shutdown(config, session, console, folder, lambda: 0.0) for _ in range(2))
    assert before._control is not None and after._control is not None
    for word in ("stop", "save"):
        (tmp_path / "control").write_text(word)
        before._control.look()
    assert not (tmp_path / "control").exists()
    after.repeat(before.requests)
    assert after.requests == (True, True)
    assert Shutdown(config, session, console, None, lambda: 0.0).requests == (False, False)
    folder.close()


@pytest.mark.parametrize("has_locks", [True, False])
def test_lost_process_that_wakes_up_writes_no_records(
    has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without file locks on the disk, the process that takes over cannot see that one on another node has them."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
        monkeypatch.setattr(lock_module, "_address_of", lambda _: None)
    frozen = RunFolder(tmp_path)
    frozen.begin("", {}, step=0)
    frozen.record("step", step=1, loss=2.0)
    survivor = RunFolder(tmp_path, takes_over=True)
    survivor.continue_records(1)
    frozen.record("step", step=2, loss=3.0)
    frozen.status("failed", step=2)
    survivor.record("step", step=2, loss=1.0)
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 2.0), (2, 1.0)]
    assert (status := read_status(tmp_path)) is not None and status.state == "running"
    frozen.close()
    survivor.close()


def _ended(*codes: int, formed: list[int] | None = None) -> dict[int, int]:
    """Return the failures of a run whose ranks ended with ``codes``; those that are not negative reported their end."""
    reports = _Reports()
    processes: list[Any] = [SimpleNamespace(poll=lambda code=code: code, send_signal=lambda _: None) for code in codes]
    ranks = [_Rank(number, process, reports) for number, process in enumerate(processes)]
    for number, code in enumerate(codes):
        for told in ({"recovers": True}, *([{"ended": True}] if code >= 0 else [])):
            os.write(reports.descriptor, (json.dumps({"rank": number, **told}) + "\n").encode())
    if formed is not None:
        os.write(reports.descriptor, (json.dumps({"rank": formed[0], "formed": formed}) + "\n").encode())
    for rank in ranks:
        rank.poll()
    found = _Survivors(ranks, reports).killed()
    os.close(reports.descriptor)
    reports.close()
    return found


def test_run_whose_recording_rank_is_killed_at_its_end_has_failed() -> None:
    """The other ranks had already ended, so none of them has recorded the end."""
    killed = -int(signal.SIGKILL)
    assert _ended(killed, 0, 0) == {0: killed}
    assert _ended(killed, 0, 0, formed=[1, 2]) == {}
    assert _ended(killed, killed, 0, formed=[1, 2]) == {0: killed, 1: killed}
    assert _ended(0, killed, 0) == {}


def test_rank_that_misses_the_result_of_a_meeting_knows_whether_the_others_continue_without_it(tmp_path: Path) -> None:
    """As a node whose network fails during the meeting: it must not write into their records."""

    def is_fenced(rank: int, generation: int, has_agreed: bool) -> bool:
        recovery = Recovery.__new__(Recovery)
        recovery._config = SimpleNamespace(run=SimpleNamespace(dir=tmp_path))  # type: ignore[assignment]
        recovery._session = SimpleNamespace(rank=rank)  # type: ignore[assignment]
        recovery._generation, recovery._has_agreed = generation, has_agreed
        return recovery.is_fenced

    assert not is_fenced(1, 1, False), "nobody has claimed it"
    assert claim(tmp_path, 1, {"ranks": [0, 2]})
    assert [is_fenced(rank, 1, False) for rank in range(3)] == [False, True, False]
    assert [is_fenced(rank, 1, True) for rank in (0, 1)] == [False, False]
    assert is_fenced(1, 0, True)
