"""A real Slurm cluster on this machine, from Debian's package slurm-wlm: a controller and nodes in namespaces."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support import guardian, hosts

NODES, CPUS = 2, 2
PATIENCE_SECONDS = 240
"""For what takes seconds: other tests may run beside, and a run that saves has as long in the configuration below."""


def why_not() -> str | None:
    """Why this machine cannot have a cluster; None where it can."""
    missing = [tool for tool in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(tool) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)}); as root on Debian: make test-slurm"
    return hosts.why_not()


class SlurmCluster:
    """Two nodes, ``node0`` and ``node1``; partition ``high`` preempts partition ``low``, which is the default."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = 17_000 + os.getpid() % 10_000
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("state", "munge", "log", *(f"spool/node{index}" for index in range(NODES))):
            (folder / name).mkdir(parents=True, mode=0o755)
        self.hosts = hosts.Hosts(NODES, folder)
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"), guardian.MARK: self.hosts.mark,
        }  # fmt: skip
        try:
            self._up()
        except BaseException:
            self.close()
            raise

    def _up(self) -> None:
        folder = self._folder
        key, socket = folder / "munge" / "key", folder / "munge" / "socket"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20 // NODES
        nodes = [
            f"NodeName=node{index} NodeHostname=node{index} NodeAddr={self.hosts.address(index)} Port={self._port + 1} "
            f"CPUs={CPUS} RealMemory={memory} State=UNKNOWN"
            for index in range(NODES)
        ]
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(
            host=os.uname().nodename, address=self.hosts.address(), port=self._port, folder=folder, socket=socket,
            nodes="\n".join(nodes),
        ))  # fmt: skip
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # the default looks for a mount, and fails
        self._start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}",
            f"--pid-file={folder}/munge/pid", f"--log-file={folder}/log/munged.log", f"--seed-file={folder}/munge/seed",
        )  # fmt: skip
        wait_for(socket.exists, "munged")
        self._start("slurmctld", "-c", "-D")
        for index in range(NODES):
            self._start(*self.hosts.command(index, ["slurmd", "-D", "-N", f"node{index}"]))
        wait_for(lambda: self._idle() == NODES, "idle nodes", self._explain)

    def _start(self, *command: str) -> None:
        with (self._folder / "log" / f"daemon-{len(self._daemons)}.out").open("wb") as output:
            self._daemons.append(subprocess.Popen(command, stdout=output, stderr=output, env=self.environment))

    def _idle(self) -> int:
        return len(set(self.ask("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split()))

    def _explain(self) -> str:
        logs = sorted((self._folder / "log").iterdir())
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in logs)

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints; its errors are in there too."""
        done = subprocess.run(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.ask("scontrol", "show", "job", "--oneliner", number)))

    def wait_for_state(self, number: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of ``states``."""
        wait_for(
            lambda: self.job(number).get("JobState") in states,
            f"job {number} to be {' or '.join(states)}",
            lambda: self.ask("scontrol", "show", "job", number),
        )
        return self.job(number)

    def clear(self) -> None:
        """Cancel all jobs and wait for idle nodes."""
        self.ask("scancel", "--user=root")
        wait_for(lambda: self._idle() == NODES, "idle nodes", self._explain)

    def close(self) -> None:
        """End jobs, daemons and nodes."""
        if self._daemons:
            self.ask("scancel", "--user=root")
            deadline = time.monotonic() + 30
            while self.ask("squeue", "--noheader").strip() and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.hosts.close()


def wait_for(is_so: Callable[[], bool], what: str, explain: Callable[[], str] = lambda: "") -> None:
    """Look until ``is_so``.

    Raises:
        AssertionError: it is not so within ``PATIENCE_SECONDS``.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS} s for {what}\n{explain()}"
        time.sleep(0.1)


# An authorisation lives 5 s, not 120: a job that is queued again starts no sooner than that.
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=2,requeue_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=300
MinJobAge=300
SlurmctldTimeout=300
SlurmdTimeout=300
InactiveLimit=0
{nodes}
PartitionName=low  Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=300
PartitionName=high Nodes=ALL Default=NO  MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
