"""``launch=slurm``: write and submit the batch script of a run, of a sweep as one array job, or of measurements."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import serried
from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, StopRequested, UserError
from serried.configs.schema.declaration import declared
from serried.configs.schema.launch_plan_track import RecoverSection
from serried.configs.schema.sections import RunConfig
from serried.launch.local.processes import NotedSignals
from serried.launch.slurm.queue import job_folder, jobs_of, note_job, queued_before_another, queued_jobs
from serried.runtime.process import processes_per_node, say, training_command

_PACKAGE = Path(serried.__file__).parent
_MARK = "# ---- From here on every script is the same. ----\n"
_PATIENCE_SECONDS = 120
_UNCONFIGURED = "Could not establish a configuration source"  # from sbatch's error message
_EXAMINATION_MINUTES = 10
_LOOK_SECONDS = 2.0
_SILENT_SECONDS = 300
_LOOKS = 10
_LAST_LINES = {"preflight": "verdict", "plan calibrate": "written"}
"""First word of the last line that each measuring command prints."""
_NO_LINE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Characters that no option of a batch script may contain."""
_SAME_NAMES = ("partition", "account", "qos", "reservation", "constraint", "exclude", "dependency")
"""Keys of ``slurm`` with the same name as sbatch's option."""


class _NothingSubmitted(UserError):
    """Raised if Slurm is not available or has refused the job."""


def submit(points: Mapping[tuple[str, ...], RunConfig]) -> int:
    """Submit the runs ``points``, keyed by command line; several become one array job. Return the exit code.

    The submitted script is kept as ``slurm/JOB.sbatch`` in the (first) run folder.

    Raises ``UserError`` if a job of one of the runs is already in the queue, or Slurm refuses the job.
    """
    configs = list(points.values())
    text = script(points)
    if configs[0].slurm.dry_run:
        return say(text)
    folders = [job_folder(config.run) for config in configs]
    _refuse_a_second_job(configs)
    with NotedSignals():  # until the job is recorded: an unrecorded job would be submitted a second time
        urls = {folder: config.run.url for folder, config in zip(folders, configs, strict=True)}
        job, path = _submit(text, urls, is_training=True)
    return say(_what_to_watch(job, path, configs, folders))


def refuse_unequal(configs: Sequence[RunConfig]) -> None:
    """Check that all runs of a sweep request the same nodes, since all tasks of an array do. Raises ``UserError`` if
    two runs differ."""
    first, *others = [_asked_for(config) for config in configs]
    for key, value in ((key, asked[key]) for asked in others for key in asked):
        if value != first[key]:
            one, another = ("null" if setting is None else setting for setting in (first[key], value))
            raise UserError(
                f"{key} is {one} in one run and {another} in another, but with launch=slurm a sweep is one array job, "
                f"whose tasks share this setting; start one sweep per value: {key}={one} {configs[0].another_run}"
            )


def _asked_for(config: RunConfig) -> dict[str, object]:
    """Return the settings in the part of the script that all runs share."""
    launch = {f"launch.{name}": getattr(config.launch, name) for name in ("nodes", "processes", "device")}
    return launch | {f"slurm.{name}": value for name, value in config.slurm.model_dump().items()}


def measure_by_job(command: str, argv: Sequence[str], config: RunConfig) -> int:
    """Measure nodes by submitting a job that runs ``command`` (``preflight`` or ``plan calibrate``). Wait for the
    job and print its findings. Return the exit code.

    Ctrl-C and other signals that would end this process cancel the job.

    Raises ``UserError`` if Slurm refuses the job, or the run folder cannot be written.
    """
    text = measuring_script(command, argv, config)
    if config.slurm.dry_run:
        return say(text)
    folder = job_folder(config.run) / "slurm"
    with NotedSignals() as signals:
        job, _ = _submit(text, {folder.parent: None}, is_training=False)
        say(f"submitted  job {job}: {_size(config, text)}")
        try:
            _wait_for(job, signals)
            return _result(job, folder, _LAST_LINES[command])
        except StopRequested as request:
            _cancel(job)
            say(f"stopped    {request}: job {job} is cancelled")
            return EXIT_STOPPED
        except BaseException:
            _cancel(job)
            raise


def _cancel(job: str) -> None:
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(["scancel", job], capture_output=True, timeout=_PATIENCE_SECONDS, check=False)


def _wait_for(job: str, signals: NotedSignals) -> None:
    """Wait until ``job`` has left the queue, and print its state whenever that changes.

    Raises:
        StopRequested: a signal arrived.
        UserError: squeue has not answered for a long time.
    """
    shown = None
    answered = time.monotonic()
    while (queued := queued_jobs()) is None or any(queued_job.name == job for queued_job in queued):
        if signals.received:
            raise StopRequested(signals.received[0].name)
        if queued is not None:
            answered = time.monotonic()
        elif time.monotonic() - answered > _SILENT_SECONDS:
            raise UserError(
                f"squeue has not answered for {_SILENT_SECONDS} s, so job {job} is cancelled; check `squeue --me` (if "
                f"it still lists the job: scancel {job}), and run the same command again when squeue answers"
            )
        now = next((queued_job for queued_job in queued or [] if queued_job.name == job), None)
        # Until Slurm has considered the job, its reason is (None).
        if (
            now is not None
            and now.state != "COMPLETING"
            and (now.state, now.where) not in (shown, ("PENDING", "(None)"))
        ):
            shown = now.state, now.where
            say(f"job        {now.describe()}")
        time.sleep(_LOOK_SECONDS)


def _result(job: str, folder: Path, last: str) -> int:
    """Print the findings of rank 0, up to the line that begins with ``last``. Return the exit code."""
    found: list[str] = []
    for _ in range(_LOOKS):  # a network disk may show the files late
        try:
            found = (folder / f"{job}-node-0.log").read_text("utf-8", "replace").splitlines()
            code = int((folder / f"{job}.code").read_text("utf-8"))
            break
        except (OSError, ValueError):
            time.sleep(1)
    else:
        code = EXIT_FAILED
    end = next((number for number, line in enumerate(found) if line.startswith(f"{last} ")), None)
    say("\n".join(found if end is None else found[: end + 1]))
    if end is None:
        say(f"failed: job {job} ended without printing the line `{last}`; see {folder / job}*.log")
        return EXIT_STOPPED if code == EXIT_STOPPED else EXIT_FAILED
    return EXIT_FINISHED if code == EXIT_FINISHED else EXIT_FAILED


def _submit(text: str, urls: Mapping[Path, str | None], *, is_training: bool) -> tuple[str, Path]:
    """Submit the script ``text``, and record the job in the folders of the runs that it trains.

    ``urls``: URL of each run in a bucket, by the folder of its jobs.

    Returns:
        The job's number, and the path of the script in the first folder.

    Raises:
        UserError: Slurm refuses the job, or a folder cannot be written. If nothing was submitted, no folder is
            left.
    """
    run_dirs = [*urls]
    wanted = {folder for run_dir in run_dirs for folder in (run_dir / "slurm", run_dir, *run_dir.parents)}
    missing = [folder for folder in sorted(wanted, reverse=True) if not folder.exists()]  # innermost folders first
    path, job = run_dirs[0] / "slurm" / "submitted.sbatch", ""
    try:
        for run_dir in run_dirs:
            (run_dir / "slurm").mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        job = _sbatch(path)
        for task, run_dir in enumerate(run_dirs if is_training else ()):
            note_job(run_dir, job, task if len(run_dirs) > 1 else None, urls[run_dir])
        return job, path.rename(path.with_name(f"{job}.sbatch"))
    except _NothingSubmitted:
        _remove(path, missing)
        raise
    except OSError as error:
        if not job:
            _remove(path, missing)
        raise UserError(f"cannot write {error.filename}: {error.strerror}; use run.dir=FOLDER") from None


def _remove(script: Path, folders: Sequence[Path]) -> None:
    """Remove a script that was not submitted, and the folders that were created for it."""
    with suppress(OSError):
        script.unlink()
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def script(points: Mapping[tuple[str, ...], RunConfig]) -> str:
    """Return the batch script for ``points``: their options and settings, then the rest of ``slurm/train.sbatch``."""
    configs = list(points.values())
    runs = [[*_places(each), f"arguments=({shlex.join(_without_dry_run(argv))})"] for argv, each in points.items()]
    lines = runs[0]
    if len(runs) > 1:
        cases = ["\n    ".join([f"{task})", *its_lines, ";;"]) for task, its_lines in enumerate(runs)]
        lines = ['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"]
    return _script(_options(configs), configs[0], training_command(), lines)


def _places(config: RunConfig) -> list[str]:
    """Return the lines of a script that say where the logs of its jobs and the status of its run are."""
    lines = [f"run_dir={shlex.quote(str(job_folder(config.run)))}"]
    return lines if config.run.url is None else [*lines, f"bucket={shlex.quote(config.run.url)}"]


def measuring_script(command: str, argv: Sequence[str], config: RunConfig) -> str:
    """Return the batch script of a job that measures its nodes with ``command``."""
    changes = {"time_minutes": _EXAMINATION_MINUTES, "signal_seconds": 60, "requeue": False}
    short = config.model_copy(update={
        "recover": RecoverSection(),
        "run": config.run.model_copy(update={"name": f"{config.run.name}-{command.split()[-1]}"}),
        "slurm": config.slurm.model_copy(update=changes),
    })  # fmt: skip
    folder = f"run_dir={shlex.quote(str(job_folder(config.run)))}"
    flags = [f"--config-dir={path}" for path in declared().config_dirs]
    words = f"arguments=({shlex.join([*command.split(), *flags, *_without_dry_run(argv)])})"
    return _script(_options([short]), short, ["-m", "serried"], [folder, words, "measures=true"])


def _without_dry_run(argv: Sequence[str]) -> list[str]:
    return [word for word in argv if not word.startswith("slurm.dry_run=")]


def _script(options: Sequence[str], config: RunConfig, program: Sequence[str], runs: Sequence[str]) -> str:
    template = (_PACKAGE / "slurm" / "train.sbatch").read_text("utf-8")
    slurm = config.slurm
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options), ""]
    settings = {
        "root": str(_PACKAGE.parent),
        "python": slurm.python or sys.executable,
        "container": slurm.container or "",
        "interface": slurm.interface or "",
        "requeue": str(slurm.requeue).lower(),
        "recover": str(config.recover.mode == "memory").lower(),
        "processes": str(processes_per_node(config.launch)),
        "bucket": "",  # sbatch passes variables of the user's shell on, which may have one of this name
    }
    lines += [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    lines.append(f"srun_options=({shlex.join(shlex.split(slurm.srun_options or ''))})")
    lines += [f"program=({shlex.join(program)})", *runs, f"cd {shlex.quote(str(Path.cwd()))} || exit 70"]
    if slurm.modules:
        lines.append(f"module load {shlex.join(slurm.modules.split())} || exit 70")
    if slurm.setup:
        lines.append(slurm.setup)
    return "\n".join(lines) + "\n\n" + _MARK + template.partition(_MARK)[2]


def _options(configs: Sequence[RunConfig]) -> list[str]:
    """Return the options of sbatch. They are the same for all tasks of an array."""
    config, is_array = configs[0], len(configs) > 1
    slurm = config.slurm
    gpus = slurm.gpus_per_node
    if gpus is None and config.launch.names_gpu:
        gpus = processes_per_node(config.launch)
    folder = job_folder(config.run) / "slurm"
    wanted: dict[str, object] = {
        "job-name": config.run.name,
        "nodes": config.launch.nodes or 1,
        "ntasks-per-node": 1,
        "gpus-per-node": f"{slurm.gpu_type}:{gpus}" if slurm.gpu_type else gpus,
        "cpus-per-task": slurm.cpus_per_node,
        "mem": slurm.memory,
        **{name: getattr(slurm, name) for name in _SAME_NAMES},
        "time": slurm.time_minutes,
        "signal": f"USR1@{slurm.signals_before()}",
        "array": f"0-{len(configs) - 1}" if is_array else None,
        "open-mode": "append",
        "output": str(folder).replace("%", "%%") + ("/%A_%a.log" if is_array else "/%j.log"),
    }
    if is_array and slurm.array_concurrency:
        wanted["array"] = f"{wanted['array']}%{slurm.array_concurrency}"
    for name, value in wanted.items():
        if _NO_LINE.search(str(value)):  # bash would run the text after a line break
            key = {"output": "run.dir", "job-name": "run.name"}.get(name, f"slurm.{name}")
            raise UserError(
                f"{key}: {str(value)!r} contains a line break, a control character or bytes that are not UTF-8, "
                f"which options of sbatch cannot contain; use {key}=OTHER"
            )
    options = [f"--{name}={shlex.quote(str(value))}" for name, value in wanted.items() if value is not None]
    options += [
        f"{name}={shlex.quote(value)}" if given else name
        for name, given, value in (word.partition("=") for word in shlex.split(slurm.options or ""))
    ]
    kept = ["--no-kill"] if config.recover.mode == "memory" else []
    return [*options, *kept, "--requeue" if slurm.requeue else "--no-requeue"]


def _refuse_a_second_job(configs: Sequence[RunConfig]) -> None:
    """Refuse to submit a second job for a run folder: it would wait for the first, or fail."""
    if configs[0].slurm.dependency is not None:
        return
    queued = queued_before_another([job_folder(config.run) for config in configs])
    for config in configs:
        if waiting := jobs_of(job_folder(config.run), queued):
            number = waiting[0].name.partition("_")[0]
            raise UserError(
                f"{config.run.place} already has a job in the queue: {waiting[0].describe()}; wait for it, cancel it "
                f"(scancel {number}), queue behind it (slurm.dependency=afterany:{number}), or use {config.another_run}"
            )


def _sbatch(path: Path) -> str:
    """Submit the script ``path``. Return the job's number."""
    # Inside another job, sbatch would take that job's settings from the environment.
    clean = {key: value for key, value in os.environ.items() if not re.match("SLURM_(?!CONF$|CLUSTERS$)", key)}
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(path)],
            capture_output=True, encoding="utf-8", errors="replace", timeout=_PATIENCE_SECONDS, check=False, env=clean,
            start_new_session=True,  # Ctrl-C must reach this process only
        )  # fmt: skip
    except FileNotFoundError:
        raise _NothingSubmitted(
            "launch=slurm needs sbatch, which is not on the PATH of this machine; submit from a login node of the "
            "cluster, or print the script with slurm.dry_run=true"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"sbatch has not answered for {_PATIENCE_SECONDS} s; check `sinfo`, and run the command again"
        ) from None
    if done.returncode and _UNCONFIGURED in done.stderr:
        raise _NothingSubmitted(
            "Slurm is installed on this machine but not configured: it found neither slurm.conf in /etc/slurm nor a "
            "configuration server; submit from a login node of the cluster, or set SLURM_CONF=FILE"
        )
    if done.returncode:
        said = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines())
        raise _NothingSubmitted(f"Slurm refused the job: {said}; to print the script: slurm.dry_run=true")
    return done.stdout.strip().partition(";")[0]


def _what_to_watch(job: str, path: Path, configs: Sequence[RunConfig], folders: Sequence[Path]) -> str:
    config = configs[0]
    size = _size(config, path.read_text(encoding="utf-8"))
    if len(configs) == 1:
        watch = f"tail -F {shlex.quote(str(folders[0] / 'slurm' / f'{job}-node-0.log'))}"
        lines = [("submitted", f"job {job}: {size}"), ("script", str(path)), ("watch", watch)]
        lines.append(("", f"serried status run.dir={shlex.quote(config.run.place)}"))
    else:
        lines = [("submitted", f"array job {job}: {len(configs)} runs of {size}"), ("script", str(path))]
        lines += [("run", f"{job}_{task}: {each.run.place}") for task, each in enumerate(configs)]
        lines.append(("watch", "serried status"))
    return "\n".join(f"{name:<10} {text}".rstrip() for name, text in [*lines, ("cancel", f"scancel {job}")])


def _size(config: RunConfig, text: str) -> str:
    """Return the size of the job whose script is ``text``, such as ``2 nodes x 8 processes``."""
    nodes, processes = config.launch.nodes or 1, processes_per_node(config.launch)
    asks = config.launch.device == "cpu" or "--gpus-per-node" in text
    no_gpu = "" if asks else "; no GPUs requested (slurm.gpus_per_node=8 requests them)"
    return f"{nodes} node{'s' if nodes > 1 else ''} x {processes} process{'es' if processes > 1 else ''}{no_gpu}"
