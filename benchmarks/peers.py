"""This project beside a hand-written loop, HF Trainer, accelerate and Lightning: the same module, the same tokens.

    pip install -e .[bench]
    python -m benchmarks.peers                          # 2 processes, fp32
    python -m benchmarks.peers --precision bf16         # eager and with compiled blocks
    python -m benchmarks.peers --shape tiny             # the drivers alone: almost no compute, 1 process
    python -m benchmarks.peers --cold 3                 # start to first step, in processes of their own

All live side by side in the same processes and step in turn, so that a machine that slows down slows all. HF Trainer
and Lightning have loops of their own: each runs in a thread that waits for its turn after every step of the optimizer.
All get the project's module with its chunked loss; in bf16 attention is SDPA's for the others. Logged every ten steps,
clipped at norm 1, AdamW fused; batches of the others lie in memory. Lightning and accelerate have no FSDP2 on a CPU.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MODEL = [
    "model.dim=256", "model.layers=6", "model.heads=8", "model.kv_heads=4", "model.hidden_dim=768",
    "model.vocab_size=4096", "model.tie_embeddings=false", "data.sequence_length=256", "trainer.global_batch=16",
    "trainer.micro_batch=4",
]  # fmt: skip
TINY = [
    "model.dim=16", "model.layers=6", "model.heads=2", "model.kv_heads=1", "model.hidden_dim=16",
    "data.sequence_length=16", "trainer.global_batch=8", "trainer.micro_batch=2",
]  # fmt: skip
SHAPES = {"work": (MODEL, 2, 1), "tiny": (TINY, 1, 20)}
"""Keys, processes, and steps in a turn."""
WARM_UP = 2
"""Turns that are not counted: caches and allocators fill, and blocks are compiled."""
PEERS = ("HF Trainer", "accelerate", "Lightning")
BASE = "hand-written, ddp"
LEARNING_RATE = 3e-4


class Job:
    """What a peer trains, and how."""

    def __init__(self, model: nn.Module, samples: list[tuple[Tensor, Tensor]], config: Any, accumulation: int) -> None:
        self.model, self.samples, self.accumulation = model, samples, accumulation
        self.micro_batch = config.trainer.micro_batch
        self.is_low = config.precision.name == "bf16"
        self.seed = config.trainer.seed


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """So many that no peer begins another epoch."""

    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, labels = self._samples[index % len(self._samples)]
        return {"input_ids": tokens, "labels": labels}


class WithLoss(nn.Module):
    """The module in the form of transformers' models: their Trainer may name the targets of all ranks and passes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        count = labels.numel() if num_items_in_batch is None else num_items_in_batch
        return {"loss": self.model(input_ids, labels) / count}


def in_turn(train: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Yield after each step of ``train``, which calls what it is given after each, in a thread of its own."""
    go, done, errors = threading.Semaphore(0), threading.Semaphore(0), list[BaseException]()

    def after_step() -> None:
        done.release()
        go.acquire()

    def run() -> None:
        go.acquire()
        try:
            train(after_step)
        except BaseException as error:
            errors.append(error)
            done.release()

    threading.Thread(target=run, daemon=True).start()
    while True:
        go.release()
        done.acquire()
        if errors:
            raise errors[0]
        yield


def hugging_face(job: Job) -> Iterator[None]:
    """HF Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class AfterStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            after()

    after: Callable[[], None] = lambda: None  # noqa: E731
    folder = tempfile.mkdtemp(prefix="serried-peers-")
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=job.micro_batch, use_cpu=True, bf16=job.is_low,
        max_steps=100_000,
        gradient_accumulation_steps=job.accumulation, learning_rate=LEARNING_RATE, lr_scheduler_type="cosine",
        optim="adamw_torch_fused", weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0, logging_steps=10, report_to=[],
        save_strategy="no", disable_tqdm=True,
        ddp_backend="gloo" if "RANK" in os.environ else None, ddp_find_unused_parameters=False, seed=job.seed,
    )  # fmt: skip
    trainer = Trainer(WithLoss(job.model), arguments, train_dataset=Samples(job.samples), callbacks=[AfterStep()])
    trainer.log = lambda *_, **__: None  # type: ignore[method-assign] # of numbers: computed, not printed

    def train(after_step: Callable[[], None]) -> None:
        nonlocal after
        after = after_step
        trainer.train()

    return in_turn(train)


def accelerated(job: Job) -> Iterator[None]:
    """A loop with accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if job.is_low else "no")
    optimizer = _adamw(job.model)
    loader = torch.utils.data.DataLoader(Samples(job.samples), batch_size=job.micro_batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100_000)
    model, optimizer, loader, schedule = accelerator.prepare(job.model, optimizer, loader, schedule)
    batches, step = iter(loader), 0
    while True:
        step, total = step + 1, torch.zeros(())
        for number in range(job.accumulation):
            batch, is_last = next(batches), number + 1 == job.accumulation
            with nullcontext() if is_last else accelerator.no_sync(model):
                loss = model(batch["input_ids"], batch["labels"]) / batch["labels"].numel() / job.accumulation
                accelerator.backward(loss)
            total += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.reduce(total, "mean").item()
        yield


def lightning(job: Job) -> Iterator[None]:
    """Lightning's Trainer."""
    import warnings

    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    warnings.filterwarnings("ignore", module="lightning")
    after: Callable[[], None] = lambda: None  # noqa: E731

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.model(batch["input_ids"], batch["labels"]) / batch["labels"].numel()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = _adamw(self, fused=not job.is_low)  # refused with clipping under autocast
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100_000)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_batch_end(self, _: Any, __: Any, index: int) -> None:
            if (index + 1) % job.accumulation == 0:
                after()

    world = dist.get_world_size() if dist.is_initialized() else 1
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, precision="bf16-mixed" if job.is_low else "32-true", max_steps=100_000,
        strategy=DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True) if world > 1 else "auto",
        accumulate_grad_batches=job.accumulation, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=10,
    )  # fmt: skip

    def train(after_step: Callable[[], None]) -> None:
        nonlocal after
        after = after_step
        trainer.fit(Module(), torch.utils.data.DataLoader(Samples(job.samples), batch_size=job.micro_batch))

    return in_turn(train)


STARTS = {"HF Trainer": hugging_face, "accelerate": accelerated, "Lightning": lightning}


def _adamw(model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)


def race(
    argv: list[str], budget: float, steps_in_a_turn: int, compiles: bool, layouts: list[str]
) -> dict[str, list[tuple[float, float]]]:
    """Seconds a step of each turn, and of processor time, by name; turns for ``budget`` seconds. Runs on every rank."""
    from benchmarks.step_overhead import _built, _take, hand_written
    from serried.configs.compose import compose
    from serried.parallel.layout.mesh import gradient_accumulation, resolve_layout
    from serried.recipes.text.causal_lm import CausalLM
    from serried.runtime.session import open_session

    base, trainers, racers = compose(argv), [], dict[str, Iterator[Any]]()
    with open_session(base.launch) as session:
        accumulation = gradient_accumulation(base.trainer, resolve_layout(base.parallel, session.world_size))

        def configured(name: str, *more: str) -> Any:
            return compose([*argv, *more, f"run.dir={base.run.dir}-{name.replace(' ', '-').replace(',', '')}"])

        for compiled in (False, True) if compiles else (False,):
            end = ", compiled" if compiled else ""
            for layout in layouts:
                parallel, name = f"parallel={layout}", f"serried, {layout}{end}"
                config = configured(name, parallel, f"trainer.compile={str(compiled).lower()}")
                trainers.append(_built(config, CausalLM(config), session))
                racers[name] = trainers[-1].steps()
                plain = configured("hand-written", parallel, "model.attention=sdpa")
                recipe = CausalLM(plain)
                recipe.open_data(recipe.prepare(lambda _: None))
                racers[f"hand-written, {layout}{end}"] = hand_written(plain, recipe, session.device, compiles=compiled)
            samples = [
                (tokens, targets)
                for step in _take(plain, recipe, 8)
                for batch in step
                for tokens, targets in zip(batch.tokens, batch.targets, strict=True)
            ]
            for name in PEERS if layouts != ["fsdp"] else ():
                model: Any = recipe.build_model().to_empty(device=session.device)
                torch.manual_seed(base.trainer.seed)
                for parameter in model.parameters():
                    nn.init.normal_(parameter, std=0.02)
                if compiled:
                    for block in model.layers:
                        block.compile(dynamic=False)
                racers[name + end] = STARTS[name](Job(model, samples, plain, accumulation))
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in racers}
        names, began, is_over = list(racers), time.perf_counter(), torch.zeros(())
        while not is_over:
            turn = len(seconds[names[0]])
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if session.world_size > 1:
                    dist.barrier()
                started, used = time.perf_counter(), time.process_time()
                for _ in range(steps_in_a_turn):
                    next(racers[name])
                took, used = time.perf_counter() - started, time.process_time() - used
                seconds[name].append((took / steps_in_a_turn, used / steps_in_a_turn))
            if turn < WARM_UP:
                began = time.perf_counter()
            is_over.fill_(turn >= WARM_UP + 2 and time.perf_counter() - began > budget)
            if session.world_size > 1:
                dist.broadcast(is_over, 0)
        for trainer in trainers:
            trainer.saver.checkpointer.close()
        return {name: values[WARM_UP:] for name, values in seconds.items()}


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Return the speed of ``ours`` against ``theirs``, of turns: median (quartiles)."""
    low, middle, high = statistics.quantiles((t / o for o, t in zip(ours, theirs, strict=True)), n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def show(measured: dict[str, list[tuple[float, float]]]) -> None:
    """Print the table, and how the project stands against the best of the others."""
    found = {name: [took for took, _ in turns] for name, turns in measured.items()}
    used = {name: [cores for _, cores in turns] for name, turns in measured.items()}
    base = next(name for name in found if name.startswith("hand-written"))
    print(f"{len(found[base])} turns; load {os.getloadavg()[0]:.0f}\n")
    print(f"| | ms/step | speed relative to {base}: median (quartiles) | same, in processor time |")
    print("| --- | --- | --- | --- |")
    for name, values in found.items():
        milliseconds = 1000 * statistics.median(values)
        print(f"| {name} | {milliseconds:.1f} | {ratio(values, found[base])} | {ratio(used[name], used[base])} |")

    def against(ours: str, theirs: str) -> str:
        wall, cores = ratio(found[ours], found[theirs]), ratio(used[ours], used[theirs])
        return f"- {ours} against {theirs}: {wall}; of processor time {cores}"

    def best(names: list[str]) -> str:
        ratios = {name: [b / a for a, b in zip(used[name], used[base], strict=True)] for name in names}
        return max(names, key=lambda name: statistics.median(ratios[name]))

    ours = [name for name in found if name.startswith("serried")]
    pairs = [(best(ours), best([name for name in found if name not in ours]))]
    pairs += [(name, name.replace("serried", "hand-written")) for name in ours]
    print()
    for each in dict.fromkeys(pairs):
        print(against(*each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="work")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--seconds", type=float, default=180.0, help="of turns, after those that warm up")
    parser.add_argument("--layouts", nargs="+", choices=["ddp", "fsdp"], default=["ddp", "fsdp"])
    parser.add_argument("--cold", type=int, default=0, help="rounds of start to first step instead")
    parser.add_argument("--first-step", choices=["hand-written", *PEERS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.first_step:
        first_step(options.first_step)
        return
    if options.cold:
        cold(options.cold)
        return
    from testing.rank_pool import Cluster
    from testing.runs import write_text

    keys, processes, steps = SHAPES[options.shape]
    with tempfile.TemporaryDirectory(prefix="serried-peers-") as folder:
        text = write_text(Path(folder) / "text")
        argv = [
            "data=text", f"data.path={text}", f"data.cache_dir={folder}/cache", f"run.dir={folder}/run", *keys,
            "trainer.steps=100k", "trainer.eval_every=0", "trainer.log_every=10", "checkpoint.every=0",
            f"parallel={'ddp' if processes > 1 else 'single'}", f"precision={options.precision}",
        ]  # fmt: skip
        cluster = Cluster(processes)
        found = cluster.run(
            processes, "benchmarks.peers:race", timeout_seconds=3600, argv=argv, budget=options.seconds,
            layouts=options.layouts if processes > 1 else ["single"], steps_in_a_turn=steps,
            compiles=options.precision == "bf16" and options.shape == "work",
        )[0].value  # fmt: skip
        cluster.stop()
    show(found)


def first_step(name: str) -> None:
    """Build one of the others under torchrun, and print when its first step is done."""
    from serried.recipes.models.families.llama import Transformer
    from serried.recipes.models.families.llama_config import LlamaSection

    section = LlamaSection(
        name="work", dim=256, layers=6, heads=8, kv_heads=4, hidden_dim=768, vocab_size=4096, attention="sdpa"
    )
    model = Transformer(section, 4096)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(4096, (64, 257))
    samples = [(each[:-1], each[1:]) for each in tokens]

    class Trained:
        micro_batch, seed = 4, 0

    class Config:
        trainer = Trained
        precision = type("Precision", (), {"name": "fp32"})

    job = Job(model, samples, Config, 2)
    if name == "hand-written":
        dist.init_process_group("gloo")
        replicas = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = _adamw(replicas)
        batch = [torch.stack(each[:4]) for each in zip(*samples, strict=True)]
        for is_last in (False, True):
            with nullcontext() if is_last else replicas.no_sync():
                (replicas(*batch) / batch[1].numel() / 2).backward()
        nn.utils.clip_grad_norm_(replicas.parameters(), 1.0)
        optimizer.step()
    else:
        next(STARTS[name](job))
    print("first step", flush=True)
    os._exit(0)


def cold(rounds: int) -> None:
    """Print seconds from the start of the command to the first step, of processes of their own, in turns."""
    from testing.runs import write_text

    found: dict[str, list[float]] = {name: [] for name in ("serried", "hand-written", *PEERS)}
    with tempfile.TemporaryDirectory(prefix="serried-peers-") as folder:
        text = write_text(Path(folder) / "text")
        for turn in range(rounds + 1):  # the first warms up the files
            for name in found:
                started = time.perf_counter()
                if name == "serried":
                    run = Path(folder) / f"run{turn}"
                    command = [
                        sys.executable, "train.py", "launch=local", "launch.processes=2", "data=text",
                        f"data.path={text}", f"data.cache_dir={folder}/cache", f"run.dir={run}", *MODEL,
                        "trainer.steps=2", "trainer.log_every=1", "trainer.eval_every=0", "trainer.sample_tokens=0",
                    ]  # fmt: skip
                    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                    lines = run / "metrics.jsonl"
                    while process.poll() is None and not (lines.exists() and '"event": "step"' in lines.read_text()):
                        time.sleep(0.02)
                    took = time.perf_counter() - started
                else:
                    command = [
                        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m",
                        "benchmarks.peers", "--first-step", name,
                    ]  # fmt: skip
                    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                    assert process.stdout is not None
                    said = next((line for line in process.stdout if line.startswith("first step")), "")
                    assert said, f"{name} made no step"
                    took = time.perf_counter() - started
                process.communicate()
                if turn:
                    found[name].append(took)
    print(
        "| | start to first step, s: median (lowest to highest) | serried's time relative to it |\n| --- | --- | --- |"
    )
    for name, values in found.items():
        share = statistics.median(found["serried"]) / statistics.median(values)
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"| {name} | {statistics.median(values):.1f} ({spread}) | {share:.2f} |")


if __name__ == "__main__":
    main()
