"""Answers with a label (KTO), weights of rows, and several pairs in a sequence: one loss on any layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serried.commands import evaluate_model
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.program import main
from serried.recipes.data.readers.columns import Changed, Column
from serried.recipes.text.preference import Preference
from testing import runs
from testing.rank_pool import Cluster
from tests.support import trl_losses


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, and rows with weights: single answers, and pairs of very different lengths."""
    folder = tmp_path_factory.mktemp("inputs")
    trl_losses.write_inputs(folder)
    answers = [
        {"prompt": f"Say {n}.", "completion": f"{n}{'!' * (n % 7)}", "label": n % 3 > 0, "weight": 0.1 + n % 4}
        for n in range(48)
    ]
    pairs = [
        {"prompt": f"Say {n}.", "chosen": f"{n}{'!' * (n % 7)}", "rejected": "No" * (1 + n % 11), "weight": 0.5 + n % 3}
        for n in range(12)
    ]
    for name, rows in (("answers", answers), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(inputs: Path, loss: str, *more: str) -> list[str]:
    given = [
        *trl_losses.arguments(inputs, loss), f"data.path={inputs / ('answers' if loss == 'kto' else 'pairs')}.jsonl",
        "trainer.steps=2", "trainer.global_batch=12", "trainer.micro_batch=12",
        "optim.eps=0.001",  # with a small one, gradients near 0 are divided by themselves: rounding becomes a step
        *more,
    ]  # fmt: skip
    return [f"{key}={value}" for key, value in dict(word.split("=", 1) for word in given).items()]


def train(argv: list[str]) -> None:
    assert main(argv) == 0


def assert_equal_runs(found: Path, want: Path, within: float = 1e-5) -> None:
    for event in ("step", "eval"):
        for line, other in zip(runs.metrics(found, event), runs.metrics(want, event), strict=True):
            names = {"loss", "tokens", "divergence", "grad_norm", "reward_margin", "chosen_reward"}
            # In the first step all rewards are 0, but for rounding.
            shared = sorted((names | ({"reward_accuracy"} if line["step"] > 1 else set())) & other.keys())
            assert "loss" in shared
            got, wanted = ([each[name] for name in shared] for each in (line, other))
            assert got == pytest.approx(wanted, rel=within, abs=within), shared


KTO = ["data.validation_fraction=0.25", "trainer.eval_every=2"]


@pytest.mark.slow
def test_answers_have_one_loss_on_any_number_of_ranks_and_micro_batches(
    cluster: Cluster, inputs: Path, tmp_path: Path
) -> None:
    train(arguments(inputs, "kto", *KTO, f"run.dir={tmp_path / 'whole'}"))
    assert runs.metrics(tmp_path / "whole")[-1]["divergence"] > 0.1, "the estimate is not cut off at 0"
    assert runs.metrics(tmp_path / "whole", "eval")[-1]["divergence"] > 0.1
    for ranks, layout in ((2, "parallel=fsdp"), (3, "parallel=ddp")):
        argv = arguments(inputs, "kto", *KTO, layout, "trainer.micro_batch=2", f"run.dir={tmp_path / str(ranks)}")
        cluster.run(ranks, "tests.runs.fine_tuning.test_unpaired:train", argv=argv)
        assert_equal_runs(tmp_path / str(ranks), tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["parallel=fsdp", "parallel.tensor=2"],
        ["parallel=fsdp", "parallel.pipeline=2", "trainer.micro_batch=3"],
        ["data.packing=best_fit", "trainer.global_batch=4", "trainer.micro_batch=1", "parallel=fsdp"],
    ],
)
def test_answers_have_one_loss_on_other_axes(cluster: Cluster, inputs: Path, tmp_path: Path, more: list[str]) -> None:
    packed = [word for word in more if word.startswith(("data.packing", "trainer.global"))]
    micro = ["trainer.micro_batch=4"] if packed else []
    train(arguments(inputs, "kto", *packed, *micro, f"run.dir={tmp_path / 'whole'}"))
    argv = arguments(inputs, "kto", *more, f"run.dir={tmp_path / 'other'}")
    cluster.run(2, "tests.runs.fine_tuning.test_unpaired:train", argv=argv)
    assert_equal_runs(tmp_path / "other", tmp_path / "whole")


@pytest.mark.slow
def test_adapters_compare_answers_with_their_base(
    cluster: Cluster, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["adapter=lora", "adapter.rank=4", "optim.lr=0.02", "trainer.steps=3", *KTO, "task.undesirable_weight=0"]
    train(arguments(inputs, "kto", *more, f"run.dir={tmp_path / 'whole'}"))
    argv = arguments(inputs, "kto", *more, "parallel=fsdp", "trainer.micro_batch=2", f"run.dir={tmp_path / 'fsdp'}")
    cluster.run(2, "tests.runs.fine_tuning.test_unpaired:train", argv=argv)
    assert_equal_runs(tmp_path / "fsdp", tmp_path / "whole", within=5e-5)  # a high rate makes rounding grow
    lines = [*runs.metrics(tmp_path / "whole"), *runs.metrics(tmp_path / "whole", "eval")]
    assert max(line["divergence"] for line in lines) > 0
    capsys.readouterr()
    assert evaluate_model.evaluate([str(tmp_path / "whole"), "json=true"]) == 0
    found, last = json.loads(capsys.readouterr().out.splitlines()[-1]), runs.metrics(tmp_path / "whole", "eval")[-1]
    shared = ("loss", "divergence", "chosen_reward")
    assert [found[name] for name in shared] == pytest.approx([last[name] for name in shared], abs=1e-6)
    assert found["answers"] != round(found["answers"]), "the weight of all rows"


PACKED = ["data.packing=best_fit", "data.sequence_length=160", "trainer.micro_batch=1"]


def samples_of(argv: list[str]) -> int:
    """Return the number of training samples."""
    task = Preference(compose(argv))
    task.open_data(task.prepare())
    return len(task.dataset("train"))


def test_packed_pairs_have_the_loss_of_padded_pairs(inputs: Path, tmp_path: Path) -> None:
    train(arguments(inputs, "ipo", f"run.dir={tmp_path / 'padded'}"))
    packed = arguments(inputs, "ipo", *PACKED)
    count = samples_of(packed)
    assert count <= 8, "several pairs in a sample"
    train([*packed, f"trainer.global_batch={count}", f"run.dir={tmp_path / 'packed'}"])
    assert_equal_runs(tmp_path / "packed", tmp_path / "padded")


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ipo", "cpo"])
@pytest.mark.parametrize("axis", ["parallel.reshard_after_forward=true", "parallel.tensor=2", "parallel.pipeline=2"])
def test_packed_pairs_have_the_loss_of_padded_pairs_on_axes(
    cluster: Cluster, inputs: Path, tmp_path: Path, axis: str, loss: str
) -> None:
    train(arguments(inputs, loss, f"run.dir={tmp_path / 'padded'}"))
    packed = arguments(inputs, loss, *PACKED, "data.sequence_length=128", "parallel=fsdp", axis)
    count = samples_of(packed)
    argv = [*packed, f"trainer.global_batch={count}", f"run.dir={tmp_path / 'packed'}"]
    cluster.run(2, "tests.runs.fine_tuning.test_unpaired:train", argv=argv)
    assert_equal_runs(tmp_path / "packed", tmp_path / "padded")


@pytest.mark.slow
def test_packed_pairs_of_a_reward_model_have_the_loss_of_padded_pairs(inputs: Path, tmp_path: Path) -> None:
    def reward(*more: str) -> list[str]:
        own = [word for word in arguments(inputs, "ipo", *more) if not word.startswith(("recipe=", "task."))]
        return ["recipe=reward", *own]

    train(reward(f"run.dir={tmp_path / 'padded'}"))
    count = samples_of(arguments(inputs, "ipo", *PACKED))
    train(reward(*PACKED, f"trainer.global_batch={count}", f"run.dir={tmp_path / 'packed'}"))
    assert_equal_runs(tmp_path / "packed", tmp_path / "padded")


def batch_of(argv: list[str], count: int) -> tuple[Preference, Any]:
    task = Preference(compose(argv))
    task.open_data(task.prepare())
    dataset = task.dataset("train")
    return task, task.collate_numbered([dataset[n] for n in range(count)], np.arange(count))


def test_loss_is_the_mean_weighted_by_rows(inputs: Path) -> None:
    task, batch = batch_of(arguments(inputs, "simpo"), 12)
    assert sorted(batch.weights.flatten().tolist()) == sorted(0.5 + n % 3 for n in range(12))
    output = torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(2))
    terms = task.terms(output, batch)
    alone = [task.terms(output[2 * n : 2 * n + 2], _row(batch, n)) for n in range(12)]
    weights = batch.weights[:, 0]
    each = torch.stack([terms.loss_sum / terms.weight for terms in alone])
    assert (terms.loss_sum / terms.weight).item() == pytest.approx((weights @ each.double() / weights.sum()).item())
    total, weight = terms.metrics["chosen_reward"]
    assert weight == weights.sum()
    own = torch.stack([part.metrics["chosen_reward"][0] for part in alone])
    assert total.item() == pytest.approx(own.sum().item())


def _row(batch: Any, row: int) -> Any:
    rows = {"tokens": slice(2 * row, 2 * row + 2), "targets": slice(2 * row, 2 * row + 2)}
    rest = dict.fromkeys(("sample_ids", "reference", "weights"), slice(row, row + 1))
    return batch._replace(**{name: getattr(batch, name)[part] for name, part in (rows | rest).items()})


def test_other_answer_of_a_row_follows_its_own_prompt(inputs: Path) -> None:
    task, batch = batch_of(arguments(inputs, "kto"), 8)
    tokenizer, texts = task._text.tokenizer, []
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        said = tokenizer.decode(targets[targets >= 0].tolist()).removesuffix("<|im_end|>")
        texts.append((tokenizer.decode(tokens.tolist()).split("Say ")[1].split(".")[0], said))
    for (asked, said), (other_asked, other_said) in zip(texts[::2], texts[1::2], strict=True):
        assert asked == other_asked == said.rstrip("!")
        assert other_said.rstrip("!") != asked


def read(row: dict[str, Any], kind: Any = "unpaired") -> Any:
    found = Column("label", kind).content_of(row)
    return found.content if isinstance(found, Changed) else found


ASK, SAY = {"role": "user", "content": "?"}, {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "?", "completion": "A", "label": True},
        {"prompt": [ASK], "completion": [SAY], "label": 1},
        {"question": "?", "answer": "A", "label": "True"},
        {"messages": [ASK, SAY], "label": True, "score": 3},
        {"conversations": [ASK, SAY], "label": True, "weight": 1},
    ],
)
def test_forms_of_a_labelled_answer_are_the_same(row: dict[str, Any]) -> None:
    assert read(row) == {"prompt": [ASK], "completion": [SAY], "label": True}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "?", "completion": "A"}, " has no column 'label'; its columns are prompt, completion; rename"),
        ({"prompt": "?", "label": True}, " has a label and no answer; its columns are prompt, label; rename"),
        ({"prompt": "?", "completion": "A", "label": None}, ": column 'label' is null, not true or false; fix"),
        ({"prompt": "?", "completion": "A", "label": 0.5}, ": column 'label' is a number (0.5), not true or false"),
        ({"prompt": "?", "completion": 3, "label": True}, ": column 'completion' is a number (3), not text or a list"),
        ({"messages": [SAY, ASK], "label": True}, ": column 'messages' does not end with a reply, so there is no an"),
        ({"messages": "A", "label": True}, ": column 'messages' is text ('A'), so there is no answer to label; fix"),
        ({"prompt": "?", "completion": "A", "label": True, "weight": -1}, ": column 'weight' is a number (-1), not a"),
    ],
)  # fmt: skip
def test_row_that_is_no_labelled_answer_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        read(row)
    assert said in str(refused.value)


def test_pairs_become_two_labelled_answers(inputs: Path) -> None:
    task, batch = batch_of(arguments(inputs, "kto", f"data.path={inputs / 'pairs.jsonl'}"), 24)
    assert batch.is_desired.flatten().tolist() == [True, False] * 12
    assert batch.weights.flatten().tolist() == [weight for n in range(12) for weight in [0.5 + n % 3] * 2]
    assert "split into" not in task.describe_data()


def test_answers_of_one_label_are_refused(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"Say {n}.", "completion": "A", "label": True} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(arguments(inputs, "kto", f"data.path={tmp_path / 'rows.jsonl'}", f"run.dir={tmp_path / 'run'}")) == 78
    error = capsys.readouterr().err
    assert "all 12 answers of the train split have the label true, and KTO compares good answers with bad ones" in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_resumed_run_on_answers_has_the_same_bits(inputs: Path, tmp_path: Path) -> None:
    more = [*KTO, "trainer.deterministic=true", "trainer.steps=3", "data.packing=best_fit", "trainer.global_batch=4"]
    argv = arguments(inputs, "kto", *more, "trainer.micro_batch=2")
    train([*argv, f"run.dir={tmp_path / 'whole'}"])
    stopped = [*argv, f"run.dir={tmp_path / 'stopped'}"]
    assert main([*stopped, "trainer.stop_at=1"]) == 75
    train(stopped)
    assert not runs.different_tensors(tmp_path / "whole", tmp_path / "stopped")
