"""``serried convert``: configs of other frameworks become commands that train.py accepts."""

import copy
import functools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from serried.cli import main
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.help import choices_of
from serried.configs.messages.suggestions import unknown_key
from serried.configs.plain_data import flatten
from serried.conversion.converted import Converted
from serried.conversion.foreign_config import read
from serried.conversion.overrides_of_facts import converted
from testing.rank_pool import ROOT
from testing.runs import metrics, run_here
from tests.runs.fine_tuning.test_sft import write_chats

BASES: dict[str, dict[str, Any]] = {
    "axolotl": {
        "base_model": "org/model", "datasets": [{"path": "chats.jsonl", "type": "chat_template"}], "adapter": "lora",
        "micro_batch_size": 2, "gradient_accumulation_steps": 4, "num_epochs": 1, "learning_rate": "2e-4",
    },
    "LLaMA-Factory": {"model_name_or_path": "org/model", "stage": "sft", "finetuning_type": "lora", "dataset": "demo"},
    "TRL": {"model_name_or_path": "org/model", "dataset_name": "org/data", "learning_rate": 2e-5},
    "torchtune": {
        "model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b"},
        "checkpointer": {"checkpoint_dir": "org/model"}, "optimizer": {"_component_": "torch.optim.AdamW"},
        "dataset": {"_component_": "torchtune.datasets.chat_dataset", "source": "org/data"}, "batch_size": 1,
    },
    "Unsloth": {"model_name": "org/model", "max_seq_length": 512, "load_in_4bit": True, "dataset": "org/data"},
    "DeepSpeed": {"zero_optimization": {"stage": 2}},
    "accelerate": {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"},
}  # fmt: skip
"""A small config of each framework."""


def rows_of_the_page() -> list[tuple[str, str, str]]:
    page = (ROOT / "docs" / "reference" / "coming-from.md").read_text()
    table = page.partition("## What people type")[2].partition("## What is computed")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    return [(framework, line.strip("`"), here) for framework, line, here in cells]


def written(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree))
    return path


def conversion(folder: Path, tree: dict[str, Any], name: str = "their.yaml", **more: Any) -> Converted:
    result = converted(read([written(folder / name, tree)]), more.get("gpus"), more.get("steps"), more.get("recipe"))
    composes(result)
    return result


def composes(result: Converted) -> None:
    """Compose the command as train.py does. Models and teachers are not opened: they are on no machine."""
    words = [shlex.split(word)[0] for word in result.words]
    elsewhere = ("model.path=", "task.teacher=", "adapter.path=", "data.add_", "data.sequence_length=")
    compose_once(tuple(word for word in words if not word.startswith(elsewhere)))


compose_once = functools.cache(compose)


def with_line(tree: dict[str, Any], line: str) -> dict[str, Any]:
    """Return ``tree`` with a ``line`` of a config, whose key may be dotted."""
    path, _, value = line.partition(": ")
    return with_value(tree, path, yaml.safe_load(value))


def with_value(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    *above, last = path.split(".")
    section = tree
    for name in above:
        section = section.setdefault(name, {})
    section[last] = value
    return tree


def sentences(result: Converted) -> list[str]:
    return [*result.explained, *result.decide, *result.lacking]


@pytest.mark.parametrize(("framework", "line", "here"), rows_of_the_page())
def test_line_that_people_type_is_converted_or_answered(framework: str, line: str, here: str, tmp_path: Path) -> None:
    file = written(tmp_path / "their.yaml", with_line(BASES[framework], line))
    result = converted(read([file]), None, None, None)  # composed in a slow test
    if here.startswith("`"):
        launched = [f"launch.processes={result.processes}"]
        assert {*here.strip("`").split()} <= {*launched, *(f"{key}={value}" for key, value in result.overrides.items())}
        assert not [sentence for sentence in result.lacking if line.partition(":")[0] in sentence]
    else:
        assert len([sentence for sentence in sentences(result) if here in sentence]) == 1
        assert not any("serried has no key" in sentence for sentence in result.lacking)


@pytest.mark.slow
def test_commands_of_all_lines_that_people_type_compose(tmp_path: Path) -> None:
    for framework, line, _ in rows_of_the_page():
        conversion(tmp_path, with_line(BASES[framework], line))


def test_page_has_the_rows_that_the_test_reads() -> None:
    assert len(rows_of_the_page()) >= 30
    assert {framework for framework, _, _ in rows_of_the_page()} == {*BASES}


@functools.cache
def config_of_lora() -> dict[str, Any]:
    return flatten(compose(["recipe=lora"]).model_dump(mode="json"))


@pytest.mark.parametrize("line", sorted({line for _, line, _ in rows_of_the_page()}))
def test_line_that_people_type_to_train_py_is_answered(line: str) -> None:
    key, _, value = line.partition(": ")
    message = unknown_key(key, value.replace(" ", ""), "command line", choices_of(), config_of_lora())
    assert "did you mean" in message or message.startswith(f"{key}=")  # an answer of its own
    assert "--help lists the keys" not in message


def test_command_on_the_page_composes() -> None:
    page = (ROOT / "docs" / "reference" / "coming-from.md").read_text()
    shown = page.partition("$ serried convert lora-8b.yml gpus=8\n")[2].partition("\n#\n")[0]
    words = shlex.split(shown.partition("\n")[2].replace("\\\n", ""))
    assert words[:2] == ["python", "train.py"]
    assert compose([word for word in words[2:] if not word.startswith("model.path=")]).trainer.global_batch == 64


# Arithmetic -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "lines", "gpus", "expected"),
    [
        ("axolotl", {}, None, (8, 2, 1)),
        ("axolotl", {}, 16, (128, 2, 16)),
        ("axolotl", {"sequence_parallel_degree": 4}, 8, (16, 2, 8)),  # 2 x 4 x 8 GPUs / 4
        ("axolotl", {"tensor_parallel_size": 2, "context_parallel_size": 2}, 8, (16, 2, 8)),
        ("axolotl", {"dp_shard_size": 4, "dp_replicate_size": 2, "tensor_parallel_size": 2}, None, (64, 2, 16)),
        ("axolotl", {"dp_shard_size": 2, "expert_parallel_size": 2}, None, (32, 2, 4)),  # ranks of data, too
        ("axolotl", {"dp_replicate_size": 2}, 8, (64, 2, 8)),  # the shards are what is left
        ("torchtune", {"batch_size": 2, "tensor_parallel_dim": 2, "data_parallel_shard_dim": 4}, None, (8, 2, 8)),
        ("torchtune", {"batch_size": 2, "tensor_parallel_dim": 2, "data_parallel_shard_dim": -1}, 8, (8, 2, 8)),
        ("LLaMA-Factory", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}, 4, (32, 1, 4)),
        ("LLaMA-Factory", {}, None, (8, 8, 1)),  # the default of transformers
        ("torchtune", {"batch_size": 4, "gradient_accumulation_steps": 16}, 2, (128, 4, 2)),
        ("DeepSpeed", {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, None, (64, 2, 32)),
        ("DeepSpeed", {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 32, (64, 2, 32)),
        ("DeepSpeed", {"train_batch_size": 64, "gradient_accumulation_steps": 2}, 8, (64, 4, 8)),
    ],
)
def test_batch_is_micro_batch_times_accumulation_times_gpus(
    framework: str, lines: dict[str, Any], gpus: int | None, expected: tuple[int, int, int], tmp_path: Path
) -> None:
    result = conversion(tmp_path, {**BASES[framework], **lines}, gpus=gpus)
    batch = (int(result.overrides["trainer.global_batch"]), int(result.overrides["trainer.micro_batch"]))
    assert (*batch, result.processes) == expected


@pytest.mark.parametrize(
    ("framework", "lines", "expected"),
    [
        ("axolotl", {"dp_shard_size": 4}, {"parallel": "fsdp", "parallel.shard": "4"}),
        (
            "axolotl",
            {"dp_shard_size": 4, "dp_replicate_size": 2, "tensor_parallel_size": 2},
            {"parallel": "hsdp", "parallel.shard": "4", "parallel.replicate": "2", "parallel.tensor": "2"},
        ),
        (
            "axolotl",
            {"dp_shard_size": 1, "dp_replicate_size": 2},
            {"parallel": "hsdp", "parallel.shard": "1", "parallel.replicate": "2"},
        ),
        (
            "axolotl",
            {"dp_shard_size": 2, "expert_parallel_size": 2},
            {"parallel": "fsdp", "parallel.shard": "4", "parallel.expert": "2"},
        ),
        (
            "axolotl",
            {"expert_parallel_size": 4},
            {"parallel": "fsdp", "parallel.shard": "4", "parallel.expert": "4"},
        ),
        (
            "torchtune",
            {"tensor_parallel_dim": 2, "data_parallel_shard_dim": 4},
            {"parallel": "fsdp", "parallel.shard": "4", "parallel.tensor": "2"},
        ),
        (
            "torchtune",
            {"tensor_parallel_dim": 2, "data_parallel_shard_dim": -1},
            {"parallel": "fsdp", "parallel.tensor": "2"},
        ),
    ],
)
def test_stated_mesh_keeps_its_degrees_and_states_the_gpus(
    framework: str, lines: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    result = conversion(tmp_path, {**BASES[framework], **lines})
    assert {key: value for key, value in result.overrides.items() if key.startswith("parallel")} == expected
    is_stated = "parallel.shard" in expected
    assert any("does not set the number of GPUs" in sentence for sentence in sentences(result)) is not is_stated


def test_deepspeed_batch_that_contradicts_the_gpus_is_kept_and_named(tmp_path: Path) -> None:
    tree = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    result = conversion(tmp_path, tree, "ds.json", gpus=8)
    assert result.overrides["trainer.global_batch"] == "64"
    assert any("equals 16" in sentence for sentence in result.decide)


def test_counts_of_epochs_become_steps_if_the_steps_are_given(tmp_path: Path) -> None:
    lines = {"num_epochs": 4, "evals_per_epoch": 4, "saves_per_epoch": 2, "val_set_size": 0.1}
    unknown = conversion(tmp_path, {**BASES["axolotl"], **lines}).overrides
    assert (unknown["trainer.epochs"], unknown["trainer.eval_every"]) == ("4", "null")
    assert "checkpoint.every" not in unknown
    known = conversion(tmp_path, {**BASES["axolotl"], **lines}, steps=1000).overrides
    assert known["trainer.epochs"] == "4"  # 250 steps an epoch
    assert (known["trainer.eval_every"], known["checkpoint.every"]) == ("63", "125")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ({}, ("0", "0")),
        ({"val_size": 0.1}, ("0.1", "null")),
        ({"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 500}, ("0.1", "500")),
        ({"val_size": 0.1, "eval_strategy": "no"}, ("0.1", "0")),  # held out, and not evaluated on
        ({"val_size": 0.1, "eval_steps": 0.25, "max_steps": 200}, ("0.1", "50")),
        ({"val_size": 200, "eval_steps": 10}, ("0.05", "10")),
    ],
)
def test_evaluation_holds_out_as_many_rows_and_runs_as_often(
    lines: dict[str, Any], expected: tuple[str, str], tmp_path: Path
) -> None:
    overrides = conversion(tmp_path, {**BASES["LLaMA-Factory"], **lines}).overrides
    assert (overrides["data.validation_fraction"], overrides["trainer.eval_every"]) == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ({}, {"schedule": "linear", "schedule.min_lr_ratio": "0", "schedule.warmup_steps": "0"}),
        (
            {"lr_scheduler_type": "cosine", "warmup_steps": 7},
            {"schedule.min_lr_ratio": "0", "schedule.warmup_steps": "7"},
        ),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 0.03}, {"schedule.warmup_ratio": "0.03"}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 7}, {"schedule": "constant", "schedule.warmup_steps": "0"}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 7}, {"schedule.warmup_steps": "7"}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 2e-6}},
            {"schedule.min_lr_ratio": "0.1"},
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 50},
                "max_steps": 200,
            },
            {"schedule": "wsd", "schedule.decay_fraction": "0.25", "trainer.steps": "200"},
        ),
        ({"max_steps": -1, "num_train_epochs": 2.5}, {"trainer.epochs": "2.5"}),
    ],
)
def test_schedule_of_transformers_keeps_its_shape(
    lines: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    overrides = conversion(tmp_path, {**BASES["TRL"], **lines}).overrides
    assert {key: overrides.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("lines", "steps", "expected"),
    [
        ({"warmup_steps": 0}, None, ("0", None)),
        ({"warmup_steps": 0, "max_steps": 500}, None, ("0", None)),
        ({"warmup_steps": 10}, None, ("10", None)),
        ({"warmup_ratio": 0}, None, ("0", None)),
        ({"warmup_ratio": 0.1}, 10_000, (None, "0.1")),
        ({}, 1000, ("30", None)),
        ({}, 10_000, ("100", None)),  # at most
        ({}, None, (None, "0.03")),
    ],
)
def test_warmup_of_axolotl_is_as_stated_or_its_default(
    lines: dict[str, Any], steps: int | None, expected: tuple[str | None, str | None], tmp_path: Path
) -> None:
    result = conversion(tmp_path, {**BASES["axolotl"], **lines}, steps=steps)
    found = (result.overrides.get("schedule.warmup_steps"), result.overrides.get("schedule.warmup_ratio"))
    assert found == expected
    is_open = not lines and steps is None
    assert any("at most 100" in sentence for sentence in result.decide) is is_open


@pytest.mark.parametrize(
    ("lines", "expected"),
    [({}, "bf16"), ({"bf16": False}, "fp32"), ({"fp16": True}, "fp16"), ({"bf16": True, "fp16": False}, "bf16")],
)
def test_precision_of_axolotl_is_bf16_unless_stated(lines: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert conversion(tmp_path, {**BASES["axolotl"], **lines}).overrides["precision"] == expected


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"zero_optimization": {"stage": 0}}, {}),
        ({"zero_optimization": {"stage": 1}}, {"parallel": "fsdp", "parallel.reshard_after_forward": "false"}),
        ({"zero_optimization": {"stage": 2}}, {"parallel": "fsdp", "parallel.reshard_after_forward": "false"}),
        ({"zero_optimization": {"stage": 3}}, {"parallel": "fsdp"}),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            {"parallel": "fsdp", "parallel.offload": "true"},
        ),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}, {"parallel": "fsdp"}),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}},
            {"parallel": "fsdp", "parallel.reshard_after_forward": "false"},
        ),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, {"parallel": "hsdp"}),
        ({"distributed_type": "MULTI_GPU"}, {}),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}},
            {"parallel": "fsdp", "parallel.reshard_after_forward": "false", "optim.offload": "true"},
        ),
    ],
)
def test_sharding_becomes_a_parallel_layout(tree: dict[str, Any], expected: dict[str, str], tmp_path: Path) -> None:
    overrides = conversion(tmp_path, tree).overrides
    layout = {key: value for key, value in overrides.items() if key.startswith(("parallel", "optim.offload"))}
    assert layout == expected


def test_several_files_of_a_run_are_joined_in_any_order(tmp_path: Path) -> None:
    sft = written(tmp_path / "sft.yaml", {**BASES["TRL"], "per_device_train_batch_size": 2})
    launch = written(tmp_path / "fsdp.yaml", {"distributed_type": "FSDP", "num_processes": 16, "num_machines": 2})
    for files in ([sft, launch], [launch, sft]):
        result = converted(read(files), None, None, None)
        composes(result)
        assert (result.processes, result.nodes, result.overrides["parallel"]) == (8, 2, "fsdp")
        assert result.overrides["trainer.global_batch"] == "32"


def test_deepspeed_file_that_a_config_names_is_read_and_auto_is_left_to_the_config(tmp_path: Path) -> None:
    stage = {
        "zero_optimization": {"stage": 1},
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    written(tmp_path / "zero3.json", stage)  # its content counts, not its name
    result = conversion(tmp_path, {**BASES["axolotl"], "deepspeed": "zero3.json", "max_grad_norm": 0.5})
    assert result.overrides["parallel.reshard_after_forward"] == "false"
    assert result.overrides["trainer.max_grad_norm"] == "0.5"


def test_deepspeed_section_of_a_config_is_read(tmp_path: Path) -> None:
    section = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}
    result = conversion(tmp_path, {**BASES["axolotl"], "deepspeed": section})
    assert (result.overrides["parallel"], result.overrides["parallel.reshard_after_forward"]) == ("fsdp", "false")
    assert result.overrides["trainer.max_grad_norm"] == "0.5"
    assert not any("not found" in sentence for sentence in sentences(result))


@pytest.mark.parametrize(
    ("framework", "lines", "samples"),
    [("TRL", {}, "sequences"), ("axolotl", {"rl": "dpo"}, "pairs"), ("axolotl", {"rl": "kto"}, "rows")],
)
def test_samples_of_a_step_have_the_name_of_the_task(
    framework: str, lines: dict[str, Any], samples: str, tmp_path: Path
) -> None:
    result = conversion(tmp_path, {**BASES[framework], **lines})
    assert f"trainer.global_batch=8 {samples} per step" in " ".join(result.explained)


def test_further_data_sets_of_kto_are_not_called_pairs(tmp_path: Path) -> None:
    result = conversion(
        tmp_path, {**BASES["axolotl"], "rl": "kto", "datasets": [{"path": "a.json"}, {"path": "b.json"}]}
    )
    assert [sentence for sentence in result.decide if sentence.startswith("rows are read from the first data set only")]


@pytest.mark.parametrize(
    ("framework", "lines", "expected"),
    [
        ("LLaMA-Factory", {"stage": "dpo", "pref_ftx": 0.5}, {"task.beta": None, "task.nll_weight": "0.5"}),
        (
            "LLaMA-Factory",
            {"stage": "dpo", "pref_loss": "simpo"},
            {"task.loss": "simpo", "task.beta": "0.1", "task.margin": "0.5", "task.nll_weight": None},
        ),
        (
            "axolotl",
            {"rl": "simpo", "rl_beta": 2.0, "simpo_gamma": 1.5, "cpo_alpha": 0.0},
            {"task.loss": "simpo", "task.beta": "2", "task.margin": "1.5", "task.nll_weight": "0"},
        ),
        ("axolotl", {"rl": "simpo"}, {"task.beta": "0.1", "task.margin": "0.5", "task.nll_weight": "1"}),
        ("axolotl", {"rl": "ipo", "rl_beta": 0.2}, {"task.loss": "ipo", "task.beta": "0.2", "task.margin": None}),
        ("axolotl", {"rl": "orpo", "orpo_alpha": 0.3}, {"task.loss": "orpo", "task.beta": "0.3"}),
        ("TRL", {"beta": 0.05, "loss_type": "sigmoid"}, {"task.loss": None, "task.beta": "0.05"}),
        ("torchtune", {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.2}}, {"task.beta": "0.2"}),
        (
            "LLaMA-Factory",
            {"stage": "kto", "kto_rejected_weight": 1.5, "pref_beta": 0.2},
            {"recipe": "kto", "task.beta": "0.2", "task.undesirable_weight": "1.5", "task.desirable_weight": None},
        ),
        ("axolotl", {"rl": "kto", "kto_desirable_weight": 0.5}, {"recipe": "kto", "task.desirable_weight": "0.5"}),
    ],
)
def test_preference_loss_keeps_its_parameters(
    framework: str, lines: dict[str, Any], expected: dict[str, str | None], tmp_path: Path
) -> None:
    overrides = conversion(tmp_path, {**BASES[framework], **lines}).overrides
    assert overrides["recipe"] in ("dpo", "kto")
    assert {key: overrides.get(key) for key in expected} == expected


def test_tokens_adapters_and_rope_are_kept(tmp_path: Path) -> None:
    lines = {
        "tokens": ["<tool>", "</tool>", "a,b"], "lora_modules_to_save": ["embed_tokens", "lm_head"],
        "overrides_of_model_config": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    }  # fmt: skip
    result = conversion(tmp_path, {**BASES["axolotl"], **lines})
    assert """'data.add_tokens=["<tool>","</tool>","a,b"]'""" in result.words
    expected = {
        "adapter.modules_to_save": "[embed_tokens,lm_head]", "model.rope_scaling.rope_type": "yarn",
        "model.rope_scaling.factor": "4",
    }  # fmt: skip
    assert {key: result.overrides.get(key) for key in expected} == expected
    started = conversion(tmp_path, {**BASES["axolotl"], "lora_model_dir": "adapters", "lora_r": 8}).overrides
    assert started["adapter.path"] == "adapters"
    assert "adapter.rank" not in started  # a key that contradicts the adapters is refused
    experts = {"lora_target_linear": True, "lora_target_parameters": ["mlp.experts.gate_up_proj"]}
    overrides = conversion(tmp_path, {**BASES["axolotl"], **experts}).overrides
    assert overrides["adapter.modules"] == "[*.self_attn.*,mlp.experts.gate_up_proj]"
    special = conversion(tmp_path, {**BASES["LLaMA-Factory"], "add_special_tokens": "<|a|>, <|b|>"})
    assert special.lists["data.add_special_tokens"] == ["<|a|>", "<|b|>"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "trl dpo --model_name_or_path org/model --dataset_name org/pairs --learning_rate 5.0e-6 --use_peft",
            {"recipe": "dpo", "adapter": "lora", "optim.lr": "5e-6", "trainer.global_batch": "8"},
        ),
        (
            "accelerate launch --num_processes 4 --config_file launch.yaml scripts/sft.py --model_name_or_path "
            "org/model "
            "\\\n  --dataset_name org/data --lora_target_modules q_proj v_proj --use_peft",
            {"recipe": "lora", "parallel": "fsdp", "trainer.global_batch": "32", "adapter.modules": "[q_proj,v_proj]"},
        ),
        (
            "export X=1\nCUDA_VISIBLE_DEVICES=0,1 axolotl train axolotl.yml --num-epochs 3 --micro-batch-size=1",
            {"recipe": "lora", "trainer.epochs": "3", "trainer.micro_batch": "1", "trainer.global_batch": "8"},
        ),
        (
            "tune run --nproc_per_node 4 lora_distributed --config torchtune.yaml optimizer.lr=3e-4 batch_size=2",
            {"recipe": "lora", "optim.lr": "0.0003", "trainer.global_batch": "8", "parallel": "fsdp"},
        ),
        (
            "torchrun --nnodes 2 --nproc_per_node=8 sft.py --model_name_or_path o/m --dataset_name o/d --max_steps 5",
            {"recipe": "sft", "trainer.steps": "5", "trainer.global_batch": "128"},
        ),
    ],
)
def test_shell_script_with_flags_is_converted(script: str, expected: dict[str, str], tmp_path: Path) -> None:
    written(tmp_path / "axolotl.yml", BASES["axolotl"])
    written(tmp_path / "torchtune.yaml", BASES["torchtune"])
    written(tmp_path / "launch.yaml", {"distributed_type": "FSDP", "num_processes": 2})
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n# --not --read\n{script}\n")
    result = converted(read([tmp_path / "run.sh"]), None, None, None)
    composes(result)
    assert {key: result.overrides.get(key) for key in expected} == expected
    assert not [sentence for sentence in result.lacking if "serried has no key" in sentence]


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("torchrun --nproc_per_node=8", 8),
        ("torchrun --nnodes 2 --nproc_per_node=8", 16),
        ("deepspeed --num_nodes 2 --num_gpus 4", 8),
        ("accelerate launch --num_machines 2 --num_processes 16", 16),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node=gpu", 4),
        ("torchrun --nnodes=2 --nproc_per_node=gpu", "--nproc_per_node=gpu"),
        ("torchrun --nnodes $N --nproc_per_node=8", "--nnodes=$N"),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nnodes $N --nproc_per_node=8", "--nnodes=$N"),
        ("torchrun --nnodes=1:4 --nproc_per_node=8", "--nnodes=1:4"),
        ("accelerate launch --num_processes $N", "--num_processes=$N"),
        ("CUDA_VISIBLE_DEVICES=$GPUS python", "CUDA_VISIBLE_DEVICES=$GPUS"),
    ],
)
def test_gpus_of_a_script_are_counted_or_to_decide(launcher: str, expected: int | str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        f"{launcher} sft.py --model_name_or_path o/m --dataset_name o/d --per_device_train_batch_size 1\n"
    )
    result = converted(read([tmp_path / "run.sh"]), None, None, None)
    open_flags = [sentence for sentence in result.decide if "does not state the number of GPUs" in sentence]
    if isinstance(expected, int):
        assert (result.processes * result.nodes, open_flags) == (expected, [])
        assert result.overrides["trainer.global_batch"] == str(expected)
    else:
        assert (result.processes, len(open_flags)) == (1, 1)
        assert expected in open_flags[0]
        given = converted(read([tmp_path / "run.sh"]), 8, None, None)
        assert given.overrides["trainer.global_batch"] == "8"
        assert not any("does not state" in sentence for sentence in given.decide)


@pytest.mark.parametrize(
    ("environment", "gpus", "is_open"),
    [("NNODES=2 NPROC_PER_NODE=4", 8, False), ("FORCE_TORCHRUN=1 NNODES=2", 1, True), ("NNODES=$N", 1, True)],
)
def test_nodes_of_llama_factory_are_read_from_its_variables(
    environment: str, gpus: int, is_open: bool, tmp_path: Path
) -> None:
    written(tmp_path / "sft.yaml", {**BASES["LLaMA-Factory"], "per_device_train_batch_size": 1})
    (tmp_path / "run.sh").write_text(f"{environment} llamafactory-cli train sft.yaml\n")
    result = converted(read([tmp_path / "run.sh"]), None, None, None)
    assert result.processes * result.nodes == gpus
    assert any("NNODES=" in sentence for sentence in result.decide) is is_open


# Data -----------------------------------------------------------------------------------------------------------------


def test_data_of_llama_factory_comes_from_its_table(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = {
        "mine": {"file_name": "mine.json", "formatting": "sharegpt", "columns": {"messages": "dialog"}},
        "hub": {"hf_hub_url": "org/hub", "subset": "en", "columns": {"prompt": "q", "response": "a"}},
        "plain": {"file_name": "plain.json"},
    }
    written(tmp_path / "data" / "dataset_info.json", table)
    one = conversion(tmp_path, {**BASES["LLaMA-Factory"], "dataset": "mine"}).overrides
    assert (one["data.path"], one["data.messages_column"]) == (str(tmp_path / "data" / "mine.json"), "dialog")
    many = conversion(tmp_path, {**BASES["LLaMA-Factory"], "dataset": "mine, hub, plain"}).overrides
    assert many["data"] == "mixture"
    assert many["data.sources.hub-en.subset"] == "en"
    assert (many["data.sources.hub-en.columns.prompt"], many["data.sources.hub-en.columns.completion"]) == ("q", "a")
    assert many["data.sources.plain.name"] == "text"


def test_columns_and_splits_of_axolotl_are_kept(tmp_path: Path) -> None:
    kind = {"field_instruction": "question_text", "field_output": "best answer"}
    entry = {"path": "org/data", "name": "en", "split": "train[:10%]", "type": kind}
    result = conversion(tmp_path, {**BASES["axolotl"], "datasets": [entry]})
    expected = {
        "data": "hf", "data.path": "org/data", "data.subset": "en", "data.split": "train[:10%]",
        "data.columns.prompt": "question_text", "data.columns.completion": "best answer",
    }  # fmt: skip
    assert {key: result.overrides.get(key) for key in expected} == expected
    text = conversion(
        tmp_path, {**BASES["axolotl"], "datasets": [{"path": "a.jsonl", "type": "completion", "field": "body"}]}
    )
    assert (text.overrides["data.format"], text.overrides["data.text_column"]) == ("text", "body")


def test_fraction_of_rows_of_a_data_set_is_to_decide_and_not_a_weight(tmp_path: Path) -> None:
    mixer = {"a/big": 1.0, "a/small": 0.25}
    mixture = [{"id": "a/big", "weight": 1.0}, {"id": "a/small", "split": "think", "weight": 0.25}]
    for lines, split in (
        ({"dataset_mixer": mixer}, "train"),
        ({"dataset_mixture": {"datasets": mixture}}, "think"),
    ):
        tree = {key: value for key, value in BASES["TRL"].items() if key != "dataset_name"}
        result = conversion(tmp_path, {**tree, **lines})
        assert not [key for key in result.overrides if key.endswith(".weight")]
        assert result.overrides["data"] == "mixture"
        (fraction,) = [sentence for sentence in result.decide if "0.25 of a/small" in sentence]
        assert "fraction of its rows" in fraction
        assert f"{split}[:25%]" in fraction
        assert result.overrides["data.weigh_by"] == "size"


def test_share_of_a_mixture_of_rows_is_to_decide(tmp_path: Path) -> None:
    datasets = [{"path": "a/big", "fraction": 0.75}, {"path": "a/small", "fraction": 0.25}]
    result = conversion(tmp_path, {"model_name_or_path": "o/m", "datasets": datasets})
    shares = [sentence for sentence in result.decide if "share of the rows of the mixture" in sentence]
    assert [share.partition(" is ")[0] for share in shares] == ["fraction=0.75 of a/big", "fraction=0.25 of a/small"]


def test_data_set_of_another_hub_is_to_decide(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    written(tmp_path / "data" / "dataset_info.json", {"mine": {"ms_hub_url": "org/data"}})
    result = conversion(tmp_path, {**BASES["LLaMA-Factory"], "dataset": "mine"})
    assert "data.path" not in result.overrides
    (sentence,) = [sentence for sentence in result.decide if "data.path=FILE" in sentence]
    assert sentence.startswith("dataset=mine: its entry in ")


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("absent.yaml", None, "cannot read"),
        ("broken.yaml", "base_model: [", "not YAML"),
        ("broken.json", '{"zero_optimization": ', "not JSON"),
        ("aliases.yaml", "a: &x 1\nb: *x\n", "YAML alias *x"),
        ("text.yaml", "just text", "has no keys with values"),
        ("other.yaml", "apiVersion: v1\nkind: Pod\n", "has an unknown format"),
        ("train.py", "import torch", "is code, which is not run"),
        ("empty.sh", "#!/bin/bash\necho hello\n", "has no line that starts training"),
        ("ppo.yaml", "model_name_or_path: a\nstage: ppo\ndo_train: true\n", "stage=ppo"),
        ("grpo.yaml", "model_name_or_path: a\nnum_generations: 8\n", "no reinforcement learning"),
        ("ebft.yaml", "base_model: a\nrl: ebft\n", "rl=ebft"),
        ("evaluate.yaml", "model: {_component_: torchtune.models.llama2.llama2_7b}\n", "does not describe training"),
        (
            "chat.yaml",
            "model_name_or_path: a\ntemplate: llama3\ninfer_backend: huggingface\n",
            "does not describe training",
        ),
        ("words.yaml", "base_model: a\nmicro_batch_size: two\n", "micro_batch_size=two"),
        ("rate.yaml", "model_name_or_path: a\nlearning_rate: fast\n", "learning_rate=fast"),
        ("files.yaml", "base_model: a\ndatasets: [{path: json, data_files: 5}]\n", "data_files=5"),
        ("mixer.yaml", "model_name_or_path: a\ndataset_mixer: {o/d: half}\n", "dataset_mixer=half of o/d"),
        (
            "columns.yaml",
            "batch_size: 1\noptimizer: {lr: 1}\n"
            "dataset: {_component_: torchtune.datasets.instruct_dataset, source: o/d, column_map: [a]}\n",
            "column_map=[a]",
        ),
    ],
)
def test_file_that_cannot_be_converted_gets_one_line(
    name: str, content: str | None, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["convert", str(tmp_path / name)]) == 78
    out = capsys.readouterr()
    assert out.out == ""
    (line,) = out.err.splitlines()
    assert line.startswith("error: ")
    assert expected in line
    assert name in line


def test_gpus_that_do_not_fit_the_degrees_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gpus=6 is not a multiple of 4"):
        conversion(tmp_path, {**BASES["axolotl"], "tensor_parallel_size": 4}, gpus=6)


def test_gpus_that_do_not_fit_the_stated_mesh_are_refused(tmp_path: Path) -> None:
    tree = {**BASES["axolotl"], "dp_shard_size": 4, "tensor_parallel_size": 2}
    with pytest.raises(UserError, match=r"gpus=16 does not fit dp_shard_size=4 x tensor_parallel_size=2 .* use gpus=8"):
        conversion(tmp_path, tree, gpus=16)


def test_mesh_of_several_nodes_is_to_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {**BASES["axolotl"], "dp_shard_size": 8, "dp_replicate_size": 2}
    assert main(["convert", str(written(tmp_path / "a.yaml", tree))]) == 0
    assert "for nodes of 8 GPUs use launch=slurm launch.nodes=2 launch.processes=8" in capsys.readouterr().out


def test_dashes_and_unknown_keys_get_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(written(tmp_path / "a.yaml", BASES["axolotl"]))
    for words, expected in (
        (["--gpus", "8"], "keys have no dashes; write gpus=8"), (["gpu=8"], "did you mean gpus=8"),
        (["gpus=0"], "gpus=0 is not a whole number from 1"), (["recipe=slft"], "use recipe=sft"),
    ):  # fmt: skip
        assert main(["convert", file, *words]) == 78
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line


def test_tokens_and_passwords_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {
        "hub_token": "hf_SECRET",
        "mlflow_tracking_uri": "https://me:SECRET@mlflow.org",
        "use_auth_token": "SECRET",
        "my_passwd": "SECRET",
        "wandb_key": "SECRET",
        "api_keys": {"openai": "SECRET"},
        "my_auth_tokens": ["SECRET"],
        "env": {"OPENAI_KEY": "SECRET"},
        "servers": [{"name": "a", "api_key": "SECRET"}],
        "notify": ["OPENAI_KEY=SECRET", "x=1"],
        "on_start": "start --api-key SECRET --token=SECRET --rank 1",
        "headers": {"Authorization": "Bearer SECRET"},
        "my_pad_token": "<pad>",
    }
    assert main(["convert", str(written(tmp_path / "a.yaml", {**BASES["axolotl"], **lines}))]) == 0
    out = capsys.readouterr().out
    assert "SECRET" not in out
    for name in ("my_passwd", "wandb_key", "api_keys.openai", "my_auth_tokens", "env.OPENAI_KEY"):
        assert f"{name}=***" in out
    for line in ("my_pad_token=<pad>", "notify=[OPENAI_KEY=***,x=1]", "start --api-key *** --token=*** --rank 1"):
        assert line in out


def test_output_is_a_shell_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {
        **BASES["axolotl"],
        "datasets": [{"path": "it's here.jsonl", "type": "chat_template"}],
        "wandb_name": "a b/c",
    }
    assert main(["convert", str(written(tmp_path / "a.yaml", tree)), "gpus=2"]) == 0
    out = capsys.readouterr().out
    command = [line for line in out.splitlines() if not line.startswith("#")]
    assert all(line.endswith(" \\") for line in command[:-1])
    words = shlex.split("\n".join(command).replace("\\\n", ""))
    assert words[:2] == ["python", "train.py"]
    assert {"launch=local", "launch.processes=2", "run.name=a-b-c"} <= {*words}
    assert not [line for line in out.splitlines() if "Refused" in line]
    composes_as_typed = [word for word in words[2:] if not word.startswith("model.path=")]
    assert compose(composes_as_typed).data.path == "it's here.jsonl"  # type: ignore[union-attr]


@pytest.mark.slow
def test_converted_config_of_axolotl_trains(tmp_path: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import load_file

    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path / "model")
    write_chats(tmp_path / "chats.jsonl", 24)
    tree = {
        **BASES["axolotl"], "base_model": "model", "sequence_len": 256, "sample_packing": True, "lora_r": 4,
        "lora_target_linear": True, "lora_alpha": 8, "max_steps": 3, "val_set_size": 0.2, "eval_steps": 3,
        "warmup_ratio": 0.5, "lr_scheduler": "linear", "bf16": False, "logging_steps": 1,
        "output_dir": str(tmp_path / "out"),
    }  # fmt: skip
    result = converted(read([written(tmp_path / "axolotl.yml", tree)]), None, None, None)
    words = [shlex.split(word)[0] for word in result.words]
    ended = run_here([*words, "data.tokenizer=bytes", f"data.cache_dir={tmp_path / 'cache'}"])
    assert ended.code == 0, ended.printed
    steps = metrics(tmp_path / "out")
    assert [step["lr"] for step in steps] == pytest.approx([1e-4, 2e-4, 0.0])  # 0.5 x 3 steps, rounded up, are warm-up
    adapter = load_file(tmp_path / "out" / "checkpoints" / "step-00000003" / "adapter_model.safetensors")
    trained = [tensor for name, tensor in adapter.items() if name.endswith("lora_B.weight")]  # they start at zero
    assert trained
    assert all(tensor.any() for tensor in trained)


ODD: list[Any] = [None, True, -1, 2.5, 10**30, "auto", "x" * 5000, [None], [{"a": 1}], {"path": None}]


@pytest.mark.parametrize("framework", BASES)
def test_odd_values_are_converted_or_get_one_line(framework: str, tmp_path: Path) -> None:
    lines = [line.partition(": ")[0] for name, line, _ in rows_of_the_page() if name == framework]
    for key in {*BASES[framework], *lines}:
        for value in ODD:
            file = written(tmp_path / "odd.json", with_value(BASES[framework], key, value))
            try:
                assert converted(read([file]), None, None, None).words is not None
            except UserError as error:
                assert all("\n" not in sentence for sentence in error.args)


@pytest.mark.parametrize(
    ("framework", "section", "keys"),
    [
        ("axolotl", "datasets", "path name split type data_files field_messages field_instruction roles_to_train"),
        ("axolotl", "pretraining_dataset", "path name split text_column"),
        ("torchtune", "dataset", "_component_ source name split column_map column conversation_column data_files"),
        ("TRL", "dataset_mixture", "id path config split weight fraction"),
        ("LLaMA-Factory", "dataset_info", "file_name hf_hub_url ms_hub_url subset columns tags formatting"),
    ],
)
def test_odd_values_of_a_data_set_are_converted_or_get_one_line(
    framework: str, section: str, keys: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    plain = {"path": "json", "id": "json", "source": "json", "_component_": "torchtune.datasets.chat_dataset"}
    for key in keys.split():
        for value in (*ODD, [1, "a"], {"a": [1]}):
            entry = {**(plain if section != "dataset_info" else {}), key: value}
            tree = dict(BASES[framework])
            if section == "dataset_info":
                written(tmp_path / "data" / "dataset_info.json", {"demo": entry})
            else:
                tree[section] = {"datasets": [entry], "dataset": entry}.get(section, {"datasets": [entry]})
                tree[section] = [entry] if section in ("datasets", "pretraining_dataset") else tree[section]
            try:
                result = converted(read([written(tmp_path / "odd.json", tree)]), None, None, None)
                paths = [path for key, path in result.overrides.items() if key.endswith(".path")]
                assert "None" not in [Path(path).name for path in paths]
            except UserError as error:
                assert all("\n" not in sentence for sentence in error.args)
