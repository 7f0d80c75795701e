"""What a run is at is seen: on a terminal in a line that leaves no trace, elsewhere in plain lines, few of them."""

import errno
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serried.runtime import live
from serried.runtime.console import Console
from serried.runtime.live import Doing, Live
from serried.trainer.activity import Activity
from serried.trainer.watchdog import DATA, EVALUATE, LOG, SAVE, TRAIN, Pulse
from tests.cluster import ROOT
from tests.runs import tiny_overrides

SCREEN_COLUMNS = 300
TRAIN_PY = [sys.executable, "-u", str(ROOT / "train.py")]


def on_terminal(argv: list[str], *, term: str = "xterm", until: Callable[[str], bool] | None = None) -> tuple[int, str]:
    """Run ``argv`` on a terminal of its own. Returns the exit code and every character that arrived there.

    Once ``until`` is true of what has arrived, Ctrl-C is pressed.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": term, "COLUMNS": str(SCREEN_COLUMNS)}
        os.chdir(ROOT)
        os.execv(argv[0], argv)
    arrived, deadline = b"", time.monotonic() + 240
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                arrived += os.read(terminal, 65536)
            except OSError as error:  # Linux's way to say that nobody has the other end open
                assert error.errno == errno.EIO
                break
            if until is not None and until(arrived.decode(errors="replace")):
                os.write(terminal, b"\x03")
                until = None
        else:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), arrived.decode()


def screen(arrived: str) -> list[str]:
    """What stands on a terminal that never scrolls, once ``arrived`` has: lines, carriage returns, clearing to the
    end of a line, and nothing else."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]+|\x1b.", arrived):
        if part == "\n":
            lines.append("")
        elif part == "\r":
            column = 0
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            assert not part.startswith("\x1b"), f"an unknown escape: {part!r}"
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + len(part) :]
            column += len(part)
            assert column < SCREEN_COLUMNS, "a line that wraps cannot be cleared"
    return lines


def logged(run_dir: Path) -> list[str]:
    """What rank 0 said, without the times."""
    return [line[20:] for line in (run_dir / "log" / "rank-0.log").read_text().splitlines()]


def test_a_terminal_shows_what_is_done_and_keeps_the_plain_lines_alone(text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "trainer.eval_every=3", "trainer.sample_tokens=3")
    code, arrived = on_terminal([*TRAIN_PY, *argv])
    assert code == 0, arrived
    drawn = re.findall(r"\r\x1b\[K([^\r\n\x1b]+)", arrived)
    assert any(re.search(r"  \d+ s$|\d+/6", line) for line in drawn), "nothing was shown while it was done"
    shown = [line.rstrip() for line in screen(arrived) if line.strip()]
    assert shown == [line.rstrip() for line in logged(tmp_path / "run") if line.strip()]


def test_ctrl_c_leaves_a_clean_terminal(text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "trainer.steps=100000", "trainer.log_every=5")
    code, arrived = on_terminal([*TRAIN_PY, *argv], until=lambda arrived: "step     10/100000" in arrived)
    assert code == 75, arrived
    shown = screen(arrived)
    assert shown[-1] == "", "the prompt comes on a line of its own"
    # The terminal puts its ^C where it likes, also into a line that is being printed; alone it is gone.
    rest = [line.replace("^C", "").rstrip() for line in shown if line.strip()]
    assert rest == [line.rstrip() for line in logged(tmp_path / "run") if line.strip()]


def test_a_terminal_that_cannot_rewrite_lines_gets_plain_ones() -> None:
    script = (
        "from serried.runtime.console import Console\n"
        "c = Console(True, 0); c.doing('something'); c.progress('10 of 20');"
        "c.progress(''); c.say('done'); c.close()"
    )
    code, arrived = on_terminal([sys.executable, "-c", script], term="dumb")
    assert (code, arrived) == (0, "10 of 20\r\ndone\r\n")


def test_a_pipe_gets_plain_lines(text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "trainer.sample_tokens=3")
    done = subprocess.run([*TRAIN_PY, *argv], cwd=ROOT, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert b"\r" not in done.stdout
    assert b"\x1b" not in done.stdout
    assert done.stdout.decode().splitlines() == [line.rstrip("\n") for line in logged(tmp_path / "run")]


class Said:
    """What was printed, and a way to wait for it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._more = threading.Condition()

    def __call__(self, text: str) -> None:
        with self._more:
            self.lines.append(text)
            self._more.notify_all()

    def wait(self, count: int) -> list[str]:
        with self._more:
            assert self._more.wait_for(lambda: len(self.lines) >= count, timeout=60), self.lines
            return list(self.lines)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_TICK_SECONDS", 0.001)
    monkeypatch.setattr(live, "SILENCE_SECONDS", (0.005, 0.01, 1e9))


@pytest.mark.usefixtures("quick")
def test_a_silence_is_broken_at_growing_intervals_and_anew_for_each_thing_that_is_done() -> None:
    said, doing = Said(), [Doing("saving step 3", "saving", 3)]
    shower = Live(said, lambda: doing[0], is_drawn=False)
    shower.start()
    first = said.wait(2)
    assert all(re.fullmatch(r"waiting    0 s so far: saving step 3", line) for line in first), first
    doing[0] = Doing("evaluating after step 3", "evaluating", 3)
    more = said.wait(4)
    shower.close()
    assert [line.rpartition(": ")[2] for line in more[2:4]] == ["evaluating after step 3"] * 2
    assert len(said.lines) == 4, "the third of each is far off"


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_a_step_that_is_slow_by_nature_is_worth_a_word_only_where_it_is_slower_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, pulse, said = Clock(monkeypatch), Pulse(), list[str]()
    console = Console(False, 0)
    activity = Activity(pulse, _Alone(), console, 100)  # type: ignore[arg-type]
    shower = Live(said.append, activity, is_drawn=False)

    def passes(seconds: int) -> list[str]:
        said.clear()
        for _ in range(seconds):
            clock.now += 1
            shower.look()
        return list(said)

    def step(number: int, seconds: int) -> list[str]:
        pulse.enter(TRAIN, number)
        shower.look()
        return passes(seconds)

    first = step(1, 40)
    assert all("the first of this start" in line for line in first)
    assert step(2, 40) == [], "the first took as long"
    assert step(3, 81) != []
    pulse.enter(EVALUATE, 3)
    assert all("evaluating after step 3" in line for line in passes(15))
    pulse.enter(SAVE, 3)
    assert passes(15) == ["waiting    10 s so far: saving step 3"]


class _Alone:
    waits_for: str | None = None


def test_the_line_between_two_log_lines_has_the_step_and_what_was_logged_last() -> None:
    pulse, console, session = Pulse(), Console(False, 0), _Alone()
    activity = Activity(pulse, session, console, 300)  # type: ignore[arg-type]
    assert activity() is None, "of setting up the console knows more"
    session.waits_for = "every rank"
    assert activity() == Doing("waiting for every rank", "set-up", "every rank")
    session.waits_for = None
    for phase in (DATA, TRAIN, LOG):
        pulse.enter(phase, 7)
        assert (doing := activity()) is not None
        assert not doing.is_routine
        pulse.enter(phase, 8)
        assert (doing := activity()) is not None
        assert (doing.is_routine, doing.line) == (True, "step   8/300")
    console.last_step = {"step": 6, "loss": 2.5, "tokens_per_second": None}
    assert "loss 2.5000 at step 6" in (activity() or doing).line
    told = {"step": 6, "loss": 2.5, "tokens_per_second": 1234.0, "step_seconds": 2.0, "eta_seconds": 588.0}
    console.last_step = {**told, "is_first": True}
    assert (activity() or doing).line == "step   8/300  loss 2.5000 at step 6"
    console.last_step = {**told, "is_first": False}
    assert (activity() or doing).line == "step   8/300  loss 2.5000 at step 6  tok/s 1.2k  eta 9m44s"


def test_a_line_is_cut_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    shower = Live(print, lambda: Doing("x" * 50, "x"), is_drawn=True)
    shower.look()
    shower.close()
    out = capsys.readouterr().out  # type: ignore[attr-defined]
    assert out == f"\r\x1b[K{'x' * 19}\r\x1b[K"
