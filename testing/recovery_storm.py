"""Kill ranks of runs that recover from memory, at chosen and at random moments, and compare with undisturbed runs.

    python -m testing.recovery_storm kills=200 [seed=1] [folder=FOLDER]

Each run is ``launch=local`` with 3 to 6 ranks, as DDP or HSDP, with checkpoints and evaluations under way. Ranks are
killed one after the other, two at once, or a second one while the others recover from the first, until one replica is
left, which finishes the run. The program prints counts as JSON, and fails unless every run finishes with each step
recorded once, on the curve of the undisturbed run within 1e-6, leaves no process behind, and opens no more files.
"""

import functools
import gc
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from serried.configs.schema.declaration import BUILT_IN
from serried.program import main
from serried.runtime.peer_sockets import local_hosts, sever
from serried.runtime.process import is_running
from serried.runtime.session import Session
from serried.trainer import step as step_module
from serried.trainer.callbacks import Callback
from serried.trainer.checkpoint.save import Checkpointer
from serried.trainer.evaluator import Evaluator
from serried.trainer.loop import Loop
from serried.trainer.recovery import recovery as recovery_module
from serried.trainer.saver import Saver
from serried.trainer.step import TrainStep
from serried.trainer.step_log import StepLog
from serried.trainer.trainer import Trainer
from testing.forked_runs import FORKS, settle, torchruns_variables
from testing.runs import ObservedRecipe, metrics, overrides, status, write_text

PLACES: dict[str, tuple[Any, str]] = {
    "data": (Loop, "_begin_step"), "forward": (TrainStep, "__call__"), "vote": (step_module, "confirm"),
    "update": (TrainStep, "commit"), "log": (StepLog, "read"), "evaluate": (Evaluator, "evaluate"),
    "begin to save": (Saver, "begin"), "write": (Checkpointer, "_write_all"), "commit": (Checkpointer, "_save"),
    "agree": (recovery_module, "meet_survivors"), "form": (Session, "form_again"), "build": (Trainer, "__init__"),
    "compare": (Saver, "compare_always"), "group": (Session, "background_group"),
}  # fmt: skip
"""Functions by the moment at which they are called."""
RECOVERING = ("agree", "form", "build", "group", "compare")
"""Moments of a recovery."""
SEVER = -1
"""Kind of a ``Death`` that only closes the connections of the rank to the others."""
LAYOUTS = {
    "ddp x2": (2, "parallel=ddp"), "ddp x3": (3, "parallel=ddp"), "ddp x4": (4, "parallel=ddp"),
    "hsdp 2x2": (4, "parallel=hsdp parallel.replicate=2 parallel.shard=2"),
    "hsdp 3x2": (6, "parallel=hsdp parallel.replicate=3 parallel.shard=2"),
}  # fmt: skip


class Death(NamedTuple):
    """A rank that dies when it is at a place for the ``number``-th time."""

    rank: int
    place: str
    """One of ``PLACES``, or ``answer``: after the vote, whose result another rank does not get. Or ``time``: after
    ``number`` milliseconds of training."""
    number: int
    """1 for the first time."""
    kind: int = signal.SIGKILL
    """Signal that the rank sends to itself. 0: it only waits until the file ``go`` exists. Or ``SEVER``."""


class Ended(NamedTuple):
    """A run that has ended."""

    code: int
    printed: str
    deaths: list[float]
    """Time of each death."""
    left_behind: list[int]
    """Ranks whose process still runs."""
    open_files: list[list[int]]
    """Number of open files of each surviving rank, for each of its trainers."""
    held: list[list[int]]
    """Bytes of the tensors that each surviving rank holds, for each of its trainers."""


def arm(deaths: Sequence[Death], out: Path) -> None:
    """Let the ranks that this process forks die as in ``deaths``. What they do is written to ``out``."""
    calls: Counter[str] = Counter()

    def rank() -> int:
        return int(os.environ.get("RANK", "-1"))

    def die(number: int) -> None:
        if not number:
            while not (out / "go").exists():
                time.sleep(0.02)
            return
        if number == SEVER:
            port = int(os.environ["MASTER_PORT"])
            sever(local_hosts(port), port, [])
            return
        (out / f"death-{rank()}").write_text(str(time.time()))
        os.kill(os.getpid(), number)

    def reach(place: str) -> None:
        calls[place] += 1
        for death in deaths:
            if (death.rank, death.place, death.number) == (rank(), place, calls[place]):
                die(death.kind)

    def before(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            reach(place)
            if place == "build" and calls[place] == 1:
                (out / f"process-{rank()}").write_text(str(os.getpid()))
            if place == "data" and calls[place] == 1:
                for death in deaths:
                    if (death.rank, death.place) == (rank(), "time"):
                        timer = threading.Timer(death.number / 1000, die, (death.kind,))
                        timer.daemon = True
                        timer.start()
            result = function(*arguments, **named)
            if place == "vote":
                reach("answer")
                if any(death.place == "answer" and death.number == calls["vote"] for death in deaths):
                    ranks = range(int(os.environ["WORLD_SIZE"]))
                    if rank() == max(set(ranks) - {death.rank for death in deaths}):
                        raise RuntimeError("Connection closed by peer, as if the result of the vote was lost")
            is_first = place == "build" and calls[place] == 1
            if is_first or (place == "compare" and calls["build"] > calls["counted"]):  # a save compares, too
                calls["counted"] = calls["build"]
                with (out / f"files-{rank()}").open("a") as file:
                    print(len(os.listdir("/proc/self/fd")), file=file)  # noqa: PTH208
                with (out / f"held-{rank()}").open("a") as file:
                    print(_held_bytes(), file=file)
            return result

        return called

    for place, (owner, name) in PLACES.items():
        setattr(owner, name, before(place, getattr(owner, name)))


def _held_bytes() -> int:
    """Return the bytes of all tensors of this process that garbage collection knows, without those of its imports."""
    found = [tensor for tensor in gc.get_objects() if type(tensor) in (Tensor, Parameter)]  # not a FakeTensor
    tensors = [tensor for tensor in found if tensor.device.type == "cpu"]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _work(
    argv: Sequence[str], deaths: Sequence[Death], out: Path, task: Callable[[], Any],
    variables: Mapping[str, str] = MappingProxyType({}), callbacks: Sequence[type[Callback]] = (),
) -> None:  # fmt: skip
    settle()
    os.environ.update({"OMP_NUM_THREADS": "1", **variables})
    for number, path in ((1, out / "printed"), (2, out / "printed")):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    arm(deaths, out)
    code = main(list(argv), BUILT_IN._replace(task=task, callbacks=tuple(callbacks)))
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" not in os.environ:
        (out / "code").write_text(str(code))
    os._exit(code)


def ragged_task() -> ObservedRecipe:
    """Return a task whose samples have different numbers of targets."""
    return ObservedRecipe(ragged=True)


def run(
    argv: Sequence[str], deaths: Sequence[Death], out: Path, task: Callable[[], Any] = ragged_task,
    seconds: float = 150, on_look: Callable[[], object] = lambda: None, callbacks: Sequence[type[Callback]] = (),
) -> Ended:  # fmt: skip
    """Train with ``argv``, while ranks die as in ``deaths``. ``on_look`` is called often meanwhile."""
    out.mkdir(parents=True)
    process = FORKS.Process(target=_work, args=(argv, deaths, out, task, {}, callbacks))
    process.start()
    deadline = time.monotonic() + seconds
    while process.exitcode is None and time.monotonic() < deadline:
        process.join(0.1)
        on_look()
    if is_late := process.exitcode is None:
        process.terminate()
        process.join(20)
        process.kill()
    process.join()
    printed = (out / "printed").read_text() if (out / "printed").exists() else ""
    pids = {int(path.name.partition("-")[2]): int(path.read_text()) for path in out.glob("process-*")}
    left = [rank for rank, pid in pids.items() if is_running(pid)]
    for rank in left:
        with suppress(ProcessLookupError):
            os.kill(pids[rank], signal.SIGKILL)
    died = {int(path.name.partition("-")[2]): float(path.read_text()) for path in out.glob("death-*")}
    survivors = sorted(rank for rank in pids if rank not in died)
    files, held = (
        [[int(line) for line in (out / f"{what}-{rank}").read_text().split()] for rank in survivors]
        for what in ("files", "held")
    )
    code = -1 if is_late else int(process.exitcode or 0)
    return Ended(code, printed, sorted(died.values()), left, files, held)


def run_nodes(argv: Sequence[str], deaths: Sequence[Death], out: Path, nodes: int, seconds: float = 150) -> list[int]:
    """Like ``run``, with a rank on each of several nodes, as torchrun starts them. Returns the exit codes."""
    from torch.distributed import TCPStore

    out.mkdir(parents=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    processes = []
    for node in range(nodes):
        variables = torchruns_variables(node, nodes, store.port) | alone | {"GROUP_RANK": str(node)}
        processes.append(FORKS.Process(target=_work, args=(argv, deaths, out, ragged_task, variables)))
        processes[-1].start()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    return [int(process.exitcode or 0) for process in processes]


def words(layout: str, text: Path, run_dir: Path, *more: str) -> list[str]:
    """Return the arguments of a run on ``layout``."""
    processes, parallel = LAYOUTS[layout]
    return overrides(
        text, run_dir, "launch=local", f"launch.processes={processes}", "launch.device=cpu", *parallel.split(),
        "recover.mode=memory", "trainer.steps=24", "trainer.global_batch=12", "trainer.micro_batch=1",
        "checkpoint.every=5", "model.layers=2", "trainer.eval_every=4", "data.validation_fraction=0.1",
        "trainer.eval_batches=1", *more,
    )  # fmt: skip


def faults(
    ended: Ended, run_dir: Path, expected: dict[int, float], deaths: int, eval_every: int = 4
) -> tuple[list[str], float]:
    """Return what is wrong with a run that lost ranks, and the largest relative difference of a loss."""
    found = []
    if ended.code:
        found.append(f"exit code {ended.code}")
    if (run_dir / "status.json").exists() and (state := status(run_dir))["state"] != "finished":
        found.append(f"status {state}")
    if ended.left_behind:
        found.append(f"ranks {ended.left_behind} still run")
    if len(ended.deaths) != deaths:
        found.append(f"{len(ended.deaths)} of {deaths} ranks died")
    lines = [(line["step"], line["loss"]) for line in metrics(run_dir)] if (run_dir / "metrics.jsonl").exists() else []
    if [step for step, _ in lines] != sorted(expected):
        found.append(f"steps {[step for step, _ in lines]}")
    if not all(loss is not None and math.isfinite(loss) for _, loss in lines):
        return [*found, "a loss is not finite"], math.inf
    difference = max((abs(loss / expected[step] - 1) for step, loss in lines if step in expected), default=0.0)
    if difference > 1e-6:
        found.append(f"a loss differs by {difference:.1e}")
    evaluated = Counter(line["step"] for line in metrics(run_dir, "eval")) if lines else Counter()
    if sorted(evaluated) != [step for step in sorted(expected) if eval_every and step % eval_every == 0]:
        found.append(f"evaluated after {dict(evaluated)}")
    # A second trainer may open a few more files than the first; later ones do not.
    if any(max(files[2:], default=0) > files[1] + 1 for files in ended.open_files if len(files) > 1):
        found.append(f"open files {ended.open_files}")
    return found, difference


def _in_a_recovery(rank: int, rng: random.Random) -> Death:
    place = rng.choice(RECOVERING)
    return Death(rank, place, 2 if place in ("build", "group") else 1)  # the first trainer is built at the start


def random_deaths(layout: str, rng: random.Random) -> list[Death]:
    """Return deaths that leave one replica."""
    processes, parallel = LAYOUTS[layout]
    shard = 2 if "shard=2" in parallel else 1
    replicas = processes // shard
    dying = rng.sample(range(replicas), replicas - 1)
    deaths: list[Death] = []
    count = 0
    for number, replica in enumerate(dying):
        rank = replica * shard + rng.randrange(shard)
        kind = rng.choice(["place", "place", "time", "second", "twice"])
        count += rng.randint(2, 18 // max(1, replicas - 1))
        if kind == "time":
            deaths.append(Death(rank, "time", rng.randint(1, 700)))
        elif kind == "second" and number:
            deaths.append(_in_a_recovery(rank, rng))
        elif kind == "twice" and number:
            deaths.append(deaths[-1]._replace(rank=rank))
        else:
            place = rng.choice(["data", "forward", "vote", "answer", "update", "log", "evaluate", "begin to save",
                                "write", "commit"])  # fmt: skip
            often = place not in ("evaluate", "begin to save", "write", "commit")
            deaths.append(Death(rank, place, count if often else rng.randint(1, 4)))
    return deaths


def storm(
    kills: int, seed: int, folder: Path, say: Callable[[str], None] = lambda _: None,
    layouts: Sequence[str] = tuple(LAYOUTS),
) -> dict[str, Any]:  # fmt: skip
    """Run until ``kills`` ranks have died. Return counts."""
    rng, text = random.Random(seed), write_text(folder / "text")
    expected: dict[str, dict[int, float]] = {}
    done, runs, worst = 0, 0, 0.0
    places: Counter[str] = Counter()
    seconds: list[float] = []
    wrong: list[str] = []
    most_files = 0
    while done < kills:
        layout = layouts[runs % len(layouts)]
        if layout not in expected:
            undisturbed = folder / f"undisturbed-{layout}".replace(" ", "-")
            ended = run(words(layout, text, undisturbed), [], folder / f"{undisturbed.name}-out")
            assert ended.code == 0, ended.printed
            expected[layout] = {line["step"]: line["loss"] for line in metrics(undisturbed)}
        deaths = random_deaths(layout, rng)
        run_dir, out = folder / f"run-{runs}", folder / f"run-{runs}-out"
        ended = run(words(layout, text, run_dir), deaths, out)
        # A death that is planned for a moment that does not come, for example in a recovery, is none.
        found, difference = faults(ended, run_dir, expected[layout], len(ended.deaths))
        runs, done, worst = runs + 1, done + len(ended.deaths), max(worst, difference)
        places.update(death.place for death in deaths)
        most_files = max([most_files, *(max(files) for files in ended.open_files if files)])
        seconds += [line["seconds"] for line in metrics(run_dir, "recovered")]
        say(json.dumps({"run": runs, "layout": layout, "deaths": deaths, "died": len(ended.deaths), "wrong": found}))
        if found:
            wrong.append(f"run {runs} ({layout}, {[*map(list, deaths)]}): {'; '.join(found)}")
    return {
        "kills": done, "runs": runs, "wrong": wrong, "places": dict(places),
        "largest_relative_difference": worst, "recoveries": len(seconds),
        "recovery_seconds": {
            "median": statistics.median(seconds), "worst": max(seconds),
        } if seconds else {}, "most_open_files": most_files,
    }  # fmt: skip


def _main(given: Iterable[str]) -> int:
    values = dict(word.split("=", 1) for word in given)
    with tempfile.TemporaryDirectory(prefix="serried-storm-") as scratch:
        folder = Path(values.get("folder", scratch))
        found = storm(
            int(values.get("kills", 40)), int(values.get("seed", 1)), folder,
            lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
    print(json.dumps(found, indent=2))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
