"""``serried preflight``, ``serried submit`` and ``serried status``."""

import json
from pathlib import Path

from serried.configs.errors import EXIT_FINISHED, UserError
from serried.configs.schema.sections import RunConfig
from serried.configs.subcommand_arguments import run_key
from serried.runtime.process import is_started, say
from serried.saved import is_run, similar_runs


def preflight(words: list[str]) -> int:
    """Test one node, or all nodes of a run under torchrun or in a Slurm job.

    torchrun --nnodes=2 --nproc_per_node=8 ... -m serried preflight run.dir=RUN
    serried preflight launch=slurm launch.nodes=2 ... run.dir=RUN    submits a job, waits for it and prints its table
    """
    from serried.configs.compose import compose
    from serried.launch.slurm.batch_script import measure_by_job

    config = compose(words)
    if config.launch.name == "slurm" and not is_started():
        return measure_by_job("preflight", words, config)
    if (config.launch.nodes or 1) > 1 and not is_started():
        raise UserError(
            f"launch.nodes={config.launch.nodes}, but this is one process on one node; use launch=slurm to test the "
            "nodes in a job, start torchrun on each node, or leave launch.nodes out to test only this node"
        )
    return _preflight_here(config)


def _preflight_here(config: RunConfig) -> int:
    from serried.launch.preflight import preflight as examine
    from serried.trainer.metrics.peak_flops import PEAK_FLOPS

    peaks = {name: peaks["bf16"] for name, peaks in PEAK_FLOPS.items() if "bf16" in peaks}  # preflight measures in bf16
    url = config.run.url
    needed_bytes = checkpoints_bytes(config) if url is None else None
    return examine(config.launch, config.run.dir, needed_bytes, peaks, config.slurm.exclude, url)


def checkpoints_bytes(config: RunConfig) -> int:
    """Return the size in bytes of the checkpoints that a run keeps, plus one being written."""
    from serried.recipes.text.causal_lm import CausalLM
    from serried.trainer.checkpoint.checkpoint_size import saved_bytes
    from serried.trainer.model import build_model

    built = build_model(config, CausalLM(config))
    return (config.checkpoint.keep + 1) * saved_bytes(config, built.module, built.plan)


def submit(words: list[str]) -> int:
    """Submit a run to Slurm; same as python train.py launch=slurm. Also with launch=kubernetes and launch=skypilot."""
    from serried.program import main as train

    return train([*words, *([] if any(word.startswith("launch=") for word in words) else ["launch=slurm"])])


def _runs_at(folder: Path) -> list[Path]:
    """Return ``folder`` if it is of a run or a sweep, else the runs and sweeps in it."""
    from serried.launch.show_status import is_listed, runs_in

    return [folder] if is_run(folder) or is_listed(folder) else runs_in(folder)


def status(words: list[str]) -> int:
    """Show the state of a run or sweep, of its job and of its goodput; by default, of all runs in runs/.

    RUN          a run, a folder of runs, or s3://BUCKET/PATH of a run or of a folder of runs; several are allowed
    --json       print one JSON object per run instead
    """
    from serried.configs.compose import compose
    from serried.launch.show_status import describe_run, run_values
    from serried.launch.sweep.train_sweep import update_summary
    from serried.records.report import write_report

    is_json = "--json" in words
    words = [word for word in words if word != "--json"]
    words = [f"{run_key(word)}={word}" if "=" not in word and run_key(word) else word for word in words]
    given = [Path(word.partition("=")[2]) for word in words if word.startswith("run.dir=")]
    if words and len(given) < 2:
        run_dir = compose(words).run.dir
        if not run_dir.is_dir():
            raise UserError(f"there is no run in {run_dir}; {similar_runs(run_dir, is_run)}")
        given = [run_dir]
    folders = [run for folder in given or [Path("runs")] for run in _runs_at(folder)] or given
    if not folders:
        raise UserError("there is no run in runs; use run.dir=FOLDER")
    if len(folders) == 1 and given:
        say(json.dumps(run_values(folders[0])) if is_json else describe_run(folders[0]))
        update_summary(folders[0], write_report)
        return EXIT_FINISHED
    if is_json:
        return say("\n".join(json.dumps(run_values(folder)) for folder in folders))
    return say("\n\n".join(map(describe_run, folders)))
