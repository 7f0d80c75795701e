"""Check whether nodes are fit for a run: equal versions, working and equally fast devices and network, disk space."""

import os
import statistics
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED
from serried.configs.formats import columns, size
from serried.configs.messages.suggestions import pasteable
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.launch import probes
from serried.launch.bucket_check import BucketReport, check_bucket, rates
from serried.runtime.session import Session, run_in_session

_PATIENCE_SECONDS = 120.0
_SLOW_SHARE = {"gpu": 0.8, "cpu": 0.5}
"""Slowest accepted speed as a share of the median. A CPU may be shared with other processes."""
_SLOW_WIRE_SHARE = 0.5
_FREE_SHARE = 0.9
_CLOCK_SECONDS = 1.0
_SHARED_MEMORY_BYTES_PER_RANK = 128 * 2**20
_INODES = 1000
_SOCKETS_PER_PEER = 4
"""Sockets between two ranks: for the world's group, the groups of checkpoints and the groups of axes."""
_WRITE_BYTES_PER_SECOND = 20e6


@dataclass
class Findings:
    """Problems found on single hosts, and problems of all hosts."""

    by_host: dict[str, list[str]] = field(default_factory=dict)
    common: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def blame(self, host: str, what: str) -> None:
        """Record the problem ``what`` of ``host``, once."""
        if what not in self.by_host.setdefault(host, []):
            self.by_host[host].append(what)


def preflight(
    section: LaunchSection,
    run_dir: Path,
    needed_bytes: int | None,
    peaks: dict[str, float],
    excluded: str | None = None,
    url: str | None = None,
) -> int:
    """Examine all nodes of this start, and print a table and a verdict. Return the exit code: 0 fit, 70 unfit.

    Args:
        needed_bytes: size of the run's checkpoints in ``run_dir``; None if unknown.
        peaks: specified FLOP/s of devices, by name.
        excluded: nodes that are already excluded, separated by commas.
        url: URL of a run in a bucket, whose ``run_dir`` is the scratch folder of a node.
    """
    patience = min(section.start_timeout_seconds, _PATIENCE_SECONDS)
    impatient = section.model_copy(update={"start_timeout_seconds": patience})

    def work(session: Session) -> int:
        facts = session.gather(examine(session, run_dir, url))

        def print_report() -> int:
            findings = judge(facts, session.device.type, session.local_world_size, run_dir, needed_bytes)
            print("\n".join(report(facts, findings, peaks, excluded)), flush=True)
            return EXIT_FAILED if findings.by_host or findings.common else EXIT_FINISHED

        return int(session.once(print_report))

    return run_in_session(impatient, work)


def examine(session: Session, run_dir: Path, url: str | None = None) -> dict[str, Any]:
    """Return all measurements of this rank. This is a collective call: all ranks measure the network together.
    Everything else is measured by each rank on its own, at the same time."""
    facts: dict[str, Any] = {"rank": session.rank, "host": session.host(), "problems": []}

    def alone(name: str, probe: Callable[[], Any]) -> None:
        try:
            facts[name] = probe()
        except Exception as error:  # recorded as a finding; the other probes continue
            facts[name] = None
            problem = f"{name.replace('_', ' ')}: {type(error).__name__}: {error}"
            if isinstance(error, OSError) and name in ("disk", "sees_run_dir"):
                problem = f"cannot write to {run_dir}: {error.strerror}; use run.dir=FOLDER on another disk"
            if problem not in facts["problems"]:
                facts["problems"].append(problem)

    hosts = session.gather(facts["host"])
    alone("versions", probes.versions)
    alone("device", lambda: probes.device(session))
    session.gather("imported")  # all ranks compute at the same time, as in training
    alone("matmul", lambda: probes.matmul_flops(session))
    alone("unresolved", lambda: probes.unresolved([*hosts, os.environ.get("MASTER_ADDR", "localhost")]))
    alone("shared_memory", probes.shared_memory_bytes)
    alone("open_files", probes.open_files)
    alone("sees_run_dir", lambda: _sees_what_rank_0_writes(session, run_dir) if url is None else None)
    is_first = hosts.index(facts["host"]) == session.rank
    if url is not None:
        found = check_bucket(url) if session.is_main else BucketReport()
        facts["bucket"] = asdict(found)
        is_usable = not session.gather(found.problems)[0]
        alone("bucket_rates", lambda: rates(url) if is_first and is_usable else None)
    alone("disk", lambda: probes.disk(run_dir) if is_first else None)
    session.gather("measured")  # no rank measures the network while another still computes
    if session.world_size > 1:
        facts["collectives"] = probes.collectives(session)
        firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
        members = firsts if len(firsts) > 1 else list(range(session.world_size))
        facts["pairs"] = probes.pairs_bytes_per_second(session, members, session.device)
        if len(firsts) > 1:  # checkpoints are sent from host to host
            facts["host_pairs"] = probes.pairs_bytes_per_second(session, firsts, torch.device("cpu"))
    facts["clock"] = probes.clock_ahead_seconds(session)
    return facts


def _sees_what_rank_0_writes(session: Session, run_dir: Path) -> bool | None:
    """Return whether the run folder is on a disk shared with rank 0; None if unknown. This is a collective call."""
    folder, name = session.gather([str(probes.existing(run_dir).absolute()), f".preflight-{uuid.uuid4().hex}"])[0]
    path = Path(folder) / name
    problem: OSError | None = None
    if session.is_main:
        try:
            path.touch()
        except OSError as error:
            problem = error
    is_there = session.gather(problem is None)[0]
    seen = is_there and session.appears(path)
    session.gather("looked")
    if problem is not None:
        raise problem
    if session.is_main:
        path.unlink(missing_ok=True)
    return seen if is_there else None


# verdict --------------------------------------------------------------------------------------------------------------


def judge(
    facts: list[dict[str, Any]], device_type: str, ranks_per_node: int, run_dir: Path, needed_bytes: int | None
) -> Findings:
    """Return the problems in the facts of all ranks."""
    findings = Findings()
    for fact in facts:
        for problem in fact["problems"]:
            findings.blame(fact["host"], f"rank {fact['rank']}: {problem}")
    _judge_sameness(facts, findings)
    _judge_speeds(facts, device_type, findings)
    _judge_collectives(facts, findings)
    _judge_node(facts, ranks_per_node, findings)
    _judge_disk(facts, run_dir, needed_bytes, findings)
    for fact in facts:
        findings.common += fact.get("bucket", {}).get("problems", [])
        findings.warnings += fact.get("bucket", {}).get("warnings", [])
    return findings


def _judge_sameness(facts: list[dict[str, Any]], findings: Findings) -> None:
    """Compare versions and devices. Hosts that differ from the majority are at fault; without a majority, no host
    is."""
    values: dict[str, list[tuple[dict[str, Any], Any]]] = {}
    for fact in facts:
        for name, value in (fact["versions"] or {}).items():
            values.setdefault(name, []).append((fact, value))
        for name in ("name", "count"):
            if fact["device"] is not None:
                values.setdefault(f"device {name}", []).append((fact, fact["device"][name]))
    for name, found in values.items():
        (usual, count), *others = Counter(value for _, value in found).most_common()
        if others and 2 * count > len(found):
            for fact, value in found:
                if value != usual:
                    findings.blame(fact["host"], f"{name} is {value}, but {usual} on most ranks")
        elif others:
            first_host: dict[Any, str] = {}
            for fact, value in found:
                first_host.setdefault(value, fact["host"])
            told = "; ".join(f"{value} on {host}" for value, host in first_host.items())
            findings.common.append(f"{name} differs between nodes: {told}")


def _judge_speeds(facts: list[dict[str, Any]], device_type: str, findings: Findings) -> None:
    for name, what, least in (
        ("matmul", "matrix products run at", _SLOW_SHARE["cpu" if device_type == "cpu" else "gpu"]),
        ("pairs", "data exchange with other ranks runs at", _SLOW_WIRE_SHARE),
        ("host_pairs", "exchange of host memory with other nodes runs at", _SLOW_WIRE_SHARE),
    ):
        known = [fact for fact in facts if fact.get(name)]
        if len(known) < (1 if name == "matmul" else 3):  # both ends of one link measure the same
            continue
        usual = statistics.median_high(fact[name] for fact in known)
        for fact in known:
            if fact[name] < least * usual:
                findings.blame(fact["host"], f"rank {fact['rank']}: {what} {fact[name] / usual:.0%} of the median")


def _judge_collectives(facts: list[dict[str, Any]], findings: Findings) -> None:
    """Find the ranks at fault for wrong results of collectives. A rank whose data is wrong on most other ranks is a
    faulty sender. Otherwise, ranks with wrong results are faulty if they are a minority."""
    known = [fact for fact in facts if fact.get("collectives")]
    wrong = [fact for fact in known if fact["collectives"]["is_reduce_wrong"] or fact["collectives"]["gather_wrong"]]
    if not wrong:
        return
    senders = Counter(rank for fact in wrong for rank in fact["collectives"]["gather_wrong"] if rank != fact["rank"])
    guilty = [fact for fact in known if 2 * senders[fact["rank"]] > len(known) - 1 and len(known) > 2]
    for fact in guilty or (wrong if 2 * len(wrong) < len(known) else []):
        how = "sends wrong data in an all-gather" if guilty else "gets wrong results from collectives"
        findings.blame(fact["host"], f"rank {fact['rank']}: {how}")
    if not guilty and 2 * len(wrong) >= len(known):
        ranks = ", ".join(str(fact["rank"]) for fact in wrong)
        findings.common.append(
            f"collectives give wrong results on ranks {ranks}; run serried preflight on fewer nodes to find "
            "the faulty one"
        )


def _judge_node(facts: list[dict[str, Any]], ranks_per_node: int, findings: Findings) -> None:
    middle = statistics.median_high(fact["clock"] for fact in facts)
    for fact in facts:
        host, ahead = fact["host"], fact["clock"] - middle
        if abs(ahead) > _CLOCK_SECONDS:
            findings.blame(host, f"the clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the median")
        if fact["device"] is not None and fact["device"]["free_share"] < _FREE_SHARE:
            free = fact["device"]["free_share"]
            findings.blame(
                host, f"rank {fact['rank']}: only {free:.0%} of device memory is free; another process uses the rest"
            )
        if fact["unresolved"]:
            text = f"{host}: cannot resolve the host name {', '.join(fact['unresolved'])}"
            if text not in findings.warnings:
                findings.warnings.append(text)
        files, needed = fact["open_files"], _SOCKETS_PER_PEER * len(facts)
        text = (
            f"{host}: the limit of open files is {files}, but {len(facts)} ranks may need {needed}; use: "
            f"ulimit -Hn {needed}"
        )
        if files is not None and files < needed and text not in findings.warnings:
            findings.warnings.append(text)
        shared = fact["shared_memory"]
        text = (
            f"{host}: /dev/shm has {size(shared or 0)}, less than {ranks_per_node} x 128 MiB for its ranks; start a "
            "container with --shm-size=8g"
        )
        if (shared or 0) < ranks_per_node * _SHARED_MEMORY_BYTES_PER_RANK and text not in findings.warnings:
            findings.warnings.append(text)


def _judge_disk(facts: list[dict[str, Any]], run_dir: Path, needed_bytes: int | None, findings: Findings) -> None:
    for fact in facts:
        if fact["sees_run_dir"] is False:
            findings.blame(
                fact["host"], f"does not see files that rank 0 writes to {run_dir}; use run.dir=FOLDER on a shared disk"
            )
    known = [fact["disk"] for fact in facts if fact["disk"]]
    if not known:
        return
    free, inodes = min(found["free_bytes"] for found in known), [found["free_inodes"] for found in known]
    if needed_bytes is not None and free < needed_bytes:
        findings.common.append(
            f"{run_dir} has {size(free)} free, but the checkpoints to keep and the one being written need "
            f"{size(needed_bytes)}; use run.dir=FOLDER on another disk, or lower checkpoint.keep"
        )
    if any(count is not None and count < _INODES for count in inodes):
        left = min(count for count in inodes if count is not None)
        findings.common.append(f"{run_dir} has room for only {left} files; use run.dir=FOLDER on another disk")
    for fact in facts:
        if fact["disk"] and fact["disk"]["write_bytes_per_second"] < _WRITE_BYTES_PER_SECOND:
            speed = size(fact["disk"]["write_bytes_per_second"])
            findings.warnings.append(f"{fact['host']} writes {speed}/s to {run_dir}: saving will be slow")


# table ----------------------------------------------------------------------------------------------------------------


_COLUMNS = (
    "node", "ranks", "device", "matmul", "all-reduce", "all-gather", "pairs", "host network", "write", "free", "clock",
    "",
)  # fmt: skip


def report(
    facts: list[dict[str, Any]], findings: Findings, peaks: dict[str, float], excluded: str | None = None
) -> list[str]:
    """Return the lines of the report: table, problems, nodes to exclude in addition to ``excluded``, and verdict."""
    hosts = list(dict.fromkeys(fact["host"] for fact in facts))
    rows: list[tuple[str, ...]] = [_COLUMNS]
    rows += [_row(host, [fact for fact in facts if fact["host"] == host], findings, peaks) for host in hosts]
    lines = columns(rows)
    versions: dict[str, str] = next((fact["versions"] for fact in facts if fact["versions"]), {})
    lines.append("versions   " + ", ".join(f"{name} {value}" for name, value in versions.items() if value))
    for fact in facts:
        if fact.get("bucket_rates"):
            written, read = map(size, fact["bucket_rates"])
            lines.append(f"bucket     {fact['host']} writes {written}/s and reads {read}/s, one object of 64 MiB")
    lines += [f"WARNING    {text}" for text in findings.warnings]
    lines += [f"unfit      {host}: {what}" for host, whats in findings.by_host.items() for what in whats]
    lines += [f"unfit      {what}" for what in findings.common]
    ranks = f"{len(hosts)} node{'s' if len(hosts) > 1 else ''}, {len(facts)} rank{'s' if len(facts) > 1 else ''}"
    if not findings.by_host and not findings.common:
        return [*lines, f"verdict    fit: {ranks}"]
    if findings.by_host and len(findings.by_host) < len(hosts):
        names = ",".join([*([excluded] if excluded else []), *findings.by_host])
        value = f'"{names}"' if "," in names else names  # Hydra reads a comma as a list
        lines.append(f"exclude    {pasteable('slurm.exclude', value)}, or sbatch --exclude={names}")
    return [*lines, f"verdict    not fit: {ranks}"]


def _row(host: str, facts: list[dict[str, Any]], findings: Findings, peaks: dict[str, float]) -> tuple[str, ...]:
    """Return the row of a node, with the worst value of its ranks in each column."""
    ranks = [fact["rank"] for fact in facts]
    device = next((fact["device"] for fact in facts if fact["device"]), None)
    slowest = min((fact["matmul"] for fact in facts if fact["matmul"]), default=None)
    peak = peaks.get(device["name"]) if device else None
    collective = [fact["collectives"] for fact in facts if fact.get("collectives")]
    disk = next((fact["disk"] for fact in facts if fact["disk"]), None)
    share = f" ({slowest / peak:.0%} of peak)" if slowest and peak else ""

    def rate(name: str) -> str:
        return f"{size(min(found[name] for found in collective))}/s" if collective else "-"

    def between(name: str) -> str:
        rates = [fact[name] for fact in facts if fact.get(name)]
        return f"{size(min(rates))}/s" if rates else "-"

    return (
        host,
        str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}",
        f"{device['name']} x{device['count']}" if device else "-",
        f"{_flops(slowest)}{share}" if slowest else "-",
        rate("reduce_bytes_per_second"),
        rate("gather_bytes_per_second"),
        between("pairs"),
        between("host_pairs"),
        f"{size(disk['write_bytes_per_second'])}/s" if disk else "-",
        size(disk["free_bytes"]) if disk else "-",
        f"{max((fact['clock'] for fact in facts), key=abs):+.3f} s",
        "NOT FIT" if host in findings.by_host else "fit",
    )


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
