"""Metrics and counts with other names are refused before anything is added up."""

import pytest
import torch

from serried.configs.errors import UserError
from serried.parallel.layout.process_groups import gather_plain
from serried.parallel.loss_checks import agreed_shapes, check_names
from serried.parallel.plan import LossTerms
from serried.parallel.sum_table import section
from testing.rank_pool import Cluster


def compare(names: list[list[str] | None]) -> str:
    import os

    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    from serried.configs.schema.launch_plan_track import LaunchSection
    from serried.runtime.session import open_session

    with open_session(LaunchSection(device="cpu")):
        assert dist.is_initialized()
        one = torch.ones(())
        try:
            mine = names[rank]
            terms = None if mine is None else LossTerms(one, 1, dict.fromkeys(mine, (one, one)))
            return " ".join(section(agreed_shapes(terms and terms.table().shapes, gather_plain), "metrics"))
        except UserError as error:
            return str(error)


def test_ranks_that_name_other_metrics_are_refused_on_every_rank(cluster: Cluster) -> None:
    same = cluster.run(2, "tests.unit.test_metric_names:compare", names=[["a", "b"], ["a", "b"]])
    assert [answer.value for answer in same] == ["a b", "a b"]
    learned = cluster.run(2, "tests.unit.test_metric_names:compare", names=[None, ["a", "b"]])
    assert [answer.value for answer in learned] == ["a b", "a b"], "of a pipeline's first stage, which has no loss"
    for names in ([["a", "b"], ["b", "a"]], [["a"], []]):
        found = cluster.run(2, "tests.unit.test_metric_names:compare", names=names)
        assert all("return the same names, in the same order, from every batch" in answer.value for answer in found)


@pytest.mark.parametrize("counts", [{"b": 2}, {"a": 3}, {}, {"b": 2, "a": 2}])
def test_counts_with_other_names_or_lengths_than_before_are_refused(counts: dict[str, int]) -> None:
    one = torch.ones(())
    first = {name: torch.zeros(2) for name in ("a", "b")[: max(1, len(counts))]}
    known = LossTerms(one, 1, counts=first)
    check_names(known, known.table().shapes)
    with pytest.raises(UserError, match="the same names and shapes from every batch"):
        check_names(
            LossTerms(one, 1, counts={name: torch.zeros(size) for name, size in counts.items()}), known.table().shapes
        )
