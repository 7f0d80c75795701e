"""Text that many prompts get together, with the cache and on any layout, is the text that each gets alone."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.parallel.layout.mesh import Layout
from serried.runtime.session import open_session
from testing.rank_pool import Cluster
from tests.ranks.models import test_any_hugging_face_model as any_model
from tests.ranks.models.test_families import FAMILIES, ROWS, WINDOW, opened_on, saved
from tests.support.continuing import TOKENS, continued, greedy_and_sampled

LENGTHS = (6, 1, WINDOW + 5, 2)
"""Of prompts: most are shorter than the convolutions of linear attention and than the window, one is longer."""
SEED = 3
ENDS = range(0, ROWS, 9)
NAMES = [name for name in FAMILIES if "," not in name or name.startswith("gemma4")]
NAMES += ["hf opt", "hf phi", "hf bloom", "hf gemma3_text"]
DAILY = ("gpt_oss", "qwen3_5_text")
LAYOUTS = {
    "ddp x2": (Layout("ddp", replicate=2), ["llama", "hf bloom"]),
    "fsdp x2": (Layout("fsdp", shard=2), ["gpt2", "deepseek_v3", "qwen3_next", "hf opt"]),
    "tensor x2": (Layout("fsdp", tensor=2), ["gemma2", "deepseek_v3", "qwen3_5_text", "hf phi"]),
    "expert x2": (Layout("fsdp", shard=2, expert=2), ["gpt_oss", "qwen3_next"]),
    "context x2": (Layout("fsdp", context=2), ["gpt_oss"]),
    "pipeline x2": (Layout("fsdp", pipeline=2, stages=2), ["llama"]),
}
"""Layouts, and families with different caches."""

Together = Callable[[str], tuple[Path, list[list[int]]]]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(ROWS, (length,), generator=generator).tolist() for length in LENGTHS]


def choice_of(folder: Path) -> str:
    return "hf" if folder.name.startswith("hf") else "auto"


def texts(layout: Layout, folder: Path, rows: int) -> list[list[int]]:
    """Of the prompts: the likeliest text and a sampled one, in turn."""
    if (choice := choice_of(folder)) == "hf":
        layout = replace(layout, sequence=False)
    family, model = opened_on(layout, folder, choice)
    return continued(model, family, prompts(), rows=rows, choose=greedy_and_sampled(SEED))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    """A folder with a model of a family, and what it writes for all prompts in one batch."""

    @cache
    def made(name: str) -> tuple[Path, list[list[int]]]:
        folder = tmp_path_factory.mktemp(name.partition(" ")[0].rstrip(","))
        if name.startswith("hf "):
            any_model.saved(name.removeprefix("hf "), folder, tie_word_embeddings=False)
        else:
            saved(name, folder, tie_word_embeddings=False)
        found = texts(Layout("single"), folder, rows=4)
        greedy, sampled = (max(len({*text}) for text in found[first::2]) for first in (0, 1))
        assert greedy > 2 and sampled > 20, "a model that repeats itself would compare equal to much"
        return folder, found

    return made


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in DAILY)) for name in NAMES])
@torch.no_grad()
def test_batch_gives_each_prompt_the_tokens_of_its_own_logits(name: str, together: Together) -> None:
    """The logits are those of the text alone, computed in one forward without a cache."""
    folder, found = together(name)
    family, model = opened_on(Layout("single"), folder, choice_of(folder))
    assert family.new_cache([0], 1) is not None
    choose = greedy_and_sampled(SEED)
    for number, (prompt, text) in enumerate(zip(prompts(), found, strict=True)):
        logits = model.module(torch.tensor([prompt + text[:-1]]))[0, len(prompt) - 1 :]
        assert [int(choose(row[None], [number])) for row in logits] == text
        assert len(text) == TOKENS


@pytest.mark.slow
def test_batch_gives_each_prompt_the_text_that_it_gets_alone(together: Together) -> None:
    folder, found = together("gpt_oss")
    assert texts(Layout("single"), folder, rows=1) == found


@pytest.mark.slow
def test_positions_that_depend_on_the_longest_text_are_computed_one_prompt_at_a_time(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    saved("llama", tmp_path, rope_parameters=rope)
    for choice, is_batched in (("hf", False), ("auto", True)):
        family, _ = opened_on(Layout("single"), tmp_path, choice)
        assert family.is_batched == is_batched
        assert (family.new_cache([0, 3], 9) is not None) == is_batched


def texts_on(layout: str, folders: dict[str, str]) -> dict[str, Any]:
    """What each model writes on a layout. Of the first also, under "ends": texts that end at different tokens, and the
    text of a single prompt; under "frees": whether a rank holds only shards of blocks after each forward."""
    with open_session(compose([]).launch):
        found = {name: texts(LAYOUTS[layout][0], Path(folder), rows=2) for name, folder in folders.items()}
        family, model = opened_on(LAYOUTS[layout][0], Path(next(iter(folders.values()))))  # a built-in family
        choose, are_shards = greedy_and_sampled(SEED), set[bool]()

        def watched(logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
            blocks = dict(model.module.named_children())["h" if layout == "fsdp x2" else "layers"]
            are_shards.add(all(isinstance(parameter, DTensor) for parameter in blocks[0].parameters()))
            return choose(logits, numbers)

        write = partial(continued, model, family, choose=watched)
        found["ends"] = write(prompts(), ends=ENDS) + write(prompts()[:1], 9)
        return found | {"frees": are_shards == {True}}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_of_each_prompt_is_the_same_on_every_layout(layout: str, together: Together, cluster: Cluster) -> None:
    first = together(LAYOUTS[layout][1][0])[1]
    until = [next((at + 1 for at, token in enumerate(text) if token in ENDS), TOKENS) for text in first]
    assert len({*until}) > 2, "they end at different tokens"
    expected: dict[str, Any] = {name: together(name)[1] for name in LAYOUTS[layout][1]}
    expected["ends"] = [text[:count] for text, count in zip(first, until, strict=True)] + [first[0][:9]]
    folders = {name: str(together(name)[0]) for name in LAYOUTS[layout][1]}
    function = "tests.ranks.models.test_batched_generation:texts_on"
    for answer in cluster.run(2, function, layout=layout, folders=folders):
        assert answer.value == expected | {"frees": layout != "ddp x2"}


def with_votes(batches: Iterable[int]) -> Iterator[int]:
    """Yield ``batches`` after votes of all ranks, as an evaluation does."""
    for batch in batches:
        dist.all_reduce(torch.zeros(1))
        yield batch


def nan_on(layout: str, folder: str) -> str:
    with open_session(compose([]).launch) as session:
        family, model = opened_on(LAYOUTS[layout][0], Path(folder))
        if session.rank == 1:
            for parameter in model.parameters:
                parameter.tensor.detach().fill_(float("nan"))
        try:
            continued(model, family, prompts(), 9, batches=with_votes)
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("layout", ["ddp x2", pytest.param("fsdp x2", marks=pytest.mark.slow)])
def test_nan_on_one_rank_is_one_error_on_all(layout: str, together: Together, cluster: Cluster) -> None:
    function = "tests.ranks.models.test_batched_generation:nan_on"
    for answer in cluster.run(2, function, layout=layout, folder=str(together("gpt_oss")[0])):
        assert "the logits of the model are NaN" in answer.value
