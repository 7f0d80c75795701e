"""Adapters: trained as PEFT trains them, on any layout, saved alone, opened by PEFT, and merged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import serried
from serried.commands import evaluate_model, export_models
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.hugging_face.adapter_folder import described_adapters
from serried.configs.schema.sections import AdapterSection
from serried.parallel.axes.tensor import check_roles
from serried.parallel.initialize import normal_rows
from serried.parallel.layout.local_shards import HeldTensor
from serried.parallel.layout.mesh import Layout
from serried.parallel.lora import A, B, initialize_orthogonal
from serried.parallel.nf4 import _LEVELS, inputs_of_shard, pack, unpack
from serried.parallel.plan import ParallelPlan
from serried.program import main
from serried.recipes.data.samples.token_dataset import Batch
from serried.recipes.text.causal_lm import CausalLM
from serried.saved import config_of_model
from serried.trainer.adapters import Adapters
from serried.trainer.evaluation.evaluate import load_model
from serried.trainer.model import build_model
from serried.trainer.task import task_for_run
from serried.trainer.trainer import Trainer
from testing import runs
from testing.rank_pool import Cluster
from tests.runs.fine_tuning.test_sft import write_chats
from tests.support.own_task import Points

TOKENS = torch.randint(257, (2, 30), generator=torch.Generator().manual_seed(5))
SIZES = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
DORA = ["adapter=dora", "adapter.scale=rslora", "adapter.rank=4", "adapter.alpha=8"]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders as transformers writes them."""
    import transformers

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).save_pretrained(folder / "llama")
    phi3 = transformers.Phi3Config(**SIZES, **HEADS, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    transformers.Phi3ForCausalLM(phi3).save_pretrained(folder / "phi3")
    gpt2 = transformers.GPT2Config(vocab_size=257, n_positions=256, n_embd=32, n_layer=2, n_head=4)
    for dropout in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(gpt2, dropout, 0.0)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
    write_chats(folder / "chats.jsonl", 60)
    return folder


def lora(models: Path, run_dir: Path, *more: str, model: str = "llama") -> list[str]:
    given = [
        "recipe=lora", f"model.path={models / model}", f"data.path={models / 'chats.jsonl'}", "data.tokenizer=bytes",
        f"data.cache_dir={models / 'cache'}", f"run.dir={run_dir}", "precision=fp32", "data.sequence_length=128",
        "data.isolate_documents=false", "trainer.steps=4", "trainer.global_batch=4", "trainer.micro_batch=2",
        "trainer.eval_every=0", "trainer.log_every=1", "data.workers=0", "optim.lr=0.01", "schedule=constant",
        "schedule.warmup_steps=0", "adapter.rank=4", "adapter.alpha=8", *more,
    ]  # fmt: skip
    return [f"{key}={value}" for key, value in dict(word.split("=", 1) for word in given).items()]


def train_watched(argv: list[str]) -> tuple[list[Batch], dict[str, Tensor]]:
    """Train; return the batches, and the first values of A, which the first step leaves as they are: B is zero."""
    first: dict[str, Tensor] = {}

    def watch(trainer: Trainer, step: int) -> None:
        if step == 1:
            for name, part in trainer.state.parts():
                where = part.fragments[0]
                if name == "adapter_model" and "lora_A" in where.name:
                    first[where.name] = part.local.detach().clone().view(where.stored_shape)

    with runs.kept_batches(CausalLM) as batches:
        assert runs.run_here(argv, watch).code == 0
    return batches, first


def steps_of_peft(model: Any, first: dict[str, Tensor], batches: list[Batch]) -> list[float]:
    """Train a PEFT model from the values ``first`` of A, with a batch per step; return the losses."""
    import peft

    assert not peft.set_peft_model_state_dict(model, first).unexpected_keys
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    found = []
    for batch in batches:
        logits = model(input_ids=batch.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())  # -100 is ignored
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return found


@pytest.mark.parametrize(
    ("model", "more", "options"),
    [
        ("llama", [], {"target_modules": "all-linear"}),
        (
            "llama",
            [*DORA, "adapter.modules=[q_proj,*.1.mlp.down_proj]"],
            {"target_modules": r".*(q_proj|1\.mlp\.down_proj)", "use_dora": True, "use_rslora": True},
        ),
        pytest.param("phi3", [], {"target_modules": "all-linear"}, marks=pytest.mark.slow),
        pytest.param(
            "gpt2",
            [],
            {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lora", "dora, rslora, some layers", "phi3", "gpt2"],
)  # fmt: skip
def test_losses_of_ten_steps_and_saved_adapters_equal_those_of_peft(
    models: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    model: str,
    more: list[str],
    options: dict[str, Any],
) -> None:
    import peft
    import transformers

    argv = lora(models, tmp_path / "run", "trainer.steps=10", "trainer.micro_batch=4", *more, model=model)
    batches, first = train_watched(argv)
    ours = runs.losses(tmp_path / "run")

    def base() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(models / model, dtype=torch.float32)

    theirs = peft.get_peft_model(base(), peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))
    losses = steps_of_peft(theirs, first, batches)
    assert len(ours) == len(losses) == 10
    assert ours == pytest.approx(losses, abs=1e-5)
    assert ours[-1] < ours[0] - 0.03

    saved = runs.checkpoint(tmp_path / "run")
    names = set(peft.get_peft_model_state_dict(theirs))
    assert set(runs.weights(tmp_path / "run", "adapter_model")) == names
    export_models.export([f"run.dir={tmp_path / 'run'}", f"out={tmp_path / 'adapters'}"])
    export_models.export([f"run.dir={tmp_path / 'run'}", f"out={tmp_path / 'merged'}", "merge=true"])
    with torch.no_grad():
        want = theirs.eval()(TOKENS).logits
        for folder in (saved, tmp_path / "adapters"):
            assert_close(peft.PeftModel.from_pretrained(base(), folder)(TOKENS).logits, want)
        assert not list(saved.glob("model*"))
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        assert_close(merged(TOKENS).logits, want)
        assert_close(serried.load_model(tmp_path / "run")(TOKENS), want)
    evaluated = [evaluate_here(folder, models, capfd) for folder in (tmp_path / "run", tmp_path / "adapters")]
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-6)


def evaluate_here(folder: Path, models: Path, capfd: pytest.CaptureFixture[str]) -> float:
    """The loss of a saved model."""
    capfd.readouterr()
    words = [f"data.path={models / 'chats.jsonl'}", "data.packing=best_fit", f"data.cache_dir={models / 'cache'}"]
    own = [] if folder.name == "run" else ["data.sequence_length=128"]
    how = ["launch.device=cpu", "json=true", "precision=fp32"]
    assert evaluate_model.evaluate([f"run.dir={folder}", "data=text", *words, *own, *how]) == 0
    return float(json.loads(capfd.readouterr().out.splitlines()[-1])["loss"])


def assert_close(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found, want, atol=2e-5, rtol=0)


def losses(cluster: Cluster, ranks: int, argv: list[str], run_dir: Path, code: int = 0) -> list[float]:
    answers = cluster.run(ranks, "testing.runs:train_reported", argv=argv)
    assert {answer.value for answer in answers} == {code}, answers[0].printed
    return runs.losses(run_dir)


LAYOUTS = {
    "ddp": ["parallel=ddp"],
    "uneven": ["parallel=ddp", "parallel.uneven=true", "trainer.micro_batch=1"],
    "tensor": ["parallel=fsdp", "parallel.tensor=2"],
    "pipeline": ["parallel=fsdp", "parallel.pipeline=2", "trainer.micro_batch=1"],
}


@pytest.fixture(scope="module")
def single(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    run_dir = tmp_path_factory.mktemp("single") / "run"
    ended = runs.run_here(lora(models, run_dir, "trainer.deterministic=true"))
    assert ended.code == 0, ended.printed
    assert "14 layers" in ended.printed
    return run_dir, runs.losses(run_dir)


@pytest.mark.parametrize(
    "layout", ["tensor", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "uneven", "pipeline"))]
)
def test_losses_of_two_ranks_equal_those_of_one(
    cluster: Cluster, models: Path, tmp_path: Path, single: tuple[Path, list[float]], layout: str
) -> None:
    ranks = 3 if layout == "uneven" else 2
    found = losses(cluster, ranks, lora(models, tmp_path / "run", *LAYOUTS[layout]), tmp_path / "run")
    assert found == pytest.approx(single[1], abs=1e-5)


def test_orthogonal_initial_values_are_those_of_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    layer = peft.tuners.lora.Linear(nn.Linear(10, 6), "default", peft.LoraConfig(init_lora_weights=False), r=4)
    found, drawn = {}, []
    for key, shape in ((A, (4, 10)), (B, (6, 4))):
        held = HeldTensor.whole(f"layer.{key}", torch.empty(shape))
        initialize_orthogonal(held, key, "layer.weight", 5)
        found[key] = held.tensor
    draws = {"layer.weight.orthogonal": (4, 4), "layer.lora_A": (10, 2), "layer.lora_B": (2, 6)}
    for name, shape in draws.items():
        drawn.append(normal_rows(5, name, shape, 0, shape[0]))
    monkeypatch.setattr(torch, "randn", lambda *shape: next(each for each in drawn if each.shape == shape))
    layer.orthogonal_init("default")
    torch.testing.assert_close(found[A], layer.lora_A["default"].weight.data)
    torch.testing.assert_close(found[B], layer.lora_B["default"].weight.data)
    assert (found[B] @ found[A]).abs().max() < 1e-6 < found[B].abs().max()


@pytest.mark.slow
def test_run_with_orthogonal_initial_values_starts_from_the_base_model_on_tensor_ranks_too(
    cluster: Cluster, models: Path, tmp_path: Path, single: tuple[Path, list[float]]
) -> None:
    argv = lora(models, tmp_path / "one", "adapter.init=orthogonal", "trainer.steps=2")
    assert runs.run_here(argv).code == 0
    more = ["adapter.init=orthogonal", "trainer.steps=2", "parallel=fsdp", "parallel.tensor=2"]
    found = losses(cluster, 2, lora(models, tmp_path / "two", *more), tmp_path / "two")
    assert found == pytest.approx(runs.losses(tmp_path / "one"), abs=1e-5)
    assert found[0] == pytest.approx(single[1][0], abs=1e-5)
    assert abs(found[1] - single[1][1]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_dora_on_tensor_ranks_equals_that_of_one(cluster: Cluster, models: Path, tmp_path: Path, model: str) -> None:
    """Row norms of weights whose inputs are divided are summed over ranks."""
    argv = lora(models, tmp_path / "one", *DORA, model=model)
    assert runs.run_here(argv).code == 0
    for sequence in (True, False):
        run_dir = tmp_path / f"sequence-{sequence}"
        more = ["parallel=fsdp", "parallel.tensor=2", f"parallel.sequence={sequence}"]
        found = losses(cluster, 2, lora(models, run_dir, *DORA, *more, model=model), run_dir)
        assert found == pytest.approx(runs.losses(tmp_path / "one"), abs=1e-5)
        saved = runs.weights(run_dir, "adapter_model")
        for name, tensor in runs.weights(tmp_path / "one", "adapter_model").items():
            torch.testing.assert_close(saved[name], tensor, atol=1e-3, rtol=0)


def test_stopped_run_resumes_on_other_ranks_and_bitwise_on_the_same(
    cluster: Cluster, models: Path, tmp_path: Path, single: tuple[Path, list[float]]
) -> None:
    """The base model has moved meanwhile."""
    shutil.copytree(models / "llama", tmp_path / "base")

    def argv(name: str, base: str, *more: str) -> list[str]:
        return lora(models, tmp_path / name, f"model.path={tmp_path / base}", *more)

    losses(cluster, 2, argv("run", "base", "parallel=fsdp", "trainer.stop_at=2"), tmp_path / "run", 75)
    one = ["trainer.deterministic=true"]
    assert runs.run_here(argv("same", "base", *one, "trainer.stop_at=2")).code == 75
    (tmp_path / "base").rename(tmp_path / "moved")
    ended = runs.run_here(argv("run", "base"))
    assert ended.code == 78
    assert (
        "does not exist; if the folder was moved, use train.py ... model.path=FOLDER" in ended.printed.splitlines()[-1]
    )
    assert losses(cluster, 1, argv("run", "moved"), tmp_path / "run") == pytest.approx(single[1], abs=1e-5)
    assert runs.run_here(argv("same", "moved", *one)).code == 0
    assert not runs.different_tensors(single[0], tmp_path / "same", "adapter_model", "optimizer")


def test_another_base_model_is_refused(models: Path, tmp_path: Path) -> None:
    import transformers

    assert runs.run_here(lora(models, tmp_path / "run", "trainer.stop_at=1")).code == 75
    torch.manual_seed(4)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).save_pretrained(tmp_path / "other")
    ended = runs.run_here(lora(models, tmp_path / "run", f"model.path={tmp_path / 'other'}"))
    assert ended.code == 78
    assert "is not the base model of" in ended.printed.splitlines()[-1]
    assert "model.safetensors has different content" in ended.printed.splitlines()[-1]


@pytest.fixture(scope="module")
def exported(single: tuple[Path, list[float]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapters of a run, in PEFT's format."""
    folder = tmp_path_factory.mktemp("exported") / "adapters"
    assert export_models.export([f"run.dir={single[0]}", f"out={folder}"]) == 0
    return folder


def adapters_in(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_that_starts_from_adapters_continues_with_them(
    cluster: Cluster, models: Path, exported: Path, tmp_path: Path, ranks: int
) -> None:
    import peft
    import transformers

    more = [
        f"checkpoint.resume={exported}",
        "trainer.steps=1",
        "optim.lr=0",
        f"parallel={('single', 'fsdp')[ranks - 1]}",
    ]
    argv = lora(models, tmp_path / "run", *more)
    if ranks == 1:
        with runs.kept_batches(CausalLM) as batches:
            ended = runs.run_here(argv)
        assert ended.code == 0, ended.printed
        assert f"step 0 with the weights of {models / 'llama'} and the adapters of {exported}" in ended.printed
        base = transformers.AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float32)
        theirs = peft.PeftModel.from_pretrained(base, exported)
        total, count = 0.0, 0
        for batch in batches:
            with torch.no_grad():
                logits = theirs(input_ids=batch.tokens).logits.flatten(0, 1)
            total += F.cross_entropy(logits, batch.targets.flatten(), reduction="sum").item()
            count += int((batch.targets != -100).sum())
        assert runs.losses(tmp_path / "run") == pytest.approx([total / count], abs=1e-5)
    else:
        losses(cluster, ranks, argv, tmp_path / "run")
    saved = adapters_in(runs.checkpoint(tmp_path / "run"))
    for name, tensor in adapters_in(exported).items():
        assert saved[name].equal(tensor), name


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["adapter.alpha=16"], "has adapter.alpha=8.0, so its weights do not fit adapter.alpha=16; leave"),
        (["adapter.rank=8", "adapter.modules=[q_proj]"], "do not fit adapter.rank=8 adapter.modules=[q_proj]; leave"),
        (["adapter=dora"], "has adapter.method=lora, so its weights do not fit adapter.method=dora; leave"),
        (["adapter=none"], "has adapters; use adapter=lora"),
    ],
)
def test_adapters_unlike_those_of_the_run_are_refused_as_its_start(
    models: Path, exported: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    argv = lora(models, tmp_path / "run", f"checkpoint.resume={exported}", *more)
    none = [word for word in argv if not word.startswith("adapter.")] if "adapter=none" in more else argv
    assert message in runs.run_here(none).error


def test_model_that_is_not_the_base_model_is_refused_as_the_start_of_adapters(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "llama", tmp_path / "other")
    error = runs.run_here(lora(models, tmp_path / "run", f"checkpoint.resume={tmp_path / 'other'}")).error
    assert f"the base model of adapter.method=lora is model.path={models / 'llama'}; use model.path={tmp_path}" in error
    own = ["adapter=lora", f"run.dir={tmp_path / 'own'}", f"checkpoint.resume={tmp_path / 'other'}"]
    with pytest.raises(UserError, match=r"is the one that build_model.. returns; load the weights there, or remove"):
        serried.fit(Points, own)
    words = [f"checkpoint.resume={models / 'llama'}", "trainer.steps=1"]  # the base model itself
    assert runs.run_here(lora(models, tmp_path / "run", *words)).code == 0


def test_every_key_of_peft_that_changes_what_is_computed_is_refused_by_name(exported: Path, tmp_path: Path) -> None:
    """With the values that PEFT itself writes by default nothing is refused."""
    import peft

    tensors = adapters_in(exported).keys()

    def described(**keys: Any) -> dict[str, Any]:
        defaults = peft.LoraConfig(r=4, lora_alpha=8, base_model_name_or_path="base").to_dict()
        (tmp_path / "adapter_config.json").write_text(json.dumps({**defaults, **keys}, default=list))
        return described_adapters(tmp_path, tensors)

    modules = [name[17:-14] for name in tensors if name.endswith(".lora_A.weight")]
    assert described() == {"method": "lora", "scale": "standard", "rank": 4, "alpha": 8.0, "modules": modules}
    assert described(use_dora=True, use_rslora=True).items() >= {"method": "dora", "scale": "rslora"}.items()
    free = {
        "base_model_name_or_path", "task_type", "auto_mapping", "peft_version", "inference_mode", "lora_dropout",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "megatron_core",
        "qalora_group_size", "rank_pattern", "alpha_pattern",
    }  # fmt: skip
    for key in (*(peft.LoraConfig().to_dict().keys() - free), "a_key_of_tomorrow"):
        for value in ("pissa", [1], {"q_proj": 2}, -1):
            with pytest.raises(UserError, match=rf"adapter_config.json has {key} "):
                described(**{key: value})


def opened_by_us(adapters: Path) -> nn.Module:
    config = config_of_model(adapters, ["data.tokenizer=bytes", "precision=fp32"])
    return load_model(config, CausalLM(config), Layout("single"), torch.device("cpu"), adapters).module


@pytest.mark.parametrize(
    "init", ["orthogonal", *(pytest.param(init, marks=pytest.mark.slow) for init in ("gaussian", False))]
)
def test_initial_values_that_leave_the_base_model_alone_are_computed_as_by_peft(
    models: Path, tmp_path: Path, init: str | bool
) -> None:
    import peft
    import transformers

    def base() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float32)

    options = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": init}
    model = peft.get_peft_model(base(), peft.LoraConfig(**options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "adapters")
    with torch.no_grad():
        ours = opened_by_us(tmp_path / "adapters")
        assert_close(ours(TOKENS), peft.PeftModel.from_pretrained(base(), tmp_path / "adapters")(TOKENS).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_alpha": 1e308}, r"has lora_alpha 1e.308: not in 32 bits$"),
        ({"r": "4"}, "has r 4: must be a number"),
        (
            {"target_modules": ["q_proj", "embed_tokens"]},
            r"contains the tensor base_model.model.model.embed_tokens.*merge",
        ),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            "has an adapter for lm_head, which is not supported; merge",
        ),
    ],
)
def test_adapters_that_cannot_be_computed_are_refused_with_the_key_or_tensor(
    models: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float32)
    usable = {key: value for key, value in options.items() if key not in ("r", "lora_alpha")}
    model = peft.get_peft_model(base, peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **usable}))
    model.save_pretrained(tmp_path / "adapters", save_embedding_layers=False)
    file = tmp_path / "adapters/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))
    with pytest.raises(UserError, match=message):
        opened_by_us(tmp_path / "adapters")


def meta_model(*words: str) -> Any:
    config = compose(["recipe=lora", "data.tokenizer=bytes", *words])
    return build_model(config, CausalLM(config))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["adapter.modules=[*.mlp.*_prjo]"], "e.g. 'adapter.modules=...mlp.._proj.'"),
        (["adapter.modules=[q_prj]"], "matches none of the .* e.g. 'adapter.modules=.q_proj.'"),
    ],
)
def test_pattern_that_cannot_be_followed_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        meta_model(*words)


def test_patterns_choose_layers_by_the_names_of_hugging_face() -> None:
    model = meta_model("adapter.modules=[q_proj,'model.layers.1.mlp.*']", "model.layers=2").module
    adapted = {name for name, module in model.named_modules() if hasattr(module, "adapter")}
    assert adapted == {
        "layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj",
        *(f"layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
    }  # fmt: skip
    assert {name.rpartition(".")[2] for name, each in model.named_parameters() if each.requires_grad} == {
        "lora_A", "lora_B",
    }  # fmt: skip


def test_mixture_has_adapters_where_peft_takes_no_name_for_that_of_an_expert() -> None:
    """PEFT 0.21 looks for ``*.gate_proj`` of a dense layer or a shared expert among the routed experts."""
    model = meta_model("model=moe_tiny").module
    adapted = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "adapter")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_batch_norm_with_adapters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(UserError, match="BatchNorm"):
        Adapters(AdapterSection(method="lora"), model, ParallelPlan(), task_for_run(Points()).exported)


def test_blocks_of_quantized_weights_are_not_split_by_tensor_ranks() -> None:
    words = ["adapter.quantize=nf4", "model.dim=128", "model.hidden_dim=192", "model.layers=1"]
    model = meta_model("model=tiny", *words)
    with pytest.raises(UserError, match=r"down_proj has 192 inputs, and their shards would split the blocks of 64"):
        check_roles(model.module, model.plan, Layout("fsdp", tensor=2))


def test_plan_of_an_8b_model_fits_one_gpu_with_its_base_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=lora", "model=llama8b", "data.tokenizer=bytes", "launch.device=cpu", "dry_run=true"]
    assert main(words) == 0
    plan = capsys.readouterr().out
    assert "41,943,040 (0.52%) are trained: lora of rank 16, alpha 32, in 224 layers" in plan
    assert "frozen weights in bf16; fp32 adapters" in plan
    assert "parameters 15.1GiB, gradients 160.0MiB, optimizer state 320.0MiB" in plan
    assert "480.0MiB each" in plan
    assert "does not fit" not in plan
    assert "WARNING    adapter.method=lora needs a base model: model.path=FOLDER_OR_NAME" in plan
    assert main([word.replace("=lora", "=qlora") for word in words]) == 0
    plan = capsys.readouterr().out
    assert "8,072,204,288 parameters" in plan
    assert "frozen linear layers in nf4, other frozen weights in bf16" in plan
    assert "parameters 5.8GiB, gradients 160.0MiB" in plan


def test_adapters_of_a_users_task_train_and_load(tmp_path: Path) -> None:
    words = ["adapter=lora", f"run.dir={tmp_path / 'run'}"]
    result = serried.fit(Points, words)
    assert result.state == "finished"
    assert {name.rpartition("model.")[2] for name in runs.weights(tmp_path / "run", "adapter_model")} == {
        f"{layer}.lora_{part}.weight" for layer in (0, 3) for part in "AB"
    }
    model = serried.load_model(tmp_path / "run", Points)
    assert json.loads((runs.checkpoint(tmp_path / "run") / "state.json").read_text())["base"]["path"] is None
    assert model.get_parameter("3.lora_B").abs().sum() > 0
    torch.manual_seed(1)
    task = Points()
    task.config = Points.Config()
    assert model.get_parameter("0.weight").equal(task.build_model()[0].weight)


def train_and_look(argv: list[str]) -> dict[str, int]:
    """Train on this rank; return how many numbers of each type it holds."""
    held: dict[str, int] = {}

    def look(trainer: Trainer, step: int) -> None:
        if step == 1:
            for each in trainer.state.parallel.parameters:
                held[str(each.local.dtype)] = held.get(str(each.local.dtype), 0) + each.local.numel()

    assert runs.run_here(argv, look).code == 0
    return held


def test_frozen_weights_are_held_in_bf16_whole_and_sharded(cluster: Cluster, models: Path, tmp_path: Path) -> None:
    """Dropout too: its masks are the same on both."""
    found = {}
    for name, ranks in (("single", 1), ("fsdp", 2)):
        argv = lora(models, tmp_path / name, "precision=bf16", f"parallel={name}", "adapter.dropout=0.1")
        answers = [
            answer.value for answer in cluster.run(ranks, "tests.runs.fine_tuning.test_lora:train_and_look", argv=argv)
        ]
        held = {key: sum(answer[key] for answer in answers) for key in answers[0]}
        found[name] = (held, runs.losses(tmp_path / name))
    base = 2 * 257 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
    adapters = 4 * 2 * (2 * 64 + 2 * 48 + 3 * 80)
    assert found["single"][0] == found["fsdp"][0] == {"torch.bfloat16": base, "torch.float32": adapters}
    assert found["fsdp"][1] == pytest.approx(found["single"][1], abs=2e-3)


def test_quantized_numbers_are_the_nearest_levels_of_their_blocks() -> None:
    rows = torch.randn(6, 192, generator=torch.Generator().manual_seed(2))
    rows[1, 64:128] = 0
    scales = rows.unflatten(1, (-1, 64)).abs().amax(2, keepdim=True)
    levels = (torch.tensor(_LEVELS) * scales.unsqueeze(3)).expand(-1, -1, 64, -1)
    nearest = (levels - rows.unflatten(1, (-1, 64)).unsqueeze(3)).abs().argmin(3, keepdim=True)
    packed = pack(rows)
    assert packed.nbytes * 8 == rows.numel() * 4.5
    unpacked = unpack(packed, torch.float32)
    torch.testing.assert_close(unpacked, levels.gather(3, nearest).flatten(1), atol=1e-6, rtol=0)
    for shard, columns in enumerate(unpacked.chunk(3, 1)):
        assert unpack(inputs_of_shard(packed, shard, 3), torch.float32).equal(columns)


@pytest.mark.parametrize(
    ("precision", "tensor", "bound"),
    [
        ("fp32", 2, 1e-5),
        pytest.param("fp32", 1, 1e-5, marks=pytest.mark.slow),
        pytest.param("bf16", 1, 2e-3, marks=pytest.mark.slow),
    ],
)
def test_qlora_equals_lora_of_the_dequantized_model(
    cluster: Cluster, tmp_path: Path, models: Path, precision: str, tensor: int, bound: float
) -> None:
    """Begun on two ranks that divide the bits, by rows or between blocks; resumed on one."""
    import transformers

    config = transformers.LlamaConfig(**SIZES | {"hidden_size": 128, "intermediate_size": 128}, **HEADS)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for module in model.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(unpack(pack(module.weight), torch.float32))
    model.save_pretrained(tmp_path / "rounded")
    more = [f"precision={precision}"]
    plain = lora(models, tmp_path / "plain", f"model.path={tmp_path / 'rounded'}", *more)
    assert runs.run_here(plain).code == 0
    argv = lora(models, tmp_path / "run", "recipe=qlora", f"model.path={tmp_path / 'base'}", *more)
    losses(cluster, 2, [*argv, "parallel=fsdp", f"parallel.tensor={tensor}", "trainer.stop_at=2"], tmp_path / "run", 75)
    assert runs.run_here(argv).code == 0
    want, found = (runs.losses(tmp_path / name) for name in ("plain", "run"))
    assert len(found) == 4
    assert found == pytest.approx(want, abs=bound)
    opened = [serried.load_model(tmp_path / name)(TOKENS) for name in ("run", "plain")]
    torch.testing.assert_close(*opened, atol=2 * bound, rtol=0)
