"""Sums of a step by name: what is packed is what is read, whichever rank packs it."""

import pytest
import torch

from serried.configs.errors import UserError
from serried.parallel.loss_checks import LOSS_ALONE, agreed_shapes, check_names
from serried.parallel.plan import LossTerms
from serried.parallel.sum_table import SumTable, section
from serried.trainer.step import StepResult

CPU = torch.device("cpu")
TERMS = LossTerms(torch.tensor(2.5), 3, {"accuracy": (1.5, torch.tensor(2))}, {"sources": torch.tensor([1, 2])})


def test_entries_of_joined_tables_are_read_by_name() -> None:
    table = (TERMS.table() + TERMS.table()).joined(SumTable.pack({"votes": 1.0}, CPU))
    assert table.read() == {
        "loss_sum": 5.0, "weight": 6.0, "metrics/accuracy": [3.0, 4.0], "counts/sources": [2.0, 4.0], "votes": 1.0,
    }  # fmt: skip
    assert table["votes"].shape == ()
    assert section(table.read(), "counts") == {"sources": [2.0, 4.0]}


def test_an_entry_is_a_view_of_the_vector_that_ranks_add_up() -> None:
    table = TERMS.table()
    assert table["weight"] == 3
    table.vector += 1
    assert table["weight"] == 4


def test_rank_without_a_loss_receives_the_entries_of_a_rank_with_one() -> None:
    shapes = TERMS.table().shapes
    plain = [[name, list(shape)] for name, shape in shapes.items()]  # as JSON brings them
    assert agreed_shapes(None, lambda mine: [mine, plain]) == shapes
    assert SumTable.zeros(shapes, CPU).vector.shape == TERMS.table().vector.shape
    assert agreed_shapes(None, lambda mine: [mine]) == LOSS_ALONE


def test_metrics_that_change_between_batches_are_refused() -> None:
    with pytest.raises(UserError, match=r"metrics accuracy for one batch and \(none\) for another"):
        check_names(TERMS, LOSS_ALONE)
    check_names(TERMS, TERMS.table().shapes)


def test_result_of_a_step_has_means_of_metrics_and_tokens_of_experts() -> None:
    single = {"loss": 0.5, "grad_norm": 1.0, "skipped": 0, "scale": 1, "loss_limit": 9, "norm_limit": 9}
    result = SumTable.pack({**single, "failed_in_row": 0}, CPU).joined(TERMS.table())
    experts = {"experts/0": torch.tensor([3, 1]), "metrics/none": (0.0, 0)}
    read = StepResult.read(result.joined(SumTable.pack(experts, CPU)).read())
    assert (read.loss, read.tokens, read.by_source, read.loads) == (0.5, 3.0, (1.0, 2.0), ((3, 1),))
    assert read.metrics["accuracy"] == 0.75
    assert read.metrics["none"] != read.metrics["none"], "NaN: nothing was counted"
