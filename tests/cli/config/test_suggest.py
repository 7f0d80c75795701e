"""What somebody coming from another framework types, and whether the answer works when pasted back."""

import functools
import json
import re
import shlex
from pathlib import Path

import pytest

from serried.configs.compose import FOLDER, compose
from serried.configs.errors import UserError
from serried.configs.help import choices_of
from serried.configs.messages.keys import all_keys, readers
from serried.configs.messages.suggestions import meant, other_names, unknown_choice, unknown_key
from serried.configs.plain_data import flatten
from tools.key_tables import coming_from

GROUPS = choices_of()
NAMES = other_names()
NEEDED = {  # what else a suggestion needs to be a whole run; the message it then gets names them
    "data=hf": ["data.path=owner/name"], "data=tokens": ["data.path=x.bin", "data.tokenizer=bytes"],
    "data=text": ["data.path=x"], "data=mixture": ["data.sources.a.name=stdlib"],
    "data.text_column": ["data=text", "data.path=x"], "data.messages_column": ["data=text", "data.path=x"],
    "data.subset": ["data=hf", "data.path=x"], "data.split": ["data=hf", "data.path=x"],
    "data.revision": ["data=hf", "data.path=x"], "data.validation_split": ["data=hf", "data.path=x"],
    "data.streaming": ["data=hf", "data.path=x"], "data.path": ["data=text"],
    "data.vocab_size": ["data.tokenizer=train"], "checkpoint.weights_only": ["checkpoint.resume=runs/a"],
    **{key: ["data.tokenizer=owner/name"] for key in ("data.add_tokens", "data.add_special_tokens")},
    "data.token_dtype": ["data=tokens", "data.path=x.bin", "data.tokenizer=bytes"],
    "data.chat_template": ["data=text", "data.path=x", "data.format=chat"],
    "data.train_on": ["data=text", "data.path=x", "data.format=chat"], "data.columns": ["data=text", "data.path=x"],
    **{key: ["model=deepseek_v3"] for key in ("model.expert_groups", "model.groups_per_token", "model.value_head_dim")},
    **{key: ["model=deepseek_v3"] for key in ("model.query_rank", "model.key_value_rank", "model.rotary_head_dim")},
    "model.plain_head_dim": ["model=deepseek_v3", "model.value_head_dim=64"],
    "data.packing": ["data=text", "data.path=x"], "schedule.decay_fraction": ["schedule=wsd"],
    "task.loss": ["recipe=dpo", "data.path=x"], "task.margin": ["recipe=dpo", "data.path=x", "task.loss=cpo"],
    "task.nll_weight": ["recipe=dpo", "data.path=x"], "task.beta": ["recipe=dpo", "data.path=x"],
    "trainer.steps": ["profile.steps=null"], "model.local_rope_theta": ["model=gemma3_1b"],
}  # fmt: skip


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        compose(argv)
    return str(caught.value)


def overrides_in(sentence: str) -> list[str]:
    """What in a sentence can be pasted: ``key=value``, quoted or not."""
    found = re.findall(r"'([a-z_]+[a-z_.]*=[^']+)'|(?<![\w.=-])([a-z_]+[a-zA-Z_.]*=(?:\[[^\]]*\]|[^\s;?(]+))", sentence)
    return [word.rstrip(",") for pair in found for word in pair if word]


PRESETS = {
    "llama": "tiny", "mistral": "mistral7b", "gemma2": "gemma2_9b", "glm4_moe": "moe_tiny", "gpt2": "gpt2",
    "deepseek_v3": "deepseek_v3",
}  # fmt: skip
"""Presets by family. A key is tried with the first preset that reads it."""


@functools.cache
def paste(override: str) -> None:
    """Type a suggestion, with what else such a run needs."""
    key = override.partition("=")[0]
    reader = next((name for name in PRESETS if name in readers(key)), "")
    family = [f"model={PRESETS[reader]}"] if key.startswith("model.") else []
    family += ["adapter=lora"] if key.startswith("adapter.") else []
    # It needs a model or adapters, and only train.py takes task=masked_lm.
    if key not in ("model.path", "adapter.path", "task.mask_share") and override != "model=auto":
        compose([*NEEDED.get(override, NEEDED.get(key, family)), override])


def example(key: str) -> str:
    return shlex.split(all_keys()[key].override)[0].partition("=")[2] if key in all_keys() else GROUPS[key][0]


@pytest.mark.parametrize("key", sorted({key for keys in NAMES.keys.values() for key in keys}))
def test_a_name_from_another_framework_leads_to_a_key_that_accepts_its_value(key: str) -> None:
    typed = [name for name, keys in NAMES.keys.items() if key in keys]
    for name in typed:
        message = unknown_key(name, example(key), "here", GROUPS)
        if name in NAMES.advice:  # the sentence is better
            continue
        suggested = overrides_in(message.partition("did you mean ")[2])
        assert any(word.startswith(f"{key}=") for word in suggested), message
    paste(f"{key}={example(key)}")


@pytest.mark.parametrize("name", sorted(NAMES.choices))
def test_a_choice_by_another_name_leads_to_an_override_that_is_accepted(name: str) -> None:
    for override in NAMES.choices[name]:
        for each in override.split():
            paste(each)
        key, _, choice = override.partition(" ")[0].partition("=")
        if key in GROUPS and name not in GROUPS[key]:
            assert f"Did you mean {key}={choice}?" in unknown_choice(key, name, GROUPS[key])
        if name not in NAMES.keys and name not in NAMES.advice:
            assert meant(name, "true", GROUPS) == [NAMES.choices[name][0]]


@pytest.mark.parametrize("sentence", sorted(set(NAMES.advice.values())))
def test_advice_holds_overrides_that_are_accepted(sentence: str, tmp_path: Path) -> None:
    name = next(name for name, known in NAMES.advice.items() if known == sentence)
    if "=" in name:  # of a choice
        message = unknown_choice(*name.split("="), [])
    else:
        value = "0.9" if "beta" in name else "4"
        message = unknown_key(name, value, "here", GROUPS, flatten(compose([]).model_dump(mode="json")))
        assert message.startswith(f"{name}={value} (here): ")
    assert "{" not in message
    said = message.partition(": ")[2].replace("FOLDER", str(tmp_path)).replace("NAME", "web")
    words = [
        word for word in overrides_in(said) if word.partition("=")[0] in all_keys() or word.partition("=")[0] in GROUPS
    ]
    assert words or any(hint in said for hint in ("leave it out", "torchrun", "-m ", "--config-dir"))
    if "launch=slurm" not in words and "," not in "".join(word for word in words if "[" not in word):
        compose([word for word in words if not word.startswith("hydra")])


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("trainer.tokens=1B", "trainer.steps=122071"),
        ("gradient_accumulation_steps=4 per_device_train_batch_size=8", "trainer.global_batch=32"),
        ("gradient_accumulation_steps=4 per_device_train_batch_size=16", "trainer.global_batch=64"),
        ("gradient_accumulation_steps=4 launch.processes=2", "trainer.global_batch=64"),
        ("optim.beta2=0.99", "optim.betas=[0.9,0.99]"),
        ("beta1=0.8", "optim.betas=[0.8,0.95]"),
        ("warmup_ratio=0.1", "schedule.warmup_ratio=0.1"),
        ("min_lr=6e-5 learning_rate=6e-4", "schedule.min_lr_ratio=0.1"),
        ("slurm.time=4h", "slurm.time_minutes=240"),
        ("slurm.time=1d2h30m", "slurm.time_minutes=1590"),
        ("slurm.gres=gpu:h100:8", "slurm.gpus_per_node=8"),
        ("launch.device=gpu", "launch.device=auto"),
        ("--deepspeed ds.json", "parallel=fsdp"),
        ("--training.steps 5", "trainer.steps=5"),
        ("batch_size=8", "trainer.global_batch=8 or trainer.micro_batch=8"),
        ("track.wandb=true", "track.wandb=online"),
        ("wandb=offline", "track.wandb=offline"),
        ("learningRate=1e-3", "optim.lr=1e-3"),
        ("optimizer.learning-rate=1e-3", "optim.lr=1e-3"),
        ("model_name_or_path=meta-llama/Llama-3.2-1B", "did you mean model.path=meta-llama/Llama-3.2-1B"),
        ("target_modules=q_proj,v_proj", "did you mean 'adapter.modules=[q_proj,v_proj]'"),
        ("optim=adamw_torch", "optim=adamw"),
        ("precision=fp8", "use precision=float8"),
        ("model.converters=float8", "use precision=float8"),
        ("target_modules=all-linear", "did you mean adapter.modules=null?"),
        ("parallelism.context_parallel_rotate_method=alltoall", "did you mean parallel.context_method=ring?"),
        ("report_to=none", "did you mean track=files?"),
        ("special_tokens.pad_token=x", "from the tokenizer and from config.json; leave it out"),
        ("eval_strategy=steps", "use trainer.eval_every=100 checkpoint.every=100"),
        ("torch_dtype=bfloat16", "did you mean precision=bf16?"),
        ("checkpoint.enable=true", "no key is needed for this; leave it out"),
        ("load_best_model_at_end=true", "did you mean checkpoint.keep_best=true?"),
        ("resume_from_checkpoint=true", "did you mean checkpoint.resume=auto?"),
        ("checkpoint.resume=False", "use checkpoint.resume=never"),
        ("--resume", "write checkpoint.resume=auto"),
        ("data.validation.path=a.txt", "write data.validation.NAME.path, with a name of your choice"),
        ("data=text data.path=. data.sources.a.name=text", "(command line) is a key of data=mixture"),
    ],
)
def test_a_figure_in_a_suggestion_is_computed_from_the_rest_of_the_command(typed: str, expected: str) -> None:
    assert expected in refusal(*(["--deepspeed", "ds.json"] if "ds.json" in typed else typed.split()))


LLAMA = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 257,
    "intermediate_size": 32, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("model={folder}", "use model=auto model.path={folder}"),
        ("model_name={folder}", "did you mean model=auto model.path={folder}?"),
        ("model=Qwen/Qwen2.5-7B", "use model=auto model.path=Qwen/Qwen2.5-7B"),
        ("data=alpaca.jsonl", "use data=text data.path=alpaca.jsonl, with recipe=sft if its rows are conversations"),
        ("dataset=alpaca.jsonl", "did you mean data=text data.path=alpaca.jsonl?"),
        ("datasets=[my.jsonl]", "did you mean data=text data.path=my.jsonl?"),
        ("data=tatsu-lab/alpaca", "use data=hf data.path=tatsu-lab/alpaca, with recipe=sft"),
        ("flash_attention=true", "use model.attention=sdpa, flex or varlen"),
        ("chat_template=chatml", "leave it out, or set a template file with recipe=sft data.chat_template=FILE.jinja"),
        ("template=qwen", "leave it out, or set a template file with recipe=sft data.chat_template=FILE.jinja"),
        ("save_minutes=30", "did you mean checkpoint.every_minutes=30?"),
        ("save_minutes=0.5", "did you mean checkpoint.every_minutes=1?"),
        ("train_time_interval=01:30:00", "did you mean checkpoint.every_minutes=90?"),
        ("sequence_len=2048", "did you mean data.sequence_length=2048?"),
        ("cutoff_len=2k", "did you mean data.sequence_length=2k?"),
        ("val_set_size=0.05", "did you mean data.validation_fraction=0.05?"),
        ("use_flash_attention_2=true", "use model.attention=sdpa, flex or varlen"),
        ("search.seed=3", "python train.py -m search.trials=20"),
    ],
)
def test_what_newcomers_type_leads_to_a_command_that_is_accepted(typed: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    typed, expected = (text.format(folder=tmp_path) for text in (typed, expected))
    message = refusal(typed)
    assert expected in message
    pasted = [word.rstrip("?") for word in overrides_in(expected) if word.partition("=")[0] in {*all_keys(), *GROUPS}]
    if "Qwen" not in typed and "-m " not in expected:  # on the Hub; a sweep
        assert pasted
        compose([*pasted, *["data.tokenizer=bytes"] * ("model=auto" in pasted)])


def test_no_name_from_another_framework_is_a_key_of_serried() -> None:
    assert [name for name in NAMES.keys if name in all_keys()] == []


def test_the_page_for_newcomers_is_what_the_command_prints() -> None:
    page = (FOLDER.parent / "docs/reference/coming-from.md").read_text(encoding="utf-8")
    committed = page.partition("<!-- python -m tools.key_tables coming-from -->\n")[2].partition("\n<!-- end -->")[0]
    assert committed == coming_from(), (
        "put the output of `python -m tools.key_tables coming-from` into docs/reference/coming-from.md"
    )


@pytest.mark.parametrize("typed", ["attention_bias=true", "attention_window=100", "num_local_experts=8"])
def test_a_key_of_other_model_families_is_suggested_with_their_names(typed: str) -> None:
    with pytest.raises(
        UserError, match=r"did you mean model\.(\w+)=\w+\? model\.\1 is a key of model\.family=.*mi[sx]t"
    ):
        compose([typed])
    with pytest.raises(UserError, match=r"did you mean model\.hidden_dim=48\?$"):
        compose(["intermediate_size=48"])
