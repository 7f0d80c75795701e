"""Nothing here can run code that a file or another process brings: no pickle is read or written anywhere."""

import ast
from collections.abc import Iterator
from pathlib import Path

from testing.rank_pool import ROOT

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
CALLS = {
    "torch.load", "torch.save", "torch.jit.load", "torch.package", "torch.distributed.checkpoint",
    "numpy.load", "numpy.save", "numpy.savez", "numpy.savez_compressed", "pandas.read_pickle",
}  # fmt: skip
NAMES = {
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "read_pickle", "to_pickle", "allow_pickle", "async_save",
}  # fmt: skip


def sources() -> list[Path]:
    # The benchmarks measure torch's own checkpoints beside ours.
    places = [each for each in ROOT.iterdir() if each.name not in ("tests", "benchmarks") and each.name[0] != "."]
    found = [path for place in places for path in (place.rglob("*.py") if place.is_dir() else (place,))]
    return [path.relative_to(ROOT) for path in found if path.suffix == ".py"]


def uses(text: str) -> Iterator[str]:
    """What ``text`` uses of the above; what it merely says, in strings and comments, does not count."""
    tree = ast.parse(text)
    full: dict[str, str] = {}  # name in this file -> what it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                full[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield from _judged(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from _judged(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from _judged(_dotted(node, full))
        elif isinstance(node, ast.Name):
            yield from _judged(full.get(node.id, node.id))
        elif isinstance(node, ast.keyword) and node.arg in NAMES:
            yield f"{node.arg}="


def _dotted(node: ast.expr, full: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, full)}.{node.attr}"
    return full.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def _judged(name: str) -> Iterator[str]:
    parts = name.split(".")
    if parts[0] in MODULES or parts[-1] in NAMES or any(name == call or name.startswith(f"{call}.") for call in CALLS):
        yield name


def test_no_source_reads_or_writes_a_pickle() -> None:
    files = sources()
    assert {"train.py", "trainer/checkpoint/save.py", "recipes/data/samples/token_dataset.py"} <= {
        str(path) for path in files
    }
    found = [f"{path}: {name}" for path in files for name in uses((ROOT / path).read_text())]
    assert not found


def test_checker_of_sources_finds_pickle_calls() -> None:
    for text in (
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.save({}, 'x')",
        "from torch import load as read",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
        "import numpy as np\nnp.load('x')",
        "import numpy as np\nread = np.load",
        "import numpy as np\nnp.memmap('x', allow_pickle=True)",
        "import torch.distributed.checkpoint as dcp",
    ):
        assert list(uses(text)), text
    for text in (
        "'''pickle and torch.load are words here'''",
        "import json\njson.load(file)",
        "from safetensors.torch import load_file\nload_file('x')",
        "import numpy as np\nnp.fromfile('x')",
    ):
        assert not list(uses(text)), text
