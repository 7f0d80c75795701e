"""Any torch optimizer trains: registered by name, transactional, its state in checkpoints, groups by name pattern."""

import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import serried
from benchmarks.parity import CUTS, OPTIMIZER_CUTS, OPTIMIZERS, TOLERANCES, compare, run
from serried.configs.compose import FOLDER, compose, config_yaml
from serried.configs.errors import UserError
from serried.configs.help import help_text
from serried.configs.schema.registry import optimizers, register_schedule, schedules
from serried.configs.schema.run_config import check
from serried.configs.schema.sections import OptimSection
from serried.parallel.plan import LossTerms
from serried.runtime.session import open_session
from serried.trainer.optim.optimizer import build_optimizer, create_state, learning_rate, take_step, takes_verdict
from serried.trainer.optim.optimizer_state import (
    StateBytes,
    ensure_state,
    group_values,
    load_plain_state,
    plain_state,
    state_bytes,
    state_bytes_by_name,
    tensor_state,
)
from serried.trainer.optim.parameter_groups import freeze, parameter_groups
from serried.trainer.run import train
from testing.rank_pool import Cluster
from testing.runs import (
    ObservedRecipe,
    changes_by_step,
    different_tensors,
    losses,
    metrics,
    overrides,
    train_small,
    weights,
)

OWN_OPTIMIZER = '''
import serried
import torch


class Section(serried.Section):
    """A user's optimizer."""

    friction: float = 0.1
    """Share of the velocity lost per step."""


class Rolling(torch.optim.Optimizer):
    def step(self):
        for group in self.param_groups:
            group["updates"] = group.get("updates", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                state["count"] = state.get("count", 0) + 1
                velocity.mul_(1 - group["friction"]).add_(parameter.grad)
                with torch.no_grad():
                    parameter.sub_(velocity, alpha=group["lr"] / state["count"] ** 0.1)


@serried.register_optimizer("rolling", section=Section)
def build(groups, section):
    return Rolling(groups, {"lr": section.lr, "friction": section.friction})
'''
ACCUMULATION = 3
NAMES = ["adamw", "adamw_bf16", "adam", "sgd", "rmsprop", "adafactor", "lion", "muon", "adamw8bit"]


@pytest.fixture
def own_optimizer(tmp_path: Path) -> Path:
    """A file outside the checkout that registers an optimizer, without a YAML file."""
    file = tmp_path / "rolling.py"
    file.write_text(OWN_OPTIMIZER)
    return file


def with_own(file: str | Path) -> None:
    if "rolling" not in optimizers.names():
        runpy.run_path(str(file))


def changes_with_own(argv: list[str], fault: dict[str, Any], file: str) -> list[str]:
    with_own(file)
    return changes_by_step(argv, fault)


def train_with_own(argv: list[str], file: str) -> dict[str, Any]:
    with_own(file)
    return train_small(argv)


# the step -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optim", "layout"),
    [
        ("rolling", "fsdp"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("sgd", "fsdp"), ("rolling", "ddp"))),
    ],
)
def test_nan_on_one_rank_leaves_parameters_and_state_bit_unchanged_on_all(
    optim: str, layout: str, cluster: Cluster, text: Path, tmp_path: Path, own_optimizer: Path
) -> None:
    argv = overrides(
        text, tmp_path / "run", f"parallel={layout}", f"optim={optim}", "trainer.global_batch=12",
        "trainer.micro_batch=2", "trainer.steps=4", "health.replica_check_every=1",
    )  # fmt: skip
    forwards = [(step - 1) * ACCUMULATION + 2 for step in (1, 3)]  # the first step would create the state
    fault = {"rank": 1, "forwards": forwards, "value": math.nan}
    answers = cluster.run(
        2, "tests.ranks.optim.test_optimizers:changes_with_own", argv=argv, fault=fault, file=str(own_optimizer)
    )
    for answer in answers:
        assert [what == "nothing" for what in answer.value] == [True, False, True, False]


@pytest.mark.parametrize("optim", ["adamw", "adamw_bf16", "adamw8bit", "adamw4bit", "muon", "adafactor"])
def test_rejected_step_changes_no_bit_of_parameters_or_next_step(optim: str) -> None:
    def bits(verdicts: list[bool]) -> list[bytes]:
        torch.manual_seed(2)
        named = {"matrix": nn.Parameter(torch.randn(6, 32)), "norm": nn.Parameter(torch.ones(4))}
        named["matrix"].data[0, 0] = -0.0
        optimizer = build_optimizer(named.items(), compose([f"optim={optim}", "optim.lr=0.1"]).optim)
        assert takes_verdict(optimizer)
        for rejected in verdicts:
            for parameter in named.values():
                parameter.grad = torch.full_like(parameter, math.nan if rejected else 3.0)
            take_step(optimizer, torch.tensor(2.0), torch.tensor(float(rejected)))
        state = [value for each in named.values() for value in tensor_state(optimizer, each).values()]
        return [each.detach().view(-1).view(torch.uint8).numpy().tobytes() for each in (*named.values(), *state)]

    assert bits([True]) == bits([])
    assert bits([False, True, False]) == bits([False, False])
    assert bits([False]) != bits([])


def losses_by_hand(argv: list[str]) -> tuple[list[float], list[float]]:
    """Losses of a run on this process, and those of a loop in plain torch over the same batches."""
    batches: list[Any] = []
    first: dict[str, Tensor] = {}

    class Recorded(ObservedRecipe):
        def loss(self, model: nn.Module, batch: Any) -> LossTerms:
            if not first:
                first.update({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
            batches.append(batch)
            return super().loss(model, batch)

    config = compose(argv)
    recipe = Recorded(config, ragged=False, fault=None)
    with open_session(config.launch) as session:
        assert train(config, recipe, session, config_yaml(config)) == 0
    run = losses(config.run.dir)

    model = recipe.build_model().to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(first[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    by_hand = []
    for step in range(1, config.trainer.steps + 1):
        mine = batches[(step - 1) * ACCUMULATION : step * ACCUMULATION]
        terms = [ObservedRecipe.loss(recipe, model, batch) for batch in mine]
        loss = sum(term.loss_sum for term in terms) / sum(term.weight for term in terms)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.max_grad_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(step, config.trainer.steps, config.optim.lr, config.schedule)
        optimizer.step()
        optimizer.zero_grad()
        by_hand.append(loss.item())
    return run, by_hand


def test_losses_equal_a_plain_torch_loop(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    argv = overrides(
        text, tmp_path / "run", "parallel=single", "optim=sgd", "optim.lr=0.3", "trainer.steps=8",
        "trainer.global_batch=12", "trainer.micro_batch=4", "trainer.max_grad_norm=0.5",
    )  # fmt: skip
    (answer,) = cluster.run(1, "tests.ranks.optim.test_optimizers:losses_by_hand", argv=argv)
    run, by_hand = answer.value
    assert run == pytest.approx(by_hand, rel=1e-5)
    assert run[-1] < run[0] - 0.1


# state and checkpoints ------------------------------------------------------------------------------------------------


def test_own_optimizer_resumes_bitwise_with_its_tensors_and_numbers(
    cluster: Cluster, text: Path, tmp_path: Path, own_optimizer: Path
) -> None:
    def run(name: str, *more: str) -> Path:
        small = ["trainer.steps=6", "trainer.global_batch=4", "trainer.micro_batch=2", "optim=rolling", *more]
        argv = overrides(text, tmp_path / name, "parallel=fsdp", *small)
        cluster.run(2, "tests.ranks.optim.test_optimizers:train_with_own", argv=argv, file=str(own_optimizer))
        return tmp_path / name

    whole = run("whole")
    run("stopped", "trainer.stop_at=3")
    stopped = run("stopped")
    assert losses(stopped) == losses(whole)
    assert not different_tensors(stopped, whole)
    state = json.loads((stopped / "checkpoints" / "step-00000006" / "state.json").read_text())["step_state"][
        "optimizer"
    ]
    assert {values["count"] for values in state["parameters"].values()} == {6}
    assert state["groups"]["matrices"] == {"updates": 6}


@pytest.mark.parametrize("name", NAMES)
def test_state_that_was_saved_is_restored(name: str) -> None:
    section = check(compose([f"optim={name}"]).model_dump(mode="json")).optim

    def made() -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
        torch.manual_seed(1)
        named = {"matrix": nn.Parameter(torch.randn(4, 3)), "unused": nn.Parameter(torch.ones(2))}
        return named, build_optimizer(named.items(), section)

    def step(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
        named["matrix"].grad = torch.arange(12.0).view(4, 3) - 5
        optimizer.step()

    named, optimizer = made()
    configured = group_values(optimizer)
    step(named, optimizer)
    tensors = {
        (key, name): value.clone() for name in named for key, value in tensor_state(optimizer, named[name]).items()
    }
    plain = json.loads(json.dumps(plain_state(optimizer, named.items(), configured)))
    at_save = named["matrix"].detach().clone()
    step(named, optimizer)

    again, resumed = made()
    saved = {name for _, name in tensors}
    ensure_state(resumed, lambda parameter: any(again[name] is parameter for name in saved))
    with torch.no_grad():
        again["matrix"].copy_(at_save)
        for name, parameter in again.items():
            for key, value in tensor_state(resumed, parameter).items():
                value.copy_(tensors.pop((key, name)))
    assert not tensors
    load_plain_state(resumed, again.items(), configured, plain)
    step(again, resumed)
    assert again["matrix"].equal(named["matrix"])


def test_plain_state_is_loaded_into_both_copies_of_a_tied_parameter() -> None:
    copies = [("tied", nn.Parameter(torch.ones(2))), ("tied", nn.Parameter(torch.ones(2)))]
    optimizer = torch.optim.SGD([{"params": [each for _, each in copies], "name": "norms"}])
    saved = {"parameters": {"tied": {"count": 3}, "elsewhere": {"count": 4}}, "groups": {}}
    load_plain_state(optimizer, copies, group_values(optimizer), saved)
    assert [optimizer.state[each] for _, each in copies] == [{"count": 3}, {"count": 3}]


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_with_nothing_to_train_takes_steps_that_do_nothing(name: str) -> None:
    chosen = compose([f"optim={name}", "optim.groups.other.parameters=elsewhere"]).optim
    optimizer = build_optimizer([("here", nn.Parameter(torch.ones(2), requires_grad=False))], chosen)
    take_step(optimizer, torch.ones(()), torch.zeros(()))
    assert not optimizer.state


def test_planned_state_bytes_equal_optimizer_state() -> None:
    matrix = nn.Parameter(torch.zeros(4, 4))
    state = tensor_state(build_optimizer([("", matrix)], compose([]).optim), matrix)
    assert sum(each.nbytes for each in state.values() if each.ndim) == 8 * matrix.numel(), "which is not measured"
    expected = {"adamw": 8, "sgd": 4, "lion": 4, "adafactor": 0, "muon": 4}
    assert {name: state_bytes(compose([f"optim={name}"]).optim).per_element for name in expected} == expected
    assert state_bytes(compose(["optim=sgd", "optim.momentum=0"]).optim) == StateBytes(0)
    assert state_bytes(compose(["optim=muon"]).optim, is_in_block=False) == StateBytes(8)
    shapes = {"matrix": (10, 30), "experts": (2, 10, 30), "norm": (30,), "scale": ()}
    assert state_bytes_by_name(compose(["optim=adafactor"]).optim, shapes, ()) == {
        "matrix": StateBytes(0, 160), "experts": StateBytes(0, 320), "norm": StateBytes(4), "scale": StateBytes(0),
    }  # fmt: skip


def test_state_that_no_checkpoint_can_hold_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [parameter], "name": "norms"}])
    optimizer.state[parameter]["history"] = [torch.ones(2)]
    with pytest.raises(UserError, match="SGD keeps a list \\(history of bias\\)"):
        plain_state(optimizer, [("bias", parameter)], group_values(optimizer))
    optimizer.state["mean"] = torch.ones(3)  # type: ignore[index]
    with pytest.raises(UserError, match="SGD keeps state of 'mean', but checkpoints do not store it"):
        group_values(optimizer)
    del optimizer.state["mean"]  # type: ignore[arg-type]
    optimizer.param_groups[0]["count"] = torch.ones(())
    with pytest.raises(UserError, match="SGD keeps count of a parameter group, but checkpoints do not store it"):
        group_values(optimizer)


# parameter groups -----------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    return nn.ModuleDict({"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 3), "head": nn.Linear(3, 1, bias=False)})


def section(**groups: dict[str, Any]) -> OptimSection:
    return OptimSection.model_validate({"lr": 0.1, "weight_decay": 0.2, "groups": groups})


def groups_of(module: nn.Module, chosen: OptimSection) -> dict[str, tuple[int, float, float]]:
    found = parameter_groups(module.named_parameters(), chosen)
    return {group["name"]: (len(group["params"]), group["weight_decay"], group["lr_scale"]) for group in found}


def test_without_groups_only_matrices_have_weight_decay() -> None:
    assert groups_of(model(), section()) == {"matrices": (3, 0.2, 1.0), "norms": (2, 0.0, 1.0)}


def test_stacked_biases_of_experts_have_no_weight_decay() -> None:
    stacked = nn.ParameterDict({"up": torch.zeros(2, 3, 3), "up_bias": torch.zeros(2, 3)})
    assert groups_of(stacked, section()) == {"matrices": (1, 0.2, 1.0), "norms": (1, 0.0, 1.0)}


def test_groups_by_pattern_have_their_own_lr_and_weight_decay() -> None:
    chosen = section(slow={"parameters": "decoder.*", "lr_scale": 0.1}, head={"parameters": "head*", "weight_decay": 0})
    assert groups_of(model(), chosen) == {
        "matrices": (1, 0.2, 1.0),
        "norms": (1, 0.0, 1.0),
        "slow.matrices": (1, 0.2, 0.1),
        "slow.norms": (1, 0.0, 0.1),
        "head": (1, 0.0, 1.0),
    }


def test_frozen_group_is_not_trained_and_has_no_state() -> None:
    module, chosen = model(), section(still={"parameters": "encoder.*", "frozen": True})
    freeze(module, chosen)
    assert [name for name, each in module.named_parameters() if not each.requires_grad] == [
        "encoder.weight",
        "encoder.bias",
    ]
    optimizer = build_optimizer(module.named_parameters(), compose(["optim=lion"]).optim)
    create_state(optimizer)
    assert len(optimizer.state) == 3


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"slow": {"parameters": "decodr.weight"}}, "matches none of the 5 parameters; similar names: decoder.weight"),
        ({"slow": {"parameters": "*codr.weihgt"}}, r"e.g. 'optim.groups.slow.parameters=\*oder.weight'"),
        ({"slow": {"parameters": "12345.*"}}, r"e.g. 'optim.groups.slow.parameters=[\w.]*\w\.\*'"),
        ({"all": {"parameters": "*", "frozen": True}}, "optim.groups.all.frozen=true leaves no parameter to train"),
        (
            {"all": {"parameters": "decoder.*"}, "slow": {"parameters": "decoder.weight"}},
            "matches only parameters of earlier groups, .*; put optim.groups.slow before optim.groups",
        ),
    ],
)
def test_invalid_parameter_group_is_refused_in_one_line(groups: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        freeze(model(), section(**groups))


@pytest.mark.slow
def test_groups_have_the_same_curve_on_every_layout(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    groups = [
        "optim.groups.embedding.parameters='embed*'", "optim.groups.embedding.frozen=true",
        "optim.groups.attention.parameters='*attn*'", "optim.groups.attention.lr_scale=0.1", "trainer.steps=4",
        "trainer.micro_batch=9",
    ]  # fmt: skip
    for processes, layout in ((1, "single"), (2, "fsdp")):
        argv = overrides(text, tmp_path / layout, f"parallel={layout}", *groups)
        cluster.run(processes, "testing.runs:train_small", argv=argv)
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)
    last = metrics(tmp_path / "fsdp")[1]
    assert last["lr_by_group"] == {
        "matrices": last["lr"], "norms": last["lr"], "attention": pytest.approx(last["lr"] * 0.1),
    }  # fmt: skip
    names = [name for name in weights(tmp_path / "fsdp", "optimizer") if "embed" in name]
    assert names == []


BOUNDS = {"adamw8bit": 1e-3, "adamw4bit": 1e-3, "adamw_bf16": 5e-3}


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adafactor", "lion", "rmsprop", "adamw8bit", "adamw4bit", "adamw_bf16"])
def test_optimizer_loss_curve_equals_single_process(optim: str, cluster: Cluster, text: Path, tmp_path: Path) -> None:
    chosen = (f"optim={optim}", *OPTIMIZERS[optim])
    cut = next(each for each in OPTIMIZER_CUTS if each.name == "tensor x2 x fsdp x2")
    reference = run(cluster, CUTS[0], 1, "fp32", text, tmp_path / "single", *chosen, steps=5)
    curve = run(cluster, cut, cut.accumulations[-1], "fp32", text, tmp_path / "run", *chosen, steps=5)
    difference = compare(curve, reference)
    assert difference.same_samples
    assert max(difference.loss, difference.grad_norm) < BOUNDS.get(optim, TOLERANCES["fp32"])
    assert curve.losses[-1] < 0.98 * curve.losses[0], "a run that learns nothing would agree with anything"


# the registry ---------------------------------------------------------------------------------------------------------


def test_registered_optimizer_is_chosen_by_name_with_its_own_keys(own_optimizer: Path) -> None:
    with_own(own_optimizer)
    chosen: Any = compose(["optim=rolling", "optim.friction=0.3", "optim.lr=0.5"]).optim
    assert (chosen.name, chosen.friction, chosen.lr) == ("rolling", 0.3, 0.5)
    with pytest.raises(
        UserError, match=r"optim.friction=0.3 .* is a key of optim=rolling, but the run uses optim=adamw"
    ):
        compose(["optim.friction=0.3"])
    with pytest.raises(UserError, match="optimizer rolling is registered twice"):
        serried.register_optimizer("rolling")(print)


def test_function_that_returns_no_optimizer_is_refused_in_one_line() -> None:
    if "forgotten" not in optimizers.names():
        serried.register_optimizer("forgotten")(lambda *_: None)
    chosen = compose(["optim=forgotten", "optim.lr=1"]).optim
    with pytest.raises(UserError, match=r"optim=forgotten builds None, not a torch.optim.Optimizer; return one from"):
        build_optimizer([("weight", nn.Parameter(torch.ones(2, 2)))], chosen)


def test_registered_schedule_is_a_function_of_the_step_after_the_warm_up() -> None:
    class Root(serried.Section):
        """A user's schedule."""

        power: float = 0.5
        """The learning rate falls as step to minus this power."""

    if "falling" not in schedules.names():
        register = register_schedule("falling", section=Root)
        register(lambda step, _, peak, own: peak * (own.warmup_steps / step) ** own.power)
    chosen = compose(["schedule=falling", "schedule.power=1", "schedule.warmup_steps=4"]).schedule
    assert [learning_rate(step, 100, 2.0, chosen) for step in (2, 4, 8)] == [1.0, 2.0, 1.0]


def test_documented_optimizer_and_schedule_run() -> None:
    page = (FOLDER.parent / "docs/how-to/extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name, registry in (("my_lion", optimizers), ("polar", optimizers), ("root", schedules)):
        (code,) = (each for each in blocks if f'("{name}"' in each)
        if name not in registry.names():
            exec(code, {"__name__": "documented"})
    for typed in ("beta1", "be_ta"):
        with pytest.raises(UserError, match=r"did you mean optim.beta=0.95( or task.beta=0.95)?\?$"):
            compose(["optim=my_lion", f"optim.{typed}=0.95"])
    assert "keys of optim=my_lion\n  optim.beta" in help_text(chosen=["optim=my_lion"])
    chosen = compose(["optim=my_lion", "optim.beta=0.5", "optim.lr=0.1"]).optim
    parameter = nn.Parameter(torch.ones(2, 2))
    own = build_optimizer([("weight", parameter)], chosen)
    parameter.grad = torch.ones(2, 2)
    own.step()
    assert parameter.allclose(torch.full((2, 2), 1 - 0.1 * 0.1 - 0.1))
    matrix = nn.Parameter(torch.zeros(2, 2))
    own = build_optimizer([("weight", matrix)], compose(["optim=polar", "optim.lr=0.1"]).optim)
    matrix.grad = torch.diag(torch.tensor([3.0, -0.5]))
    own.step()
    assert matrix.allclose(torch.diag(torch.tensor([-0.1, 0.1])), atol=1e-6)
    rate = learning_rate(40, 100, 2.0, compose(["schedule=root", "schedule.warmup_steps=10"]).schedule)
    assert rate == pytest.approx(1.0)


def test_fused_sgd_does_not_accept_found_inf() -> None:
    """A rejected first step would leave its momentum uninitialised."""
    weight = torch.nn.Parameter(torch.ones(2))
    assert takes_verdict(torch.optim.AdamW([weight], fused=True))
    assert not takes_verdict(torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True))
