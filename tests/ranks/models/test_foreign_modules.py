"""Any nn.Module trains alike on every layout: eager, tied, frozen, with unused parameters, buffers, odd shapes."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.parallel.checkpoint_mapping import unchanged
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.fsdp_units import units_of
from serried.parallel.layout.mesh import resolve_layout
from serried.parallel.parallelize import parallelize
from serried.parallel.plan import LossTerms, ParallelPlan
from serried.parallel.sync.buffers import Buffers
from serried.runtime.session import open_session
from serried.trainer.checkpoint.checkpoints import FolderCheckpoints
from serried.trainer.checkpoint.save import Checkpointer
from serried.trainer.checkpoint.tensors import load_state, state_parts
from serried.trainer.model import build_model
from serried.trainer.optim.optimizer import build_optimizer, take_step
from serried.trainer.task import RunTask
from testing.rank_pool import Cluster

BATCH, STEPS = 12, 5


def gpt2() -> nn.Module:
    """Tied: lm_head.weight is transformer.wte.weight."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 97, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4}
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


class Odd(nn.Module):
    """All that user code does and a sharding library trips over."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.zeros(1))
        self.never_used = nn.Linear(5, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.low = nn.Parameter(torch.full((6,), 0.5, dtype=torch.bfloat16))
        self.codes = nn.Parameter(torch.arange(6), requires_grad=False)
        self.register_buffer("shift", torch.linspace(0, 1, 6))
        self.register_buffer("derived", torch.linspace(1, 2, 6), persistent=False)

    def encode(self, tokens: Tensor) -> dict[str, Tensor]:
        """Called by the loss in place of forward."""
        x = self.embed(tokens) + self.shift
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return {"x": self.frozen(x) * self.scale + self.offset + self.codes * self.low + self.derived}


def odd_loss(model: Any, rows: Tensor) -> LossTerms:
    x = model.encode(rows % 11)["x"]
    if model.training:
        model.norm(x.detach())  # statistics of this rank's samples
    return LossTerms((x.sin() ** 2).sum(), torch.tensor(x.numel()))


def vit() -> nn.Module:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=8, patch_size=4,
        num_labels=3,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def vit_loss(model: nn.Module, rows: Tensor) -> LossTerms:
    pixels = torch.sin(rows.view(-1, 1, 1, 1) * torch.arange(1, 193).view(1, 3, 8, 8))
    logits = model(pixels).logits
    return LossTerms(nn.functional.cross_entropy(logits, rows % 3, reduction="sum"), torch.tensor(len(rows)))


def cnn() -> nn.Module:
    """In fp64, where rounding is too small to move the input of a ReLU across zero: see docs/evidence/parity.md."""
    layers = (
        layer
        for inputs, outputs in ((1, 6), (6, 6), (6, 6))
        for layer in (nn.Conv1d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(3, outputs), nn.ReLU())
    )
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(18, 5)).double()


def cnn_loss(model: nn.Module, rows: Tensor) -> LossTerms:
    signals = torch.sin(rows.view(-1, 1, 1).double() * torch.arange(1, 25))
    return LossTerms(nn.functional.cross_entropy(model(signals), rows % 5, reduction="sum"), torch.tensor(len(rows)))


VIT_PLAN = ParallelPlan(
    roles={
        "vit.layers.*.attention": "region",
        "vit.layers.*.attention.[qkv]_proj": "column",
        "vit.layers.*.attention.o_proj": "row",
        "vit.layers.*.mlp": "region",
        "vit.layers.*.mlp.fc1": "column",
        "vit.layers.*.mlp.fc2": "row",
    }
)

MODELS: dict[str, tuple[Callable[[], nn.Module], Any, ParallelPlan]] = {
    "odd": (Odd, odd_loss, ParallelPlan()),
    "vit": (vit, vit_loss, VIT_PLAN),
    "cnn": (cnn, cnn_loss, ParallelPlan()),
}


def train(name: str, argv: list[str], run_dir: str) -> dict[str, Any]:
    """Losses of some steps, the number of parameters, and a checkpoint in ``run_dir`` that is read back."""
    config = compose([f"run.dir={run_dir}", "checkpoint.mode=sync", "optim.lr=0.01", *argv])
    build, loss, plan = MODELS[name]
    objective: Any = SimpleNamespace(loss=loss)
    with open_session(LaunchSection()) as session:
        torch.manual_seed(config.trainer.seed)
        layout = resolve_layout(config.parallel, session.world_size)

        def parallel() -> DistributedModel:
            return parallelize(
                build(), plan, None, seed=1, layout=layout, section=config.parallel, low_dtype=None,
                device=session.device,
            )  # fmt: skip

        model = parallel()
        optimizer = build_optimizer(model.module.named_parameters(), config.optim)
        losses, norms = [], []
        rows = torch.arange(BATCH).chunk(layout.data_ranks)[model.place.data_rank]
        for step in range(STEPS):
            batches = list((rows + BATCH * step).chunk(2))
            totals = model.forward_backward(batches, objective, 1 / BATCH)
            losses.append((totals["loss_sum"] / totals["weight"]).item())
            norms.append(model.sum_squares().sqrt().item() * model.gradient_divisor)
            take_step(optimizer, torch.tensor(1 / model.gradient_divisor), torch.tensor(0.0))
        evaluated = model.evaluate([(half, True) for half in rows.chunk(2)], objective)
        losses.append((evaluated["loss_sum"] / evaluated["weight"]).item())
        saver = Checkpointer(
            FolderCheckpoints(Path(run_dir), config.checkpoint, session),
            config.checkpoint,
            layout,
            session,
            lambda: state_parts(model, optimizer, unchanged),
            lambda _: None,
        )
        if session.is_main:
            Path(run_dir).mkdir(parents=True, exist_ok=True)
        session.gather(None)
        saver.begin(STEPS, {})
        saver.finish()
        saved = saver.wait()
        assert saved is not None
        assert saved.problem is None
        again = parallel()
        load_state(saved.path, again, build_optimizer(again.module.named_parameters(), config.optim), unchanged)
        for mine, theirs in zip(
            (*again.parameters, *again.buffers.held()), (*model.parameters, *model.buffers.held()), strict=True
        ):
            assert torch.equal(mine.local, theirs.local), mine.name
        saver.close()
        return {"losses": losses, "norms": norms, "parameters": sum(held.tensor.numel() for held in model.parameters)}


def share_buffers(strategy: str) -> dict[str, Any]:
    """Broadcasts of a step with ten BatchNorms, their buffers after it, and this rank's before it shared them."""
    config = compose([f"parallel={strategy}"])
    count, before = 0, list[Any]()
    broadcast, share = torch.distributed.broadcast, Buffers.share

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return broadcast(*arguments, **named)

    def shared(self: Buffers) -> None:
        before.extend(each.tensor.tolist() for each in self.held())
        with patch.object(torch.distributed, "broadcast", counted):
            share(self)

    def loss(model: nn.Module, rows: Tensor) -> LossTerms:
        return LossTerms((model(rows.view(-1, 1).float().sin().expand(-1, 6)) ** 2).sum(), torch.tensor(len(rows)))

    with open_session(LaunchSection()) as session, patch.object(Buffers, "share", shared):
        torch.manual_seed(1)
        layout = resolve_layout(config.parallel, session.world_size)
        module = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6))))
        model = parallelize(
            module, ParallelPlan(), None, seed=1, layout=layout, section=config.parallel, low_dtype=None,
            device=session.device,
        )  # fmt: skip
        objective: Any = SimpleNamespace(loss=loss)
        rows = torch.arange(BATCH).chunk(layout.data_ranks)[model.place.data_rank]
        model.forward_backward([rows], objective, 1 / BATCH)
        return {
            "broadcasts": count,
            "before": before,
            "buffers": [each.tensor.tolist() for each in model.buffers.held()],
        }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_of_one_dtype_are_broadcast_together_bitwise(strategy: str, cluster: Cluster) -> None:
    answers = cluster.run(2, "tests.ranks.models.test_foreign_modules:share_buffers", strategy=strategy)
    first, second = (answer.value for answer in answers)
    assert first["broadcasts"] == second["broadcasts"] == 2, "fp32 and int64"
    assert len(first["buffers"]) == 30
    assert first["buffers"] == second["buffers"] == first["before"] != second["before"]


LAYOUTS = [(1, "single"), (2, "ddp"), (2, "fsdp"), (3, "fsdp")]


def on_every_layout(cluster: Cluster, folder: Path, name: str) -> list[dict[str, Any]]:
    found = []
    for ranks, strategy in LAYOUTS:
        argv, run_dir = [f"parallel={strategy}"], str(folder / f"{strategy}{ranks}")
        answers = cluster.run(
            ranks, "tests.ranks.models.test_foreign_modules:train", name=name, argv=argv, run_dir=run_dir
        )
        found.append(answers[0].value)
    return found


def test_arbitrary_modules_have_the_same_loss_curve_on_every_layout(cluster: Cluster, tmp_path: Path) -> None:
    alone, *others = on_every_layout(cluster, tmp_path, "odd")
    for other in others:
        assert other["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert other["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert other["parameters"] == alone["parameters"]


def test_cnn_with_group_norm_and_relu_has_one_curve_on_every_layout_in_fp64(cluster: Cluster, tmp_path: Path) -> None:
    """In fp32 its curves may differ by rounding that switches a ReLU, which would hide a wrong gradient as well."""
    alone, *others = on_every_layout(cluster, tmp_path, "cnn")
    for other in others:
        assert other["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        assert other["norms"] == pytest.approx(alone["norms"], rel=1e-12)


def test_a_vit_of_transformers_has_one_curve_when_tensor_ranks_divide_it(cluster: Cluster, tmp_path: Path) -> None:
    """By the roles in its plan alone: its own values are sliced, and no class knows of ranks."""
    found = []
    for ranks, argv in (
        (1, ["parallel=single"]),
        (2, ["parallel=fsdp", "parallel.tensor=2", "parallel.sequence=false"]),
    ):
        answers = cluster.run(
            ranks,
            "tests.ranks.models.test_foreign_modules:train",
            name="vit",
            argv=argv,
            run_dir=str(tmp_path / str(ranks)),
        )
        found.append(answers[0].value)
    assert found[1]["losses"] == pytest.approx(found[0]["losses"], rel=1e-5)
    assert found[1]["norms"] == pytest.approx(found[0]["norms"], rel=1e-4)


def test_fsdp_units_are_repeated_blocks_and_large_untied_ends() -> None:
    assert units_of(gpt2()) == (("transformer.h.0",), ("transformer.h.1",), ("transformer.h.2",))
    assert units_of(Odd()) == (("embed",), ("blocks.0",), ("blocks.1",), ("blocks.2",), ("frozen",))
    assert units_of(nn.Linear(3, 3)) == ()
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    encoder = nn.TransformerEncoder(layer, 2)
    assert units_of(encoder) == (("layers.0",), ("layers.1",))
    shared = nn.Linear(4, 4)
    assert units_of(nn.Sequential(nn.Sequential(shared, nn.Linear(4, 4)), shared)) != ()


def test_a_plan_that_separates_a_tied_parameter_is_refused() -> None:
    config = compose(["parallel=fsdp", "parallel.shard=1"])
    layout = resolve_layout(config.parallel.model_copy(update={"strategy": "fsdp", "shard": 2}), 2)
    with pytest.raises(UserError, match=r"lm_head.weight and transformer\.wte\.weight are one parameter"):
        parallelize(
            gpt2(), ParallelPlan((("transformer.wte",), ("lm_head",))), None, seed=1, layout=layout,
            section=config.parallel, low_dtype=None, device=torch.device("cpu"),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("part", "more", "told"),
    [
        (lambda: nn.LazyLinear(2), "", "parameter 0.weight has no shape yet: give the lazy module its sizes"),
        (lambda: nn.Linear(2, 2).to(torch.complex64), "", "parameter 0.weight is complex64, but complex parameters"),
        (lambda: nn.Embedding(3, 2, sparse=True), "", "0 has sparse gradients, but these cannot be summed over ranks"),
        (lambda: nn.ReLU(), "", "the model, a Sequential, has no parameters to train"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "parallel=fsdp", "parallel=fsdp cannot shard 0, a torch.jit"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_untrainable_parameters_are_refused_in_one_line(part: Callable[[], nn.Module], more: str, told: str) -> None:
    class Parts(RunTask):
        def build_model(self) -> nn.Module:
            return nn.Sequential(part())

    with pytest.raises(UserError, match=re.escape(told)):
        build_model(compose(more.split()), Parts())


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_module_is_trained_where_it_is_not_sharded() -> None:
    class Parts(RunTask):
        def build_model(self) -> nn.Module:
            return torch.jit.script(nn.Linear(2, 2))

    assert build_model(compose(["parallel=ddp"]), Parts()).module
