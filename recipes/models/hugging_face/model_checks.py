"""Tests of a transformers model's code before it trains: what it supports besides plain training."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from serried.recipes.models.hugging_face.document_attention import NAME, documents_at, register_attention
from serried.recipes.models.hugging_face.generation_cache import supports_cache
from serried.recipes.models.hugging_face.small_copy import WINDOWS, head_width, small_copy
from serried.recipes.models.hugging_face.tensor_roles import refuse_roles
from serried.recipes.models.layers.attention import causal_mask
from serried.recipes.models.layers.attention_choice import LEAST_WIDTH

Isolation = Callable[[Tensor], dict[str, Tensor]]
"""Maps positions [B, S], which restart from 0 with each document, to arguments that isolate documents."""

_ROUNDING = 1e-4
"""Largest difference of logits, in standard deviations, that counts as rounding."""


class ModelChecks:
    """What the code of a transformers model supports, tested when it is first needed.

    The tests run on a small copy of the model, or on the model itself if there is none.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._forward = model, model.forward

    @cached_property
    def _copy(self) -> Any:
        return small_copy(self._model)

    def run(self) -> None:
        """Run the tests that need no parallel layout now, if there is a small copy: the forwards of a plan have no
        data."""
        if self._copy is not None:
            _ = self.takes_attention, self.returns_head_output, self.computes_in_bf16

    @property
    def _tested(self) -> Any:
        return self._model if self._copy is None else self._copy

    @cached_property
    def takes_attention(self) -> bool:
        """Whether the model computes the same logits with the attention of the built-in families."""
        config = self._model.config
        has_dropout = any("drop" in key and "att" in key and value for key, value in config.to_dict().items())
        is_chunked = getattr(config, "attention_chunk_size", None)
        takes_any = getattr(self._model, "_supports_attention_backend", False)
        if self._copy is None or has_dropout or is_chunked or not takes_any:
            return False
        register_attention()
        changed = deepcopy(self._copy)
        with self._testing() as device, suppress(Exception):  # the code uses the mask itself
            tokens = _tokens(12, changed, device)
            changed.set_attn_implementation(NAME)
            expected = self._logits(tokens)
            is_equal = (changed(tokens).logits - expected).abs().max() <= _ROUNDING * expected.std()
            if is_equal and head_width(config) >= LEAST_WIDTH:
                self._copy = changed  # for the other tests
                return True
        return False

    @cached_property
    def returns_head_output(self) -> bool:
        """Whether the model returns the output of its head unchanged: no cap, no scale."""
        found: list[Tensor] = []
        with self._testing() as device:
            hook = self._tested.get_output_embeddings().register_forward_hook(lambda *args: found.append(args[-1]))
            logits = self._logits(_tokens(2, self._tested, device))
            hook.remove()
        return len(found) == 1 and found[0] is logits

    @cached_property
    def isolation(self) -> Isolation | None:
        """Arguments that isolate documents in a sequence from each other; None if the model supports none.

        Compares the logits of a short document after another one with its logits in a separate sequence.
        """
        ways: list[Isolation] = [_by_mask, _by_summed_mask]
        if "position_ids" in inspect.signature(self._forward).parameters:
            ways = [_by_positions, *(_with_positions(way) for way in ways)]
        elif self.takes_attention:
            ways = [_by_attention]
        if self._copy is None and any(getattr(self._model.config, key, None) for key in WINDOWS):
            ways = [way for way in ways if way is _by_positions]  # the tokens do not exceed the window
        with self._testing() as device:
            tokens = _tokens(12, self._tested, device)
            positions = torch.cat((torch.arange(5), torch.arange(7))).to(device).unsqueeze(0)
            alone, together = self._logits(tokens[:, 5:]), self._logits(tokens)[:, 5:]
            seen = (together - alone).abs().max()
            for way in ways:
                with suppress(Exception), documents_at(positions):  # some models accept no custom masks
                    if (self._logits(tokens, **way(positions))[:, 5:] - alone).abs().max() <= seen / 100:
                        return way
        return None

    def limits(self) -> list[str]:
        """Return what is slower than in a built-in family, or not supported, as clauses for the plan."""
        found = [] if self.computes_in_bf16 else ["FSDP gathers weights in fp32 at any precision"]
        if self._copy is not None and self.isolation is None:
            found.append("documents in a sequence cannot be isolated")
        elif not self.takes_attention or self.isolation not in (_by_positions, _by_attention):
            found.append("packed documents need a mask of the full sequence")
        return found

    @cached_property
    def takes_cache(self) -> bool:
        """Whether the model generates the same text with transformers' cache, also from a batch with padding. False if
        there is no small copy."""
        if self._copy is None:
            return False
        with self._testing() as device:
            return supports_cache(self._copy.forward, self._copy.config, device)

    @cached_property
    def computes_in_bf16(self) -> bool:
        """Whether the model computes with weights in bf16, without autocast, and uses all of them.

        False for a model that keeps some weights in fp32, and if there is no small copy.
        """
        in_fp32 = tuple(getattr(self._model, "_keep_in_fp32_modules_strict", None) or ())
        if self._copy is None or any(kept in name for name, _ in self._model.named_parameters() for kept in in_fp32):
            return False
        copy = deepcopy(self._copy)
        tokens = _tokens(12, copy, torch.device("cpu"))
        positions = torch.arange(12, device="cpu").unsqueeze(0)
        try:
            for parameter in copy.parameters():
                parameter.data = parameter.data.bfloat16()
            named = self.isolation(positions) if self.isolation else {}
            with torch.autocast("cpu", enabled=False), torch.enable_grad(), documents_at(positions):
                copy(tokens, **named).logits.float().logsumexp(-1).sum().backward()
        except Exception:  # mixed dtypes
            return False
        return all(parameter.grad is not None for parameter in copy.parameters())

    @cached_property
    def refuses_roles(self) -> str:
        """Why the model's plan for tensor parallelism cannot be used, as a clause; empty if it can."""
        return refuse_roles(self._model, self._copy)

    def _logits(self, tokens: Tensor, **named: Tensor) -> Tensor:
        forward = self._forward if self._copy is None else self._copy.forward
        logits: Tensor = forward(tokens, **named).logits
        return logits

    @contextmanager
    def _testing(self) -> Iterator[torch.device]:
        """Context manager for test forwards, with the device of their inputs: evaluation mode, fp32, no gradients. No
        random numbers are drawn, and no state changes."""
        device = next(self._tested.parameters()).device
        training = [module for module in self._tested.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with torch.no_grad(), torch.autocast(device.type, enabled=False), torch.device(device):
                yield device
        finally:
            for module in training:
                module.training = True


def _tokens(count: int, model: Any, device: torch.device) -> Tensor:
    """Return token ids, [1, count], the same on all ranks."""
    return (torch.arange(7, 7 + 7 * count, 7, device=device) % model.config.vocab_size).unsqueeze(0)


def _by_positions(positions: Tensor) -> dict[str, Tensor]:
    """Return the positions as an argument, from which transformers derives its masks."""
    return {"position_ids": positions}


def _by_attention(positions: Tensor) -> dict[str, Tensor]:
    """Return no arguments: ``document_attention`` needs none."""
    del positions
    return {}


def _with_positions(way: Isolation) -> Isolation:
    return lambda positions: way(positions) | _by_positions(positions)


def _by_mask(positions: Tensor) -> dict[str, Tensor]:
    """Return a mask, True where a query attends to a key."""
    sees = causal_mask(positions, positions.shape[1], positions.device, kernel="sdpa")
    assert isinstance(sees, Tensor)
    return {"attention_mask": sees}


def _by_summed_mask(positions: Tensor) -> dict[str, Tensor]:
    """Return a mask that is added to scores."""
    sees = _by_mask(positions)["attention_mask"]
    mask = torch.zeros(sees.shape, device=sees.device).masked_fill_(~sees, torch.finfo(torch.float32).min)
    return {"attention_mask": mask}
