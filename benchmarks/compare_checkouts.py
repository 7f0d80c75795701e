"""Train the same runs with two checkouts and compare them bit for bit.

    python -m benchmarks.compare_checkouts OLD NEW                  # two folders, such as git worktrees
    python -m benchmarks.compare_checkouts OLD NEW --only lora fp16

Each run has six steps, on CPU with Gloo and one thread per rank, and is started as ``train.py`` of the checkout, with
the checkout's ``.venv`` if it has one. The comparison covers the losses and norms in ``metrics.jsonl``, every tensor
file of the checkpoints, and ``state.json``. For some layouts, NEW also resumes a run that OLD stopped after step 3. An
older checkout is given renamed keys under their old names. Exits with 1 if anything differs.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from serried.configs.plain_data import flatten
from serried.configs.renamed_keys import RENAMED, with_new_names
from testing.runs import write_text

FSDP, TWO_REPLICAS = "parallel=fsdp", ("parallel=hsdp", "parallel.replicate=2")
PIPELINE, RING = (FSDP, "parallel.pipeline=2", "trainer.micro_batch=3"), "parallel.context_method=ring"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ("parallel=single",)),
    "single, accumulation": (1, ("parallel=single", "trainer.micro_batch=2")),
    "ddp x2": (2, ("parallel=ddp",)),
    "ddp x2, accumulation": (2, ("parallel=ddp", "trainer.micro_batch=2")),
    "fsdp x2": (2, (FSDP,)),
    "fsdp x3": (3, (FSDP, "trainer.micro_batch=4")),
    "hsdp 2x2": (4, (*TWO_REPLICAS, "trainer.micro_batch=3")),
    "tensor x2": (2, (FSDP, "parallel.tensor=2")),
    "context x2": (2, (FSDP, "parallel.context=2")),
    "context x2, ring": (2, (FSDP, "parallel.context=2", RING)),
    "pipeline x2, 1f1b": (2, PIPELINE),
    "pipeline x2, zbv": (2, (*PIPELINE, "parallel.pipeline_schedule=zbv")),
    "expert x2": (2, (FSDP, "model=moe_tiny", "model.expert_hidden_dim=24", "parallel.expert=2")),
    "fp16": (2, (FSDP, "precision=fp16", "precision.initial_scale=256", "precision.growth_interval=2")),
    "bf16, muon": (2, (FSDP, "precision=bf16", "optim=muon")),
    "ema": (2, ("parallel=ddp", "trainer.ema_decay=0.9")),
    "lora": (2, (FSDP, "adapter=lora", "adapter.rank=4", "model.path=base")),
}
RESUMED = ("single", "fsdp x2", "hsdp 2x2", "tensor x2", "pipeline x2, 1f1b", "expert x2", "fp16", "ema", "lora")
"""Layouts of runs that OLD starts and NEW finishes."""
RUN = (
    "recipe=tiny", "data=text", "data.path=text", "data.cache_dir=cache", "data.sequence_length=32", "model.dim=32",
    "model.layers=4", "model.heads=4", "model.kv_heads=2", "model.hidden_dim=48", "model.tie_embeddings=false",
    "trainer.steps=6", "trainer.global_batch=12", "trainer.micro_batch=6", "trainer.log_every=1",
    "trainer.eval_every=3", "trainer.eval_batches=2", "trainer.sample_tokens=0", "trainer.deterministic=true",
    "schedule.warmup_steps=2", "checkpoint.every=3", "checkpoint.keep=2", "launch=local", "launch.device=cpu",
)  # fmt: skip
NUMBERS = ("step", "set", "loss", "grad_norm", "lr", "samples", "tokens", "skipped", "scale")
NOT_COMPARED = ("tracker_run_id", "base.path")
"""Values in ``state.json`` that differ between any two runs, or name a folder."""


def train(checkout: Path, folder: Path, layout: str, *more: str) -> Path:
    """Train in ``folder`` with the code of ``checkout``. Return the run folder."""
    processes, keys = LAYOUTS[layout]
    name = re.sub(r"\W+", "-", layout)
    words = (*RUN, *keys, *more, f"launch.processes={processes}", f"run.name={name}")
    given = dict(word.split("=", 1) for word in words)
    if not (checkout / "configs/renamed_keys.py").exists():
        old_names = {new: old for old, new in RENAMED.items()}
        given = {old_names.get(key, key): value for key, value in given.items()}
    python = checkout / ".venv/bin/python"
    argv = [f"{key}={value}" for key, value in given.items()]
    command = [python if python.exists() else sys.executable, checkout / "train.py", *argv]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=one_thread, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 75):
        sys.exit(f"{checkout}, {layout}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return folder / "runs" / name


def numbers(run: Path) -> list[str]:
    """Return the numbers of steps and evaluations in ``metrics.jsonl``, as text: equal text means equal bits."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [json.dumps([line.get(key) for key in NUMBERS]) for line in lines if line["event"] in ("step", "eval")]


def tensor_files(run: Path) -> dict[str, bytes]:
    """Return the content of the tensor files of all checkpoints."""
    files = sorted((run / "checkpoints").rglob("*.safetensors"))
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


def state(run: Path) -> dict[str, str]:
    """Return the values in ``state.json`` of the last checkpoint by their path; renamed keys have their new names."""
    content = json.loads(max((run / "checkpoints").glob("*/state.json")).read_text())
    content["config"] = with_new_names(content["config"])
    return {path: json.dumps(value) for path, value in flatten(content).items() if path not in NOT_COMPARED}


def compare(before: Path, after: Path) -> tuple[str, bool]:
    """Return the figures of two runs, and whether they are equal. New values in ``state.json`` are only counted."""
    (ours, theirs), (files, other_files) = map(numbers, (before, after)), map(tensor_files, (before, after))
    values, other_values = state(before), state(after)
    lines = sum(a == b for a, b in zip(ours, theirs, strict=False))
    same_files = sum(other_files.get(name) == content for name, content in files.items())
    different = [path for path, value in values.items() if other_values.get(path) != value]
    added = other_values.keys() - values.keys()
    equal = ours == theirs and bool(files) and files == other_files and not different
    figures = (
        f"{lines} of {max(len(ours), len(theirs))} lines, {same_files} of {len(files)} tensor files, "
        f"{len(values) - len(different)} of {len(values)} values of state.json ({len(added)} more are new)"
    )
    return f"{figures}; different: {', '.join(different[:5])}" if different else figures, equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=[*LAYOUTS], metavar="LAYOUT")
    arguments = parser.parse_args()
    old, new = (folder.resolve() for folder in (arguments.old, arguments.new))
    differences = 0
    with tempfile.TemporaryDirectory(prefix="serried-checkouts-") as temporary:
        folders = [Path(temporary) / name for name in ("old", "new", "resumed")]
        for folder in folders:
            write_text(folder / "text")
        base = train(old, folders[0], "single") / "checkpoints/step-00000006"
        for folder in folders:
            shutil.copytree(base, folder / "base")
        shutil.rmtree(folders[0] / "runs")
        for layout in arguments.only:
            before, after = train(old, folders[0], layout), train(new, folders[1], layout)
            pairs = [(layout, before, after)]
            if layout in RESUMED:
                train(old, folders[2], layout, "trainer.stop_at=3")
                pairs.append((f"{layout}, resumed", before, train(new, folders[2], layout)))
            for name, one, other in pairs:
                figures, equal = compare(one, other)
                differences += not equal
                print(f"{'equal    ' if equal else 'DIFFERENT'} {name}: {figures}", flush=True)
                shutil.rmtree(other)
            shutil.rmtree(before)
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
