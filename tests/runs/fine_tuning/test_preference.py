"""Preference training: the losses of TRL, on any layout, with a reference that is computed once."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.schema.declaration import BUILT_IN
from serried.parallel.plan import Vocabulary
from serried.program import main
from serried.recipes.data.chat.preference_pairs import PairEncoder, pair_encoder
from serried.recipes.data.readers.columns import Column
from serried.recipes.data.readers.row_files import units_of_file
from serried.recipes.data.samples.pair_dataset import PairBatch
from serried.recipes.data.tokenizers.tokenizer import BytesTokenizer
from serried.recipes.models.layers import attention_choice
from serried.recipes.models.layers.lm_head import IGNORE, LanguageModelHead, token_losses
from serried.recipes.text.preference import Preference
from serried.recipes.text.preference_config import PreferenceSection
from serried.recipes.text.preference_losses import margin_losses, orpo_losses
from serried.records.metrics import named_metrics
from testing import runs
from testing.rank_pool import Cluster
from tests.support import trl_losses

ASK = {"role": "user", "content": "Say three."}
YES, NO = ({"role": "assistant", "content": text} for text in ("Three.", "Nope, never."))


def write_pairs(path: Path, first: str = "Say") -> Path:
    rows = [
        {"prompt": f"{first} {n}.", "chosen": f"{n}." * (1 + n % 3), "rejected": f"No{'o' * (n % 5)} {n}."}
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as transformers writes it, and pairs beside it."""
    import transformers

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    write_pairs(folder / "pairs.jsonl")
    return folder


def dpo(model: Path, run_dir: Path, *more: str) -> list[str]:
    given = [
        "recipe=dpo", f"model.path={model / 'llama'}", f"data.path={model / 'pairs.jsonl'}", "data.tokenizer=bytes",
        f"data.cache_dir={model / 'cache'}", f"run.dir={run_dir}", "precision=fp32", "data.sequence_length=128",
        "trainer.steps=4", "trainer.global_batch=4", "trainer.micro_batch=2", "trainer.eval_every=2",
        "trainer.log_every=1", "data.workers=0", "optim.lr=0.003", "schedule=constant", "schedule.warmup_steps=0",
        *more,
    ]  # fmt: skip
    return [f"{key}={value}" for key, value in dict(word.split("=", 1) for word in given).items()]


def train(argv: list[str], code: int = 0) -> None:
    assert main(argv) == code


class Watched(Preference):
    """Keeps the batches it trains on."""

    batches: list[PairBatch]
    reads: int
    """Times that weights are read, or their names."""

    def exported_from(self, folder: Path) -> Any:
        type(self).reads += 1
        return super().exported_from(folder)

    def terms(self, output: Tensor, batch: PairBatch) -> Any:
        if torch.is_grad_enabled():
            self.batches.append(batch)
        return super().terms(output, batch)


CHOSEN = torch.tensor([-12.5, -30.25, -4.0, -0.5], dtype=torch.float64)
REJECTED = torch.tensor([-14.0, -28.75, -40.5, -0.75], dtype=torch.float64)
BY_REFERENCE = torch.tensor([[-13.0, -30.0, -6.5, -0.25], [-13.5, -29.5, -38.0, -1.0]], dtype=torch.float64).T
LENGTHS = torch.tensor([[5, 11, 8, 1], [7, 9, 20, 2]]).T


def test_losses_of_log_probabilities_are_those_of_trl() -> None:
    """TRL 1.16: ``ORPOTrainer.odds_ratio_loss`` (without the loss of the chosen answer), ``CPOTrainer.cpo_loss``."""
    sums = torch.stack((CHOSEN, REJECTED), dim=1)
    means = sums / LENGTHS
    odds = torch.tensor([-0.1011694595, -0.0486027077, -0.0094080484, -0.0886156410]).double()
    assert torch.allclose(orpo_losses(means, 0.1), -means[:, 0] - odds, atol=1e-6)
    margins = torch.tensor([2.1269280910, 0.7502452135, 0.1210974231, 1.5019290447]).double()
    assert torch.allclose(margin_losses(2.0 * means, 1.0), margins, atol=1e-6)
    log_ratios = 0.1 * (sums - BY_REFERENCE)
    assert torch.allclose(margin_losses(log_ratios, 0.0), -F.logsigmoid(log_ratios[:, 0] - log_ratios[:, 1]))
    assert orpo_losses(torch.tensor([[-1e-9, -50.0]]).double(), 0.1).isfinite().all()


def published_losses(model: Any, reference: Any, batch: PairBatch, loss: str) -> Tensor:
    """Of each pair, by the formulas of the papers, from whole logits."""

    def sums(of: Any) -> Tensor:
        log_probs = of(batch.tokens).logits.log_softmax(-1).gather(2, batch.targets.clamp(min=0).unsqueeze(2))
        return (log_probs.squeeze(2) * (batch.targets != IGNORE)).sum(1)

    policy, lengths = sums(model), (batch.targets != IGNORE).sum(1)
    if loss == "dpo":
        with torch.no_grad():
            ratios = policy - sums(reference)
        ratios = ratios + policy - policy.detach()
        return -F.logsigmoid(0.1 * (ratios[::2] - ratios[1::2]))
    means = policy / lengths
    if loss == "simpo":
        return -F.logsigmoid(2.0 * means[::2] - 2.0 * means[1::2] - 1.0)
    odds = means - torch.log1p(-means.exp())
    return -means[::2] - 0.1 * F.logsigmoid(odds[::2] - odds[1::2])


@pytest.mark.parametrize(
    "loss", ["ipo", "kto", *(pytest.param(loss, marks=pytest.mark.slow) for loss in ("cpo", "simpo"))]
)
def test_losses_of_steps_are_those_that_trl_computes(tmp_path: Path, loss: str) -> None:
    trl_losses.write_inputs(tmp_path)
    train([*trl_losses.arguments(tmp_path, loss), f"run.dir={tmp_path / 'run'}"])
    want = json.loads(trl_losses.RECORDED.read_text())[loss]
    assert runs.losses(tmp_path / "run") == pytest.approx(want, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("loss", ["dpo", "orpo", "simpo"])
def test_training_is_that_of_transformers_model_with_the_published_loss(model: Path, tmp_path: Path, loss: str) -> None:
    from transformers import LlamaForCausalLM

    Watched.batches, Watched.reads = [], 0
    argv = dpo(model, tmp_path / "run", f"task.loss={loss}", "trainer.max_grad_norm=0")
    assert main(argv, BUILT_IN._replace(task=Watched)) == 0
    assert Watched.reads == 2, "the names, then the weights once, for the reference and for training"
    ours = runs.metrics(tmp_path / "run")
    theirs, reference = (LlamaForCausalLM.from_pretrained(model / "llama") for _ in range(2))
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.003, betas=(0.9, 0.95), weight_decay=0.0)
    for step, line in enumerate(ours):
        losses = [published_losses(theirs, reference, each, loss) for each in Watched.batches[2 * step : 2 * step + 2]]
        mean = torch.cat(losses).mean()
        assert line["loss"] == pytest.approx(mean.item(), abs=1e-5)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(ours) == 4
    assert ours[-1]["reward_margin"] > ours[0]["reward_margin"]
    assert ours[-1]["chosen_log_prob"] < 0
    assert named_metrics(ours[0]).keys() == {*PreferenceSection.metrics}, "what checkpoint.best_metric may be"
    if loss == "dpo":
        assert (ours[0]["reward_margin"], ours[0]["loss"]) == pytest.approx((0.0, 0.693147), abs=1e-5)


def test_layouts_agree_and_a_resumed_run_has_the_same_bits(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    folder, deterministic = model / "cache" / "reference", "trainer.deterministic=true"
    train(dpo(model, tmp_path / "whole", deterministic))
    known = {path: path.stat().st_mtime_ns for path in folder.glob("*.f64")}
    assert len(known) == 2, "training and validation"
    train(dpo(model, tmp_path / "stopped", deterministic, "trainer.stop_at=2"), 75)
    train(dpo(model, tmp_path / "stopped", deterministic))
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.f64")} == known, "computed once"
    assert not runs.different_tensors(tmp_path / "whole", tmp_path / "stopped")
    want = runs.metrics(tmp_path / "whole")
    for name, *layout in (
        ("fsdp", "parallel=fsdp", "parallel.reshard_after_forward=true", "trainer.micro_batch=1"),
        ("tensor", "parallel=fsdp", "parallel.tensor=2", f"data.cache_dir={tmp_path / 'other'}"),
    ):
        cluster.run(2, "tests.runs.fine_tuning.test_preference:train", argv=dpo(model, tmp_path / name, *layout))
        found = runs.metrics(tmp_path / name)
        for key in ("loss", "reward_margin", "chosen_reward", "rejected_log_prob"):
            assert [line[key] for line in found] == pytest.approx([line[key] for line in want], rel=1e-5, abs=1e-5)
    validation = [runs.metrics(tmp_path / name, "eval")[-1]["loss"] for name in ("whole", "fsdp", "tensor")]
    assert validation == pytest.approx([validation[0]] * 3, abs=1e-5)


def test_a_changed_model_or_changed_pairs_have_a_reference_of_their_own(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    folder, argv = tmp_path / "cache" / "reference", dpo(model, tmp_path / "run", "trainer.steps=1")
    argv += [f"data.cache_dir={tmp_path / 'cache'}", "trainer.eval_every=0"]
    (tmp_path / "llama").mkdir()
    for file in (model / "llama").iterdir():
        (tmp_path / "llama" / file.name).write_bytes(file.read_bytes())
    pairs = write_pairs(tmp_path / "pairs.jsonl", "Count to")
    files = 0
    for number, more in enumerate([[], [f"data.path={pairs}"], [f"model.path={tmp_path / 'llama'}"], ["changed"], []]):
        if more == ["changed"]:
            weights = load_file(tmp_path / "llama" / "model.safetensors")
            weights["model.norm.weight"] += 1
            save_file(weights, tmp_path / "llama" / "model.safetensors")
            more = [f"model.path={tmp_path / 'llama'}"]
        train([*argv, *more, f"run.dir={tmp_path / str(number)}"])
        files, before = len([*folder.iterdir()]), files
        # The same weights in another folder are known; so is what was computed at first.
        assert files - before == (number in (0, 1, 3))
        if number == 0:
            (path,) = folder.iterdir()
            first = np.fromfile(path).reshape(-1, 2)
            assert np.isfinite(first[:, 0]).sum() == 4, "those of one step"
    train([*argv, f"run.dir={tmp_path / 'longer'}", "trainer.steps=2"])
    longer = np.fromfile(path).reshape(-1, 2)
    assert np.isfinite(longer[:, 0]).sum() == 8
    assert (longer == first).sum() == 2 * 4, "not computed again"
    # The run whose model has changed since is not resumed with another reference.
    resumed = [*argv, f"model.path={tmp_path / 'llama'}", f"run.dir={tmp_path / '2'}", "trainer.steps=2"]
    capsys.readouterr()
    train(resumed, 78)
    assert "model.safetensors has different content; restore the original files, or use run." in capsys.readouterr().err
    train([*resumed, "checkpoint.allow_changes=[model.path]"])


@pytest.mark.slow
def test_damaged_reference_is_reported_and_computed_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*dpo(model, tmp_path / "run"), f"data.cache_dir={tmp_path / 'cache'}", "trainer.eval_every=0"]
    argv += ["trainer.deterministic=true", "trainer.steps=2"]
    train([*argv, f"run.dir={tmp_path / 'whole'}"])
    (path,) = (tmp_path / "cache" / "reference").iterdir()
    content = path.read_bytes()
    numbers = content[: len(content) // 16 * 16]
    assert content == numbers + zlib.crc32(numbers).to_bytes(4, "little")

    def resumed(name: str, found: bytes) -> str:
        train([*argv, f"run.dir={tmp_path / name}", "trainer.stop_at=1"], 75)
        path.write_bytes(found)
        capsys.readouterr()
        train([*argv, f"run.dir={tmp_path / name}"])
        assert runs.losses(tmp_path / name) == runs.losses(tmp_path / "whole")
        assert path.read_bytes() == content
        return capsys.readouterr().out

    damaged = bytearray(content)
    damaged[next(place for place in range(6, len(numbers), 8) if numbers[place : place + 2] != b"\xf8\x7f")] ^= 8
    said = f"WARNING    {path} is damaged; the reference is recomputed\n"
    assert said in resumed("flipped", bytes(damaged))
    assert said in resumed("cut", content[:-9])
    assert said not in resumed("without-checksum", numbers)


def test_a_model_that_is_trained_and_a_frozen_one_have_each_a_reference(model: Path, tmp_path: Path) -> None:
    def settings(*more: str) -> Any:
        return Preference(compose(dpo(model, tmp_path / "run", "parallel.pipeline=2", *more))).reference_settings()

    full, lora, qlora = settings(), settings("adapter=lora"), settings("adapter=lora", "adapter.quantize=nf4")
    assert full != lora != qlora != full
    assert settings("adapter=lora", "adapter.method=dora", "adapter.rank=4") == lora


@pytest.mark.parametrize("words", [[], ["task.loss=orpo", "adapter=lora"]])
def test_preference_without_pretrained_weights_is_refused(model: Path, tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(UserError, match=r"use model\.pretrained=true"):
        Preference(compose(dpo(model, tmp_path / "run", "model.pretrained=false", *words)))


def test_adapters_compare_with_their_base_and_keep_nothing(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    more = ["adapter=lora", "adapter.rank=4", f"data.cache_dir={tmp_path / 'cache'}", "trainer.eval_every=0"]
    train(dpo(model, tmp_path / "single", *more))
    cluster.run(
        2, "tests.runs.fine_tuning.test_preference:train", argv=dpo(model, tmp_path / "fsdp", *more, "parallel=fsdp")
    )
    want, found = (runs.metrics(tmp_path / name) for name in ("single", "fsdp"))
    assert not (tmp_path / "cache" / "reference").exists()
    assert want[0]["reward_margin"] == 0
    assert want[-1]["reward_margin"] > 0
    for key in ("loss", "reward_margin"):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in want], abs=1e-5)


@pytest.mark.slow
def test_reference_of_a_run_that_trains_a_module_beside_adapters_is_computed_before_it(
    model: Path, tmp_path: Path
) -> None:
    """Without its adapters, the model has the trained module."""
    more = ["adapter=lora", "adapter.modules_to_save=[norm]", f"data.cache_dir={tmp_path / 'cache'}"]
    train(dpo(model, tmp_path / "run", *more, "trainer.eval_every=0"))
    assert (tmp_path / "cache" / "reference").exists()
    assert runs.metrics(tmp_path / "run")[0]["reward_margin"] == 0


def test_loss_of_each_token_and_its_gradient_are_those_of_cross_entropy() -> None:
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 5, 8, generator=random, requires_grad=True)
    weight = torch.randn(11, 8, generator=random, requires_grad=True)
    targets = torch.randint(11, (2, 5), generator=random)
    targets[0, :2] = IGNORE
    slopes = torch.randn(2, 5, generator=random)
    head = LanguageModelHead(8, 11, tied=True, soft_cap=3.0)
    head.loss = token_losses
    assert isinstance(head.vocabulary, Vocabulary)
    logits = 3 * torch.tanh(F.linear(hidden, weight) / 3)
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none").view(2, 5)
    found = head(hidden, targets, weight)
    torch.testing.assert_close(found, want)
    gradients = []
    for losses in (found, want):
        gradients = torch.autograd.grad((losses * slopes).sum(), (hidden, weight), retain_graph=True)
        torch.testing.assert_close(
            gradients, torch.autograd.grad((want * slopes).sum(), (hidden, weight), retain_graph=True)
        )


def encoder(length: int = 128) -> PairEncoder:
    section = compose(["recipe=dpo", "data.tokenizer=bytes", f"data.sequence_length={length}"]).data
    return pair_encoder(section, BytesTokenizer())


def encoded(folder: Path, row: Any, length: int = 128) -> Any:
    (folder / "pairs.jsonl").write_text(
        json.dumps({"chosen": [ASK, YES], "rejected": [ASK, NO]}) + "\n" + json.dumps(row)
    )
    path = folder / "pairs.jsonl"
    (unit,) = units_of_file(path, Column("chosen", "preference"), path.stat().st_size, None)
    rows = [*unit.all_rows()]
    found = [row.error or pair for row, pair in zip(rows, encoder(length)(rows, path.name), strict=True)]
    for each in found:
        if isinstance(each, UserError):
            raise each
    return found


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Say three.", "chosen": "Three.", "rejected": "Nope, never."},
        {"question": "Say three.", "chosen": "Three.", "rejected": "Nope, never.", "system": None},
        {"prompt": [ASK], "chosen": [YES], "rejected": [NO]},
        {"prompt": "Say three.", "chosen": [ASK, YES], "rejected": [ASK, NO], "score": 3},
        {"prompt": "Say three.", "chosen": [YES], "rejected": [NO]},
    ],
)
def test_forms_of_a_pair_are_the_same_tokens(tmp_path: Path, row: dict[str, Any]) -> None:
    want, found = encoded(tmp_path, row)
    assert (found.tokens == want.tokens).all()
    assert (found.supervised == want.supervised).all()
    text = BytesTokenizer().decode
    assert text(found.tokens[found.supervised == 1].tolist()) == "Three.<|im_end|>"
    assert text(found.tokens[found.supervised == 3].tolist()) == "Nope, never.<|im_end|>"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "?", "chosen": "A"}, "pairs.jsonl line 2 has no column rejected; its columns are prompt, chosen"),
        ({"chosen": "A", "rejected": "B"}, "line 2: the row has two answers but no prompt; put the"),
        ({"prompt": "?", "chosen": "A", "rejected": 3}, "line 2: column 'rejected' is a number (3), not text or a li"),
        ({"prompt": "?", "chosen": "A", "rejected": None}, "line 2: column 'rejected' is null, not text or a list"),
        ({"prompt": "?", "chosen": "A", "rejected": [YES]}, "line 2: one of 'chosen' and 'rejected' is text, the"),
        ({"prompt": "?", "chosen": "A", "rejected": "A"}, "pairs.jsonl line 2: chosen and rejected are the same an"),
        ({"prompt": "?", "chosen": "A", "rejected": ""}, "pairs.jsonl line 2: rejected is empty; fix or remove the "),
        ({"chosen": [ASK], "rejected": [ASK, NO]}, "pairs.jsonl line 2: chosen is empty"),
        ({"prompt": "?" * 200, "chosen": "A", "rejected": "B"}, "pairs.jsonl line 2: the prompt has 250 tokens, so"),
        ({"chosen": [ASK, YES], "rejected": [YES, NO]}, "line 2: chosen and rejected begin with different messages"),
        ({"prompt": 3, "chosen": "A", "rejected": "B"}, "line 2: the prompt is a number (3)"),
        ({"chosen": [ASK, ASK], "rejected": [ASK, NO]}, "pairs.jsonl line 2, chosen: nothing to train on: no"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_pair_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        encoded(tmp_path, row)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_plan_names_the_reference(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(dpo(model, tmp_path / "run", "dry_run=true"))
    assert f"reference  log-probabilities of {model / 'llama'}, computed once on this layout" in capsys.readouterr().out
    train(dpo(model, tmp_path / "run", "dry_run=true", "adapter=lora"))
    assert "reference  the model without its adapters" in capsys.readouterr().out
    train(["recipe=dpo", "dry_run=true"], 78)
    assert "use model.path=FOLDER_OR_NAME" in capsys.readouterr().err


@pytest.mark.parametrize(("window", "is_whole"), [(64, True), (512, False)])
def test_batches_have_one_shape_where_a_gpu_compiles_attention_for_each(
    window: int, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_choice, "has_flex", lambda _: True)
    words = ["recipe=dpo", "task.loss=simpo", "model=mistral7b", "data.sequence_length=256"]
    assert Preference(compose([*words, f"model.sliding_window={window}"]))._needs_one_shape == is_whole


def test_padding_does_not_lengthen_a_sequence_for_rope(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = "short_factor: [1,1,1,1], long_factor: [9,9,9,9], attention_factor: 30"
    scaling = f"model.rope_scaling={{rope_type: longrope, factor: 2, original_max_sequence_length: 96, {factors}}}"
    words = [scaling, "trainer.steps=1", "task.loss=simpo"]
    train(dpo(model, tmp_path / "longest", *words))
    monkeypatch.setattr(Preference, "_needs_one_shape", True)
    train(dpo(model, tmp_path / "whole", *words))
    losses = [runs.metrics(tmp_path / name)[0]["chosen_log_prob"] for name in ("longest", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_all_pairs_are_trained_on(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(dpo(model, run, "data.validation_fraction=0", "trainer.eval_every=0", "trainer.steps=1", "task.loss=simpo"))
    assert not runs.metrics(run, "eval")
    train(dpo(model, run, "data.validation_fraction=0", "trainer.eval_every=1"), 78)


def test_answers_that_truncation_makes_equal_are_refused(tmp_path: Path) -> None:
    row = {"prompt": "?", "chosen": "same " * 30 + "yes", "rejected": "same " * 30 + "no"}
    with pytest.raises(
        UserError, match=r"line 2: chosen and rejected differ only after the first data\.sequence_length=128"
    ) as caught:
        encoded(tmp_path, row)
    fix = re.search(r"use data\.sequence_length=(\d+)", str(caught.value))
    assert fix
    assert len(encoded(tmp_path, row, int(fix[1]))) == 2
