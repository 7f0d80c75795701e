"""Overrides for the task, model, data and adapters of another framework's config."""

import re

from serried.configs.errors import UserError
from serried.configs.help import choices_of
from serried.configs.messages.keys import all_keys
from serried.configs.messages.suggestions import nearest
from serried.conversion.converted import LAYOUTS, Converted
from serried.conversion.foreign_config import ForeignConfig, local_path
from serried.conversion.foreign_data import ForeignData, Source, names_of

_ROPE = {"original_max_position_embeddings": "original_max_sequence_length"}
_LINEAR_LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
_OF_TORCHTUNE = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LOSSES = {"sigmoid": "dpo", "dpoloss": "dpo", "simpoloss": "simpo", "kto_pair": "kto", "ipoloss": "ipo"}
_TASKS = {"dpo": "preference", "kto": "preference", "reward": "reward", "distill": "distillation"}
"""Tasks of recipes."""
_STAGES = ("", "dpo", "ipo", "kto", "orpo", "simpo", "cpo", "reward", "rm", "sft")
_OF_REINFORCEMENT = (
    "reward_funcs",
    "num_generations",
    "ppo_epochs",
    "grpo_samples",
    "grpo_size",
    "trl.num_generations",
)
"""Keys of configs for reinforcement learning."""
_REINFORCED = ("ppo", "grpo", "rloo", "gdpo", "online_dpo", "reinforce")
_REFUSED_TASKS = "serried has no reinforcement learning; recipes are sft, lora, qlora, dpo, kto, reward and distill"


# Task, model, data ----------------------------------------------------------------------------------------------------


def choose_recipe(config: ForeignConfig, out: Converted, recipe: str | None) -> str:
    """Set the recipe and return the task: sft, text, preference, reward or distillation."""
    task, loss = _task_and_loss(config, out)
    if recipe:
        if recipe not in choices_of()["recipe"]:
            near = nearest(recipe, choices_of()["recipe"])
            raise UserError(f"there is no recipe {recipe}; use recipe={near[0] if near else 'sft'}")
        task = {"dpo": "preference", "kto": "preference", "reward": "reward", "distill": "distillation"}.get(
            recipe, task
        )
    quantized, method = _quantized(config), _method(config)
    if task in ("sft", "text"):
        chosen = "sft" if method == "none" else "qlora" if quantized and method == "lora" else "lora"
        if recipe or config.title not in LAYOUTS:
            out.set("recipe", recipe or chosen)
        if method == "dora" or (method == "lora" and recipe == "sft"):
            out.set("adapter", method)
    else:
        pairs = "kto" if loss == "kto" else "dpo"
        out.set("recipe", recipe or {"preference": pairs, "reward": "reward"}.get(task, "distill"))
        if method != "none":
            out.set("adapter", method)
    if method == "none" and recipe in ("lora", "qlora"):
        method = "lora"
    if quantized and method == "lora" and out.overrides.get("recipe") != "qlora":
        out.set("adapter.quantize", "nf4")
    if quantized and method == "dora":
        out.lack(config.said("quantize", "adapter"), "4-bit frozen weights need LoRA, not DoRA; use adapter=lora")
    if quantized and method == "none":
        out.lack(
            config.said("quantize", "adapter"), "4-bit weights cannot be trained, and this config trains the full model"
        )
    if config.flag("load_in_8bit") or config.value("quantization_bit") == 8:
        subject = config.said("load_in_8bit", "quantization_bit")
        out.lack(
            subject, "frozen weights are kept in bf16; recipe=qlora, or adapter.quantize=nf4, keeps them in 4 bits"
        )
    if loss not in ("", "dpo", "kto"):
        if loss in all_keys()["task.loss"].choices:
            out.set("task.loss", loss)
        else:
            out.lack(
                config.said("rl", "preference_loss", "stage", "loss"),
                f"task.loss does not support {loss}, only {', '.join(all_keys()['task.loss'].choices)}",
            )
    return task


def _task_and_loss(config: ForeignConfig, out: Converted) -> tuple[str, str]:
    """Return the task, and the loss of a preference task."""
    if "teacher" in config:
        return "distillation", ""
    stage, named = config.text("stage"), config.text("rl").lower()
    losses = config.words("preference_loss")
    loss = losses[0].lower() if losses else ""
    component = config.text("loss").rpartition(".")[2].lower()
    for word in (stage, named, loss):
        if word in _REINFORCED:
            raise UserError(f"{config.said('stage' if word == stage else 'rl')} in {config.path}: {_REFUSED_TASKS}")
    if found := [setting for setting, _ in config.answers if setting.name in _OF_REINFORCEMENT]:
        raise UserError(f"{found[0]} in {config.path}: {_REFUSED_TASKS}")
    if named not in _STAGES:
        raise UserError(f"{config.said('rl')} in {config.path}: {_REFUSED_TASKS}")
    if config.flag("reward_model") or stage == "rm" or named in ("reward", "rm"):
        return "reward", ""
    if component in _LOSSES:
        return "preference", _LOSSES[component]
    if stage == "pt" or "pretraining_dataset" in config:
        return "text", ""
    if stage in ("dpo", "kto") or named in ("dpo", "ipo", "kto", "orpo", "simpo", "cpo"):
        own = stage if stage == "kto" else named if named not in ("", "dpo") else ""
        return "preference", own or _LOSSES.get(loss, loss) or "dpo"
    if stage == "" and named == "":
        guess, reason = _guessed(config, loss)
        if guess:
            out.explained.append(
                f"recipe=dpo: the file names no trainer, but {reason}; if it is another, add recipe=sft"
            )
            return "preference", guess
    return "sft", ""


def _guessed(config: ForeignConfig, loss: str) -> tuple[str, str]:
    """Return the preference loss of a config of TRL, which does not name its trainer, and why; empty if none."""
    if loss in ("sigmoid", "ipo", "hinge", "simpo", "apo_zero", "kto", "robust"):
        return _LOSSES.get(loss, loss), config.said("preference_loss")
    if "preference_loss" in config and loss not in ("nll", "chunked_nll", "dft"):
        return loss, config.said("preference_loss")
    names = " ".join([str(config.path), config.text("output_dir"), config.text("run_name")]).lower()
    named = next(
        (word for word in ("orpo", "simpo", "kto", "ipo", "dpo") if re.search(rf"(?<![a-z]){word}(?![a-z])", names)), ""
    )
    if "beta" in config:
        return named or "dpo", config.said("beta")
    return named, f"{named} is in its name or in output_dir" if named else ""


def _quantized(config: ForeignConfig) -> bool:
    component = config.text("model_component").rpartition(".")[2]
    return (
        config.flag("quantize") or config.text("adapter").lower() == "qlora" or config.value("quantization_bit") == 4
        or component.startswith("qlora")
    )  # fmt: skip


def _method(config: ForeignConfig) -> str:
    """Return ``none``, ``lora`` or ``dora``."""
    component = config.text("model_component").rpartition(".")[2]
    is_adapter = (
        config.text("adapter").lower() in ("lora", "qlora")
        or (config.text("finetuning") == "lora")
        or config.flag("adapter_switch")
        or component.startswith(("lora_", "qlora_", "dora_"))
    ) and not config.flag("full_finetuning")
    return ("dora" if config.flag("dora") else "lora") if is_adapter else "none"


def set_model(config: ForeignConfig, out: Converted) -> None:
    if "model" in config:
        path = config.text("model")
        out.set("model.path", local_path(config, path) or path)
    elif config.title in LAYOUTS:
        out.decide.append(
            "the file has no model and no data; convert it together with the config of the run: serried convert "
            f"RUN.yaml {config.path}"
        )
    else:
        out.decide.append("the file names no model; add model.path=FOLDER_OR_NAME")
    if "revision" in config and config.value("revision") != "main":
        download = f"hf download {config.text('model', 'NAME')} --revision {config.text('revision')} --local-dir FOLDER"
        out.lack(config.said("revision"), f"download it, and use the folder: {download}; then model.path=FOLDER")
    if "teacher" in config:
        out.set("task.teacher", config.text("teacher"))
        out.set("task.weight", config.number("distillation_weight", 0.5))
    if config.flag("adapter_path"):
        out.set("adapter.path", config.text("adapter_path"))
    scaling = config.value("rope_scaling")
    if isinstance(scaling, dict) and scaling:
        out.set("model.rope_scaling.rope_type", scaling.get("rope_type", scaling.get("type", "linear")))
        for key in ("factor", "original_max_position_embeddings"):
            if scaling.get(key) is not None:
                out.set(f"model.rope_scaling.{_ROPE.get(key, key)}", scaling[key])
    if "rope_theta" in config:
        out.set("model.rope_theta", config.number("rope_theta"))
    if config.flag("rope_type"):
        kind = config.text("rope_type")
        factor = "cutoff_len / max_position_embeddings of the model, rounded up"
        overrides = f"model.rope_scaling.rope_type={kind} model.rope_scaling.factor=N"
        out.decide.append(f"{config.said('rope_type')}: add {overrides}, where N is {factor}")
    if config.flag("train_from_scratch"):
        out.lack(
            config.said("train_from_scratch"),
            "weights are read from model.path; to train from scratch, use a recipe such as llama1b",
        )


def set_data(config: ForeignConfig, out: Converted, data: ForeignData, task: str) -> None:
    training = data.training
    out.decide += data.notes
    out.lacking += data.lacking
    if not (training or data.notes) and config.title not in LAYOUTS:
        out.decide.append("the file names no data; add data.path=FILE, or data=hf data.path=OWNER/NAME")
    if len(training) > 1 and task in ("preference", "reward"):
        paths = ", ".join(source.path for source in training[1:])
        rows = "rows" if out.overrides["recipe"] == "kto" else "pairs"
        out.decide.append(f"{rows} are read from the first data set only; join the others into one file: {paths}")
        training = training[:1]
    if len(training) == 1:
        if training[0].kind != "text":
            out.set("data", training[0].kind)
        _source(out, "data", training[0])
    elif training:
        out.set("data", "mixture")
        out.set("data.path", None)
        for name, source in names_of(training):
            out.set(f"data.sources.{name}.name", source.kind)
            _source(out, f"data.sources.{name}", source)
        out.set("data.weigh_by", "size")
    formats = {source.format for source in training}
    if formats == {"text"} and task in ("sft", "text"):
        out.set("data.format", "text")
    elif len(formats) > 1:
        out.lack("datasets of text and of conversations", "a mixture has one format; only the conversations are used")
    if formats == {"text"}:
        pass
    elif any(source.trains_on_all for source in training) or config.flag("train_on_inputs"):
        out.set("data.train_on", "all")
    elif config.flag("last_only"):
        out.set("data.train_on", "last")
    if config.flag("text_or_chat") and formats == {"chat"} and task == "sft":
        _trained_tokens(config, out)
    for name, source in names_of(data.validation):
        out.set(f"data.validation.{name}.name", source.kind)
        _source(out, f"data.validation.{name}", source)
    _template(config, out, formats)
    if config.flag("streaming"):
        out.lack(config.said("streaming"), "conversations are not streamed, but prepared once in data.cache_dir")
    if "max_samples" in config:
        out.lack(
            config.said("max_samples"),
            "every row is used; shorten the file, or name a split such as train[:1000] with data=hf",
        )


def _source(out: Converted, section: str, source: Source) -> None:
    if "://" in source.path:
        out.lack(source.path, "only local files and folders and names on the Hub are supported; copy the data")
    out.set(f"{section}.path", source.path)
    if source.kind == "hf":
        if source.subset:
            out.set(f"{section}.subset", source.subset)
        if source.split not in (None, "train"):
            out.set(f"{section}.split", source.split)
        if source.revision:
            out.set(f"{section}.revision", source.revision)
    elif source.path.endswith((".csv", ".arrow")):
        out.lack(source.path, "CSV and Arrow files are read from a folder: data=hf data.path=FOLDER")
    if source.text and source.text != "text" and source.format == "text":
        out.set(f"{section}.text_column", source.text)
    if source.messages:
        out.set(f"{section}.messages_column", source.messages)
    known = {key.rpartition(".")[2] for key in _columns()}
    for name, column in source.columns.items():
        if name in known and source.format != "text":
            out.set(f"{section}.columns.{name}", column)


def _columns() -> tuple[str, ...]:
    from serried.recipes.data.readers.columns import COLUMNS

    return COLUMNS


def _trained_tokens(config: ForeignConfig, out: Converted) -> None:
    """Choose the tokens to train on as TRL does, which depends on the columns."""
    if config.flag("assistant_only") or config.flag("completion_only"):
        return
    if "completion_only" in config or "assistant_only" in config:
        out.set("data.train_on", "all")
        return
    out.decide.append(
        f"data.train_on: {config.title} trains on all tokens of rows with messages, and on the completion of rows "
        "with a prompt, but serried trains only on replies; add data.train_on=all to train on all tokens, or "
        "data.format=text for plain text"
    )


def _template(config: ForeignConfig, out: Converted, formats: set[str]) -> None:
    if "chat" not in formats and "preference" not in formats:
        return
    text = config.text("template_file") or config.text("template_text")
    if text.endswith((".jinja", ".jinja2", ".txt")):
        out.set("data.chat_template", text)
    elif text and ("{%" in text or "{{" in text):
        subject = config.facts["template_file" if "template_file" in config else "template_text"].name
        out.decide.append(f"{subject} is a template; write it to a file and add data.chat_template=FILE.jinja")
    elif text:
        out.decide.append(
            f"{config.said('template_file', 'template_text')}: the template of the model's tokenizer is used; for "
            "another one add data.chat_template=FILE.jinja"
        )
    if config.value("thinking") is False:
        out.set("data.chat_template_kwargs.enable_thinking", False)
    name = config.text("template")
    if name and name not in ("tokenizer_default", "jinja", "empty") and not text:
        out.decide.append(
            f"{config.said('template')}: the template of the model's tokenizer is used, else ChatML; for another "
            "one, as with a base model, add data.chat_template=FILE.jinja"
        )


def set_sequences(config: ForeignConfig, out: Converted, task: str) -> None:
    if "sequence_length" in config:
        out.set("data.sequence_length", config.count("sequence_length"))
    elif config.title == "torchtune":
        out.decide.append(
            "max_seq_len=null has no limit; data.sequence_length is 1024 in this recipe, and longer rows are truncated"
        )
    if task in ("preference", "reward") or config.title in LAYOUTS:
        return
    is_pretraining = task == "text" and config.text("stage") == "pt"
    if config.text("packing_strategy") == "wrapped" or is_pretraining:
        out.set("data.packing", "split")
        out.set("data.isolate_documents", False)
    elif config.flag("isolate") or (config.flag("packing") and config.title != "LLaMA-Factory"):
        out.set("data.packing", "best_fit")
    elif config.flag("packing"):
        out.set("data.packing", "best_fit")
        out.set("data.isolate_documents", False)
        out.explained.append(
            f"data.isolate_documents=false: as with {config.said('packing')}, conversations of a sequence attend to "
            "each other"
        )
    else:
        out.set("data.packing", "none")
        out.explained.append(
            "data.packing=none: one row per sequence, as in the file; data.packing=best_fit packs several rows, with "
            "attention masked between them, which is faster and trains on more rows per step"
        )


# Adapter --------------------------------------------------------------------------------------------------------------


def set_adapter(config: ForeignConfig, out: Converted) -> bool:
    """Set the keys of adapters. Return whether adapters are trained."""
    if config.text("finetuning") in ("freeze", "oft") or config.text("adapter").lower() not in (
        "",
        "lora",
        "qlora",
        "none",
        "false",
    ):
        out.lack(
            config.said("finetuning", "adapter"),
            "only lora, dora and full fine-tuning are supported; the full model is trained",
        )
    has_adapter = _method(config) != "none" or out.overrides.get("recipe") in ("lora", "qlora")
    if not has_adapter:
        return False
    if "adapter.path" in out.overrides:
        out.explained.append(f"rank, alpha and layers are taken from {config.said('adapter_path')}")
        return True
    if "rank" in config:
        out.set("adapter.rank", config.count("rank"))
    if "alpha" in config:
        out.set("adapter.alpha", config.number("alpha"))
    elif config.title == "LLaMA-Factory":
        out.set("adapter.alpha", 2 * config.count("rank"))
    if config.number("dropout"):
        out.set("adapter.dropout", config.number("dropout"))
    if config.flag("rslora"):
        out.set("adapter.scale", "rslora")
    _targets(config, out)
    if "loraplus" in config:
        out.set("optim.groups.b.parameters", "*lora_B")
        out.set("optim.groups.b.lr_scale", config.number("loraplus"))
    if config.flag("modules_to_save"):
        out.set("adapter.modules_to_save", config.words("modules_to_save"))
    return True


def _targets(config: ForeignConfig, out: Converted) -> None:
    given = config.words("targets")
    if config.title == "torchtune" and (given or "targets_mlp" in config):
        given = [*given, *(["gate_proj", "up_proj", "down_proj"] * config.flag("targets_mlp"))]
        if config.flag("targets_head"):
            out.lack(config.said("targets_head"), "adapters of the head are not supported")
    names = list(dict.fromkeys(_OF_TORCHTUNE.get(name, name) for name in given))
    if outside := [name for name in names if name in ("lm_head", "embed_tokens", "embedding")]:
        out.lack(f"adapters of {', '.join(outside)}", "only linear layers of the blocks can have adapters")
        names = [name for name in names if name not in outside]
    experts = config.words("target_parameters")
    if not names and not experts and "targets_all" not in config and config.title in ("TRL", "axolotl"):
        out.set("adapter.modules", ["q_proj", "v_proj"])
        out.explained.append(
            "adapter.modules=[q_proj,v_proj]: the file does not name layers; these are PEFT's default for Llama, "
            "Mistral, Qwen and Gemma; leave it out to adapt all linear layers of the blocks"
        )
    if config.flag("targets_all") or {"all", "all-linear"} & {*names} or {*names} >= _LINEAR_LAYERS:
        if not experts:
            return
        names = ["*.self_attn.*"]
        out.explained.append("adapter.modules names attention layers too, since experts have adapters only by name")
    names += experts
    if any(not re.fullmatch(r"[\w.*]+", name) for name in names):
        out.lack(config.said("targets"), "patterns must be glob patterns; write 'adapter.modules=[*.layers.3.*]'")
        return
    if names:
        out.set("adapter.modules", names)
