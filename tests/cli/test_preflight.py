"""Preflight finds the node that is not fit, says why, and how to leave it out."""

import os
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from serried.commands.slurm_jobs import checkpoints_bytes
from serried.configs.compose import compose
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.launch import probes
from serried.launch.preflight import judge, preflight, report
from serried.runtime.session import Session
from testing.forked_runs import typed
from testing.rank_pool import Cluster

GIB = 2**30
MATMUL, ALL_REDUCE, VERSIONS = probes.matmul_flops, probes.all_reduce, probes.versions


def node(rank: int, **other: Any) -> dict[str, Any]:
    """What the one rank of a sound node of one GPU finds out."""
    facts = {
        "rank": rank, "host": f"node{rank}", "problems": [], "versions": {"torch": "2.13.0", "driver": "570.1"},
        "device": {"name": "NVIDIA H200", "count": 1, "free_share": 0.99}, "matmul": 600e12, "unresolved": [],
        "shared_memory": 8 * GIB, "open_files": 2**16, "sees_run_dir": True, "clock": 0.001 * rank, "pairs": 40e9,
        "host_pairs": 3e9,
        "disk": {"free_bytes": 100 * GIB, "free_inodes": None, "write_bytes_per_second": 1e9},
        "collectives": {
            "is_reduce_wrong": False, "gather_wrong": [], "reduce_bytes_per_second": 4e10,
            "gather_bytes_per_second": 4e10,
        },
    }  # fmt: skip
    for key, value in other.items():
        facts[key] = facts[key] | value if isinstance(value, dict) else value
    return facts


def told(*others: dict[str, Any]) -> str:
    """What is said of five nodes, of which ``others`` are not as sound as the rest."""
    ranks = {other["rank"]: other for other in others}
    facts = [ranks.get(rank, node(rank)) for rank in range(5)]
    findings = judge(facts, "cuda", 1, Path("runs/x"), 10 * GIB)
    return "\n".join(report(facts, findings, {"NVIDIA H200": 989e12}))


def test_equal_nodes_are_fit() -> None:
    text = told()
    assert text.endswith("verdict    fit: 5 nodes, 5 ranks")
    assert "600 TFLOP/s (61% of peak)" in text
    assert "unfit" not in text
    assert "WARNING" not in text


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        ({"versions": {"driver": "550.9"}}, "driver is 550.9, but 570.1 on most ranks"),
        ({"device": {"name": "NVIDIA A100"}}, "device name is NVIDIA A100, but NVIDIA H200 on most ranks"),
        ({"device": {"free_share": 0.5}}, "rank 3: only 50% of device memory is free; another process uses the rest"),
        ({"matmul": 420e12}, "rank 3: matrix products run at 70% of the median"),
        ({"pairs": 10e9}, "rank 3: data exchange with other ranks runs at 25% of the median"),
        ({"host_pairs": 1e9}, "rank 3: exchange of host memory with other nodes runs at 33% of the median"),
        ({"clock": -7.0}, "the clock is 7.0 s behind the median"),
        (
            {"sees_run_dir": False},
            "does not see files that rank 0 writes to runs/x; use run.dir=FOLDER on a shared disk",
        ),
        ({"collectives": {"is_reduce_wrong": True}}, "rank 3: gets wrong results from collectives"),
        ({"problems": ["disk: OSError: no space"], "disk": None}, "rank 3: disk: OSError: no space"),
    ],
)
def test_unfit_node_is_named_and_excluded(finding: dict[str, Any], expected: str) -> None:
    text = told(node(3, **{key: value for key, value in finding.items() if value is not None}, **_nothing(finding)))
    assert f"unfit      node3: {expected}" in text
    assert text.count("unfit") == 1
    assert text.endswith(
        "exclude    slurm.exclude=node3, or sbatch --exclude=node3\nverdict    not fit: 5 nodes, 5 ranks"
    )


def _nothing(finding: dict[str, Any]) -> dict[str, None]:
    return {key: None for key, value in finding.items() if value is None}


def test_rank_whose_data_is_wrong_at_all_others_is_at_fault() -> None:
    wrong = {"collectives": {"is_reduce_wrong": True, "gather_wrong": [2]}}
    text = told(*(node(rank, **wrong) for rank in (0, 1, 3, 4)))
    assert "unfit      node2: rank 2: sends wrong data in an all-gather" in text
    assert "--exclude=node2" in text


def test_problem_of_all_nodes_excludes_none() -> None:
    full = {"disk": {"free_bytes": GIB}}
    text = told(*(node(rank, **full) for rank in range(5)))
    assert "runs/x has 1.0GiB free, but the checkpoints to keep and the one being written need 10.0GiB; use " in text
    assert "--exclude" not in text
    wrong = {"collectives": {"is_reduce_wrong": True}}
    text = told(*(node(rank, **wrong) for rank in range(5)))
    assert "unfit      collectives give wrong results on ranks 0, 1, 2, 3, 4" in text


def test_possible_later_problems_are_warnings() -> None:
    text = told(node(1, shared_memory=64 * 2**20), node(2, unresolved=["node4"]), node(3, open_files=19))
    assert "WARNING    node1: /dev/shm has 64.0MiB, less than 1 x 128 MiB for its ranks" in text
    assert "WARNING    node2: cannot resolve the host name node4" in text
    assert "WARNING    node3: the limit of open files is 19, but 5 ranks may need 20; use: ulimit -Hn 20" in text
    assert text.endswith("verdict    fit: 5 nodes, 5 ranks")


@pytest.mark.parametrize("count", [2, 3, 6, 7])
def test_tournament_pairs_each_two_members_once(count: int) -> None:
    rounds = list(probes.tournament(list(range(count))))
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)
    assert sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs) == list(combinations(range(count), 2))


def examine(run_dir: str, bad: int, how: str) -> int:
    """Preflight of ranks that take themselves for nodes, of which one is made bad."""
    is_bad = int(os.environ["RANK"]) == bad

    def slow(session: Session) -> float:
        return MATMUL(session) / (100 if is_bad and how == "slow" else 1)

    def wrong(tensor: Any) -> Any:
        ALL_REDUCE(tensor)
        if is_bad and how == "wrong":
            tensor[7] += 1
        return tensor

    def older() -> dict[str, str | None]:
        return VERSIONS() | ({"torch": "2.9.1"} if is_bad and how == "older" else {})

    with (
        patch.object(probes, "matmul_flops", slow),
        patch.object(probes, "all_reduce", wrong),
        patch.object(probes, "versions", older),
        patch.object(Session, "host", lambda self: f"node{self.rank}"),
        patch.dict("serried.launch.preflight._SLOW_SHARE", cpu=0.05),  # the machine may be busy with other tests
        patch("serried.launch.preflight._SLOW_WIRE_SHARE", 0.0),
    ):
        return preflight(LaunchSection(), Path(run_dir), None, {})


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("older", "torch is 2.9.1, but "),
        ("slow", "rank 1: matrix products run at "),
        ("wrong", "rank 1: gets wrong results from collectives"),
    ],
)
def test_a_bad_rank_of_three_is_found(how: str, expected: str, cluster: Cluster, tmp_path: Path) -> None:
    answers = cluster.run(3, "tests.cli.test_preflight:examine", run_dir=str(tmp_path / "run"), bad=1, how=how)
    assert {answer.value for answer in answers} == {70}
    assert f"unfit      node1: {expected}" in answers[0].printed
    assert (
        "exclude    slurm.exclude=node1, or sbatch --exclude=node1\nverdict    not fit: 3 nodes, 3 ranks"
        in answers[0].printed
    )
    assert answers[1].printed == answers[2].printed == ""
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_two_different_nodes_are_both_kept(cluster: Cluster, tmp_path: Path) -> None:
    answers = cluster.run(2, "tests.cli.test_preflight:examine", run_dir=str(tmp_path), bad=1, how="older")
    assert {answer.value for answer in answers} == {70}
    assert "unfit      torch differs between nodes: " in answers[0].printed
    assert "2.9.1 on node1" in answers[0].printed
    assert "--exclude" not in answers[0].printed


def test_two_equal_ranks_are_fit(cluster: Cluster, tmp_path: Path) -> None:
    answers = cluster.run(2, "tests.cli.test_preflight:examine", run_dir=str(tmp_path), bad=-1, how="")
    assert {answer.value for answer in answers} == {0}
    assert "verdict    fit: 2 nodes, 2 ranks" in answers[0].printed
    [header, *rows] = answers[0].printed.splitlines()[:3]
    assert all(row[header.index("host network") :].split()[0].endswith("/s") for row in rows)


def test_command_runs_on_one_process(tmp_path: Path) -> None:
    done = typed("-m", "serried", "preflight", f"run.dir={tmp_path}", "launch.device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("verdict    fit: 1 node, 1 rank\n")
    assert "TFLOP/s" in done.stdout or "GFLOP/s" in done.stdout
    unwritable = typed("-m", "serried", "preflight", "run.dir=/proc/run", "launch.device=cpu")
    assert unwritable.returncode == 70
    assert unwritable.stdout.count("unfit ") == unwritable.stdout.count("rank 0: cannot write to /proc/run: ") == 1
    mistaken = typed("-m", "serried", "preflight", "run.dri=x")
    assert mistaken.returncode == 78
    assert mistaken.stderr.startswith("error: unknown key run.dri=x")
    assert len(mistaken.stderr.splitlines()) == 1


def test_checkpoints_of_adapters_take_the_room_of_adapters() -> None:
    model = ["model=llama1b", "model.vocab_size=1000"]
    assert checkpoints_bytes(compose([*model, "adapter=lora"])) < checkpoints_bytes(compose(model)) / 50
