"""Gated delta rule and short convolution: chunks, documents and states against the functions of transformers."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from serried.recipes.models.layers import delta_rule
from serried.recipes.models.layers.delta_rule import gated_delta_rule, short_convolution

LENGTH, HEADS, KEY, VALUE = 150, 3, 8, 6
"""Three chunks, the last of them shorter."""
BORDERS = (0, 1, 64, 70, LENGTH)
"""Where documents begin, and the end: in the middle of a chunk, at its start, and a document of more than one chunk."""
POSITIONS = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(BORDERS)]).expand(2, -1)
DOCUMENTS = (POSITIONS == 0).cumsum(1)


def inputs(strength: float = 1.0) -> list[Tensor]:
    """Queries, keys, values, decays and strengths of corrections. ``strength`` is the scale of the decays."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, LENGTH, HEADS, KEY).unbind()
    shape = (2, LENGTH, HEADS)
    return [q, k, torch.randn(*shape, VALUE), -strength * torch.rand(shape), torch.rand(shape)]


def reference(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    q, k, v, decay, beta = tensors
    out, state = torch_recurrent_gated_delta_rule(
        q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=True, **options
    )
    return out, state


@pytest.mark.parametrize("strength", [0.01, 1.0, 100.0])
def test_packed_documents_have_the_outputs_of_separate_documents(strength: float) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(strength)]
    together, _ = gated_delta_rule(*tensors, DOCUMENTS)
    pairs = list(itertools.pairwise(BORDERS))
    alone = torch.cat([reference(*(each[:, start:stop] for each in tensors))[0] for start, stop in pairs], dim=1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    towards = torch.randn_like(alone)
    ours, theirs = (torch.autograd.grad((out * towards).sum(), tensors) for out in (together, alone))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5 * max(1.0, other.abs().max().item()))


def test_document_does_not_change_a_bit_of_the_next_one() -> None:
    tensors = inputs()
    changed = [torch.cat((torch.randn_like(each[:, :64]).abs().neg(), each[:, 64:]), dim=1) for each in tensors]
    ours, theirs = (gated_delta_rule(*each, DOCUMENTS)[0][:, 64:] for each in (tensors, changed))
    assert ours.equal(theirs)


@pytest.mark.parametrize("first", [1, 64, 100])
def test_state_continues_a_sequence(first: int) -> None:
    tensors = inputs()
    out, state = reference(*tensors)
    begin, between = gated_delta_rule(*(each[:, :first] for each in tensors), None)
    rest, last = gated_delta_rule(*(each[:, first:] for each in tensors), None, between)
    torch.testing.assert_close(torch.cat((begin, rest), dim=1), out, rtol=0, atol=1e-5)
    torch.testing.assert_close(last, state, rtol=0, atol=1e-5)


def test_convolution_sees_zeros_before_a_document_and_the_past_before_a_sequence() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, LENGTH, 5), torch.randn(5, 1, 4)

    def expected(part: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(part.transpose(1, 2), (3, 0))
        return torch.nn.functional.conv1d(padded, weight, groups=5).transpose(1, 2)

    alone = torch.cat([expected(x[:, start:stop]) for start, stop in itertools.pairwise(BORDERS)], dim=1)
    torch.testing.assert_close(short_convolution(x, weight, POSITIONS), alone, rtol=0, atol=1e-5)
    continued = short_convolution(x[:, 40:], weight, None, x[:, 37:40])
    torch.testing.assert_close(continued, expected(x)[:, 40:], rtol=0, atol=1e-5)


def test_chunks_are_shorter_than_the_sequence() -> None:
    assert delta_rule._CHUNK < LENGTH, "the other tests would not see a border between chunks"
