"""What data costs: reading, preparing, waiting for it, resuming far into it, and the memory of a large index.

    python -m benchmarks.data                              # all of it, a few minutes
    python -m benchmarks.data --parts reading resuming     # some

Preparation is measured against the tokenizer alone on the same text in memory, turn by turn; resuming at sample 10^9
against sample 0, turn by turn; waiting in the ``tiny`` run as its own records tell it. The trillion tokens are sparse
files: their index is real, their content is zeros.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from serried.configs.schema.data import data_section
from serried.recipes.data.prepared.prepare import Prepared, prepare
from serried.recipes.data.prepared.token_shards import Shard
from serried.recipes.data.prepared.tokenize import TokenCounts
from serried.recipes.data.samples.token_dataset import TokenDataset, collate
from serried.recipes.data.tokenizers.hugging_face_tokenizer import find_tokenizer, train_tokenizer
from serried.recipes.data.tokenizers.tokenizer import BytesTokenizer
from serried.trainer.data.loader import BatchLoader, Reader
from serried.trainer.data.sampler import BatchShare, SampleOrder
from testing.rank_pool import ROOT

SEQUENCE = 2048
FAR = 10**9
_TRILLION = 10**12


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median (quartiles)."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def reading(folder: Path, turns: int) -> None:
    """Sequences a second that one thread reads and collates at random places, and two together."""
    tokens = 2**28  # 512 MiB as uint16
    path = folder / "train.bin"
    np.random.default_rng(1).integers(0, 2**15, tokens, np.uint16).tofile(path)
    path.with_suffix(".starts").write_bytes(bytes(8))
    dataset = TokenDataset(_opened([path]), "train", SEQUENCE)
    batches = SampleOrder(len(dataset), 1)(np.arange(4096)).reshape(-1, 8)

    def read(ids: np.ndarray) -> None:
        collate([dataset[index] for index in ids.tolist()], ids)

    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(turns + 1):
        for threads, seen in rates.items():
            with ThreadPoolExecutor(threads) as pool:
                started = time.perf_counter()
                list(pool.map(read, batches))
                seen.append(batches.size / (time.perf_counter() - started))
    for threads, seen in rates.items():
        print(f"reading: {threads} thread(s), sequences of {SEQUENCE} tokens a second: {spread(seen[1:], 0)}")


def preparing(folder: Path, turns: int) -> None:
    """Preparation of JSON lines with a byte-pair encoding, and the tokenizer alone on the same text in memory."""
    texts = [path.read_text(errors="replace") for path in sorted(Path(json.__file__).parent.parent.glob("*.py"))]
    documents = [text[start : start + 4000] for text in texts for start in range(0, len(text), 4000)] * 4
    path, tokenizer_path = folder / "text.jsonl", folder / "tokenizer.json"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    learned = train_tokenizer(iter(documents[:300]), 4096)
    tokenizer_path.write_text(learned.spec()["files"]["tokenizer.json"])
    tokenizer = find_tokenizer(str(tokenizer_path))
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    rates: dict[str, list[float]] = {"the tokenizer alone": [], "prepare": []}
    for turn in range(turns + 1):
        started = time.perf_counter()
        tokenizer.encode_many(documents)
        rates["the tokenizer alone"].append(megabytes / (time.perf_counter() - started))
        section = data_section(
            name="text", path=str(path), tokenizer=str(tokenizer_path), sequence_length=256,
            cache_dir=folder / f"cache-{turn}",
        )  # fmt: skip
        started = time.perf_counter()
        prepare(section)
        rates["prepare"].append(megabytes / (time.perf_counter() - started))
    for name, seen in rates.items():
        print(f"preparing: {name}, MB/s of {megabytes:.0f} MB: {spread(seen[1:], 2)}")
    ratios = [ours / bare for bare, ours in zip(*(seen[1:] for seen in rates.values()), strict=True)]
    print(f"preparing: prepare / the tokenizer alone {spread(ratios)}")


def waiting(folder: Path, turns: int) -> None:
    """Share of a step that the ``tiny`` run spends waiting for data, by its own records, without the first interval."""
    del turns
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py",
        "trainer.steps=100", f"run.dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}",
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=1200)
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if line["event"] == "step"][2:]
    shares = [100 * line["data_seconds"] / line["step_seconds"] for line in steps]
    print(f"waiting: percent of a step of tiny, {len(shares)} intervals: {spread(shares)}, at most {max(shares):.3f}")


def resuming(folder: Path, turns: int) -> None:
    """From the making of the order to the first batch, at the first sample and far into the data."""
    dataset = TokenDataset(_opened(_sparse(folder, shards=1000)), "train", SEQUENCE)

    def first_batch(index: int) -> float:
        started = time.perf_counter()
        loader = BatchLoader(
            Reader(dataset, collate), SampleOrder(len(dataset), 1), BatchShare(8, global_batch=8), steps=range(1),
            workers=0, pin_memory=False, first_index=index,
        )  # fmt: skip
        next(loader)
        return time.perf_counter() - started

    seconds: dict[int, list[float]] = {0: [], FAR: []}
    for _ in range(turns * 10 + 1):
        for index, seen in seconds.items():
            seen.append(first_batch(index))
    for index, seen in seconds.items():
        print(f"resuming: at sample {index:,}, first batch after {spread([s * 1e3 for s in seen[1:]])} ms")
    ratios = [far / near for near, far in zip(seconds[0][1:], seconds[FAR][1:], strict=True)]
    print(f"resuming: far / near {spread(ratios)}")


def memory(folder: Path, turns: int) -> None:
    """What memory grows by when a trillion tokens are opened and a thousand samples read, in a process of its own."""
    del turns
    _sparse(folder, shards=1000)
    for shards in (1, 1000):
        code = f"from benchmarks.data import grown; print(grown({str(folder)!r}, {shards}))"
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
        print(f"memory: {shards * _TRILLION // 1000:,} tokens in {shards} shards: {run.stdout.strip()}")


def grown(folder: str, shards: int) -> str:
    """Open the sparse shards of ``folder`` and read from them; what that added to this process's own memory."""
    before = _anonymous_bytes()
    dataset = TokenDataset(_opened(sorted(Path(folder).glob("*.bin"))[:shards]), "train", SEQUENCE)
    order = SampleOrder(len(dataset), 1)
    for index in order(np.arange(1000)).tolist():
        dataset[index]
    return f"{(_anonymous_bytes() - before) / 2**20:.2f} MiB for an order of {order.size:,} samples"


def _opened(paths: list[Path]) -> Prepared:
    """Shards as they would be after a preparation."""
    shards = [Shard(path, "uint16", path.stat().st_size // 2, path.with_suffix(".starts")) for path in paths]
    tokens = sum(shard.count for shard in shards)
    counts = TokenCounts(documents=1, text_bytes=tokens, tokens=tokens)
    splits = {"train": counts, "validation": counts}
    return Prepared(
        Path(), "benchmark", BytesTokenizer(), splits, {"train": shards, "validation": shards}, 0, 0, "document"
    )


def _anonymous_bytes() -> int:
    """Memory of this process that no file backs: pages of mapped files belong to the system, which takes them back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _sparse(folder: Path, shards: int) -> list[Path]:
    """Files that say they hold a thousandth of a trillion tokens each, of which the disk keeps nothing."""
    paths = [folder / f"train-{number:05d}.bin" for number in range(shards)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(2 * _TRILLION // 1000)
        path.with_suffix(".starts").write_bytes(bytes(8))
    return paths


def main() -> None:
    """Run the parts asked for and print what they came to."""
    parts: dict[str, Callable[[Path, int], None]] = {
        "reading": reading, "preparing": preparing, "waiting": waiting, "resuming": resuming, "memory": memory,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--turns", type=int, default=8)
    arguments = parser.parse_args()
    for name in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="serried-data-") as folder:
            parts[name](Path(folder), arguments.turns)


if __name__ == "__main__":
    main()
