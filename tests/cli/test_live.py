"""What a run is at is seen: on a terminal in a line that leaves no trace, elsewhere in plain lines, few of them."""

import errno
import os
import pty
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serried.runtime.console import Doing, Live
from serried.trainer.monitor.heartbeat import DATA, LOG, TRAIN, Pulse, activity
from testing.rank_pool import ROOT
from testing.runs import run_here, tiny_overrides

SCREEN_COLUMNS = 300
TRAIN_PY = [sys.executable, "-u", str(ROOT / "train.py")]


def on_terminal(argv: list[str], *, term: str = "xterm", until: Callable[[str], bool] | None = None) -> tuple[int, str]:
    """Run ``argv`` on a terminal of its own. Returns the exit code and every character that arrived there.

    Once ``until`` is true of what has arrived, Ctrl-C is pressed.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": term, "COLUMNS": str(SCREEN_COLUMNS)}
        modes = termios.tcgetattr(0)
        modes[3] |= termios.NOFLSH  # or Ctrl-C discards what has been written and not yet read (termios(3))
        termios.tcsetattr(0, termios.TCSANOW, modes)
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


def test_terminal_shows_a_status_line_and_ctrl_c_leaves_only_plain_lines(text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "trainer.steps=100000", "trainer.log_every=5")
    code, arrived = on_terminal([*TRAIN_PY, *argv], until=lambda arrived: "step     10/100000" in arrived)
    assert code == 75, arrived
    drawn = re.findall(r"\r\x1b\[K([^\r\n\x1b]+)", arrived)
    assert any(re.search(r"  \d+ s$|\d+/100000", line) for line in drawn), "no status line was shown"
    shown = screen(arrived)
    assert shown[-1] == "", "the prompt comes on a line of its own"
    # The terminal puts its ^C where it likes, also into a line that is being printed; alone it is gone.
    rest = [line.replace("^C", "").rstrip() for line in shown if line.strip()]
    printed = [line for line in rest if not line.startswith("waiting  ")]  # on a loaded machine, before there is a log
    assert printed == [line.rstrip() for line in logged(tmp_path / "run") if line.strip()]


def test_terminal_that_cannot_redraw_lines_gets_plain_ones() -> None:
    script = (
        "from serried.runtime.console import Console\n"
        "c = Console(True, 0); c.doing('something'); c.progress('10 of 20');"
        "c.progress(''); c.say('done'); c.close()"
    )
    code, arrived = on_terminal([sys.executable, "-c", script], term="dumb")
    assert (code, arrived) == (0, "10 of 20\r\ndone\r\n")


def test_output_that_is_no_terminal_gets_plain_lines(text: Path, tmp_path: Path) -> None:
    ended = run_here(tiny_overrides(text, tmp_path / "run", "trainer.sample_tokens=3"))
    assert ended.code == 0, ended.printed
    assert "\r" not in ended.printed
    assert ended.printed.splitlines() == logged(tmp_path / "run")


def test_long_activity_is_printed_at_growing_intervals_and_steps_are_not() -> None:
    said, activity = list[str](), [Doing("saving step 3", "save")]
    live, start = Live(said.append, lambda: activity[0], is_drawn=False), time.monotonic() + 1
    for second in range(60):
        live.look(start + second)
    assert said == [f"waiting    {seconds}s so far: saving step 3" for seconds in (10, 20, 40)]
    activity[0] = Doing("evaluating after step 3", "evaluate")
    for second in range(60, 75):
        live.look(start + second)
    assert said[3:] == ["waiting    10s so far: evaluating after step 3"]
    activity[0] = Doing("step 4", "train", line="step 4/10")
    for second in range(75, 200):
        live.look(start + second)
    assert len(said) == 4


def test_status_line_of_a_step_has_what_was_logged_last() -> None:
    pulse = Pulse()

    def line(last: dict[str, Any] | None = None) -> str:
        doing = activity(pulse, None, 300, last)
        assert doing is not None
        return doing.line

    assert activity(pulse, None, 300, None) is None, "the console knows more about set-up"
    assert activity(pulse, "every rank", 300, None) == Doing("waiting for every rank", "every rank")
    for phase in (DATA, TRAIN, LOG):
        pulse.enter(phase, 7)
        assert not line()
        pulse.enter(phase, 8)
        assert line() == "step   8/300"
    logged: dict[str, Any] = {
        "step": 6,
        "loss": 2.5,
        "tokens_per_second": 1234.0,
        "step_seconds": 2.0,
        "eta_seconds": 588.0,
    }
    assert line({**logged, "is_first": True}) == "step   8/300  loss 2.5000 at step 6"
    logged |= {"is_first": False, "unit": "tokens"}
    assert line(logged) == "step   8/300  loss 2.5000 at step 6  tok/s 1.2k  eta 9m44s"
    assert "samples/s 1.2k" in line({**logged, "unit": "samples"})


def test_status_line_is_cut_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    live = Live(print, lambda: Doing("x" * 50, 0), is_drawn=True)
    live.look(time.monotonic())
    live.close()
    out = capsys.readouterr().out  # type: ignore[attr-defined]
    assert out == f"\r\x1b[K{'x' * 19}\r\x1b[K"
