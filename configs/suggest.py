"""From what somebody typed to what they meant: nearest names, names from other frameworks, names yet to come."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches

from serried.configs.keys import all_keys, all_sections, is_name, is_section, keys_of

_ALIASES = {  # names other frameworks use, for keys or groups whose value means the same
    "trainer.steps": "max_steps num_steps n_steps total_steps train_steps num_train_steps max_train_steps "
    "num_training_steps max_iters train_iters iterations",
    "trainer.global_batch": "batch_size train_batch_size global_batch_size total_batch_size",
    "trainer.micro_batch": "per_device_train_batch_size per_device_batch_size device_batch_size micro_batch_size "
    "train_micro_batch_size_per_gpu local_batch_size mbs",
    "trainer.max_grad_norm": "grad_clip clip clip_grad gradient_clip_val gradient_clipping clip_grad_norm "
    "grad_norm_clip",
    "trainer.seed": "random_seed manual_seed rng_seed seed_everything",
    "trainer.log_every": "log_interval logging_steps log_every_n_steps log_freq log_steps",
    "trainer.eval_every": "eval_interval eval_steps evaluation_steps val_check_interval eval_freq validate_every",
    "trainer.eval_batches": "eval_iters limit_val_batches max_eval_batches val_batches",
    "trainer.deterministic": "determinism full_determinism use_deterministic_algorithms",
    "trainer.sample_tokens": "max_new_tokens",
    "optim.lr": "learning_rate peak_lr max_lr base_lr",
    "optim.betas": "adam_betas",
    "optim.eps": "epsilon adam_epsilon adam_eps",
    "optim.weight_decay": "wd decay",
    "optim": "optimizer optimizer_name opt",
    "schedule": "scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay_style",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps",
    "schedule.min_lr_ratio": "final_lr_fraction min_lr_rate",
    "data.sequence_length": "seq_len seq_length max_seq_len max_seq_length block_size context_length context_size "
    "max_length n_ctx",
    "data.workers": "num_workers dataloader_num_workers",
    "data.path": "data_path data_dir dataset_path train_file train_files data_files file files folder input "
    "input_file corpus",
    "data": "dataset dataset_name",
    "data.streaming": "dataset_streaming use_streaming",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_type tokenizer_name_or_path",
    "data.validation_fraction": "val_fraction val_split_fraction test_size",
    "data.validation_split": "val_split eval_split dataset_eval_split",
    "data.subset": "dataset_config dataset_config_name subset_name",
    "data.split": "dataset_split train_split dataset_train_split",
    "data.revision": "dataset_revision",
    "data.text_column": "text_field text_key dataset_text_field content_column text_column_name",
    "data.vocab_size": "tokenizer_vocab_size",
    "data.token_dtype": "token_type token_bytes",
    "data.cache_dir": "cache_folder dataset_cache_dir hf_datasets_cache preprocessed_data_dir",
    "data.chat_template": "chat_template_path chat_template_jinja",
    "data.messages_column": "messages_key messages_field conversation_column field_messages chat_column",
    "model": "model_name model_name_or_path model_type arch architecture",
    "model.dim": "hidden_size d_model n_embd embed_dim embedding_dim dim_model",
    "model.layers": "num_layers n_layer n_layers num_hidden_layers depth",
    "model.heads": "n_head n_heads num_heads num_attention_heads attention_heads",
    "model.kv_heads": "n_kv_heads n_kv_head num_kv_heads num_key_value_heads num_query_groups",
    "model.hidden_dim": "intermediate_size ffn_dim ffn_hidden_size d_ff mlp_dim ffn_hidden_dim",
    "model.vocab_size": "vocab vocabulary_size n_vocab padded_vocab_size",
    "model.vocab_multiple": "pad_to_multiple_of make_vocab_size_divisible_by vocab_size_multiple "
    "pad_vocab_size_multiple pad_vocab_size_to_multiple_of",
    "model.tie_embeddings": "tie_word_embeddings tied_embeddings weight_tying",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layernorm_epsilon",
    "model.rope_theta": "rotary_base rope_base theta",
    "model.initializer_std": "initializer_range init_std",
    "model.max_sequence_length": "max_position_embeddings n_positions",
    "precision": "dtype mixed_precision amp amp_dtype torch_dtype precision_type param_dtype",
    "parallel": "strategy distributed_strategy accelerator_strategy parallelism distributed",
    "parallel.replicate": "dp dp_size data_parallel data_parallel_size dp_replicate data_parallel_replicate_degree",
    "parallel.shard": "dp_shard fsdp_size sharding data_parallel_shard_degree num_shards",
    "launch": "launcher",
    "track": "report_to logger loggers tracker trackers log_with logging_backend",
    "track.wandb": "wandb_mode",
    "track.tensorboard": "enable_tensorboard tensorboard_dir tb",
    "track.mlflow": "mlflow_tracking_uri tracking_uri mlflow_uri",
    "track.project": "wandb_project project project_name mlflow_experiment_name",
    "track.entity": "wandb_entity entity wandb_team team",
    "track.group": "wandb_group group group_name wandb_run_group",
    "track.tags": "wandb_tags tags",
    "track.notes": "wandb_notes notes",
    "launch.device": "accelerator platform device_type",
    "slurm.partition": "queue slurm_partition",
    "slurm.account": "slurm_account",
    "slurm.qos": "slurm_qos",
    "slurm.time_minutes": "timeout_min walltime time",
    "slurm.cpus_per_node": "cpus_per_task",
    "slurm.memory": "mem mem_gb slurm_mem",
    "slurm.array_concurrency": "array_parallelism slurm_array_parallelism",
    "slurm.setup": "slurm_setup setup_commands",
    "slurm.interface": "gloo_socket_ifname nccl_socket_ifname socket_ifname",
    "slurm.signal_seconds": "signal_delay_s",
    "launch.step_timeout_seconds": "ddp_timeout comm_timeout nccl_timeout train_timeout_seconds hang_timeout",
    "health.spike": "loss_spike spike_detection spike_policy skip_spikes",
    "health.spike_deviations": "sigma_factor spike_threshold loss_spike_factor",
    "health.spike_window": "rolling_interval_length",
    "health.non_finite": "nan_policy terminate_on_nan check_for_nan_in_loss_and_grad on_nan",
    "health.replica_check_every": "check_weight_hash_across_dp_replicas_interval replica_check",
    "profile.steps": "profile_steps profiling_steps profiler_steps",
    "profile.memory": "memory_snapshot enable_memory_snapshot record_memory_history profile_memory",
    "run.name": "run_name experiment_name exp_name name job_name wandb_run_name wandb_name",
    "run.dir": "output_dir save_dir out_dir log_dir logdir work_dir results_dir default_root_dir checkpoint_dir",
    "checkpoint.every": "save_every save_steps save_interval checkpoint_every save_freq every_n_train_steps "
    "checkpoint_interval",
    "checkpoint.keep": "save_total_limit keep_latest_k save_top_k max_checkpoints",
    "checkpoint.resume": "resume resume_from resume_from_checkpoint ckpt_path load_checkpoint auto_resume init_from "
    "pretrained pretrained_model_name_or_path initial_load_path",
    "trainer.stop_at": "stop_step stop_after exit_interval",
    "trainer.max_minutes": "max_time exit_duration_in_mins exit_duration_minutes time_limit max_duration",
    "dry_run": "dryrun plan fast_dev_run",
    "recipe": "config config_name config_file preset experiment",
}

_SWITCHES = {  # names that are a choice by themselves, given as NAME=true elsewhere
    "bf16": "precision=bf16",
    "fp16": "precision=fp16",
    "half": "precision=fp16",
    "fp32": "precision=fp32",
    "tf32": "precision=fp32",
    "ddp": "parallel=ddp",
    "fsdp": "parallel=fsdp",
    "fsdp2": "parallel=fsdp",
    "hsdp": "parallel=hsdp",
    "zero3": "parallel=fsdp",
    "zero2": "parallel=fsdp parallel.reshard_after_forward=false",
    "deepspeed": "parallel=fsdp",
    "packing": "data.packing=best_fit",
    "sample_packing": "data.packing=best_fit",
    "reset_position_ids": "data.isolate_documents=true",
    "reset_attention_mask": "data.isolate_documents=true",
    "document_mask": "data.isolate_documents=true",
    "cpu": "launch.device=cpu",
    "use_cpu": "launch.device=cpu",
    "cuda": "launch.device=cuda",
    "gpu": "launch.device=cuda",
    "wandb": "track.wandb=online",
    "use_wandb": "track.wandb=online",
    "enable_wandb": "track.wandb=online",
    "log_to_wandb": "track.wandb=online",
    "wandb_log": "track.wandb=online",
    "tensorboard": "track.tensorboard=true",
    "use_tensorboard": "track.tensorboard=true",
    "use_mlflow": "track=mlflow",
}

_PROCESSES = (
    "the number of processes is launch=local launch.processes={value} (starts them here), or torchrun's: "
    "torchrun --nproc_per_node={value} train.py ..."
)
_ACCUMULATION = (
    "accumulation is derived, trainer.global_batch / (trainer.micro_batch x data ranks); set trainer.global_batch=512"
)
_EPOCHS = "training is counted in optimizer steps, not epochs; set trainer.steps=1000"
_RANK = "torchrun tells each process its rank; start with: torchrun --nproc_per_node=2 train.py ..."
_EXPLAINED = {  # names whose value means something else here, or nothing
    _PROCESSES: "num_gpus n_gpus gpus ngpus nproc nproc_per_node num_processes num_procs world_size devices n_procs",
    "the number of nodes is launch=slurm launch.nodes={value} (submits a job), or torchrun's: torchrun "
    "--nnodes={value} train.py ...": "num_nodes nnodes n_nodes",
    _ACCUMULATION: "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps accumulation_steps "
    "accumulate_grad_batches accumulation",
    _EPOCHS: "epochs num_epochs num_train_epochs max_epochs n_epochs",
    "warm-up is counted in steps, not as a share; set schedule.warmup_steps=100": "warmup_ratio warmup_fraction",
    "both are one list; set optim.betas=[0.9,0.95]": "beta1 beta2 adam_beta1 adam_beta2",
    "the last learning rate is given as a share of the peak; set schedule.min_lr_ratio=0.1": "min_lr "
    "min_learning_rate eta_min",
    "ZeRO-3 is parallel=fsdp, ZeRO-2 is parallel=fsdp parallel.reshard_after_forward=false": "zero_stage zero "
    "sharding_strategy",
    _RANK: "local_rank rank node_rank master_addr master_port",
    "several sources are data=mixture data.sources.NAME.name=text data.sources.NAME.path=FOLDER "
    "data.sources.NAME.weight=0.7": "blend data_blend data_mixture mixture_weights domain_weights dataset_weights "
    "interleave_datasets datasets",
    "a sweep is -m and several values for a key; write python train.py -m optim.lr=1e-3,3e-3": "multirun sweep "
    "hydra/sweeper",
    "trials are those of a search: python train.py -m hydra/sweeper=optuna hydra.sweeper.n_trials=20 "
    "'optim.lr=tag(log, interval(1e-5, 1e-2))'": "n_trials num_trials max_trials",
    "of conversations only what the assistant says is learned; use recipe=sft data.path=CHATS.jsonl": "train_on_inputs "
    "train_on_responses_only assistant_only_loss completion_only_loss",
    "there is no dropout in models of the Llama 3 family; leave it out": "dropout attention_dropout dropout_rate",
    "a profile is of steps, the first and the last; set 'profile.steps=[10,13]'": "profiler enable_profiling "
    "use_profiler use_pytorch_profiler profile_step_start profile_step_end profile_freq",
    "the run folder is run.dir, and Hydra makes none of its own; set run.dir=runs/first-try": "hydra",
}

_LATER = {  # names that the project has promised, and that work once their part is built
    "tensor parallelism": "parallel.tensor tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size",
    "context parallelism": "parallel.context cp cp_size context_parallel context_parallel_size sequence_parallel",
    "pipeline parallelism": "parallel.pipeline pp pp_size pipeline_parallel pipeline_parallel_size "
    "pipeline_model_parallel_size",
    "expert parallelism": "parallel.expert ep ep_size expert_parallel expert_parallel_size",
    "compiling the model": "compile torch_compile use_compile",
    "activation checkpointing": "gradient_checkpointing activation_checkpointing use_gradient_checkpointing",
}

_LATER_CHOICES = {
    ("precision", "float8"): "arithmetic in float8",
    ("precision", "fp8"): "arithmetic in float8",
    ("parallel", "tensor"): "tensor parallelism",
    ("parallel", "tp"): "tensor parallelism",
    ("parallel", "pipeline"): "pipeline parallelism",
    ("parallel", "pp"): "pipeline parallelism",
}

_CHOICE_ALIASES = {
    "huggingface": "hf",
    "hub": "hf",
    "datasets": "hf",
    "bin": "tokens",
    "pretokenized": "tokens",
    "fineweb": "fineweb_edu",
    "fineweb-edu": "fineweb_edu",
    "bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "true": "bf16",
    "float16": "fp16",
    "16": "fp16",
    "16-mixed": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "full": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "no": "fp32",
    "zero3": "fsdp",
    "zero2": "fsdp",
    "full_shard": "fsdp",
    "fully_shard": "fsdp",
    "fsdp2": "fsdp",
    "hybrid_shard": "hsdp",
    "dp": "ddp",
    "none": "single",
    "adam": "adamw",
    "adamw_torch": "adamw",
    "cosine_with_warmup": "cosine",
    "warmup_stable_decay": "wsd",
    "constant_with_warmup": "constant",
}


_VALUE_ALIASES = {  # of keys; those above are of groups
    "gpu": "cuda", "nvidia": "cuda",
    "true": "online", "on": "online", "yes": "online",
    "false": "off", "no": "off", "none": "off", "null": "off", "disabled": "off",
}  # fmt: skip
_A_SLIP = 0.85
"""Likeness of a key and itself with one letter wrong, or more."""


def _squeezed(name: str) -> str:
    """``maxSteps``, ``max-steps`` and ``max_steps`` are one name."""
    return re.sub(r"[-_]", "", name).lower()


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {_squeezed(name): meaning for meaning, names in table.items() for name in names.split()}


_ALIAS_OF, _EXPLANATION_OF, _LATER_OF = _by_name(_ALIASES), _by_name(_EXPLAINED), _by_name(_LATER)
_SWITCH_OF = {_squeezed(name): override for name, override in _SWITCHES.items()}


def pasteable(key: str, value: str) -> str:
    """``key=value`` as it has to be typed into a shell."""
    return shlex.quote(f"{key}={value}")


def nearest(typed: str, names: Sequence[str]) -> list[str]:
    """Up to three of ``names`` that ``typed`` may be a slip of, best first."""
    by_lower = {name.lower(): name for name in names}
    return [by_lower[name] for name in get_close_matches(typed.lower(), list(by_lower), n=3, cutoff=0.6)]


def nearest_value(typed: str, choices: Sequence[str]) -> list[str]:
    """Those of the ``choices`` of a key that ``typed`` may stand for, best first."""
    alias = _VALUE_ALIASES.get(typed.lower(), "")
    return [alias] if alias in choices else nearest(typed, choices)


def nearest_keys(typed: str, names: Iterable[str]) -> list[str]:
    """Up to three of the full dotted ``names`` that ``typed`` may be a slip of, best first.

    A name is as near as its whole or, a little less, as its last part: ``stpes`` is near ``trainer.steps``. To have
    the section in common is not enough: ``trainer.foo`` is near nothing.
    """
    typed = typed.lower().replace("/", ".").replace("-", "_")
    leaf = typed.rpartition(".")[2]

    def likeness(name: str) -> float:
        whole, last = _ratio(typed, name), _ratio(leaf, name.rpartition(".")[2])
        return max(whole if whole >= 0.8 else 0.0, 0.9 * last if last >= 0.75 else 0.0)

    ranked = sorted(((likeness(name), name) for name in names), key=lambda pair: -pair[0])[:3]
    return [name for score, name in ranked if score and score >= ranked[0][0] - 0.06]


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


def meant(key: str, value: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Overrides to paste that somebody who typed ``key=value`` may have meant; best first, empty if none.

    Without a value the overrides get an example of one.
    """
    section = key.rpartition(".")[0]
    names = keys_of(section) if section not in all_sections() and is_section(section) else [*all_keys(), *groups]
    leaf = _squeezed(key.rpartition(".")[2])
    if key in names:
        return [_assignment(key, value, groups)]
    if switch := _SWITCH_OF.get(leaf):
        chosen = _CHOICE_ALIASES.get(value.lower(), value)
        is_choice = chosen in groups.get(switch.partition("=")[0], ())
        return [pasteable(switch.partition("=")[0], chosen) if is_choice and value.lower() != "true" else switch]
    near = nearest_keys(key, names)
    if alias := _ALIAS_OF.get(leaf):
        # A name from elsewhere may also be one slip away from a real key: offer both.
        near = [alias, *(name for name in near if _ratio(key.lower(), name) >= _A_SLIP)]
    elif not near or _ratio(key.lower(), near[0]) < _A_SLIP:
        near = [*(_ALIAS_OF[name] for name in get_close_matches(leaf, _ALIAS_OF, n=1, cutoff=0.85)), *near]
    sure = {alias, *groups, *(name for name in near if _ratio(key.lower(), name) >= _A_SLIP)}
    near = [name for name in near if name in sure or _fits(name, value)] or near
    return [_assignment(name, value, groups) for name in dict.fromkeys(near)][:3]


def _fits(name: str, value: str) -> bool:
    """Whether ``value``, or each of several to sweep over, is of the kind of the key ``name``."""
    values = [value] if value.startswith("[") else value.split(",")
    return all(all_keys()[name].may_take(each) for each in values)


def _assignment(name: str, value: str, groups: Mapping[str, Sequence[str]]) -> str:
    if name == "slurm.time_minutes":
        value = _in_minutes(value)
    if name not in groups:
        return pasteable(name, value) if value else all_keys()[name].example
    chosen = [each if each in groups[name] else _CHOICE_ALIASES.get(each.lower(), "") for each in value.split(",")]
    # Several are a sweep.
    return f"{name}={','.join(chosen) if {*chosen} <= {*groups[name]} else '|'.join(groups[name])}"


def _in_minutes(limit: str) -> str:
    """A time limit as Slurm writes it, ``4:00:00``, ``30:00`` or ``1-12``, in minutes; as it is where it is none."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if found is None:
        return limit
    days, *parts = (int(part or 0) for part in found.groups())
    if found[1] is None and found[4] is None:  # minutes, or minutes:seconds
        parts = [0, parts[0], parts[1]]
    hours, minutes, seconds = parts
    return str(60 * (24 * days + hours) + minutes + (seconds > 0))


def explanation(key: str, value: str) -> str | None:
    """Why there is nothing to write instead of ``key``; ``None`` if there may be."""
    if "." in key and _squeezed(key) not in _LATER_OF and any(_ratio(key, name) >= _A_SLIP for name in all_keys()):
        return None  # optim.ep is optim.eps, not expert parallelism
    if planned := later(key):
        return f"{planned} is not in this version yet; leave it out"
    known = (_EXPLANATION_OF.get(_squeezed(name)) for name in (key.rpartition(".")[2], key.partition(".")[0]))
    text = next(filter(None, known), None)
    return text and text.format(value=value or "N")


def later(key: str) -> str | None:
    """What ``key`` will do in a later version; ``None`` if nothing is planned under that name."""
    section, leaf = key.partition(".")[0], key.rpartition(".")[2]
    names = [key, leaf] if section in all_sections() else [key, leaf, section]
    return next((_LATER_OF[_squeezed(name)] for name in names if _squeezed(name) in _LATER_OF), None)


def unknown_key(key: str, value: str, source: str, groups: Mapping[str, Sequence[str]]) -> str:
    """The sentence for a key that the schema does not have."""
    given = f"{key}={value} ({source})"
    if reason := explanation(key, value):
        return f"{given}: {reason}"
    parts = key.split(".")
    if ".".join(parts[:2]) in all_keys().named and len(parts) > 3 and not is_name(parts[2]):
        return f"{given}: {parts[2]} is no name; it takes letters, digits, _ and -, and begins with a letter"
    if suggestions := meant(key, value, groups):
        return f"unknown key {given}; did you mean {' or '.join(suggestions)}?"
    section = key.rpartition(".")[0]
    if is_section(section):
        return f"unknown key {given}; {listing(section)}"
    return f"unknown key {given}; python train.py --help lists the keys"


def listing(section: str) -> str:
    """The keys of a section, to stand after a semicolon."""
    if section in all_keys().named:
        return f"it has a section for each name of yours, as in {section}.web, {listing(f'{section}.web')}"
    return f"the keys of {section} are {', '.join(key.rpartition('.')[2] for key in keys_of(section))}"


def unknown_section(name: str, source: str) -> str:
    """The sentence for a whole section, given in a YAML file, that the schema does not have."""
    if planned := later(name):
        return f"section {name} ({source}): {planned} is not in this version yet; leave it out"
    near = nearest(name, all_sections())
    return f"unknown section {name} ({source}); " + (
        f"did you mean {' or '.join(near)}?" if near else f"sections: {', '.join(all_sections())}"
    )


def unknown_choice(group: str, choice: str, choices: Sequence[str], source: str = "") -> str:
    """The sentence for ``group=choice`` when there is no such choice."""
    where = f" ({source})" if source else ""
    if planned := _LATER_CHOICES.get((group, choice.lower())):
        return f"{group}={choice}{where}: {planned} is not in this version yet; {group}: {', '.join(choices)}"
    plural = f"{group}s" if group in ("recipe", "model", "schedule") else group
    alias = _CHOICE_ALIASES.get(choice.lower(), "")
    near = [alias] if alias in choices else nearest(choice, choices)[:1]
    hint = f" Did you mean {pasteable(group, near[0])}?" if near else ""
    return f"no {group} {choice!r}{where}.{hint} {plural}: {', '.join(choices)}"
