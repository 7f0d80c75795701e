"""Losses of preference training, per pair or per answer.

Arguments are log-probabilities of answers and rewards derived from them, in fp64. No function averages over a batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def margin_losses(rewards: Tensor, margin: float) -> Tensor:
    """Return -log sigmoid(chosen reward - rejected reward - ``margin``) of each pair.

    ``rewards`` [pairs, 2]: for DPO, beta x the log-ratio to the reference; for CPO, beta x the log-probability; for
    SimPO, beta x the mean log-probability per token.
    """
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - margin)


def ipo_losses(mean_ratios: Tensor, beta: float) -> Tensor:
    """Return the IPO loss of each pair: the squared distance of the difference of log-ratios from 1 / (2 ``beta``).

    ``mean_ratios`` [pairs, 2]: log-ratio to the reference of both answers, divided by their number of tokens.
    """
    return (mean_ratios[:, 0] - mean_ratios[:, 1] - 1 / (2 * beta)).square()


def orpo_losses(means: Tensor, beta: float) -> Tensor:
    """Return the ORPO loss of each pair: the chosen answer's loss plus ``beta`` x the loss of the odds ratio.

    ``means``: mean log-probability per token of both answers, [pairs, 2].
    """
    # Log-odds, log p - log(1 - p). log(1 - p) uses expm1 near p = 1 and log1p near p = 0: the other loses digits there.
    means = means.clamp(max=-1e-12)
    rest = torch.where(means > -0.6931471805599453, torch.log(-torch.expm1(means)), torch.log1p(-torch.exp(means)))
    odds = means - rest
    return -means[:, 0] - beta * F.logsigmoid(odds[:, 0] - odds[:, 1])


def kto_losses(rewards: Tensor, baseline: Tensor, is_desired: Tensor, desirable: float, undesirable: float) -> Tensor:
    """Return the KTO loss of each answer.

    Args:
        rewards: beta x the log-ratio to the reference, [answers].
        baseline: beta x the estimated divergence from the reference, a scalar without gradient.
        is_desired: whether the answer is a good one, [answers].
        desirable: weight of good answers.
        undesirable: weight of bad answers.
    """
    good, bad = torch.sigmoid(baseline - rewards), torch.sigmoid(rewards - baseline)
    return torch.where(is_desired, desirable * good, undesirable * bad)
