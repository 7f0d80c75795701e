"""Documents in one sequence: none sees another, in the logits, the gradients and under every cut."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.parity import CUTS, TOLERANCES, Curve, compare, run
from serried.recipes.data.samples.token_dataset import positions_in_documents
from serried.recipes.models.layers.lm_head import IGNORE
from testing import runs
from testing.rank_pool import Cluster
from tests.unit.models.test_model import build, section

LENGTHS = (40, 3, 70, 1, 25, 61)
"""Tokens of the documents in each sequence of 200."""


def pack(*orders: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and positions [orders, 200]: the documents of ``LENGTHS``, in each sequence in another order."""
    rows = []
    for row, order in enumerate(orders):
        lengths = [LENGTHS[number] for number in order]
        begins = np.cumsum([0, *lengths])
        generator = torch.Generator().manual_seed(row)
        tokens = torch.randint(131, (begins[-1],), generator=generator)
        targets = torch.cat((tokens[1:], tokens[:1]))
        targets[begins[1:] - 1] = IGNORE
        rows.append((tokens, targets, torch.from_numpy(positions_in_documents(begins, len(tokens)))))
    tokens, targets, positions = (torch.stack(column) for column in zip(*rows, strict=True))
    return tokens, targets, positions


TOKENS, TARGETS, POSITIONS = pack((0, 1, 2, 3, 4, 5), (5, 4, 0, 3, 2, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("changed", [0, 39, 41, 80, 199])
def test_a_token_changes_no_bit_of_another_documents_logits(dtype: torch.dtype, changed: int) -> None:
    model = build(section())
    other = TOKENS.clone()
    other[0, changed] = (other[0, changed] + 1) % 131
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        before, after = (model(tokens, positions=POSITIONS) for tokens in (TOKENS, other))
        unconfined = [model(tokens)[0, changed + 1 :] for tokens in (TOKENS, other)]
    documents = (POSITIONS == 0).cumsum(1)
    own = documents[0] == documents[0, changed]
    same = before[0].eq(after[0]).all(-1)
    assert same[~own].all()
    assert not same[own & (torch.arange(200) >= changed)].any()
    assert before[1].equal(after[1])
    assert changed == 199 or not unconfined[0].equal(unconfined[1]), "it would show"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_isolated_document_has_the_same_outputs_as_alone(dtype: torch.dtype) -> None:
    """Its logits, its loss and the gradient of it, to rounding: so positions restart, too."""
    model = build(section())
    tolerance = 2e-5 if dtype == torch.float32 else 0.15
    expected_loss = torch.zeros(())
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        packed = model(TOKENS, positions=POSITIONS)
        for row in range(2):
            begins = [*torch.nonzero(POSITIONS[row] == 0).flatten().tolist(), 200]
            for start, stop in itertools.pairwise(begins):
                alone = model(TOKENS[row : row + 1, start:stop])
                torch.testing.assert_close(packed[row, start:stop], alone[0], rtol=0, atol=tolerance)
                targets = TARGETS[row : row + 1, start:stop]
                expected_loss = expected_loss + model(TOKENS[row : row + 1, start:stop], targets)
        loss = model(TOKENS, TARGETS, POSITIONS)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6 if dtype == torch.float32 else 1e-3, atol=0)
    gradients = [torch.autograd.grad(value, list(model.parameters())) for value in (loss, expected_loss)]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() < (1e-5 if dtype == torch.float32 else 3e-2) * theirs.norm()


def test_no_gradient_reaches_another_documents_tokens() -> None:
    model = build(section())
    hidden: list[Tensor] = []

    def keep(_module: object, _inputs: object, output: Tensor) -> None:
        output.retain_grad()
        hidden.append(output)

    model.embed_tokens.register_forward_hook(keep)
    documents = (POSITIONS == 0).cumsum(1)
    only = torch.where(documents == 3, TARGETS, IGNORE)  # documents of 70 and of 40 tokens
    model(TOKENS, only, POSITIONS).backward()
    assert hidden[0].grad is not None
    reached = hidden[0].grad.abs().sum(-1) > 0
    assert not reached[documents != 3].any()
    assert reached[documents == 3].sum() >= 70 + 40 - 2


def test_single_document_has_the_same_outputs_as_without_positions() -> None:
    model = build(section())
    positions = torch.arange(200).expand(2, -1)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS, positions=positions), model(TOKENS), rtol=0, atol=2e-5)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_padding_does_not_lengthen_a_document_for_rope(rope_type: str, short_documents: Path, tmp_path: Path) -> None:
    factors = ", short_factor: [1,1,1,1], long_factor: [9,9,9,9]" if rope_type == "longrope" else ""
    scaling = f"{{rope_type: {rope_type}, factor: 4, original_max_sequence_length: 64{factors}}}"
    words = [f"model.rope_scaling={scaling}", "data.packing=none", "trainer.steps=1", "model.initializer_std=0.3"]
    words += ["trainer.global_batch=24", "trainer.micro_batch=24"]
    for length in (64, 128):
        argv = runs.overrides(short_documents, tmp_path / str(length), *words, f"data.sequence_length={length}")
        assert runs.run_here(argv).code == 0
    expected, found = (runs.metrics(tmp_path / str(length))[0] for length in (64, 128))
    for name in ("loss", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


# under every cut ------------------------------------------------------------------------------------------------------

PACKINGS = {
    "split": ("data.isolate_documents=true",),
    "best_fit": ("data.isolate_documents=true", "data.packing=best_fit"),
}


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """900 files of 3 to 50 bytes: sequences of 32 have several."""
    folder = tmp_path_factory.mktemp("short") / "text"
    folder.mkdir()
    random = np.random.default_rng(11)
    words = ["lorem", "ipsum", "dolor", "sit", "amet"]
    for number in range(900):
        count = random.integers(1, 9)
        chosen = random.choice(words, size=count, p=[0.4, 0.3, 0.1, 0.1, 0.1])
        (folder / f"{number:03d}.txt").write_text(" ".join(chosen))
    return folder


@pytest.fixture(scope="module")
def references(cluster: Cluster, short_documents: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve]:
    folder = tmp_path_factory.mktemp("references")
    return {
        name: run(cluster, CUTS[0], 1, "fp32", short_documents, folder / name, *overrides)
        for name, overrides in {**PACKINGS, "not isolated": ()}.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp x2", "fsdp x2 (ZeRO-3)"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_loss_of_isolated_documents_does_not_depend_on_the_layout(
    name: str, packing: str, references: dict[str, Curve], cluster: Cluster, short_documents: Path, tmp_path: Path
) -> None:
    cut = next(each for each in CUTS if each.name == name)
    curve = run(cluster, cut, 3, "fp32", short_documents, tmp_path / "run", *PACKINGS[packing])
    difference = compare(curve, references[packing])
    assert difference.same_samples
    assert difference.loss < TOLERANCES["fp32"]
    assert difference.grad_norm < TOLERANCES["fp32"]
    assert curve.losses[-1] < 0.9 * curve.losses[0]
    assert compare(references["not isolated"], references[packing]).loss > 10 * TOLERANCES["fp32"], "it would show"
