"""Check of this machine, and an anonymous description of it for a report: no user, host or network names."""

import json
import os
import platform
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from getpass import getuser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from serried.runtime.process import host_name, usable_cores
from serried.verify.check import Bounds, Case, Found
from serried.verify.started_runs import RunFailed, Workplace

_VARIABLES = re.compile(r"(NCCL|GLOO|TORCH|PYTORCH|CUDA|RCCL|HIP|ROCR|OMP|UCX)_.*")
_ADDRESS = re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b|(?<![\w:])[0-9a-fA-F]{0,4}(?::{1,2}[0-9a-fA-F]{1,4}){3,7}(?![\w:])")
"""An IPv4, IPv6 or hardware address."""
_TRIES = 2


def preflight(workplace: Workplace, _: Bounds) -> list[Case]:
    """``serried preflight`` passes on all devices."""
    return [Case("serried preflight, under torchrun", partial(_examine, workplace))]


def _examine(workplace: Workplace) -> Found:
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workplace.ranks}")
    words = (f"run.dir={workplace.new_folder()}", f"launch.device={workplace.device}")
    # Other processes may slow down a CPU for a moment, which looks like a slow rank.
    for _ in range(_TRIES if workplace.device == "cpu" else 1):
        code, printed = workplace.command(*torchrun, "-m", "serried", "preflight", *words)
        lines = printed.splitlines()
        unfit = [line.partition("  ")[2].strip() for line in lines if line.startswith("unfit ")]
        if code == 0:
            break
    if not any(line.startswith("verdict") for line in lines):
        raise RunFailed(f"serried preflight ended with exit code {code}: {printed.strip()[-300:]}")
    rates = _columns(lines)
    values = {name: rates[name] for name in ("device", "matmul", "all-reduce", "all-gather", "pairs", "write")}
    figure = f"matmul {rates['matmul']}, all-reduce {rates['all-reduce']}, all-gather {rates['all-gather']}"
    return Found(code == 0, "; ".join([*unfit, figure]), "fit", values)


def _columns(lines: list[str]) -> dict[str, str]:
    """Return the table row of this node in the output of preflight, by column."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
    head = next((number for number, row in enumerate(rows) if row[:2] == ["node", "ranks"]), None)
    if head is None or head + 1 == len(rows):
        raise RunFailed("serried preflight printed no table")
    return dict(zip(rows[head], rows[head + 1], strict=False))


# the machine in the report --------------------------------------------------------------------------------------------


def describe() -> dict[str, Any]:
    """Return versions, devices and limits of this machine. Imports torch."""
    import torch

    from serried.launch.probes import open_files, shared_memory_bytes, versions
    from serried.records.environment import environment
    from serried.runtime.accelerator import accelerator_type, device_names, memory_bytes

    try:
        ours = version("serried")
    except PackageNotFoundError:  # the checkout is not installed
        ours = "not installed"
    code = environment()
    kind = accelerator_type()
    counted = Counter(
        (name, memory_bytes(torch.device(str(kind), index))[1]) for index, name in enumerate(device_names())
    )
    return {
        "serried": ours,
        "commit": code["git_commit"],
        "changed_files": code["git_changed_files"],
        **versions(),
        "rocm": torch.version.hip,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": [
            {"name": name, "memory_bytes": nbytes, "count": count} for (name, nbytes), count in counted.items()
        ],
        "topology": _topology(),
        "open_files": open_files(),
        "shared_memory_bytes": shared_memory_bytes(),
        "variables": sorted(name for name in os.environ if _VARIABLES.fullmatch(name)),
    }


def _topology() -> list[str]:
    """Return the lines of ``nvidia-smi topo -m`` or ``rocm-smi --showtopo``; empty if neither is available."""
    for command in (("nvidia-smi", "topo", "-m"), ("rocm-smi", "--showtopo")):
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
            return [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in done.stdout.splitlines() if line.strip()]
    return []


def anonymous(*folders: Path) -> Callable[[str], str]:
    """Return a function that replaces host names, user names, IP addresses and ``folders`` in a text."""
    names = {str(folder): "FOLDER" for folder in folders}
    hosts = (host_name(), socket.getfqdn(), platform.node(), platform.node().partition(".")[0])
    names |= {host: "HOST" for host in hosts if host and host != "localhost"}
    for name_of, word in ((getuser, "USER"), (lambda: str(Path.home()), "~")):
        with suppress(Exception):  # a container may have no such user, or no home
            names[name_of()] = word
    names.pop("root", None)

    def replace(text: str) -> str:
        for name in sorted(names, key=len, reverse=True):
            domain = r"(?:\.[A-Za-z][\w-]*)*" if names[name] == "HOST" else ""
            text = re.sub(rf"(?<!\w){re.escape(name)}{domain}(?!\w)", names[name], text)
        return _ADDRESS.sub("ADDRESS", text)

    return replace


if __name__ == "__main__":
    print(json.dumps(describe()))
