"""What a checkpoint costs, compared with torch.distributed.checkpoint (DCP): the same state, processes and disk.

    python -m benchmarks.checkpoint                                       # fsdp on 2 processes, 200M parameters
    python -m benchmarks.checkpoint --layouts fsdp ddp --processes 1 2 4 --parameters 50M --turns 4

The state is a Llama-shaped model's weights and both AdamW moments, in fp32. serried and DCP, sync and async, take turns
in one set of processes; each file is fsynced (DCP's default too) and deleted before the next turn, and the first save
of each kind, which makes buffers and threads, is not counted. Between the call and the end of an async save the
processes wait; no training competes. Ours does more: it turns rows on every rank into whole tensors, checks that
they are finite, keeps a checksum of every file, and commits by a rename after fsyncing folders. DCP is given the
tensors themselves, without the time that its get_state_dict would take, and keeps its staging buffers between saves.

Stall: until the call returns, and training may change the tensors. Total: until the checkpoint is on the disk. Both of
the slowest rank. Memory: how far a fresh process's own memory (anonymous pages) grew beyond model and optimizer, over
two saves of one kind, or in loading; the largest of all ranks, sampled every 5 ms.
"""

import argparse
import gc
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from serried.configs.compose import compose
from serried.parallel.layout.local_shards import local
from serried.parallel.layout.mesh import resolve_layout
from serried.parallel.parallelize import parallelize
from serried.recipes.text.causal_lm import CausalLM
from serried.runtime.session import Session, open_session
from serried.trainer.checkpoint.checkpoints import CHECKPOINTS, FolderCheckpoints
from serried.trainer.checkpoint.save import Checkpointer
from serried.trainer.checkpoint.tensors import load_state, state_parts
from serried.trainer.optim.optimizer import build_optimizer
from testing.rank_pool import Cluster
from testing.runs import write_text

KINDS = ("serried sync", "DCP sync", "serried async", "DCP async")
_VOCABULARY = 32000
_HEAD = 64
_SAMPLE_SECONDS = 0.005

Save = Callable[[int], tuple[float, float, Path]]
"""Saves as step N; returns seconds until the call returned, seconds until all was done, and where it lies."""


# on every rank --------------------------------------------------------------------------------------------------------


class Subject:
    """A model, its optimizer, and the four ways to save them, on one rank."""

    def __init__(self, argv: list[str], session: Session) -> None:
        self._config, self._session = compose(argv), session
        config = self._config
        recipe = CausalLM(config)
        self._layout = resolve_layout(config.parallel, session.world_size)
        recipe.open_data(session.once_per_node(recipe.prepare))
        model = recipe.build_model()
        self._parallel = parallelize(
            model, recipe.parallel_plan(model), recipe.initial_std, seed=1, layout=self._layout,
            section=config.parallel, low_dtype=None, device=session.device,
        )  # fmt: skip
        self.module: nn.Module = self._parallel.module
        self.optimizer = build_optimizer(self.module.named_parameters(), config.optim)
        for state in self.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                local(state[key]).normal_().square_()  # memory that was never written is not there yet
        self._recipe, self._folder = recipe, config.run.dir / CHECKPOINTS
        if session.is_main:
            self._folder.mkdir(parents=True)

    def nbytes(self) -> int:
        """Of the whole state, as it lies on the disk."""
        return sum(prod(part.shards.shape) * part.local.element_size() for _, part in self._parts())

    def _parts(self) -> Any:
        return state_parts(self._parallel, self.optimizer, self._recipe.exported)

    def saver(self, kind: str) -> Save:
        """One of ``KINDS``. A collective."""
        whose, mode = kind.split()
        return self._ours(mode) if whose == "serried" else self._dcp(mode)

    def _ours(self, mode: str) -> Save:
        section = self._config.checkpoint.model_copy(update={"mode": mode})
        checkpointer = Checkpointer(
            FolderCheckpoints(self._folder, section, self._session), section, self._layout, self._session, self._parts,
            self._recipe.export_files,
        )  # fmt: skip

        def save(step: int) -> tuple[float, float, Path]:
            started = time.perf_counter()
            checkpointer.begin(step, {"step": step})
            checkpointer.finish()
            stall = time.perf_counter() - started
            saved = checkpointer.wait()
            assert saved is not None
            assert saved.problem is None, saved.problem
            return stall, time.perf_counter() - started, saved.path

        return save

    def tensors(self) -> dict[str, Any]:
        """The state as DCP takes it."""
        named = dict(self.module.named_parameters())
        return {"model": named, "optimizer": {name: dict(self.optimizer.state[p]) for name, p in named.items()}}

    def _dcp(self, mode: str) -> Save:
        group = self._session.background_group([range(self._session.world_size)])
        stager = DefaultStager(StagingOptions(False, False, False, False))
        tensors = self.tensors()

        def save(step: int) -> tuple[float, float, Path]:
            path = self._folder / f"dcp-{step}"
            started = time.perf_counter()
            writer = dcp.FileSystemWriter(path)
            if mode == "sync":
                dcp.save(tensors, storage_writer=writer, process_group=group)
                stall = total = time.perf_counter() - started
            else:
                future = dcp.async_save(tensors, storage_writer=writer, async_stager=stager, process_group=group)
                stall = time.perf_counter() - started
                future.result()  # type: ignore[union-attr]
                total = time.perf_counter() - started
            return stall, total, path

        return save


def race(argv: list[str], turns: int) -> dict[str, Any]:
    """Seconds of stall and in total for each kind and turn, of the slowest rank."""
    with _subject(argv) as (subject, session):
        savers = {kind: subject.saver(kind) for kind in KINDS}
        seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for turn in range(turns + 1):  # the first makes buffers and threads
            first = turn % len(KINDS)
            for number, kind in enumerate(KINDS[first:] + KINDS[:first]):
                _meet()
                stall, total, path = savers[kind](turn * len(KINDS) + number)
                _meet()
                if session.is_main:
                    shutil.rmtree(path)
                slowest = torch.tensor([stall, total])
                if session.world_size > 1:
                    dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if turn:
                    seconds[kind].append((slowest[0].item(), slowest[1].item()))
        return {"seconds": seconds, "bytes": subject.nbytes()}


def growth(argv: list[str], kind: str) -> dict[str, Any]:
    """Bytes that this rank's memory grows by in two saves of one kind; with ``load`` also in loading one."""
    with _subject(argv) as (subject, session):
        gc.collect()
        with _Highest() as saving:
            save = subject.saver(kind)
            for step in (1, 2):
                _meet()
                _, _, path = save(step)
                _meet()
                if step == 1 and session.is_main:
                    shutil.rmtree(path)
        return {"saving": saving.growth, "state": _anonymous(), "path": str(path)}


def load(argv: list[str], whose: str, path: str) -> dict[str, Any]:
    """Bytes that this rank's memory grows by in loading, and the seconds of the slowest rank."""
    with _subject(argv) as (subject, session):
        gc.collect()
        _meet()
        with _Highest() as loading:
            started = time.perf_counter()
            if whose == "serried":
                load_state(Path(path), subject._parallel, subject.optimizer, subject._recipe.exported)
            else:
                dcp.load(subject.tensors(), checkpoint_id=path)
            _meet()
            seconds = time.perf_counter() - started
        _meet()
        if session.is_main:
            shutil.rmtree(path)
        return {"loading": loading.growth, "seconds": seconds}


@contextmanager
def _subject(argv: list[str]) -> Iterator[tuple[Subject, Session]]:
    warnings.filterwarnings("ignore", module="torch.distributed")
    with open_session(compose(argv).launch) as session:
        yield Subject(argv, session), session


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


class _Highest:
    """How far the process's own memory grows meanwhile."""

    growth = 0

    def __enter__(self) -> "_Highest":
        self._before, self._end = _anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(_SAMPLE_SECONDS):
            self.growth = max(self.growth, _anonymous() - self._before)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def _anonymous() -> int:
    """Bytes of this process that no file backs: what the system cannot take back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


# the tables -----------------------------------------------------------------------------------------------------------


def shape(parameters: float) -> list[str]:
    """A Llama-shaped model of at least so many parameters, or a few more."""
    dim = max(2 * _HEAD, round(1024 * (parameters / 200e6) ** 0.5 / 128) * 128)
    hidden = round(dim * 8 / 3 / 64) * 64
    a_layer = dim * (3 * dim + 3 * hidden)  # half as many key and value heads as heads
    layers = max(1, -(-int(parameters - 2 * _VOCABULARY * dim) // a_layer))
    return [
        f"model.dim={dim}", f"model.layers={layers}", f"model.heads={dim // _HEAD}",
        f"model.kv_heads={dim // _HEAD // 2}", f"model.hidden_dim={hidden}", f"model.vocab_size={_VOCABULARY}",
        "model.tie_embeddings=false",
    ]  # fmt: skip


def _timing_rows(answers: list[Any]) -> list[str]:
    """Lines of the first table, and the ratios turn by turn."""
    seconds, nbytes = answers[0].value["seconds"], answers[0].value["bytes"]
    rows = []
    for kind in KINDS:
        stalls, totals = zip(*seconds[kind], strict=True)
        rows.append(
            f"{kind} | {_spread(stalls)} | {_spread(totals)} | {nbytes / statistics.median(totals) / 2**20:.0f} |"
        )
    for mode, columns in (("async", (0, 1)), ("sync", (1,))):
        pairs = list(zip(seconds[f"serried {mode}"], seconds[f"DCP {mode}"], strict=True))
        stall, total = (_spread([a[i] / b[i] for a, b in pairs]) if i in columns else "" for i in (0, 1))
        rows.append(f"serried / DCP, {mode} | {stall} | {total} | |")
    return rows


def _spread(values: Any) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _mib(answers: list[Any], key: str) -> str:
    return f"{max(answer.value[key] for answer in answers) / 2**20:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=("ddp", "fsdp"), default=["fsdp"])
    parser.add_argument("--processes", nargs="+", type=int, default=[2])
    parser.add_argument("--parameters", type=_number, default=200e6, help="such as 200M (the default)")
    parser.add_argument("--turns", type=int, default=8, help="saves of each kind that count; 0: memory alone")
    parser.add_argument("--no-memory", action="store_true", help="skip the memory, which starts many processes")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serried-checkpoint-", dir=options.folder) as temporary:
        write_text(Path(temporary) / "text")
        for layout in options.layouts:
            for processes in options.processes:
                _measure(layout, processes, Path(temporary), options)


def _measure(layout: str, processes: int, folder: Path, options: argparse.Namespace) -> None:
    runs = iter(range(100))

    def ask(function: str, **arguments: Any) -> list[Any]:
        argv = [
            "data=text", f"data.path={folder}/text", f"data.cache_dir={folder}/cache", "data.tokenizer=bytes",
            f"run.dir={folder}/{layout}-{processes}-{next(runs)}", *shape(options.parameters),
            f"parallel={layout if processes > 1 else 'single'}", "launch.device=cpu",
        ]  # fmt: skip
        cluster = Cluster(processes)  # fresh ones: what one kind has freed, another would use
        try:
            return cluster.run(
                processes, f"benchmarks.checkpoint:{function}", timeout_seconds=3600, argv=argv, **arguments
            )
        finally:
            cluster.stop()

    name = f"{layout if processes > 1 else 'single'} x{processes}"
    if options.turns:
        answers = ask("race", turns=options.turns)
        gigabytes = answers[0].value["bytes"] / 2**30
        print(f"\n{name}, {gigabytes:.2f} GiB, {options.turns} turns: median (quartiles)\n")
        print("| | stall, s | total, s | MiB/s |\n| --- | --- | --- | --- |")
        print("\n".join(f"| {row}" for row in _timing_rows(answers)), flush=True)
    if not options.no_memory:
        print(f"\n{name}: MiB that the memory of a rank grows by, at most\n")
        print("| | saving | loading | loading, s |\n| --- | --- | --- | --- |")
        for kind in KINDS:
            saved = ask("growth", kind=kind)
            row = f"{kind} | {_mib(saved, 'saving')}"
            if kind.endswith("sync") and not kind.endswith("async"):
                loaded = ask("load", whose=kind.split()[0], path=saved[0].value["path"])
                row += f" | {_mib(loaded, 'loading')} | {loaded[0].value['seconds']:.1f} |"
            else:
                shutil.rmtree(saved[0].value["path"])
                row += " | | |"
            print(f"| {row}", flush=True)


def _number(text: str) -> float:
    units = {"k": 1e3, "M": 1e6, "B": 1e9}
    return float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)


if __name__ == "__main__":
    main()
