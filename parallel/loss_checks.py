"""Checks of the values returned by a user's ``loss``, with one clear message per mistake."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.parallel.plan import LossTerms
from serried.parallel.sum_table import Shapes, section

LOSS_ALONE: Shapes = {"loss_sum": (), "weight": ()}
"""Table entries of a loss without named metrics and counts. Also used if no rank has a loss."""


def refuse_own_backward(root: nn.Module) -> None:
    """Raise ``UserError`` if the first loss of a run left gradients, since the task may run its own optimizer."""
    if any(parameter.grad is not None for parameter in root.parameters()):
        raise UserError(
            "loss() called backward(); return the sum of all losses in serried.LossTerms: the trainer then calls "
            "backward() and updates the optimizer"
        )


def refuse_no_gradient(loss: Tensor) -> None:
    """Raise ``UserError`` if ``loss`` does not depend on a parameter."""
    if not loss.requires_grad:
        raise UserError(
            "loss() returned a loss_sum without a gradient; compute it with the model's output, without "
            "torch.no_grad(), detach() or item()"
        )


def check_terms(terms: LossTerms) -> LossTerms:
    """Return ``terms``. Raises ``UserError`` if they are not valid ``LossTerms``."""
    returned = terms.loss_sum if isinstance(terms, LossTerms) else terms
    if not isinstance(terms, LossTerms) or getattr(returned, "shape", None) != ():
        shape = f" of shape {[*returned.shape]}" if isinstance(returned, Tensor) else ""
        of_what = "a loss_sum of type " if isinstance(terms, LossTerms) else ""
        raise UserError(
            "loss() must return serried.LossTerms(loss_sum, weight), sums over the batch and not means, "
            f"with loss_sum a scalar tensor; it returned {of_what}{type(returned).__name__}{shape}"
        )
    if isinstance(terms.weight, Tensor) and terms.weight.dim():
        raise UserError(
            f"loss() returned a weight of shape {[*terms.weight.shape]}; return one number, such as mask.sum()"
        )
    if isinstance(terms.weight, int | float) and terms.weight < 0:
        raise UserError(f"loss() returned the weight {terms.weight}; return 0 or more, such as len(x)")
    for name, metric in terms.metrics.items():
        if not isinstance(name, str):
            raise UserError(f"loss() returned a metric with the name {name!r}; use a string")
        if not isinstance(metric, tuple | list) or len(metric) != 2:
            raise UserError(f"loss() returned the metric {name} as {metric}; return it as (sum, weight), not as a mean")
        for number in metric:
            if isinstance(number, Tensor) and number.dim():
                raise UserError(
                    f"loss() returned the metric {name} with a value of shape {[*number.shape]}; return two numbers"
                )
    return terms


def check_names(terms: LossTerms, known: Shapes) -> None:
    """Raise ``UserError`` if the metrics or counts of ``terms`` differ from ``known``, the entries of earlier batches.

    Otherwise different quantities would be added up.
    """
    found, names = tuple(terms.metrics), tuple(section(known, "metrics"))
    if found != names:
        raise UserError(
            f"loss() returned the metrics {_listed(found)} for one batch and {_listed(names)} for another; return the "
            "same names from every batch, with (0, 0) for metrics that a batch does not have"
        )
    counts, known_counts = {name: tuple(count.shape) for name, count in terms.counts.items()}, section(known, "counts")
    if [*counts.items()] != [*known_counts.items()]:  # the order must be the same too
        raise UserError(
            f"loss() returned the counts {counts or 'none'} (name: shape) for one batch and {known_counts or 'none'} "
            "for another; return the same names and shapes from every batch"
        )


def agreed_shapes(mine: Shapes | None, gather: Callable[[Any], list[Any]]) -> Shapes:
    """Return the names and shapes of the loss sums, after checking that all ranks agree.

    This is a collective call on the host.

    Args:
        mine: The entries of this rank's loss; None on ranks without a loss in a pipeline.
        gather: Returns the value of every rank, in rank order.

    Raises:
        UserError: ``loss`` returned different names on another rank.
    """
    answers = gather(None if mine is None else list(mine.items()))
    known = {rank: [(name, tuple(shape)) for name, shape in answer] for rank, answer in enumerate(answers) if answer}
    if mine is not None and (other := [rank for rank, entries in known.items() if entries != list(mine.items())]):
        raise UserError(
            f"loss() returned the metrics {_listed(tuple(section(mine, 'metrics')))} on rank {dist.get_rank()}, but "
            f"different metrics on rank {other[0]}; return the same names, in the same order, from every batch, with "
            "(0, 0) for metrics that a batch does not have"
        )
    return dict(next(iter(known.values()))) if known else LOSS_ALONE


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "(none)"
