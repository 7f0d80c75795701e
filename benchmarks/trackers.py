"""What a W&B that cannot be reached costs a run, and what one costs that can: whole runs, beside runs without W&B.

    python -m benchmarks.trackers              # five turns
    python -m benchmarks.trackers --turns 10 --steps 400
    python -m benchmarks.trackers --steps 4000 --ways "service killed"  # long enough for a client, on busy cores
    python -m benchmarks.trackers --pairs 60   # what a mirror costs that has no rest

Each turn starts ``python train.py`` once for each way, in another order each time, and takes the seconds from start to
end of the process, the processor seconds of that process alone, and those of its mirror until then, which training
would have had where it uses all cores. Ratios are of one turn, to the run of that turn without W&B. Seconds grow
severalfold where others use the machine: leave it idle.

``--pairs`` goes below that noise: beside one long run, a process of a mirror's priority imports W&B's client again and
again, for two seconds, and is stopped for two. A pair is the seconds of a step in two such spans, one beside the other.
"""

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.disturb import family, last_step, lines, send
from tests.cluster import ROOT
from tests.runs import metrics, overrides, write_text
from tests.tracked import await_mirrors, mirrors
from tests.wandb_server import WandbServer, serving

WAYS = (
    "off",
    "offline",
    "reachable",
    "no key",
    "refused",
    "never answers",
    "its API hangs",
    "hangs at the end",
    "service killed",
)
_LOOK_SECONDS, _LOOK_SECONDS_WHERE_IT_COSTS, _NEAR_THE_END = 0.05, 1.0, 0.9
_SPAN_SECONDS, _STEPS_TO_WARM_UP = 2.0, 20
_WITHOUT_REST = """
import subprocess, sys
from serried.records.trackers.cores import be_nice
be_nice(19)
while True:
    subprocess.run([sys.executable, "-c", "import wandb"])
    print(flush=True)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=list(WAYS[1:]))
    arguments = parser.parse_args()
    if arguments.pairs:
        ratios, imports = beside_one_without_rest(arguments.pairs)
        lower, median, upper = statistics.quantiles(ratios, n=4)
        print(
            f"seconds of a step, of those without: {median:.3f} (quartiles {lower:.3f} to {upper:.3f}), while the "
            f"client was imported {imports} times in {arguments.pairs * _SPAN_SECONDS:.0f} s"
        )
        return
    ways = ["off", *arguments.ways]
    seconds: dict[str, list[_Seconds]] = {way: [] for way in ways}
    losses: dict[str, list[list[float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.mkdir()
        write_text(text)
        _run("off", text, Path(folder) / "warm-up", 2)  # prepares the data
        for turn in range(arguments.turns):
            shift = turn // 2 % len(ways)
            for way in (ways[shift:] + ways[:shift])[:: 1 if turn % 2 else -1]:
                run_dir = Path(folder) / f"{turn}-{way.replace(' ', '-')}"
                seconds[way].append(took := _run(way, text, run_dir, arguments.steps))
                print(
                    f"turn {turn + 1}, {way}: {took.elapsed:.2f} s, {took.processor:.2f} s of a processor, its mirror "
                    f"{took.mirror:.2f} s",
                    flush=True,
                )
                losses[way].append([line["loss"] for line in metrics(run_dir)])
                await_mirrors(run_dir)  # its rest is no part of the next
    elapsed, processor, _ = (statistics.median(values) for values in zip(*seconds["off"], strict=True))
    print(
        f"\n{arguments.turns} turns of {arguments.steps} steps; off: {elapsed:.1f} s, {processor:.1f} s of a processor"
    )
    print("\nof off, median (lowest to highest):\n")
    print("| W&B | seconds | processor seconds | the mirror's, of the run's seconds | losses |")
    print("| --- | --- | --- | --- | --- |")
    for way in ways[1:]:
        by_turn = list(zip(seconds[way], seconds["off"], strict=True))
        same = all(its == off for its, off in zip(losses[way], losses["off"], strict=True))
        print(
            f"| {way} | {_spread([its.elapsed / off.elapsed for its, off in by_turn])} | "
            f"{_spread([its.processor / off.processor for its, off in by_turn])} | "
            f"{_spread([(its.mirror - off.mirror) / off.elapsed for its, off in by_turn])} | "
            f"{'the same bits' if same else 'DIFFER'} |"
        )


class _Seconds(NamedTuple):
    """What a run took of a clock, and of processors: by its own process, and by those it started."""

    elapsed: float
    processor: float
    mirror: float


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _run(way: str, text: Path, run_dir: Path, steps: int) -> _Seconds:
    """Train once."""
    mode = way if way in ("off", "offline") else "online"
    argv = [f"trainer.steps={steps}", "trainer.log_every=10", "trainer.deterministic=true", f"track.wandb={mode}"]
    with _wandb(way) as (environment, server), (run_dir.parent / "output").open("w") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "train.py", *overrides(text, run_dir, *argv)],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
        has_killed = False
        while way == "service killed" and not has_killed and not _has_ended(process.pid, os.WNOHANG):
            if (run_dir / "wandb").exists():  # before, there is none, and to look for it takes of the processor
                services = [pid for mirror in mirrors(run_dir) for pid in family(mirror)[1:]]
                has_killed = bool(services)
                for pid in services:
                    send(pid, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)
        while way == "hangs at the end" and not server.hangs.is_set() and not _has_ended(process.pid, os.WNOHANG):
            time.sleep(_LOOK_SECONDS_WHERE_IT_COSTS)
            if last_step(run_dir) >= _NEAR_THE_END * steps:
                server.hangs.set()
        _has_ended(process.pid)
        elapsed, (own, of_children) = time.perf_counter() - started, _processor_seconds(process.pid)
        left = [sum(_processor_seconds(pid)) for mirror in mirrors(run_dir) for pid in family(mirror)]
        seconds = _Seconds(elapsed, own, of_children + sum(left))
        code = process.wait()
    if code:
        sys.exit(f"{way}: exit code {code}\n{(run_dir.parent / 'output').read_text()}")
    return seconds


def beside_one_without_rest(pairs: int) -> tuple[list[float], int]:
    """Seconds of a step while a client is being imported, of those while none is, pair by pair; and how often."""
    with tempfile.TemporaryDirectory() as folder:
        text, run_dir = Path(folder) / "text", Path(folder) / "run"
        text.mkdir()
        write_text(text)
        argv = ["trainer.steps=1M", "trainer.log_every=1", "trainer.eval_every=0", "checkpoint.every=0"]
        process = subprocess.Popen(
            [sys.executable, "train.py", *overrides(text, run_dir, *argv)],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        busy = subprocess.Popen(
            [sys.executable, "-c", _WITHOUT_REST], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            os.killpg(busy.pid, signal.SIGSTOP)
            while last_step(run_dir) < _STEPS_TO_WARM_UP:
                time.sleep(_LOOK_SECONDS)
            spans = []
            for pair in range(pairs):
                for is_busy in (True, False) if pair % 2 else (False, True):
                    os.killpg(busy.pid, signal.SIGCONT if is_busy else signal.SIGSTOP)
                    began = time.time()
                    time.sleep(_SPAN_SECONDS)
                    spans.append((is_busy, began, time.time()))
        finally:
            os.killpg(busy.pid, signal.SIGKILL)
            process.kill()
            imports = busy.communicate()[0].count(b"\n")
            process.wait()
        times = [line["time"] for line in lines(run_dir / "metrics.jsonl") if line["event"] == "step"]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for is_busy, began, ended in spans:
        within = [moment for moment in times if began <= moment < ended]
        seconds[is_busy].append((within[-1] - within[0]) / (len(within) - 1))
    return [one / other for one, other in zip(seconds[True], seconds[False], strict=True)], imports


def _has_ended(pid: int, flags: int = 0) -> bool:
    """Whether the child ``pid`` has ended, waiting unless ``flags`` say not to. Its figures can still be read."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | flags) is not None


def _processor_seconds(pid: int) -> tuple[float, float]:
    """What the process ``pid`` used of processors, and what children of it did that have ended: of Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:  # it has just ended
        return 0.0, 0.0
    user, system, of_children, system_of_children = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields)
    return user + system, of_children + system_of_children


@contextmanager
def _wandb(way: str) -> Iterator[tuple[dict[str, str], WandbServer]]:
    """The environment of a run that finds W&B so, and its server."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    with socket.socket() as waiting, serving() as server, tempfile.TemporaryDirectory() as home:
        waiting.bind(("127.0.0.1", 0))
        if way == "never answers":
            waiting.listen()
        if way == "its API hangs":  # not its front page
            server.hangs.set()
        is_served = way in ("reachable", "its API hangs", "hangs at the end", "service killed")
        environment["WANDB_BASE_URL"] = server.url if is_served else f"http://127.0.0.1:{waiting.getsockname()[1]}"
        environment["HOME"] = home  # with nobody's account
        if way != "no key":
            environment["WANDB_API_KEY"] = 40 * "0"
        yield environment, server


if __name__ == "__main__":
    main()
