"""Distillation: the loss of a hand-written reference, on any layout, with the teacher in no checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import serried
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.parallel.plan import Vocabulary
from serried.program import main
from serried.recipes.models.layers.lm_head import IGNORE
from serried.recipes.text.distillation import Distillation, _End, distillation_sums
from serried.recipes.text.distillation_config import DistillationSection
from serried.records.metrics import named_metrics
from serried.trainer.checkpoint.manifest import read_manifest, record_of, write_manifest
from testing import runs
from testing.rank_pool import Cluster
from tests.runs.fine_tuning.test_sft import write_chats

SIZES = {"vocab_size": 257, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a teacher of another family and width, and conversations."""
    import transformers

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    small, large = {"hidden_size": 32, "num_hidden_layers": 2}, {"hidden_size": 48, "num_hidden_layers": 3}
    longest = {"max_position_embeddings": 256}
    student = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **small, **longest))
    teacher = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **large, **longest))
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"vocab_size": 300}, **small, **longest))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(3)  # far from uniform
    for name, model in (("student", student), ("teacher", teacher), ("other", other)):
        model.save_pretrained(folder / name)
    for name, base, changed in (
        ("unknown", "teacher", {"model_type": "bert"}),
        ("wide", "student", {"num_key_value_heads": 4}),
    ):
        (folder / name).mkdir()
        config = json.loads((folder / base / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | changed))
    write_chats(folder / "chats.jsonl", 60)
    return folder


def distill(models: Path, run_dir: Path, *more: str) -> list[str]:
    given = [
        "recipe=distill", f"model.path={models / 'student'}", f"task.teacher={models / 'teacher'}", "precision=fp32",
        f"data.path={models / 'chats.jsonl'}", "data.tokenizer=bytes", f"data.cache_dir={models / 'cache'}",
        f"run.dir={run_dir}", "data.sequence_length=128", "task.temperature=2", "task.weight=0.7",
        "data.isolate_documents=false", "trainer.steps=4", "trainer.global_batch=4", "trainer.micro_batch=2",
        "trainer.eval_every=0", "trainer.log_every=1", "data.workers=0", "optim.lr=0.003", "schedule=constant",
        "schedule.warmup_steps=0", "trainer.max_grad_norm=0", *more,
    ]  # fmt: skip
    return [f"{key}={value}" for key, value in dict(word.split("=", 1) for word in given).items()]


def train(argv: list[str], code: int = 0) -> None:
    assert main(argv) == code


def test_training_equals_a_hand_written_loss_and_layouts_agree(
    cluster: Cluster, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    with runs.kept_batches(Distillation) as trained_on:
        assert main(distill(models, tmp_path / "run")) == 0
    ours = runs.metrics(tmp_path / "run")
    student, teacher = (AutoModelForCausalLM.from_pretrained(models / name) for name in ("student", "teacher"))
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.003, betas=(0.9, 0.95), weight_decay=0.0)
    for step, line in enumerate(ours):
        batches = trained_on[2 * step : 2 * step + 2]
        tokens, targets = (torch.cat([each[place] for each in batches]) for place in (0, 1))
        is_target = targets != IGNORE
        logits = student(tokens).logits[is_target]
        with torch.no_grad():
            wanted = (teacher(tokens).logits[is_target] / 2).log_softmax(-1)
        entropy = F.cross_entropy(logits, targets[is_target])
        divergence = F.kl_div((logits / 2).log_softmax(-1), wanted, reduction="batchmean", log_target=True)
        loss = 0.3 * entropy + 0.7 * 4 * divergence
        found = (line["loss"], line["cross_entropy"], line["divergence"])
        assert found == pytest.approx((loss.item(), entropy.item(), divergence.item()), abs=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(ours) == 4
    assert ours[-1]["divergence"] < ours[0]["divergence"]
    assert named_metrics(ours[0]).keys() == {*DistillationSection.metrics}, "what checkpoint.best_metric may be"
    assert runs.weights(tmp_path / "run").keys() == {*student.state_dict()}
    tokens = torch.arange(30).unsqueeze(0)
    exported = AutoModelForCausalLM.from_pretrained(runs.checkpoint(tmp_path / "run"))
    torch.testing.assert_close(exported(tokens).logits, student(tokens).logits, atol=1e-4, rtol=1e-4)
    assert not hasattr(serried.load_model(tmp_path / "run"), "teacher"), "what was learned needs no teacher"
    for name, code, *layout in (
        ("fsdp", 75, "parallel=fsdp", "trainer.stop_at=2"),
        ("tensor", 0, "parallel=fsdp", "parallel.tensor=2"),
    ):
        cluster.run(
            2,
            "tests.runs.fine_tuning.test_distillation:train",
            argv=distill(models, tmp_path / name, *layout),
            code=code,
        )
    train(distill(models, tmp_path / "fsdp", f"task.teacher={models / 'student'}"), 78)
    assert "has different content; restore the original" in capsys.readouterr().err
    moved = shutil.copytree(models / "teacher", tmp_path / "moved")
    train(distill(models, tmp_path / "fsdp", f"task.teacher={moved}"))  # resumed on one process
    for name in ("fsdp", "tensor"):
        assert runs.losses(tmp_path / name) == pytest.approx(runs.losses(tmp_path / "run"), abs=1e-5)


@pytest.mark.slow
def test_loss_on_other_layouts_equals_one_process(cluster: Cluster, models: Path, tmp_path: Path) -> None:
    train(distill(models, tmp_path / "run"))
    for name, *layout in (("ddp", "parallel=ddp"), ("context", "parallel=fsdp", "parallel.context=2")):
        cluster.run(2, "tests.runs.fine_tuning.test_distillation:train", argv=distill(models, tmp_path / name, *layout))
        assert runs.losses(tmp_path / name) == pytest.approx(runs.losses(tmp_path / "run"), abs=1e-5)


def test_a_student_of_adapters_learns_in_bf16(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = distill(models, tmp_path / "run", "adapter=lora", "precision=bf16", "trainer.steps=2")
    train([*argv, "dry_run=true"])
    assert "reference  the teacher" in capsys.readouterr().out
    train(argv)
    assert all("lora" in name for name in runs.weights(tmp_path / "run", "adapter_model"))
    assert len(runs.metrics(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task.teacher=null"], "task.name=distillation needs a teacher: task.teacher=FOLDER_OR_NAME"),
        (["task.teacher=nowhere"], "error: task.teacher=nowhere: cannot read nowhere/config.json"),
        (["task.teacher={}/unknown"], "task.teacher={}/unknown: {}/unknown/config.json has model_type bert"),
        (["task.teacher={}/other"], "has a vocabulary of 300 tokens, but the model has 257; "),
        (["data.sequence_length=512"], "data.sequence_length=512 exceeds"),
        (["parallel=fsdp", "parallel.pipeline=2"], "parallel.pipeline=2 is not supported with task.name=distillation"),
        (
            ["parallel=fsdp", "parallel.tensor=4", "launch.processes=4", "model.path={}/wide"],
            "parallel.tensor=4 does not divide kv_heads=2 of task.teacher={}/teacher; use parallel.tensor=2",
        ),
        (
            ["optim.groups.a.parameters=teacher.*"],
            "matches none of the 21 parameters that are trained; similar names: ",
        ),
        (
            ["optim.groups.a.parameters=*", "optim.groups.a.frozen=true"],
            "frozen=true is not supported with task.name=distillation",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    words = [word.format(models) for word in words]
    train([*distill(models, tmp_path / "run", *words), "dry_run=true"], 78)
    error = capsys.readouterr().err
    assert said.replace("{}", str(models)) in error
    assert "model=hf" not in error


def test_teacher_with_changed_defaults_since_the_checkpoint_is_reported(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = shutil.copytree(models / "student", tmp_path / "teacher")
    config = json.loads((teacher / "config.json").read_text()) | {"model_type": "mistral"}
    (teacher / "config.json").write_text(json.dumps(config))
    argv = distill(models, tmp_path / "run", f"task.teacher={teacher}", "trainer.steps=2")
    train([*argv, "trainer.stop_at=1"], 75)
    folder = runs.checkpoint(tmp_path / "run")
    state = json.loads((folder / "state.json").read_text())
    assert state.pop("teacher_keys")["sliding_window"] == 4096
    (folder / "state.json").write_text(json.dumps(state))  # as an earlier version wrote it
    write_manifest(folder, {name: record_of(folder / name) for name in read_manifest(folder)})
    assert "WARNING" not in capsys.readouterr().out
    train(argv)
    warning = next(line for line in capsys.readouterr().out.splitlines() if "WARNING" in line)
    assert f"task.teacher={teacher} has changed since {folder}: sliding_window null -> 4096" in warning
    assert warning.endswith('to keep the earlier values, set "sliding_window": null in config.json')


def test_teacher_folder_found_by_one_process_is_used_by_all(models: Path, tmp_path: Path) -> None:
    place = Distillation(compose(distill(models, tmp_path))).prepare()
    task = Distillation(compose(distill(models, tmp_path, "task.teacher=nobody/nothing")))
    task.open_data(place)
    assert task.teacher_folder() == models / "teacher"


@pytest.mark.parametrize("content", ['{"model', '{"model": {"vocab": [1]}}', '{"added_tokens": [{}]}', '{"model": []}'])
def test_damaged_tokenizer_of_the_teacher_is_refused_in_one_line(models: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    task = Distillation(compose(distill(models, tmp_path, f"task.teacher={tmp_path}")))
    with pytest.raises(UserError, match=f"^task.teacher={tmp_path}: cannot read {tmp_path}/tokenizer.json"):
        task._teacher_ids()


def test_evaluation_loss_equals_training_loss_without_gradients() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(11, 8))
    mine = _End(torch.randn(6, 8), weight, Vocabulary(), None)
    its = _End(torch.randn(6, 5), torch.randn(11, 5), Vocabulary(), 3.0)
    targets = torch.tensor([[1, 2, IGNORE, 4, 5, 6]])

    def sums_and_flops() -> tuple[Tensor, int]:
        with FlopCounterMode(display=False) as counted:
            sums = distillation_sums(mine, its, targets, 0.7, 2.0)
        return sums, counted.get_total_flops()

    trained, work = sums_and_flops()
    with torch.no_grad():
        evaluated, less = sums_and_flops()
    assert torch.equal(evaluated, trained)
    assert work > less == 2 * 6 * 11 * (8 + 5), "the logits of both, no more"
