"""On two hosts with a cable between them: the cable is cut, a host dies and comes back, and training goes on."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serried.configs.errors import EXIT_STOPPED
from testing.disturb import is_alive
from testing.rank_pool import ROOT
from testing.runs import metrics, run_here, tiny_overrides
from testing.s3_server import S3Server
from tests.support.hosts import Hosts, why_not
from tests.support.slurm import wait_for

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(420)]

_NOTICED_SECONDS = 8


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    both = Hosts(2, tmp_path_factory.mktemp("hosts"))
    yield both
    both.close()


class Run:
    """An elastic run on one host or two, as their users start it."""

    def __init__(self, hosts: Hosts, run_dir: Path, text: Path) -> None:
        self.run_dir = run_dir
        self._hosts = hosts
        self._argv = tiny_overrides(
            text, run_dir, "trainer.steps=1000000", "schedule=constant", "checkpoint.every=10", "launch.device=cpu",
            f"launch.step_timeout_seconds={_NOTICED_SECONDS}", "launch.start_timeout_seconds=60",
        )  # fmt: skip
        self._started: list[subprocess.Popen[bytes]] = []
        self.outputs: list[Path] = []

    def start(self, host: int) -> subprocess.Popen[bytes]:
        """Start torchrun on ``host``."""
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=9",
            "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400", "--rdzv-id=run",
            "--rdzv-conf=last_call_timeout=3,join_timeout=120", "train.py", *self._argv,
        ]  # fmt: skip
        self.outputs.append(self.run_dir.with_name(f"host{host}-start{len(self.outputs)}.log"))
        with self.outputs[-1].open("wb") as output:
            self._started.append(subprocess.Popen(
                self._hosts.command(host, command, own_processes=True), cwd=ROOT, stdout=output, stderr=output,
                env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            ))  # fmt: skip
        return self._started[-1]

    def printed(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-6000:]}" for path in self.outputs)

    def worlds(self) -> list[int]:
        """World sizes of its starts."""
        try:
            return [line["world_size"] for line in metrics(self.run_dir, "start")]
        except FileNotFoundError:
            return []

    def wait_for_world(self, size: int, starts: int) -> None:
        """Wait until the start number ``starts``, or a later one, is of ``size`` processes and has saved."""

        def is_so() -> bool:
            if len(self.worlds()) < starts or self.worlds()[-1] != size:
                return False
            began = metrics(self.run_dir, "start")[-1]["resumed_from"] or 0
            return any(line["step"] > began for line in metrics(self.run_dir, "checkpoint"))

        wait_for(is_so, f"start {starts} with {size} processes (so far {self.worlds()})", self.printed)

    def stop(self) -> None:
        """Ask for a stop, and wait for it."""
        (self.run_dir / "control").write_text("stop")
        wait_for(lambda: self.status() == "stopped", "the stop", self.printed)

    def status(self) -> str:
        return str(json.loads((self.run_dir / "status.json").read_text())["state"])

    def end(self) -> None:
        """Kill what is left."""
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def run(hosts: Hosts, text: Path, tmp_path: Path) -> Iterator[Run]:
    made = Run(hosts, tmp_path / "run", text)
    yield made
    made.end()
    for host in range(hosts.count):
        hosts.set_link(host, "up")


def check_every_sample_once(run_dir: Path, text: Path, tmp_path: Path) -> None:
    """Steps and samples without a gap, and the losses of one process that nobody disturbed."""
    done = metrics(run_dir)
    assert [line["step"] for line in done] == list(range(1, len(done) + 1))
    assert [line["samples"] for line in done] == [4 * line["step"] for line in done]
    alone = tmp_path / "alone"
    count = min(len(done), 400)
    argv = tiny_overrides(
        text, alone, "trainer.steps=1000000", f"trainer.stop_at={count}", "schedule=constant", "launch.device=cpu"
    )
    subprocess.run([sys.executable, "train.py", *argv], cwd=ROOT, timeout=240, check=False)
    expected = [line["loss"] for line in metrics(alone)]
    assert [line["loss"] for line in done[:count]] == pytest.approx(expected, rel=1e-3)


def test_training_resumes_after_a_host_dies_and_returns(run: Run, text: Path, tmp_path: Path) -> None:
    run.start(0)
    other = run.start(1)
    run.wait_for_world(2, starts=1)
    other.kill()
    other.wait()
    run.wait_for_world(1, starts=2)
    run.start(1)
    run.wait_for_world(2, starts=3)
    run.stop()
    check_every_sample_once(run.run_dir, text, tmp_path)
    joined = metrics(run.run_dir, "stop")[-2]
    assert (joined["state"], joined["step"]) == ("stopped", metrics(run.run_dir, "start")[-1]["resumed_from"]), (
        "for a host that joins nothing is lost"
    )


def test_cut_network_is_noticed_and_reported_and_training_resumes(
    run: Run, hosts: Hosts, text: Path, tmp_path: Path
) -> None:
    run.start(0)
    run.start(1)
    run.wait_for_world(2, starts=1)
    hosts.set_link(1, "down")
    run.wait_for_world(1, starts=2)
    told = metrics(run.run_dir, "stop")[0]
    assert told["state"] == "stopped", told
    assert "rank 1 on node1" in told["reason"]
    assert "when its heartbeat stopped" in told["reason"]
    run.stop()
    check_every_sample_once(run.run_dir, text, tmp_path)


def start_plain(
    hosts: Hosts, host: int, output: Path, argv: list[str], program: tuple[str, ...] = ("train.py",), **variables: str
) -> subprocess.Popen[bytes]:
    """Start one process of two on ``host``, not elastic."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={host}", "--nproc_per_node=1",
        "--master_addr=node0", "--master_port=29500", *program, *argv,
    ]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"} | variables
    with output.open("wb") as file:
        return subprocess.Popen(
            hosts.command(host, command, own_processes=True), cwd=ROOT, stdout=file, stderr=file, env=env
        )


@pytest.mark.parametrize("given", [None, "eth0"])
def test_hosts_that_know_themselves_by_a_loopback_address_reach_each_other(
    given: str | None, text: Path, tmp_path: Path
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    both, run_dir = Hosts(2, tmp_path, know_themselves_by="127.0.1.1"), tmp_path / "run"
    variables = {} if given is None else {"GLOO_SOCKET_IFNAME": given}
    try:
        argv = tiny_overrides(
            text, run_dir, "trainer.steps=2", "launch.device=cpu", "launch.start_timeout_seconds=60",
            "launch.step_timeout_seconds=30",
        )  # fmt: skip
        outputs = [tmp_path / f"{host}.log" for host in range(2)]
        # Whoever sets it on one node alone must not keep the other waiting.
        started = [start_plain(both, host, outputs[host], argv, **variables if host else {}) for host in range(2)]
        codes = [process.wait(150) for process in started]
    finally:
        both.close()
    printed = outputs[0].read_text(errors="replace")
    assert codes == [0, 0], printed[-3000:] + outputs[1].read_text(errors="replace")[-3000:]
    assert ", host network eth0" in next(line for line in printed.splitlines() if line.startswith("mesh"))


@pytest.mark.parametrize("how", ["dies", "loses its cable"])
def test_ranks_of_other_hosts_end_soon_after_the_first_host(how: str, hosts: Hosts, text: Path, tmp_path: Path) -> None:
    """While they wait in something that does not notice it, as in a kernel of NCCL."""
    run_dir = tmp_path / "run"
    argv = tiny_overrides(
        text, run_dir, "trainer.steps=9", "launch.device=cpu", f"launch.step_timeout_seconds={_NOTICED_SECONDS}",
        "launch.start_timeout_seconds=120", "checkpoint.mode=sync",
    )  # fmt: skip
    code = f"from tests.runs.test_watchdog import *; leave(train_hanging({argv}, 'sleep', 1, 5))"
    program = ("--no-python", sys.executable, "-c", code)
    outputs = [tmp_path / f"{host}.log" for host in range(2)]

    def printed() -> str:
        return "".join(path.read_text(errors="replace")[-4000:] for path in outputs)

    started = [start_plain(hosts, host, outputs[host], [], program, PYTHONPATH=".") for host in range(2)]
    try:
        written = run_dir / "metrics.jsonl"
        wait_for(lambda: written.exists() and len(metrics(run_dir)) >= 3, "step 3", printed)
        if how == "dies":
            started[0].kill()
        else:
            hosts.set_link(0, "down")
        assert started[1].wait(3 * _NOTICED_SECONDS + 10) == 1
    finally:
        hosts.set_link(0, "up")
        for process in started:
            process.kill()
            process.wait()
    told = outputs[1].read_text(errors="replace")
    what = "refuses connections" if how == "dies" else "has not answered for 8."
    assert f"stopped    the first node is gone: its store at node0:29500 {what}" in told
    assert "exitcode  : 75" in told
    now = json.loads((run_dir / "status.json").read_text())
    assert (now["state"], now["exit_code"]) == ("stopped", 75), now
    assert how != "dies" or now["reason"].startswith("the first node is gone: its store at node0:29500")


def start_recovering(hosts: Hosts, text: Path, tmp_path: Path, outputs: list[Path]) -> list[subprocess.Popen[bytes]]:
    """Start a run on both hosts that continues from memory, and wait for step 3."""
    run_dir = tmp_path / "run"
    argv = tiny_overrides(
        text, run_dir, "trainer.steps=1000000", "schedule=constant", "checkpoint.every=0", "launch.device=cpu",
        f"launch.step_timeout_seconds={_NOTICED_SECONDS}", "launch.start_timeout_seconds=120", "recover.mode=memory",
        "recover.silence_seconds=4",
    )  # fmt: skip
    started = [start_plain(hosts, host, outputs[host], argv) for host in range(2)]
    written = run_dir / "metrics.jsonl"
    wait_for(lambda: written.exists() and len(metrics(run_dir)) >= 3, "step 3", lambda: _printed(outputs))
    return started


def _printed(outputs: list[Path]) -> str:
    return "".join(path.read_text(errors="replace")[-4000:] for path in outputs)


@pytest.mark.parametrize("how", ["dies", "loses its cable"])
def test_first_host_continues_from_memory_on_the_same_curve(how: str, hosts: Hosts, text: Path, tmp_path: Path) -> None:
    run_dir, outputs = tmp_path / "run", [tmp_path / f"{host}.log" for host in range(2)]
    started = start_recovering(hosts, text, tmp_path, outputs)
    try:
        if how == "dies":
            started[1].kill()
        else:
            hosts.set_link(1, "down")
        wait_for(lambda: bool(metrics(run_dir, "recovered")), "the recovery", lambda: _printed(outputs))
        step = metrics(run_dir, "recovered")[0]["step"] + 2
        wait_for(lambda: metrics(run_dir)[-1]["step"] >= step, f"step {step}", lambda: _printed(outputs))
        if how != "dies":
            assert started[1].wait(100) == 1
            assert "exitcode  : 75" in outputs[1].read_text(errors="replace")
            now = json.loads((run_dir / "status.json").read_text())
            assert now["state"] == "running", "the node that was left behind has not touched the records"
    finally:
        hosts.set_link(1, "up")
        for process in started:
            process.kill()
            process.wait()
    lost = metrics(run_dir, "lost")
    assert [(line["nodes"], line["ranks"], line["replicas"]) for line in lost] == [(["node1"], [1], 1)]
    alone = tmp_path / "alone"
    argv = tiny_overrides(text, alone, "trainer.steps=1000000", "schedule=constant", f"trainer.stop_at={step}")
    assert run_here([*argv, "launch.device=cpu"]).code == EXIT_STOPPED
    assert [line["loss"] for line in metrics(run_dir)[:step]] == pytest.approx(
        [line["loss"] for line in metrics(alone)], rel=1e-6
    )


def test_second_host_stops_when_the_first_dies_since_it_cannot_continue(
    hosts: Hosts, text: Path, tmp_path: Path
) -> None:
    outputs = [tmp_path / f"{host}.log" for host in range(2)]
    started = start_recovering(hosts, text, tmp_path, outputs)
    try:
        started[0].kill()
        assert started[1].wait(60) == 1
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert "exitcode  : 75" in outputs[1].read_text(errors="replace")
    now = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (now["state"], now["exit_code"]) == ("stopped", 75), now
    assert now["reason"].startswith("the first node is gone: its store at node0:29500")


def test_run_in_a_bucket_resumes_on_one_host_after_the_other_is_lost(hosts: Hosts, text: Path, tmp_path: Path) -> None:
    """Each host has its own disk, which is empty when the host starts and ends with it."""
    disk, outputs = tmp_path / "disk", [tmp_path / f"{host}.log" for host in range(3)]
    disk.mkdir()
    variables = {"HOME": str(disk), "SERRIED_SCRATCH": str(disk / "scratch"), "AWS_ALLOW_HTTP": "true"}
    mounted = ("--no-python", "sh", "-c", 'mountpoint -q "$0" || mount -t tmpfs none "$0" && exec "$@"', str(disk))
    program = (*mounted, sys.executable, "train.py")

    def printed() -> str:
        return "".join(path.read_text(errors="replace")[-4000:] for path in outputs if path.exists())

    started: list[subprocess.Popen[bytes]] = []
    with S3Server(host=hosts.address()) as server:
        argv = [
            word for word in tiny_overrides(
                text, server.url("runs/hosts"), "trainer.steps=1000000", "schedule=constant", "checkpoint.every=10",
                "launch.device=cpu", f"launch.step_timeout_seconds={_NOTICED_SECONDS}",
                "launch.start_timeout_seconds=60",
            ) if not word.startswith("data.cache_dir=")
        ]  # fmt: skip

        def steps(event: str = "step") -> list[dict[str, Any]]:
            head = json.loads(server.objects("runs/hosts/head.json").get("runs/hosts/head.json", '{"records": 0}'))
            of_epoch = server.objects(f"runs/hosts/records/{head['records']}/metrics")
            lines = b"".join(of_epoch[key] for key in sorted(of_epoch)).splitlines()
            return [line for line in map(json.loads, lines) if line["event"] == event]

        def state() -> str:
            head = json.loads(server.objects("runs/hosts/head.json")["runs/hosts/head.json"])
            key = f"runs/hosts/records/{head['records']}/status.json"
            return str(json.loads(server.objects(key)[key])["state"])

        try:
            environment = server.environment | variables
            for host in range(2):
                started.append(start_plain(hosts, host, outputs[host], argv, program, **environment))
            wait_for(lambda: len(steps("checkpoint")) >= 2, "two checkpoints of two hosts", printed)
            log = "runs/hosts/records/1/log/rank-1.log"
            wait_for(lambda: log in server.objects("runs/hosts/records/1/log"), "the log of node1", printed)
            started[1].kill()
            assert started[0].wait(3 * _NOTICED_SECONDS + 60) != 0, printed()
            alone = [word for word in argv if not word.startswith("trainer.steps=")]
            saved = len(steps("checkpoint"))
            command = [*program[1:], *alone, "trainer.steps=1000000"]
            with outputs[2].open("wb") as file:
                started.append(subprocess.Popen(
                    hosts.command(1, command, own_processes=True), cwd=ROOT, stdout=file, stderr=file,
                    env=os.environ | environment,
                ))  # fmt: skip
            wait_for(lambda: len(steps("checkpoint")) > saved + 1, "checkpoints of the host that is left", printed)
            ask = [sys.executable, "-m", "serried", "stop", server.url("runs/hosts")]
            subprocess.run(ask, cwd=ROOT, env=os.environ | environment, check=True, timeout=120)
            assert started[2].wait(120) == 75, printed()
            assert state() == "stopped"
        finally:
            for process in started:
                process.kill()
                process.wait()
        assert [line["world_size"] for line in steps("start")] == [2, 1]
        local = tmp_path / "run"
        local.mkdir()
        lines = [*steps("start"), *steps()]
        (local / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not any(disk.iterdir()), "neither host wrote to a disk of this machine"
    check_every_sample_once(local, text, tmp_path)


def make_a_host_and_die(folder: str, how: str) -> None:
    """``how``: ``alone``, or ``with its guardian``."""
    made = Hosts(1, Path(folder))
    command = made.command(0, ["setsid", "sleep", "1000"])
    process = subprocess.Popen(command[command.index("nsenter") :])  # which does not end with this one
    Path(folder, "made").write_text(f"{made.mark} {process.pid}")
    if how == "with its guardian":
        os.kill(made._guardian._process.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGTERM if how == "alone" else signal.SIGKILL)


@pytest.mark.parametrize("how", ["alone", "with its guardian"])
def test_hosts_of_tests_end_with_them(how: str, tmp_path: Path) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    code = f"from tests.cli.test_hosts import *; make_a_host_and_die({str(tmp_path)!r}, {how!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)
    mark, process = (tmp_path / "made").read_text().split()

    def left() -> str:
        named = subprocess.run("ip netns list; ip -brief link", shell=True, capture_output=True, text=True, check=True)
        names = [line.split()[0] for line in named.stdout.splitlines() if line.startswith(mark)]
        return " ".join(names + [process] * is_alive(int(process)))

    if how == "with its guardian":
        assert process in left().split(), "nobody has cleared it"
        Hosts(0, tmp_path).close()
    wait_for(lambda: not left(), "all of it to be gone", left)
