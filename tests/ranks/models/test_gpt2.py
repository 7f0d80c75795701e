"""The second family: GPT-2 as transformers computes it, trained, saved and read on parallel layouts."""

from pathlib import Path

import pytest
import torch

import serried
from serried.recipes.models.families.gpt2 import GPT2, GPT2Model
from serried.recipes.models.families.gpt2_config import GPT2Section
from testing.rank_pool import Cluster
from testing.runs import checkpoint, metrics, overrides


def section(**changes: object) -> GPT2Section:
    values = {
        "name": "small", "family": "gpt2", "dim": 24, "layers": 2, "heads": 3, "hidden_dim": None,
        "max_sequence_length": 40,
    }  # fmt: skip
    return GPT2Section(**{**values, **changes})  # type: ignore[arg-type]


def build(config: GPT2Section) -> GPT2Model:
    torch.manual_seed(0)
    model = GPT2Model(config, 131)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model


def test_padding_past_the_table_of_positions_changes_nothing_before_it() -> None:
    model, tokens = build(section()), torch.randint(131, (1, 40))
    with torch.no_grad():
        padded = model(torch.nn.functional.pad(tokens, (0, 4)))
        torch.testing.assert_close(padded[:, :40], model(tokens))


def test_initial_values_equal_gpt2() -> None:
    family = GPT2(section(), 131)
    assert family.initial_std("h.0.ln_1.weight") is None
    assert family.initial_std("ln_f.bias") == family.initial_std("h.1.mlp.c_fc.bias") == 0.0
    assert family.initial_std("wpe.weight") == 0.02
    assert family.initial_std("h.1.attn.c_proj.weight") == pytest.approx(0.01)


def test_model_keys_match_a_hugging_face_config() -> None:
    config = section()
    found = GPT2(config, 131).export_config(0)
    keys = GPT2Section.keys_from(found)
    assert {name: getattr(config, name) for name in keys if name != "vocab_size"} | {"vocab_size": 131} == keys
    assert GPT2Section.keys_from({**found, "n_inner": None})["hidden_dim"] == 96
    with pytest.raises(ValueError, match="scale_attn_weights"):
        GPT2Section.keys_from({**found, "scale_attn_weights": False})


TRAINED = (
    "model=gpt2", "model.dim=32", "model.layers=2", "model.heads=4", "model.hidden_dim=64", "trainer.steps=4",
    "model.max_sequence_length=64", "model.tie_embeddings=true", "data.isolate_documents=true",
)  # fmt: skip


MORE_LAYOUTS = {
    "fsdp parallel.pipeline=2": 2,
    "fsdp parallel.tensor=2 parallel.pipeline=2 parallel.sequence=false": 4,
    "hsdp parallel.replicate=2 parallel.context=2": 4,
}


def curve(cluster: Cluster, ranks: int, layout: str, text: Path, run_dir: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    argv = overrides(text, run_dir, *TRAINED, *f"parallel={layout}".split(), "trainer.micro_batch=9")
    cluster.run(ranks, "testing.runs:train_small", argv=argv, ragged=True)
    return [(line["loss"], line["grad_norm"]) for line in metrics(run_dir)]


@pytest.mark.slow
def test_tensor_parallel_run_equals_one_process_and_opens_in_transformers(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """Queries, keys and values go into ``c_attn`` and come back from it."""
    import transformers

    alone = curve(cluster, 1, "single", text, tmp_path / "single")
    assert curve(cluster, 2, "fsdp parallel.tensor=2", text, tmp_path / "two") == [
        pytest.approx(step, rel=1e-5) for step in alone
    ]
    model = transformers.GPT2LMHeadModel.from_pretrained(checkpoint(tmp_path / "two"))
    tokens = torch.randint(257, (2, 32))
    with torch.no_grad():
        ours = serried.load_model(tmp_path / "two")(tokens)
        torch.testing.assert_close(ours, model(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_other_layouts_equal_one_process(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    alone = curve(cluster, 1, "single", text, tmp_path / "single")
    for number, (layout, ranks) in enumerate(MORE_LAYOUTS.items()):
        together = curve(cluster, ranks, layout, text, tmp_path / str(number))
        assert together == [pytest.approx(step, rel=1e-5) for step in alone], layout
