"""LoRA of routed experts: trained and saved as PEFT does it, on every layout; and LoRA of the families of experts."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import serried
from serried.commands import export_models
from serried.configs.errors import UserError
from serried.configs.hugging_face.adapter_folder import adapter_config
from serried.configs.schema.sections import AdapterSection
from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.plan import ParallelPlan
from serried.program import main
from serried.recipes.text.causal_lm import CausalLM
from serried.records.safetensors_files import TensorFolder
from serried.trainer.adapters import Adapters
from serried.trainer.checkpoint.merge_tensors import Built, Merged
from testing import runs
from testing.rank_pool import Cluster
from tests.ranks.models.test_families import saved
from tests.runs.fine_tuning.test_lora import (
    TOKENS,
    adapters_in,
    assert_close,
    lora,
    losses,
    meta_model,
    steps_of_peft,
    train_watched,
)
from tests.runs.fine_tuning.test_sft import write_chats
from tests.runs.fine_tuning.test_start_from_adapters import continued, loss_of_peft, write_adapters

SHARED = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of conversations; tests add models."""
    folder = tmp_path_factory.mktemp("models")
    write_chats(folder / "chats.jsonl", 60)
    return folder


def model_of(models: Path, name: str) -> Path:
    """A small random model of transformers."""
    if not (folder := models / name.replace(", ", "-")).exists():
        layers = {"gemma4_text": 4, "qwen3_next": 3, "qwen3_5_text": 3, "qwen3_5_moe_text": 3}.get(name, 2)
        saved(name, folder, vocab_size=257, max_position_embeddings=256, num_hidden_layers=layers)
    return folder


def opened(model: Path, adapters: Path | None = None) -> Any:
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return base if adapters is None else peft.PeftModel.from_pretrained(base, adapters)


def assert_as_by_peft(
    model: Path, run_dir: Path, batches: list[Any], first: dict[str, Tensor], options: dict[str, Any]
) -> None:
    """Train with PEFT from the same values and batches; compare losses and logits, those of saved and merged adapters
    too."""
    import peft

    theirs = peft.get_peft_model(opened(model), peft.LoraConfig(r=4, lora_alpha=8, **options))
    ours = runs.losses(run_dir)
    assert ours == pytest.approx(steps_of_peft(theirs, first, batches), abs=1e-5)
    assert ours[-1] < ours[0] - 0.01
    assert set(runs.weights(run_dir, "adapter_model")) == set(peft.get_peft_model_state_dict(theirs))
    with torch.no_grad():
        want = serried.load_model(run_dir)(TOKENS)
        # AdamW divides gradients by their size, so that rounding shows where they are near zero.
        torch.testing.assert_close(theirs.eval()(TOKENS).logits, want, atol=1e-3, rtol=0)
        assert_close(opened(model, runs.checkpoint(run_dir))(TOKENS).logits, want)
        merged = run_dir.with_name("merged")
        assert export_models.export([f"run.dir={run_dir}", f"out={merged}", "merge=true"]) == 0
        assert_close(opened(merged)(TOKENS).logits, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules", "options"),
    [
        (
            "gpt_oss",
            "gate_up_proj,down_proj",
            {"target_modules": [], "target_parameters": SHARED},
        ),
        (
            "gemma4_text, experts",
            "gate_up_proj,experts.down_proj,*.mlp.gate_proj",
            {"target_modules": ["gate_proj"], "target_parameters": SHARED},
        ),
        (
            "mixtral",
            "q_proj,*.1.mlp.experts.down_proj",
            {"target_modules": ["q_proj"], "target_parameters": ["1.mlp.experts.down_proj"]},
        ),
        (
            "qwen3_5_moe_text",
            "gate_up_proj,*.experts.down_proj,*.shared_expert.up_proj",
            {"target_modules": [], "target_parameters": [*SHARED, "shared_expert.up_proj.weight"]},
        ),
    ],
)
def test_losses_and_saved_adapters_of_experts_equal_those_of_peft(
    models: Path, tmp_path: Path, name: str, modules: str, options: dict[str, Any]
) -> None:
    model, run_dir = model_of(models, name), tmp_path / "run"
    argv = lora(models, run_dir, "trainer.micro_batch=4", f"adapter.modules=[{modules}]", model=model.name)
    assert_as_by_peft(model, run_dir, *train_watched(argv), options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("mixtral", "q_proj,w1,w2,w3"),
        ("deepseek_v3", "gate_proj,up_proj,down_proj"),
    ],
)
def test_adapters_of_each_expert_open_in_peft_with_equal_logits_and_merge(
    models: Path, tmp_path: Path, name: str, modules: str
) -> None:
    model, run_dir = model_of(models, name), tmp_path / "run"
    assert runs.run_here(lora(models, run_dir, f"adapter.modules=[{modules}]", model=model.name)).code == 0
    with torch.no_grad():
        want = serried.load_model(run_dir)(TOKENS)
        assert (want - opened(model)(TOKENS).logits).abs().max() > 0.1
        assert_close(opened(model, runs.checkpoint(run_dir))(TOKENS).logits, want)
        assert export_models.export([f"run.dir={run_dir}", f"out={tmp_path / 'merged'}", "merge=true"]) == 0
        assert_close(opened(tmp_path / "merged")(TOKENS).logits, want)
    again = continued(models, tmp_path / "again", run_dir, "optim.lr=0", "trainer.steps=1")
    assert runs.run_here(again).code == 0
    before = adapters_in(runs.checkpoint(run_dir))
    assert len(before) > 4 * 3 * 2
    assert all(adapters_in(runs.checkpoint(tmp_path / "again"))[key].equal(value) for key, value in before.items())


EXPERTS = "adapter.modules=[gate_up_proj,*.experts.down_proj,*.shared_experts.*,*.self_attn.*]"
LAYOUTS = {
    "expert": (2, ["parallel=fsdp", "parallel.expert=2"]),
    "expert and shards of experts": (4, ["parallel=fsdp", "parallel.expert=2", "trainer.micro_batch=1"]),
    "ddp": (2, ["parallel=ddp"]),
    "fsdp": (2, ["parallel=fsdp"]),
    "tensor": (2, ["parallel=fsdp", "parallel.tensor=2"]),
    "tensor and expert": (2, ["parallel=fsdp", "parallel.tensor=2", "parallel.expert=2"]),
    "context": (2, ["parallel=fsdp", "parallel.context=2"]),
    "pipeline": (2, ["parallel=fsdp", "parallel.pipeline=2", "trainer.micro_batch=1"]),
}


class Single(NamedTuple):
    """A run of one process."""

    run_dir: Path
    batches: list[Any]
    first: dict[str, Tensor]
    """Initial values of A."""


@pytest.fixture(scope="module")
def single(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Single:
    model_of(models, "deepseek_v3")
    run_dir = tmp_path_factory.mktemp("single") / "run"
    return Single(run_dir, *train_watched(lora(models, run_dir, EXPERTS, "trainer.micro_batch=4", model="deepseek_v3")))


def test_shared_and_routed_experts_train_and_open_as_in_peft(models: Path, single: Single) -> None:
    names = [f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
    attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    options = {"target_modules": attention, "target_parameters": [*SHARED, *names]}
    assert_as_by_peft(models / "deepseek_v3", *single, options)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name != "expert")) for name in LAYOUTS]
)
def test_losses_and_adapters_of_experts_are_the_same_on_every_layout(
    cluster: Cluster, models: Path, tmp_path: Path, single: Single, layout: str
) -> None:
    ranks, words = LAYOUTS[layout]
    argv = lora(models, tmp_path / "run", EXPERTS, *words, model="deepseek_v3")
    assert losses(cluster, ranks, argv, tmp_path / "run") == pytest.approx(runs.losses(single.run_dir), abs=1e-5)
    found = runs.weights(tmp_path / "run", "adapter_model")
    for name, tensor in runs.weights(single.run_dir, "adapter_model").items():
        torch.testing.assert_close(found[name], tensor, atol=1e-3, rtol=0)


def test_experts_that_are_modules_of_a_users_model_are_linear_layers(tmp_path: Path) -> None:
    """They are adapted one by one, so that some may have other ranks and alphas."""
    experts = [nn.ModuleDict({name: nn.Linear(8, 8) for name in ("inner", "w1")}) for _ in range(2)]
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.ModuleList(experts)})})
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def exported(name: str, shape: Any) -> Any:
        return (Fragment.whole(name, shape),)

    section = AdapterSection(
        method="lora", rank=4, alpha=4, modules=["inner", "w1"], rank_pattern={"experts.0.inner": 2},
        alpha_pattern={"experts.1.inner": 12},
    )  # fmt: skip
    adapters = Adapters(section, model, ParallelPlan(), exported)
    adapters.write_config(tmp_path, None, {})
    tensors = {
        part.name: torch.randn(value.shape)
        for name, value in model.named_parameters()
        for part in adapters.exported(name, value.shape)
    }
    assert len(tensors) == 2 * 2 * 2
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    folder = TensorFolder(tmp_path, "adapter_model")
    adapters.check_folder(tmp_path)
    merged = Merged(Built(model, exported), folder, adapter_config(tmp_path))
    for layer, scale in (("0.inner", 4 / 2), ("1.inner", 12 / 4), ("0.w1", 1), ("1.w1", 1)):
        a, b = (tensors[f"base_model.model.mlp.experts.{layer}.lora_{key}.weight"] for key in "AB")
        weight = f"mlp.experts.{layer}.weight"
        torch.testing.assert_close(merged.read_elements(weight, 0, 64).view(8, 8), before[weight] + scale * b @ a)
    del tensors["base_model.model.mlp.experts.1.w1.lora_B.weight"]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"lacks a matrix A or B of mlp\.experts\.1\.w1; copy the files"):
        Merged(Built(model, exported), TensorFolder(tmp_path, "adapter_model"), adapter_config(tmp_path))


MADE_BY_PEFT: dict[str, dict[str, Any]] = {
    "stacked": {
        "target_modules": ["q_proj"],
        "target_parameters": SHARED,
        "rank_pattern": {"experts.gate_up_proj": 3},
        "use_rslora": True,
    },
    "one stack": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
    "by the names of single experts": {"target_modules": ["k_proj", "gate_proj", "up_proj", "down_proj"]},
}


@pytest.mark.parametrize(
    ("kind", "merge"),
    [
        ("stacked", False),
        *(
            pytest.param(kind, False, marks=pytest.mark.slow)
            for kind in ("one stack", "by the names of single experts")
        ),
        pytest.param("stacked", True, marks=pytest.mark.slow),
    ],
)
def test_run_starts_from_adapters_of_experts_that_peft_made(
    models: Path, tmp_path: Path, kind: str, merge: bool
) -> None:
    model = model_of(models, "qwen3_moe")
    adapters = write_adapters(tmp_path / "adapters", model, MADE_BY_PEFT[kind])
    more = ["adapter.merge=true", "adapter.rank=4", "adapter=lora"] if merge else []
    with runs.kept_batches(CausalLM) as batches:
        ended = runs.run_here(continued(models, tmp_path / "run", adapters, "optim.lr=0", "trainer.steps=1", *more))
    assert ended.code == 0, ended.printed
    assert runs.losses(tmp_path / "run") == pytest.approx([loss_of_peft(model, adapters, batches)], abs=1e-5)
    if not merge:
        found = adapters_in(runs.checkpoint(tmp_path / "run"))
        assert all(found[name].equal(tensor) for name, tensor in adapters_in(adapters).items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["adapter.modules=[gate_proj]"],
            r"leaves out .*experts\.\*\.up_proj: PEFT opens .* only if gate, up and down",
        ),
        (["adapter.modules=[*.experts.2.*]"], "matches only some of the experts of .*experts.*; use 'adapter.modules="),
        (["adapter.modules=[gate_up_proj]", "adapter.dropout=0.1"], "adapter.dropout=0.1: .*; use adapter.dropout=0$"),
        (["adapter.modules=[gate_up_proj]", "adapter=dora"], "adapter.method=dora: PEFT has no DoRA for adapters of"),
        (
            ["adapter.modules=[gate_proj,up_proj,down_proj]", "adapter.scale=rslora"],
            "only with adapter.rank, adapter.alpha and adapter.scale=standard; use the names of stacked experts",
        ),
    ],
)
def test_adapters_of_experts_that_peft_cannot_open_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        meta_model("model=moe_tiny", *words)


def test_plan_counts_the_adapters_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=lora", "model=moe_tiny", "data.tokenizer=bytes", "launch=torchrun", "launch.device=cpu"]
    words += ["launch.processes=2", "parallel=fsdp", "parallel.expert=2", "dry_run=true"]
    assert main([*words, "adapter.modules=[experts.gate_up_proj,experts.down_proj]"]) == 0
    plan = capsys.readouterr().out
    trained = 3 * 8 * 16 * (128 + 2 * 128 + 128 + 128)  # A and B of both stacks
    assert f"of which {trained:,} " in plan
    assert "lora of rank 16, alpha 32, in 6 stacks of experts" in plan
    assert f"gradients {trained * 4 / 2**10:.1f}KiB (unsharded while accumulating; {trained * 2 / 2**10:.1f}KiB" in plan
    assert f"optimizer state {trained * 8 / 2 / 2**10:.1f}KiB" in plan


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt_oss", "deepseek_v3", "gemma4_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
)
def test_lora_of_default_layers_opens_in_peft(models: Path, tmp_path: Path, name: str) -> None:
    model, run_dir = model_of(models, name), tmp_path / "run"
    assert runs.run_here(lora(models, run_dir, "trainer.steps=2", model=model.name)).code == 0
    with torch.no_grad():
        want = serried.load_model(run_dir)(TOKENS)
        assert (want - opened(model)(TOKENS).logits).abs().max() > 0.02
        assert_close(opened(model, runs.checkpoint(run_dir))(TOKENS).logits, want)
