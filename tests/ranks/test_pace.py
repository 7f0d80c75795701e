"""A rank whose device is slow is named."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from serried.program import main
from serried.runtime.session import Session
from serried.trainer.monitor.straggler import Pace, SlowRank
from testing.rank_pool import Cluster
from testing.runs import metrics, tiny_overrides


def test_rank_slow_in_five_measurements_in_a_row_is_named_once() -> None:
    slow, named = SlowRank(), []
    for turn in range(8):
        assert slow.judge([1.0, 1.1, 1.0, 1.5 + turn]) == (3, 1.5 + turn)
        named.append(slow.named())
    assert named == [None] * 4 + [(3, 5.5)] + [None] * 3
    assert SlowRank().judge([3.0, 1.0]) == (0, 3.0), "the slower of two has a share too"


@pytest.mark.parametrize(
    "measured",
    [
        [[1.0, 1.1, 1.0, 1.5]] * 8,  # one measurement, seen eight times
        [[1.0, 1.0 + turn * (turn % 4 > 0), 1.0] for turn in range(12)],
        [[1.0 + turn * (turn % 2), 2.0 + turn * (1 - turn % 2), 1.0] for turn in range(12)],
    ],
)
def test_rank_slow_now_and_then_is_not_named(measured: list[list[float]]) -> None:
    slow = SlowRank()
    for seconds in measured:
        slow.judge(seconds)
        assert slow.named() is None


def test_measuring_takes_a_thousandth_of_the_time() -> None:
    pace, measured = Pace(torch.device("cpu")), []
    with patch.object(Pace, "_measure", lambda _: measured.append(1) or 1e-3):
        assert [pace.seconds() for _ in range(50)] == [1e-3] * 50
    assert len(measured) == 3


def train_with_a_slow_rank(argv: list[str], rank: int) -> int:
    measured = []

    def seconds(_: Pace) -> float:
        measured.append(1)
        return len(measured) * (2.0 if os.environ["RANK"] == str(rank) else 1.0)

    with (
        patch("serried.trainer.metrics.meter._EXCHANGE_SECONDS", 0.0),
        patch.object(Pace, "seconds", seconds),
        patch.object(Session, "host", lambda self: f"node{self.rank}"),
    ):
        return main(argv)


def test_run_names_its_slow_rank(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path, "trainer.steps=8")
    answers = cluster.run(2, "tests.ranks.test_pace:train_with_a_slow_rank", argv=argv, rank=1)
    assert {answer.value for answer in answers} == {0}
    told = [line for line in answers[0].printed.splitlines() if " is slow: " in line]
    assert len(told) == 1
    assert told[0].startswith("WARNING    rank 1 on node1 is slow: the same computation takes 2.00x the median")
    assert {(line["slowest_rank"], line["slowest_share"]) for line in metrics(tmp_path)} == {(1, 2.0)}
