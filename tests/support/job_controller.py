"""A stand-in for Kubernetes' job controller that runs pods as processes of this machine, as a rendered Job says."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serried.launch.kubernetes.manifests import SCRATCH, WORKSPACE
from testing.disturb import family, send
from testing.rank_pool import ROOT

_LOOK_SECONDS = 0.1


def action(rules: Sequence[dict[str, Any]], code: int, conditions: Sequence[str] = ()) -> str:
    """Return what the job controller does with a failed pod: the action of the first rule that matches, or Count."""
    for rule in rules:
        if code in rule.get("onExitCodes", {}).get("values", ()):
            return str(rule["action"])
        if any(condition["type"] in conditions for condition in rule.get("onPodConditions", ())):
            return str(rule["action"])
    return "Count"


class Ended(NamedTuple):
    """A pod that ended."""

    index: int
    code: int
    action: str
    message: str


class Pod:
    """A pod of the job as a process group of this machine."""

    def __init__(self, job: dict[str, Any], index: int, workspace: Path, port: int, start: int) -> None:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        given |= {
            "JOB_COMPLETION_INDEX": str(index), "SERRIED_JOB": "uid-of-the-job", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        self.index = index
        self.message = workspace / f"message-{index}-{start}"
        given["SERRIED_TERMINATION_LOG"] = str(self.message)
        # The volume of the pods is a folder here, and so is the disk of each.
        disk = workspace / f"disk-{index}-{start}"
        here = {
            name: value.replace(WORKSPACE, str(workspace)).replace(f"{SCRATCH}/", f"{disk}/")
            for name, value in given.items()
        }
        words = [word.replace(WORKSPACE, str(workspace)) for word in container["args"]]
        self.log = workspace / f"pod-{index}-{start}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *container["command"][1:], *words], cwd=workspace, env={**os.environ, **here},
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """End all processes of the pod at once, as if its node had failed."""
        for pid in family(self.process.pid):
            send(pid, signal.SIGKILL)
        self.process.wait()


class JobController:
    """Runs a rendered Job to its end: replaces pods as ``podFailurePolicy`` says."""

    def __init__(self, job: dict[str, Any], workspace: Path) -> None:
        self._job, self._workspace = job, workspace
        self._count = job["spec"]["completions"]
        self._starts = [0] * self._count
        self._port = _two_free_ports()
        self.ended: list[Ended] = []
        self.counted = 0
        self.pods = [self._start(index) for index in range(self._count)]

    def _start(self, index: int) -> Pod:
        self._starts[index] += 1
        return Pod(self._job, index, self._workspace, self._port, self._starts[index])

    def run(self, on_look: Callable[["JobController"], object] = lambda _: None, patience_seconds: float = 240) -> str:
        """Return Complete or Failed. ``on_look`` is called several times per second."""
        deadline, complete = time.monotonic() + patience_seconds, set[int]()
        rules = self._job["spec"]["podFailurePolicy"]["rules"]
        try:
            while time.monotonic() < deadline:
                on_look(self)
                for pod in self.pods:
                    if pod.index in complete or (code := pod.process.poll()) is None:
                        continue
                    conditions = ["DisruptionTarget"] if code < 0 else []  # of a pod whose node is gone
                    taken = "Complete" if code == 0 else action(rules, code, conditions)
                    message = pod.message.read_text() if pod.message.exists() else ""
                    self.ended.append(Ended(pod.index, code, taken, message))
                    self.counted += taken == "Count"
                    if taken == "Complete":
                        complete.add(pod.index)
                    elif taken == "FailJob" or self.counted > self._job["spec"]["backoffLimit"]:
                        return "Failed"
                    else:
                        self.pods[pod.index] = self._start(pod.index)
                if len(complete) == self._count:
                    return "Complete"
                time.sleep(_LOOK_SECONDS)
            return "timed out"
        finally:
            for pod in self.pods:
                if pod.process.poll() is None:
                    pod.kill()

    def logs(self) -> str:
        """Return the output of all pods."""
        paths = sorted(self._workspace.glob("pod-*.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in paths)


def _two_free_ports() -> int:
    """Return a free port whose successor is free too: pods meet on the first, and ranks on the second.

    Ports that the kernel gives to connections begin at 32768. One of those may be taken before a pod listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        try:
            for number in (port, port + 1):
                socket.create_server(("", number)).close()
        except OSError:
            continue
        return port
