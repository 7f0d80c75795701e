"""Scaled rotary embeddings: with each type, each family computes, trains and writes what transformers does."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from benchmarks.parity import CUTS, TOLERANCES, compare, run
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.schema.registry import models
from serried.recipes.exports import gguf_file
from serried.recipes.exports.export_formats import Source
from serried.recipes.exports.traced import longest
from serried.recipes.models.layers.rope import document_lengths
from testing.rank_pool import Cluster
from tests.ranks.models.test_families import FAMILIES, ON_LAYOUTS, SIZES, SMALL, opened, saved, written
from tests.support.continuing import continued, on_one_process

ORIGINAL, LENGTH, PROMPT, NEW, ROWS = 12, 30, 9, 40, 131
"""A generated text passes the original length."""
BORDERS = (0, 4, 21, LENGTH)
"""Where documents begin: only the second is longer than ``ORIGINAL``."""
POSITIONS = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(BORDERS)])
TYPES: Mapping[str, Mapping[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "yarn, all keys": {
        "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3,
    },
    "longrope": {},
    "longrope, all keys": {"factor": 3.0, "attention_factor": 1.3},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}  # fmt: skip
SAME = ("qwen3_next", "qwen3_5_moe_text")
"""Families whose blocks are those of ``qwen3_5_text``, but with experts. They are tested without linear attention: with
it, their fp32 logits are up to 4e-5 from those in fp64, here and in transformers, because the norm after the delta rule
divides by small values and routers pass the difference on."""
PARTIAL = ("glm4_moe", "phi3", "qwen3_5_text", *SAME)
"""Families that rotate a part of each head."""
ALL = [
    (family, kind)
    for family in FAMILIES
    for kind in TYPES
    if "," not in family and kind.partition(",")[0] in getattr(models.get(family).section, "rope_types", ())
    if "," not in kind or family in ("qwen3", "phi3", "gemma3_text", "deepseek_v3")
]
"""Optional keys are those of the type, whatever the family, except in Gemma 3."""
DAILY = [("llama", "dynamic"), ("qwen3", "yarn, all keys"), ("phi3", "longrope"), ("gemma3_text", "linear")]


def rope_of(family: str, kind: str) -> dict[str, Any]:
    """Keys of a ``config.json`` that scale the rotary embeddings of the model in ``FAMILIES``."""
    head_dim = FAMILIES[family].get("head_dim", SIZES["hidden_size"] // SIZES["num_attention_heads"])
    head_dim = FAMILIES[family].get("qk_rope_head_dim", head_dim)
    fraction = 0.5 if family in PARTIAL else 1.0
    name, pairs = kind.partition(",")[0], int(head_dim * fraction) // 2
    rope: dict[str, Any] = {"rope_type": name, "rope_theta": 500.0, **TYPES[kind]}
    if name in ("yarn", "longrope", "llama3"):
        rope["original_max_position_embeddings"] = ORIGINAL
    if name == "longrope":
        rope |= {"short_factor": [1.0 + 0.1 * pair for pair in range(pairs)]}
        rope |= {"long_factor": [1.5 + pair for pair in range(pairs)]}
    if family in PARTIAL:
        rope["partial_rotary_factor"] = fraction
    keys: dict[str, Any] = {"rope_parameters": rope, "tie_word_embeddings": False}
    if family in ("qwen3_5_text", *SAME):
        keys |= {"num_hidden_layers": 2, "full_attention_interval": 1 if family in SAME else 2}
    keys["max_position_embeddings"] = ORIGINAL if name == "dynamic" else 4 * ORIGINAL
    if family == "gemma3_text":
        keys["rope_parameters"] = {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        }
    return keys | ({"original_max_position_embeddings": ORIGINAL} if family == "phi3" else {})


@pytest.mark.parametrize(
    ("family", "kind"), [pytest.param(*case, marks=[pytest.mark.slow] * (case not in DAILY)) for case in ALL]
)
def test_family_with_scaled_rope_equals_transformers(family: str, kind: str, tmp_path: Path) -> None:
    import transformers

    theirs = saved(family, tmp_path / "theirs", **rope_of(family, kind))
    with torch.no_grad():  # else it repeats the token that it has read
        theirs.model.embed_tokens.weight *= 0.1 if family != "gemma3_text" else 1
    theirs.save_pretrained(tmp_path / "theirs")
    model, ours = opened(tmp_path / "theirs")
    assert model.section.max_sequence_length == 4 * ORIGINAL
    batches = torch.randint(ROWS, (3, 2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for length in (ORIGINAL, LENGTH):
            tokens = batches[0, :, :length]
            torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)

    # Bit-equal export, which transformers opens.
    there, back = load_file(tmp_path / "theirs/model.safetensors"), written(model, ours, tmp_path / "back")
    assert back.keys() == there.keys()
    assert all(back[key].equal(there[key]) for key in there)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(batches[0]).logits, ours(batches[0]), rtol=0, atol=1e-5)
    assert opened(tmp_path / "back")[0].section.rope_scaling == model.section.rope_scaling

    # The cache of transformers keeps the short factors, except in Phi-3.
    uses_cache = family == "phi3" or not kind.startswith("longrope")
    prompt = batches[0, :1, :PROMPT]
    settings = {
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "max_new_tokens": NEW,
        "eos_token_id": -1,
    }
    expected = again.generate(prompt, use_cache=uses_cache, pad_token_id=0, **settings)[0, PROMPT:].tolist()
    shorter = prompt[0, 4:].tolist()  # exceeds the original context later
    parallel = on_one_process(ours)
    (alone,) = continued(parallel, model, [shorter], NEW)
    assert continued(parallel, model, [shorter, *prompt.tolist()], NEW, rows=2) == [alone, expected]
    assert len({*expected}) > 1, "a model that repeats itself would compare equal to much"

    # Three steps on packed documents, which transformers sees one by one.
    mine, other = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (ours, theirs))
    for batch in batches:
        targets = batch.roll(-1, 1)
        targets[:, [border - 1 for border in BORDERS[1:]]] = -100
        loss = ours(batch, targets, POSITIONS.expand(2, -1)) / (targets >= 0).sum()
        documents = [row[start:stop] for row in batch for start, stop in itertools.pairwise(BORDERS)]
        logits = [theirs(document[None]).logits[0, :-1] for document in documents]
        reference = F.cross_entropy(torch.cat(logits), torch.cat([document[1:] for document in documents]))
        torch.testing.assert_close(loss, reference, rtol=1e-5, atol=0)
        for optimizer, each in ((mine, loss), (other, reference)):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()


def test_length_of_a_document_is_that_of_all_its_tokens() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    expected = torch.tensor([[3, 3, 3, 1, 2, 2], [6] * 6])
    assert document_lengths(positions).equal(expected)


@pytest.mark.parametrize(
    ("family", "found", "reason"),
    [
        ("llama", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "has rope_type ntk; only default, linear, dynamic"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "has rope_type linear; only default, longrope"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "has rope_type yarn without factor"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 6}}, "rope_type longrope without long_factor"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0] * 5}},
            r"model\.rope_scaling\.long_factor has 5 values, but the model has 6 rotary pairs; give a list of 6",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "has partial_rotary_factor 0.5; only 1.0 is supported",
        ),
        ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": "x"}}, r"rope_scaling\.factor=x \(config\.json"),
    ],
)
def test_rope_of_a_model_that_is_not_supported_is_refused_in_a_line(
    family: str, found: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "rope_parameters": None, "model_type": family, **found}))
    with pytest.raises(UserError, match=reason) as refusal:
        compose(["model=auto", f"model.path={tmp_path}", "data.tokenizer=bytes"])
    assert len(refusal.value.args) == 1


@pytest.mark.parametrize(
    ("outside", "rope"),
    [
        ({}, {"type": "longrope", "factor": 8.0}),
        ({"max_position_embeddings": 96}, {"rope_type": "su"}),
        ({"max_position_embeddings": 96, "original_max_position_embeddings": 12}, {"type": "yarn"}),
    ],
)
def test_forms_of_longrope_in_config_json_are_read(outside: dict[str, Any], rope: dict[str, Any]) -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "original_max_position_embeddings": 48}
    found = SIZES | {"original_max_position_embeddings": 12, "rope_parameters": None, "rope_scaling": factors | rope}
    section = models.get("phi3").section.keys_from(found | outside | {"model_type": "phi3"})
    assert section["rope_scaling"] == {
        "rope_type": "longrope", "factor": 8.0, "original_max_sequence_length": 12, "short_factor": [1.0] * 6,
        "long_factor": [2.0] * 6,
    }  # fmt: skip


def test_graph_of_a_type_that_depends_on_the_length_ends_at_the_original_length() -> None:
    dynamic = compose(["model=tiny", "model.rope_scaling={rope_type: dynamic, factor: 4}"]).model
    linear = compose(["model=tiny", "model.rope_scaling={rope_type: linear, factor: 4}"]).model
    sources = [Source(Path(), section, lambda _: torch.nn.Identity()) for section in (dynamic, linear)]
    assert [longest(source) for source in sources] == [dynamic.max_sequence_length // 4, linear.max_sequence_length]


@pytest.mark.parametrize("words", [["model=tiny"], ["model=qwen3_600m", "data.tokenizer=bytes"]])
def test_scaling_that_gguf_files_cannot_hold_here_is_refused(words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    section = compose([*words, YARN]).model
    with pytest.raises(UserError, match=r"format=gguf does not support model\.rope_scaling\.rope_type=yarn"):
        gguf_file.write(Source(tmp_path, section, lambda _: torch.nn.Identity()), tmp_path / "a.gguf", "fp16")
    assert not list(tmp_path.iterdir())


YARN = "model.rope_scaling={rope_type: yarn, factor: 4}"


@pytest.mark.parametrize(
    ("own", "words", "original", "longest"),
    [
        ({}, [YARN], 64, 256),
        ({}, ["model.rope_scaling={rope_type: dynamic, factor: 2.5}"], 64, 160),
        ({}, [YARN, "model.max_sequence_length=100"], 64, 100),
        ({}, ["model.rope_scaling={rope_type: yarn, factor: 4, original_max_sequence_length: 32}"], 32, 128),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, [YARN], 32, 128),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
         ["model.rope_scaling.factor=8"], 32, 256),
        ({"rope_type": "linear", "factor": 2.0}, ["model.rope_scaling={rope_type: linear, factor: 4}"], None, 128),
        ({"rope_type": "linear", "factor": 2.0}, ["model.rope_scaling=null"], None, 64),
    ],
)  # fmt: skip
def test_override_of_rope_scaling_extends_the_context(
    own: dict[str, Any], words: list[str], original: int | None, longest: int, tmp_path: Path
) -> None:
    found = {**SIZES, "rope_parameters": {"rope_theta": 500.0, **own}, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(found))
    model = compose(["model=auto", f"model.path={tmp_path}", "data.tokenizer=bytes", *words]).model
    assert model.max_sequence_length == longest
    assert getattr(model.rope_scaling, "original_max_sequence_length", None) == original
    assert model.rope_theta == 500


def test_override_of_rope_scaling_extends_a_preset() -> None:
    before, after = compose(["model=tiny"]).model, compose(["model=tiny", YARN]).model
    assert after.max_sequence_length == 4 * before.max_sequence_length
    assert after.rope_scaling.original_max_sequence_length == before.max_sequence_length
    # A mapping replaces the preset's own scaling, whose keys another type does not have.
    longer = compose(["model=llama8b", "data.tokenizer=bytes", YARN.replace("4", "32")]).model
    assert (longer.rope_scaling.original_max_sequence_length, longer.max_sequence_length) == (8192, 262144)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_gemma3_with_images_is_read_and_saved_alone(prefix: str, tmp_path: Path) -> None:
    """Whether tensors have the names of the published files or those in the module of transformers 5."""
    import transformers

    text = {**SIZES, **FAMILIES["gemma3_text"], **rope_of("gemma3_text", "linear"), "tie_word_embeddings": True}
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = small | {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/model.safetensors"
    found = {name.replace("language_model.model.", prefix): tensor for name, tensor in load_file(file).items()}
    save_file(found, file, {"format": "pt"})

    model, ours = opened(tmp_path / "theirs")
    (note,) = model.notes()
    assert "only its text part (language_model) is trained, and saved as Gemma3ForCausalLM" in note
    back = written(model, ours, tmp_path / "back")
    of_text = [name for name in found if "language_model." in name]
    assert len(back) == len(of_text)
    assert all(found[name].equal(back["model." + name.split("model.")[-1]]) for name in of_text)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    assert type(again) is transformers.Gemma3ForCausalLM
    tokens = torch.randint(ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(ours(tokens), again(tokens).logits, rtol=0, atol=1e-5)
    assert opened(tmp_path / "back")[0].notes() == []


FACTORS = "short_factor: [1.0,1.2], long_factor: [2.0,5.0]"
LONG = f"{{rope_type: longrope, factor: 8, original_max_sequence_length: 5, {FACTORS}}}"
SCALED = {
    "phi3_mini": {"model.rope_scaling": LONG, "model.rotary_fraction": "0.5"},
    "qwen3_8b": {"model.rope_scaling": "{rope_type: yarn, factor: 4, original_max_sequence_length: 8}"},
    "mistral7b": {
        "model.rope_scaling": "{rope_type: dynamic, factor: 8, original_max_sequence_length: 5}",
        "model.rope_theta": "20",
    },
    "gemma3_1b": {"model.rope_scaling": "{rope_type: linear, factor: 8}", "model.local_rope_theta": "100"},
    "olmo2_7b": {
        "model.rope_scaling": "{rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, "
        "original_max_sequence_length: 8}",
    },
}
"""Sequences of 24 tokens, of which some documents are longer than 5."""
AXES = ("fsdp x2 (ZeRO-3)", "tensor x2", "pipeline x2, 1f1b", "context x2, ring")
OF_TYPES = dict.fromkeys(SCALED, (*AXES, "context x2"))


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "axes"), [("phi3_mini", ("context x2",)), *OF_TYPES.items()])
def test_scaled_rope_trains_alike_on_every_axis(
    preset: str, axes: tuple[str, ...], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    keys = {"model": preset, "model.initializer_std": "0.1", **SMALL, **ON_LAYOUTS[preset], **SCALED[preset]}
    changes = [f"{key}={value}" for key, value in keys.items()]
    reference = run(cluster, CUTS[0], 1, "fp32", text, tmp_path / "single", *changes, steps=3)
    plain = run(cluster, CUTS[0], 1, "fp32", text, tmp_path / "plain", *changes, "model.rope_scaling=null", steps=3)
    assert compare(plain, reference).loss > TOLERANCES["fp32"], "scaling must show"
    for number, cut in enumerate(cut for cut in CUTS if cut.name in axes):
        curve = run(cluster, cut, cut.accumulations[-1], "fp32", text, tmp_path / str(number), *changes, steps=3)
        difference = compare(curve, reference)
        assert difference.same_samples, cut
        assert difference.loss < TOLERANCES["fp32"], cut
        assert difference.grad_norm < TOLERANCES["fp32"], cut
