"""``serried report`` and ``serried send``."""

from pathlib import Path

from serried.configs.bucket_paths import output_path, with_urls
from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, UserError
from serried.configs.plain_data import read_if_there
from serried.configs.subcommand_arguments import pairs
from serried.records.files import output_file
from serried.records.metrics import METRICS
from serried.records.run_folder import place_of
from serried.runtime.process import say
from serried.saved import existing_runs, find_run, is_run, run_folder, runs_of_a_sweep


def report(words: list[str]) -> int:
    """Write one HTML page with the curves of one run, or of several runs compared.

    RUN          run folders: runs/tiny, or runs/sweep/*; the folder of the sweep itself is skipped
    out          file to write; RUN/report.html by default, or report.html in the current folder for several runs or a
                 run in a bucket
    """
    from serried.configs.formats import size
    from serried.records.report import write_report

    # An argument with "=" is a key, unless a folder has that name.
    folders = [word for word in words if Path(word).is_dir() or not ("=" in word or word.startswith("-"))]
    given, _ = pairs([word for word in words if word not in folders], "report", ("run.dir", "run.name", "out"))
    if len(folders) > 1:  # runs/sweep-* also matches the folder of the sweep itself
        folders = [folder for folder in folders if is_run(Path(folder)) or not runs_of_a_sweep(Path(folder))] or folders
    folders += [given["run.dir"]] if "run.dir" in given else []
    folders += [f"runs/{given['run.name']}"] if "run.name" in given else []
    if not folders:
        raise UserError(f"serried report needs a run folder: serried report RUN; {existing_runs(Path('runs'), is_run)}")
    runs = list({run.resolve(): run for run in (run_folder(folder, is_run) for folder in folders)}.values())
    usual = str(runs[0] / "report.html") if len(runs) == 1 else "report.html"
    with output_path(given.get("out", usual), replaces=True) as out:
        if out.is_dir():
            raise UserError(f"out={out} is a folder; give a file, e.g. out={out / 'report.html'}")
        try:
            write_report(runs, output_file(out) if "out" in given else out)
        except OSError as error:
            raise UserError(f"cannot write out={out}: {error.strerror}; use out=FILE in a folder that exists") from None
        written = f"{with_urls(str(out))}, {size(out.stat().st_size)}"
    what = f"{len(runs)} runs compared" if len(runs) > 1 else place_of(runs[0])
    return say(f"report     {what}: {written}; open it in a browser")


def send(words: list[str]) -> int:
    """Send the records of a run that has ended to its trackers again."""
    from serried.configs.compose import saved_trackers
    from serried.configs.requirements import LIVE, asked_for, missing_trackers
    from serried.records.run_folder import RunFolder
    from serried.records.trackers.tracker_processes import Trackers
    from serried.runtime.console import Console

    given, _ = pairs(words, "send", ("run.dir", "run.name"))
    run = find_run(given, "send", is_run)
    track = saved_trackers(run / "config.yaml")
    if not {*asked_for(track)} - {*LIVE}:
        raise UserError(f"the run in {run} has no trackers that records can be sent to: its config.yaml names none")
    missing, advice = missing_trackers(track)
    if missing:
        raise UserError(advice)
    if not (run / METRICS).is_file():
        raise UserError(f"the run in {run} has not started: it has no metrics.jsonl, so there is nothing to send")
    began_in = Path(str(read_if_there(run / "environment.json").get("working_directory", "")))
    claimed = RunFolder(run)  # a run in training already has tracker processes
    try:
        trackers = Trackers(run, track, Console(speaks=True, rank=0).say)
        has_sent = trackers.send(began_in if began_in.is_dir() else None)
        return EXIT_FINISHED if has_sent else EXIT_FAILED
    finally:
        claimed.close()
