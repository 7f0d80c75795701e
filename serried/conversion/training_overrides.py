"""Overrides for the optimizer, schedule, intervals and trackers of another framework's config."""

import functools
import math
import re
from pathlib import Path
from typing import Any

from serried.configs.help import choices_of
from serried.configs.plain_data import read_yaml
from serried.conversion.converted import LAYOUTS, Converted, written
from serried.conversion.foreign_config import ForeignConfig
from serried.conversion.foreign_data import ForeignData

_ADAMS = ("adamw", "adam", "adamw8bit", "adamw4bit", "adamw_bf16", "muon")
"""Optimizers with two betas and an epsilon."""


# Optimization ---------------------------------------------------------------------------------------------------------


def _named(group: str, name: str) -> str:
    """Return our choice of ``group`` (optimizers, schedules) for another framework's name; empty if there is none."""
    table = _choices()[group]
    return next((choice for choice, names in table.items() if name.lower() in names.split()), "")


@functools.cache
def _choices() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("choices.yaml"))


def set_optimizer(config: ForeignConfig, out: Converted) -> None:
    given = config.text("optimizer").rpartition(".")[2]
    chosen = _named("optimizers", given) or "adamw"
    if given and not _named("optimizers", given):
        out.lack(config.said("optimizer"), f"optim=adamw is used; optimizers: {', '.join(choices_of()['optim'])}")
    if chosen != "adamw":
        out.set("optim", chosen)
    if "lr" in config:
        out.set("optim.lr", config.number("lr"))
    elif config.title == "TRL":
        rate = {"dpo": 1e-6, "kto": 1e-6, "reward": 1e-4}.get(out.overrides["recipe"], 2e-5)
        out.set("optim.lr", rate)
        out.explained.append(f"optim.lr={written(rate)}: TRL's default, as the file has no learning_rate")
    if "weight_decay" in config or chosen != "adamw":
        out.set("optim.weight_decay", config.number("weight_decay"))
    betas = config.numbers("betas")[:2]
    if len(betas) == 2 and chosen in _ADAMS:
        betas = [config.number("beta1", betas[0]), config.number("beta2", betas[1])]
        out.set("optim.betas", betas)
    if "eps" in config and chosen in _ADAMS and config.number("eps") != 1e-8:
        out.set("optim.eps", config.number("eps"))
    if "max_grad_norm" in config and config.number("max_grad_norm") != 1:
        out.set("trainer.max_grad_norm", config.number("max_grad_norm"))
    if config.number("label_smoothing") and out.overrides.get("recipe") not in ("dpo", "kto", "reward", "distill"):
        out.set("task.label_smoothing", config.number("label_smoothing"))


def set_steps(config: ForeignConfig, out: Converted, steps: int | None) -> float | None:
    """Set the length of the run. Return the number of steps, if known."""
    if config.number("steps") > 0:
        out.set("trainer.steps", config.count("steps"))
        return config.number("steps")
    if "steps_per_epoch" in config:
        total = config.count("steps_per_epoch") * config.number("epochs", 1)
        out.set("trainer.steps", int(total))
        out.explained.append(
            f"trainer.steps={total:g}: {config.said('steps_per_epoch')} x {config.said('epochs')}, if an epoch has "
            "this many steps; otherwise use trainer.epochs"
        )
        return total
    if "epochs" in config:
        out.set("trainer.epochs", config.number("epochs"))
    return steps


def set_schedule(config: ForeignConfig, out: Converted, total: float | None) -> None:
    if "schedule" not in config:
        return
    given = config.text("schedule").rpartition(".")[2].lower()
    chosen = _named("schedules", given)
    if not chosen:
        chosen = "cosine"
        out.lack(
            config.said("schedule"),
            "schedule=cosine is used; schedules are cosine, linear, constant and wsd, or your own",
        )
    if chosen != "cosine":
        out.set("schedule", chosen)
    if chosen != "constant":
        ratio = config.number("min_lr_ratio")
        if config.number("min_lr") and config.number("lr"):
            ratio = min(1.0, config.number("min_lr") / config.number("lr"))
        out.set("schedule.min_lr_ratio", ratio)
    if chosen == "wsd" and "decay_steps" in config:
        if total:
            out.set("schedule.decay_fraction", config.number("decay_steps") / total)
        else:
            out.decide.append(
                f"{config.said('decay_steps')}: the number of steps of the run is unknown; add "
                "schedule.decay_fraction=0.1, or convert with steps=N"
            )
    if given == "warmuplr":
        out.explained.append(
            "schedule=constant: the warm-up is linear; WarmupLR rises with the logarithm of the step, unless "
            "warmup_type=linear"
        )
    if given == "constant" and config.title != "torchtune":  # transformers ignores the warm-up
        out.set("schedule.warmup_steps", 0)
    elif 0 < config.number("warmup_steps") < 1:
        out.set("schedule.warmup_ratio", config.number("warmup_steps"))
    elif config.number("warmup_steps") > 0:
        out.set("schedule.warmup_steps", config.count("warmup_steps"))
    elif config.number("warmup_ratio") > 0:
        out.set("schedule.warmup_ratio", config.number("warmup_ratio"))
    elif config.title == "axolotl" and "warmup_steps" not in config and "warmup_ratio" not in config:
        _default_warmup_of_axolotl(out, total)
    else:
        out.set("schedule.warmup_steps", 0)


def _default_warmup_of_axolotl(out: Converted, total: float | None) -> None:
    if total:
        out.set("schedule.warmup_steps", min(int(0.03 * total), 100))
        return
    out.set("schedule.warmup_ratio", 0.03)
    out.decide.append(
        "schedule.warmup_ratio=0.03: axolotl's default is 3 % of the steps, but at most 100; for a run of more than "
        "3333 steps use schedule.warmup_steps=100 instead, or convert with steps=N"
    )


def set_preference(config: ForeignConfig, out: Converted, task: str) -> None:
    if task != "preference":
        return
    loss = "kto" if out.overrides["recipe"] == "kto" else out.overrides.get("task.loss", "dpo")
    for fact in ("desirable_weight", "undesirable_weight"):
        if loss == "kto" and config.number(fact, 1) != 1:
            out.set(f"task.{fact}", config.number(fact))
    if "beta" in config:
        out.set("task.beta", config.number("beta"))
    elif loss == "simpo" and config.title != "torchtune":
        out.set("task.beta", 0.1)  # the default of its trainers for all losses
    if loss == "simpo" and "margin" in config:
        out.set("task.margin", config.number("margin"))
    adds_nll = loss == "simpo" and config.title in ("TRL", "axolotl")  # cpo_alpha is 1 there
    weight = config.number("nll_weight", 1 if adds_nll else 0)
    if "nll_weight" not in config and not adds_nll:
        return
    if loss in ("dpo", "cpo", "simpo"):
        out.set("task.nll_weight", weight)
    elif weight:
        out.lack(config.said("nll_weight"), f"task.loss={loss} does not support an added cross entropy")


def set_memory(config: ForeignConfig, out: Converted) -> None:
    value = config.text("checkpointing").lower()
    is_on = config.flag("checkpointing") or config.flag("fsdp_checkpointing")
    if config.flag("offload_activations") or "offload" in value:
        out.set("trainer.activation_checkpoint", "offload")
    elif is_on and not config.flag("no_checkpointing"):
        out.set("trainer.activation_checkpoint", "full")
    if config.flag("compile") and config.text("compile").lower() != "no":
        out.set("trainer.compile", "auto" if config.text("compile") == "auto" else True)


# Evaluation, checkpoints, trackers ------------------------------------------------------------------------------------


def set_intervals(config: ForeignConfig, out: Converted, data: ForeignData, total: float | None) -> None:
    if "log_every" in config and config.number("log_every") >= 1:
        out.set("trainer.log_every", config.count("log_every"))
    epochs = config.number("epochs", 1)
    per_epoch = math.ceil(total / epochs) if total and epochs else None
    if config.title not in LAYOUTS:
        _evaluation(config, out, data, total, per_epoch)
    save, every = config.text("save_strategy"), config.number("save_every")
    if save == "no" or config.value("save_strategy") is False:
        out.set("checkpoint.every", 0)
    elif every >= 1:
        out.set("checkpoint.every", int(every))
    elif 0 < every < 1 and total:
        out.set("checkpoint.every", max(1, round(every * total)))
    elif save == "epoch" or "saves_per_epoch" in config or 0 < every < 1:
        times = config.number("saves_per_epoch", 1)
        said = config.said("saves_per_epoch", "save_every", "save_strategy")
        if per_epoch and times:
            out.set("checkpoint.every", max(1, math.ceil(per_epoch / times)))
        else:
            out.decide.append(
                f"{said}: checkpoint.every is set in steps, 100 in this recipe; add checkpoint.every=N, or convert "
                "with steps=N, the number of steps of the run"
            )
    if save == "best" or config.flag("keep_best"):
        out.set("checkpoint.keep_best", True)
    if "keep" in config:
        out.set("checkpoint.keep", config.count("keep"))
    metric = config.text("best_metric").removeprefix("eval_")
    if metric not in ("", "loss"):
        out.set("checkpoint.best_metric", metric)
    if config.flag("patience"):
        out.set("trainer.early_stopping_patience", config.count("patience"))


def _evaluation(
    config: ForeignConfig, out: Converted, data: ForeignData, total: float | None, per_epoch: int | None
) -> None:
    fraction = config.number("validation_fraction")
    split = config.text("validation_split") if out.overrides.get("data") == "hf" and not data.validation else ""
    strategy = config.text("eval_strategy").lower()
    is_off = strategy in ("no", "false") or (strategy == "" and config.title == "TRL" and "eval_every" not in config)
    if not is_off and (splits := [name for name in config.words("dataset_splits") if "test" in name or "val" in name]):
        split = splits[0] if out.overrides.get("data") == "hf" else ""
    if not is_off and fraction > 1:
        out.decide.append(
            f"{config.said('validation_fraction')} rows: use a fraction instead, such as data.validation_fraction=0.05"
        )
        fraction = 0.05
    if is_off or not (fraction or split or data.validation):
        out.set("data.validation_fraction", fraction if fraction < 1 else 0)  # held out there too
        out.set("trainer.eval_every", 0)
        return
    if split:
        out.set("data.validation_split", split)
    else:
        out.set("data.validation_fraction", fraction)
    every = config.number("eval_every")
    if every >= 1:
        out.set("trainer.eval_every", int(every))
    elif every > 0 and total:
        out.set("trainer.eval_every", max(1, round(every * total)))
    elif per_epoch:
        out.set("trainer.eval_every", max(1, math.ceil(per_epoch / (config.number("evals_per_epoch", 1) or 1))))
    else:
        out.set("trainer.eval_every", None)
        said = config.said("evals_per_epoch", "eval_every", "eval_strategy", "validation_fraction")
        out.explained.append(
            f"trainer.eval_every=null: evaluates every tenth of the run, because {said} is set in epochs; to keep the "
            "interval, convert with steps=N, the number of steps of the run"
        )


def set_tracking(config: ForeignConfig, out: Converted) -> None:
    wanted = {word.lower() for word in config.words("report_to")} | {
        config.text("tracker").rpartition(".")[2].lower().removesuffix("logger")
    }
    if config.title == "axolotl":
        wanted |= {"wandb"} if config.flag("project") or config.flag("wandb_mode") else set()
        wanted |= {"tensorboard"} if config.flag("tensorboard") else set()
        wanted |= {"mlflow"} if config.flag("mlflow") else set()
    if config.title == "DeepSpeed" and config.flag("tensorboard"):
        wanted.add("tensorboard")
    if "wandb" in wanted and config.text("wandb_mode") != "disabled":
        out.set("track.wandb", "offline" if config.text("wandb_mode") == "offline" else "online")
    if "tensorboard" in wanted:
        out.set("track.tensorboard", True)
    if "mlflow" in wanted:
        address = config.text("mlflow") or "sqlite:///runs/mlflow.db"
        if str(config.facts.get("mlflow", "")).find("***") >= 0:
            out.decide.append(
                "the address of MLflow contains a password; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
                "and add track.mlflow=ADDRESS"
            )
        else:
            out.set("track.mlflow", address)
    others = wanted - {"", "none", "disk", "stdout", "wandb", "tensorboard", "mlflow", "all"}
    if others:
        out.lack(config.said("report_to", "tracker"), "supported trackers are track=wandb, tensorboard and mlflow")
    if wanted & {"wandb", "mlflow"} and {"track.wandb", "track.mlflow"} & {*out.overrides}:
        if config.flag("project"):
            out.set("track.project", config.text("project"))
        if config.flag("entity"):
            out.set("track.entity", config.text("entity"))
    if config.flag("run_name"):
        out.set("run.name", re.sub(r"[\s/]+", "-", config.text("run_name")).strip("-"))
    if config.flag("output_dir"):
        out.set("run.dir", config.text("output_dir"))


def set_rest(config: ForeignConfig, out: Converted) -> None:
    if "seed" in config:
        out.set("trainer.seed", int(config.number("seed")))
    if config.flag("workers"):
        out.explained.append(
            f"{config.said('workers')}: data is read by 2 threads per process, and prepared on all cores by serried "
            "prepare"
        )
    if config.flag("deterministic"):
        out.set("trainer.deterministic", True)
    if config.flag("add_tokens"):
        out.set("data.add_tokens", config.words("add_tokens"))
    if config.flag("add_special_tokens"):
        out.set("data.add_special_tokens", config.words("add_special_tokens"))
    if config.flag("profile"):
        out.set("profile.steps", [10, 9 + config.count("profile")])
    reasons: dict[str, str] = {
        "neftune": "noise on embeddings is not supported",
        "group_by_length": "rows are not grouped by length; data.packing=best_fit avoids padding",
        "upload": "a run uploads nothing; upload the folder that serried export RUN out=FOLDER writes",
        "code": "code in a model folder is never run; use a built-in family, or model=hf",
        "restart": "the same command resumes; checkpoint.resume=never starts again",
    }
    for fact, reason in reasons.items():
        if config.flag(fact):
            out.lack(config.said(fact), reason)
    if config.flag("resume") and config.text("resume").lower() not in ("true", "auto"):
        out.lack(
            config.said("resume"),
            "the same command resumes a run; checkpoint.resume=FOLDER starts from the weights of a model folder",
        )
