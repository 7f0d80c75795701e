"""Context parallelism: a part of every sequence on each rank computes what one process does with the whole."""

from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from serried.configs.compose import compose
from serried.configs.errors import EXIT_FINISHED, EXIT_STOPPED, UserError
from serried.parallel.axes.context import Gather, Ring, head_tail, holder_of
from serried.parallel.axes.model_axes import shard_specs
from serried.parallel.layout.mesh import Layout
from serried.parallel.plan import Context, ParallelPlan
from serried.parallel.token_generation import last_logits
from serried.recipes.models.layers import attention
from serried.recipes.models.layers.attention import attend, attend_with_logsumexp, causal_mask
from serried.runtime.session import open_session
from testing.rank_pool import Cluster
from testing.runs import different_tensors, losses, tiny_overrides
from testing.wire_bytes import Wire
from tests.unit.models.test_model import build, section

METHODS = {"gather": Gather, "ring": Ring}
BATCH, HEADS, KEY_HEADS, LENGTH, WIDTH = 2, 4, 2, 48, 8
STARTS = ([0, 7, 30], [0, 20, 41])
"""Where documents begin in the two sequences; with 4 ranks, a chunk has 6 tokens."""


def positions() -> Tensor:
    """[B, S], from 0 in each document."""
    rows = torch.arange(LENGTH).expand(BATCH, -1).clone()
    for row, starts in zip(rows, STARTS, strict=True):
        for start in starts:
            row[start:] = torch.arange(LENGTH - start)
    return rows


def mask_of(positions: Tensor | None, window: int | None = None, **more: Any) -> Any:
    return causal_mask(positions, LENGTH, torch.device("cpu"), window, **more)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_context_shard_has_one_front_and_one_back_chunk() -> None:
    whole = torch.arange(24).view(2, 12)
    assert [head_tail(whole, 1, 3, index)[0].tolist() for index in range(3)] == [
        [0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7],
    ]  # fmt: skip
    assert head_tail(whole, 1, 1, 0).equal(whole)
    for place in range(12):
        rank, index = holder_of(place, 12, 3)
        assert head_tail(whole, 1, 3, rank)[0, index] == place


def test_a_length_that_cannot_be_divided_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"parallel.context=2 needs sequences of a multiple of 4 .* has 6"):
        head_tail(torch.arange(6), 0, 2, 0)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_context_shards_attend_to_equally_many_keys(parts: int) -> None:
    keys = torch.arange(1, 96 + 1)  # of the token at each place
    counts = {int(head_tail(keys, 0, parts, index).sum()) for index in range(parts)}
    assert len(counts) == 1


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 6), ("cuda", 64)])
def test_generated_text_has_few_lengths_on_a_gpu(device: str, tokens: int) -> None:
    """FlexAttention is compiled for each."""
    found: list[int] = []
    runner: Any = SimpleNamespace(logits=lambda ids, _: found.append(ids.shape[1]))
    place: Any = SimpleNamespace(context=0)
    groups: Any = SimpleNamespace(context=None, layout=Layout("fsdp", context=2))
    with FakeTensorMode():
        last_logits(runner, groups, place, torch.empty(1, 11, dtype=torch.int64, device=device))
    assert found == [tokens]


def test_mask_of_positions_equals_slice_of_full_mask() -> None:
    places = torch.tensor([3, 9, 40]), torch.tensor([30, 2, 41, 8])
    for each, window in ((positions(), None), (positions(), 5), (None, 5)):
        whole, part = mask_of(each, window, kernel="sdpa"), mask_of(each, window, places=places)
        assert isinstance(whole, Tensor)
        assert isinstance(part, Tensor)
        chosen = whole[:, :, places[0]][..., places[1]]
        assert chosen.equal(part.expand(chosen.shape))
    assert mask_of(None) is None


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("has_documents", [True, False])
@pytest.mark.parametrize(("window", "form"), [(None, {}), (5, {"soft_cap": 0.5, "scale": 0.7})])
def test_blockwise_attention_equals_masked_attention(
    has_documents: bool, window: int | None, form: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention runs on GPUs; its forward, uncompiled, runs here."""
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: flex_attention)
    documents = positions() if has_documents else None
    q, k, v = numbers(BATCH, HEADS, 24, 16), *numbers(2, BATCH, KEY_HEADS, LENGTH, 16, seed=1)
    places = head_tail(torch.arange(LENGTH), 0, 2, 1), torch.arange(LENGTH).roll(9)
    mask = mask_of(documents, window, places=places)
    expected, sums = attend_with_logsumexp(q, k, v, mask, **form)
    blocks = attention.placed_blocks(documents, places, window)
    assert isinstance(mask, Tensor)
    attended = mask.expand(BATCH, 1, 24, LENGTH).any(-1, keepdim=True)  # a query without a key has any result
    with torch.no_grad():
        for out in (attend(q, k, v, blocks, **form), attend(q, k, v, mask, **form)):
            torch.testing.assert_close(out.where(attended, 0), expected.where(attended, 0), rtol=0, atol=2e-6)
        found = attend_with_logsumexp(q, k, v, blocks, **form)[1].unsqueeze(-1)
        torch.testing.assert_close(found.where(attended, 0), sums.unsqueeze(-1).where(attended, 0), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("length", "parts"), [(2048, 4), (1200, 2)])
@pytest.mark.parametrize("has_documents", [True, False])
@pytest.mark.parametrize("window", [None, 300])
def test_blocks_of_positions_equal_blocks_of_a_mask(
    length: int, parts: int, has_documents: bool, window: int | None
) -> None:
    """Of whole and of divided blocks, without a mask of queries x keys."""
    documents = torch.stack((torch.arange(length) % 500, torch.arange(length) % 170)) if has_documents else None
    chunks = [head_tail(torch.arange(length), 0, parts, index) for index in range(parts)]
    places = chunks[1], torch.cat(chunks)
    expected = causal_mask(documents, length, torch.device("cpu"), window, places=places)
    assert isinstance(expected, Tensor)
    blocks = attention.placed_blocks(documents, places, window)
    query, key = torch.arange(len(places[0])).unsqueeze(1), torch.arange(length)
    found = torch.zeros(len(blocks.kv_num_blocks), 1, len(query), length, dtype=torch.bool)
    kinds = (blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices)
    for is_full, (counts, indices) in enumerate(kinds):
        assert counts is not None
        assert indices is not None
        assert counts.sum() > 0
        for batch, _, row in product(*map(range, counts.shape)):
            for column in indices[batch, 0, row, : counts[batch, 0, row]].tolist():
                here, there = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
                sees = blocks.mask_mod(torch.tensor(batch), torch.tensor(0), query[here], key[there])
                found[batch, 0, here, there] |= torch.ones_like(sees) if is_full else sees
    assert found.equal(expected.expand(found.shape))
    fewest = create_block_mask(blocks.mask_mod, len(found), None, len(query), length, device="cpu")
    more = (
        1 if length % (2 * parts * 128) == 0 else 1.5
    )  # where a block has the end of one chunk and the start of another
    assert int(blocks.kv_num_blocks.sum()) <= more * int(fewest.kv_num_blocks.sum())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_stay_in_fp32_under_autocast(dtype: torch.dtype) -> None:
    q, k, v = (numbers(BATCH, heads, LENGTH, WIDTH).to(dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    mask = mask_of(positions(), kernel="sdpa")
    expected, sums = attend_with_logsumexp(q, k, v, mask)
    with torch.autocast("cpu", dtype):
        out, found = attend_with_logsumexp(q, k, v, mask)
    assert out.equal(expected)
    assert found.equal(sums)


def attention_of_parts() -> list[dict[str, Any]]:
    """Of each method, with and without documents, in fp32 and bf16: what ``_compared`` found."""
    with open_session(compose([]).launch):
        cases = product(METHODS, (True, False), (torch.float32, torch.bfloat16))
        return [_compared(*case) for case in cases]


def attention_to_sinks() -> list[dict[str, Any]]:
    with open_session(compose([]).launch):
        return [_compared(method, True, torch.float32, torch.linspace(-1, 2, HEADS)) for method in METHODS]


def _compared(method: str, has_documents: bool, dtype: torch.dtype, sinks: Tensor | None = None) -> dict[str, Any]:
    """Differences from one process of output and gradients, and bytes sent and kept for the backward."""
    group = dist.group.WORLD
    assert group is not None
    every = positions() if has_documents else None
    make = partial(causal_mask, every, LENGTH, torch.device("cpu"), None, "auto")
    whole = Context(attend, attend_with_logsumexp)
    context = METHODS[method](whole, group)
    q, k, v = (
        numbers(BATCH, heads, LENGTH, WIDTH, seed=seed).to(dtype).requires_grad_()
        for seed, heads in enumerate((HEADS, KEY_HEADS, KEY_HEADS))
    )
    weights = numbers(BATCH, HEADS, LENGTH, WIDTH, seed=3)
    ends = [None, None] if sinks is None else [sinks.clone().requires_grad_() for _ in range(2)]
    expected = whole.attend(q, k, v, whole.mask(make, LENGTH, q.device), ends[0])
    (expected * weights).sum().backward()
    parts = [context.part(each.detach(), 2).requires_grad_() for each in (q, k, v)]
    mask = context.mask(make, LENGTH, q.device)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Wire() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = context.attend(*parts, mask, ends[1])
    with Wire() as backward:
        (out * context.part(weights, 2)).sum().backward()
    differences = [(out - context.part(expected, 2)).abs().max().item()]
    for mine, every in zip(parts, (q, k, v), strict=True):
        assert mine.grad is not None
        assert every.grad is not None
        differences.append((mine.grad - context.part(every.grad, 2)).abs().max().item())
    if ends[0] is not None and ends[1] is not None:
        dist.all_reduce(ends[1].grad)
        differences.append((ends[1].grad - ends[0].grad).abs().max().item())
    return {
        "method": method, "has_documents": has_documents, "width": dtype.itemsize, "difference": max(differences),
        "forward": forward.bytes, "backward": backward.bytes, "kept": sum(kept.values()),
        "hops": [each is not None for each in mask] if method == "ring" else [],
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_output_gradients_and_bytes_equal_one_process(ranks: int, cluster: Cluster) -> None:
    answers = cluster.run(ranks, "tests.ranks.test_context:attention_of_parts")
    for answer in answers:
        for found in answer.value:
            width, tokens = found["width"], BATCH * LENGTH // ranks
            sent = 2 * (ranks - 1) * tokens * KEY_HEADS * WIDTH  # numbers
            assert found["difference"] < (5e-6 if width == 4 else 6e-2), found
            if found["method"] == "gather":
                assert found["forward"] == {"allgather_base": sent * width}
                assert found["backward"] == {"reduce_scatter_base": sent * width}
            else:
                assert found["forward"] == {"alltoall_base": sent * width}
                assert found["backward"] == {"alltoall_base": sent * (width + 4)}
                kept = tokens * (2 * (HEADS + KEY_HEADS) * WIDTH * width + 4 * HEADS)
                assert found["kept"] == kept, "q, k, v, result and log-sum-exp: one part of each"
                assert all(found["hops"]) or found["has_documents"]
    if ranks == 4:
        hops = [found["hops"] for answer in answers for found in answer.value]
        assert not all(map(all, hops)), "a hop without a common document is skipped"


def test_sinks_with_a_context_axis_equal_one_process(cluster: Cluster) -> None:
    for answer in cluster.run(2, "tests.ranks.test_context:attention_to_sinks"):
        assert max(found["difference"] for found in answer.value) < 1e-5


def model_of_parts(method: str) -> list[float]:
    """Relative differences from one process of the loss, and of all parameters' gradients summed over ranks."""
    with open_session(compose([]).launch):
        group = dist.group.WORLD
        assert group is not None
        tokens, targets = torch.randint(131, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
        differences = []
        for place in (positions(), None):
            whole, parted = build(section()), build(section())
            expected = whole(tokens, targets, place)
            expected.backward()
            for module in parted.modules():
                if isinstance(getattr(module, "context", None), Context):
                    module.context = METHODS[method](module.context, group)  # type: ignore[arg-type]
            part = partial(parted.context.part, dim=1)
            loss = parted(part(tokens), part(targets), place)
            loss.backward()
            dist.all_reduce(loss.detach())
            differences.append(abs(loss.item() / expected.item() - 1))
            for name, parameter in parted.named_parameters():
                dist.all_reduce(parameter.grad)
                reference = whole.get_parameter(name).grad
                assert reference is not None
                differences.append(((parameter.grad - reference).norm() / reference.norm()).item())
        return differences


@pytest.mark.parametrize("method", METHODS)
def test_loss_and_gradients_of_a_model_equal_one_process(method: str, cluster: Cluster) -> None:
    for answer in cluster.run(2, "tests.ranks.test_context:model_of_parts", method=method):
        assert max(answer.value) < 1e-5


RUN = (
    "data.isolate_documents=true", "trainer.eval_every=3", "trainer.eval_batches=2", "trainer.sample_tokens=9",
    "trainer.deterministic=true",
)  # fmt: skip
DIVIDED = ("parallel=fsdp", "parallel.context=2", "parallel.context_method=ring", *RUN)


@pytest.mark.slow
def test_run_evaluates_samples_and_resumes_as_one_process_does(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    def train(name: str, ranks: int, *more: str, code: int = EXIT_FINISHED) -> str:
        argv = tiny_overrides(text, tmp_path / name, *more)
        answers = cluster.run(ranks, "testing.runs:train_reported", argv=argv)
        assert all(answer.value == code for answer in answers), [answer.printed for answer in answers]
        return answers[0].printed

    alone, printed = train("alone", 1, "parallel=single", *RUN), train("divided", 2, *DIVIDED)
    for event in ("step", "eval"):
        ours, theirs = (losses(tmp_path / name, event) for name in ("divided", "alone"))
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert printed.partition("sample  ")[2].splitlines()[:2] == alone.partition("sample  ")[2].splitlines()[:2] != []

    train("resumed", 2, *DIVIDED, "trainer.stop_at=4", code=EXIT_STOPPED)
    train("resumed", 2, *DIVIDED)
    assert not different_tensors(tmp_path / "divided", tmp_path / "resumed")


def test_model_without_an_extension_point_is_refused_in_one_line() -> None:
    plan, layout = ParallelPlan(), Layout("fsdp", context=2)
    with pytest.raises(UserError, match=r"parallel.context=2: the model does not declare .* use parallel.context=1"):
        shard_specs(build(section()), plan, layout)
