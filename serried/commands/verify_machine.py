"""``serried verify``."""

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, NoReturn

from serried.configs.addresses import is_address, not_a_path
from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, UserError
from serried.configs.formats import columns
from serried.configs.messages.suggestions import nearest
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.configs.subcommand_arguments import number, pairs
from serried.records.files import output_file
from serried.runtime.process import is_started, may_use_gpus, processes_per_node, say, speaks, torchrun_says

if TYPE_CHECKING:
    from serried.verify.check import Bounds, Check

_KEYS = ("out", "folder", "only", "script", "least_tokens_per_second", "least_mfu")
_CPU_RANKS = 2


def verify(words: list[str]) -> int:
    """Check this machine and this program on all of its devices, and write a report to send.

    out      JSON file to write; verify.json by default
    only     checks to run, as in only=parity,faults; all by default
    list     as the only argument: list the checks and their cases on this machine
    folder   folder for the runs, which are removed at the end, and the logs; verify by default
    launch   launch.device=cpu and launch.processes=2: devices to use; by default all GPUs, or two processes on a CPU
    least_tokens_per_second, least_mfu   fail if training is slower, as in least_mfu=0.4; by default speed is only
             reported
    script   script whose task is trained: a subclass of serried.verify.training_script.VerifiedTask

    Under torchrun, on one node: torchrun --nproc_per_node=8 -m serried verify out=report.json
    """
    from serried.configs.compose import compose
    from serried.verify.started_runs import TRAINING_SCRIPT

    is_listed = "list" in words
    given, overrides = pairs([word for word in words if word != "list"], "verify", _KEYS, reads_overrides=True)
    if wrong := [word for word in overrides if not word.startswith(("launch=", "launch."))]:
        raise UserError(
            f"{wrong[0]} has no effect here, because serried verify trains with its own configs; use launch, "
            f"{', '.join(_KEYS)}"
        )
    section = compose(overrides).launch
    checks, bounds = _chosen(given), _bounds(given)
    device, ranks = _devices(section)
    script = Path(given.get("script", TRAINING_SCRIPT)).absolute()
    if not script.is_file():
        raise UserError(f"script={given['script']} is not a file; leave it out to use the script of serried verify")
    if is_listed:
        return _list(checks, bounds, ranks, device)
    out, folder = _out(given.get("out", "verify.json")), Path(given.get("folder", "verify")).absolute()
    if not speaks():  # under torchrun only the first process works; it starts its own processes
        return EXIT_FINISHED
    return _verify(checks, bounds, out, folder, ranks, device, script)


def _verify(
    checks: "Sequence[Check]", bounds: "Bounds", out: Path, folder: Path, ranks: int, device: str, script: Path
) -> int:
    from serried.verify.started_runs import Workplace
    from serried.verify.verification import FAILED, summary, table
    from serried.verify.verification import verify as check_all

    logs = folder / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for log in logs.glob("*.log"):  # of an earlier call
            log.unlink()
        runs = Path(mkdtemp(prefix="runs-", dir=folder))
    except OSError as error:
        raise UserError(f"cannot write folder={folder}: {error.strerror}; use folder=FOLDER") from None
    for asks in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(asks) != signal.SIG_IGN:  # nohup
            signal.signal(asks, _interrupt)
    try:
        say(f"{'verify':<10} {', '.join(check.name for check in checks)}; {_described(ranks, device)}")
        report = check_all(Workplace(runs, logs, ranks, device, script), checks, bounds, out, say)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or out}: {error.strerror}; use folder=FOLDER out=FILE") from None
    finally:
        shutil.rmtree(runs, ignore_errors=True)
    say("\n".join(["", *table(report.rows), "", summary(report)]))
    say(f"{'files':<10} {out}: the report, to share; {logs}: the output of the runs, not in the report")
    if report.result == FAILED:
        return EXIT_FAILED
    return EXIT_STOPPED if report.is_interrupted else EXIT_FINISHED


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _devices(section: LaunchSection) -> tuple[str, int]:
    """Return the device type, and the number of processes, one per device: 1 or an even number.

    Raises:
        UserError: There are fewer devices than requested.
    """
    if section.submits or (section.nodes or 1) > 1:
        asked = f"launch={section.name}" if section.submits else f"launch.nodes={section.nodes}"
        raise UserError(f"{asked}: serried verify checks only its own node; use launch=local, in a job of one node")
    _, _, world, local_world = torchrun_says()
    if world != local_world:
        raise UserError(
            f"{world} processes on {world // local_world} nodes: serried verify checks one node; use --nnodes=1"
        )
    gpus = _gpus(section)
    wanted = section.processes or (world if is_started() else gpus or _CPU_RANKS)
    if gpus is not None and wanted > gpus:
        raise UserError(f"{wanted} processes, but only {gpus} GPUs; use launch.processes={gpus}, or launch.device=cpu")
    device = "cpu" if gpus is None else section.device if section.names_gpu else "cuda"
    return device, wanted if wanted == 1 else wanted - wanted % 2


def _gpus(section: LaunchSection) -> int | None:
    """Return the number of GPUs to use; None means a CPU.

    Raises:
        UserError: torch does not find the GPUs of ``launch.device``.
    """
    if not may_use_gpus(section):
        return None
    from serried.runtime.accelerator import accelerator_count, accelerator_type

    if not section.names_gpu:
        if accelerator_type() is None:  # a driver, but a torch without GPUs
            return None
        return processes_per_node(section.model_copy(update={"name": "local", "processes": None}))
    if accelerator_type() != section.device:
        raise UserError(f"launch.device={section.device} but torch finds no such device; use launch.device=cpu")
    return accelerator_count()


def _described(ranks: int, device: str) -> str:
    return f"{ranks} process{'es' if ranks > 1 else ''} on {'a CPU' if device == 'cpu' else f'GPUs ({device})'}"


def _chosen(given: dict[str, str]) -> "list[Check]":
    """Return the checks listed in ``only``, or all checks. Raises ``UserError`` for an unknown name."""
    from serried.verify.verification import CHECKS

    named = {check.name: check for check in CHECKS}
    names = [name.strip() for name in given["only"].strip("[]").split(",")] if "only" in given else list(named)
    for name in names:
        if name not in named:
            close = nearest(name, list(named))
            hint = f"did you mean {close[0]}?" if close else f"checks: {', '.join(named)}"
            raise UserError(f"only={given['only']}: there is no check {name!r}; {hint}")
    return [check for name, check in named.items() if name in names]


def _bounds(given: dict[str, str]) -> "Bounds":
    from serried.verify.check import Bounds

    tokens, mfu = "least_tokens_per_second", "least_mfu"
    return Bounds(
        number(given, tokens, 1000.0, 0, 1e15) if tokens in given else None,
        number(given, mfu, 0.4, 0, 1) if mfu in given else None,
    )


def _out(typed: str) -> Path:
    if is_address(typed):
        raise UserError(not_a_path("out", typed))
    out = Path(typed)
    if not out.name or out.is_dir() or not out.parent.is_dir():
        raise UserError(f"out={typed} is not a file in an existing folder; use out=verify.json")
    return output_file(out)


def _list(checks: "Sequence[Check]", bounds: "Bounds", ranks: int, device: str) -> int:
    """Print the checks, and the report rows that each would have on this machine."""
    from serried.verify.started_runs import Workplace

    with TemporaryDirectory(prefix="serried-verify-") as folder:
        workplace = Workplace(Path(folder), Path(folder), ranks, device)
        lines = [f"{_described(ranks, device)}", ""]
        for check in checks:
            cases = check.cases(workplace, bounds)
            rows = [("", case.name, f"skipped: {case.skipped}" if case.skipped else "") for case in cases]
            lines += [f"{check.name}: {check.purpose}", *columns(rows), ""]
    return say("\n".join(lines))
