"""What a W&B that cannot be reached costs a run, and what one costs that can: whole runs, beside runs without W&B.

    python -m benchmarks.trackers              # five turns
    python -m benchmarks.trackers --turns 10 --steps 400

Each turn starts ``python train.py`` once for each way, in another order each time, and takes the seconds from start to
end of the process. Ratios are of one turn, to the run of that turn without W&B.
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

from benchmarks.disturb import family, send
from tests.cluster import ROOT
from tests.runs import metrics, overrides, write_text
from tests.tracked import await_mirrors, mirrors
from tests.wandb_server import serving

WAYS = ("off", "offline", "reachable", "no key", "refused", "never answers", "service killed")
_LOOK_SECONDS = 0.05


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=list(WAYS[1:]))
    arguments = parser.parse_args()
    ways = ["off", *arguments.ways]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, list[list[float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.mkdir()
        write_text(text)
        _run("off", text, Path(folder) / "warm-up", 2)  # prepares the data
        for turn in range(arguments.turns):
            shift = turn % len(ways)
            for way in (ways[shift:] + ways[:shift])[:: 1 if turn % 2 else -1]:
                run_dir = Path(folder) / f"{turn}-{way.replace(' ', '-')}"
                seconds[way].append(_run(way, text, run_dir, arguments.steps))
                losses[way].append([line["loss"] for line in metrics(run_dir)])
                await_mirrors(run_dir)  # its rest is no part of the next
    print(f"{arguments.turns} turns of {arguments.steps} steps; off: {statistics.median(seconds['off']):.1f} s a run")
    for way in ways[1:]:
        ratios = sorted(its / off for its, off in zip(seconds[way], seconds["off"], strict=True))
        same = all(its == off for its, off in zip(losses[way], losses["off"], strict=True))
        print(
            f"{way:<15} {statistics.median(ratios):.3f} of off (median; {ratios[0]:.3f} to {ratios[-1]:.3f}), "
            f"losses {'the same bits' if same else 'DIFFER'}"
        )


def _run(way: str, text: Path, run_dir: Path, steps: int) -> float:
    """Seconds that the process of a run took."""
    mode = way if way in ("off", "offline") else "online"
    argv = [f"trainer.steps={steps}", "trainer.log_every=10", "trainer.deterministic=true", f"track.wandb={mode}"]
    with _wandb(way) as environment, (run_dir.parent / "output").open("w") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "train.py", *overrides(text, run_dir, *argv)],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
        has_killed = False
        while way == "service killed" and not has_killed and process.poll() is None:
            services = [pid for mirror in mirrors(run_dir) for pid in family(mirror)[1:]]
            has_killed = bool(services) and (run_dir / "wandb").exists()
            for pid in services if has_killed else []:
                send(pid, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)
        code = process.wait()
        seconds = time.perf_counter() - started
    if code:
        sys.exit(f"{way}: exit code {code}\n{(run_dir.parent / 'output').read_text()}")
    return seconds


@contextmanager
def _wandb(way: str) -> Iterator[dict[str, str]]:
    """The environment of a run that finds W&B so."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    with socket.socket() as waiting, serving() as server, tempfile.TemporaryDirectory() as home:
        waiting.bind(("127.0.0.1", 0))
        if way == "never answers":
            waiting.listen()
        is_served = way in ("reachable", "service killed")
        environment["WANDB_BASE_URL"] = server.url if is_served else f"http://127.0.0.1:{waiting.getsockname()[1]}"
        environment["HOME"] = home  # with nobody's account
        if way != "no key":
            environment["WANDB_API_KEY"] = 40 * "0"
        yield environment


if __name__ == "__main__":
    main()
