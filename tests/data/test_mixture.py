"""Mixtures: every source has its share, counted exactly, on any cut; validation sets have names."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.recipes.data.prepared.token_shards import TokenStream
from serried.recipes.data.samples.mixture_dataset import MixtureDataset
from serried.recipes.data.samples.token_dataset import Sample
from serried.recipes.models.layers.lm_head import IGNORE
from serried.recipes.text.causal_lm import CausalLM
from serried.trainer.data.sampler import passes, sample_order
from testing.rank_pool import Cluster
from testing.runs import checkpoint, metrics, run_here, tiny_overrides

VOCABULARIES = {"web": "lorem ipsum dolor sit amet", "code": "def return lambda yield", "held": "one two three four"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two sources and a validation set, each of words of its own."""
    random = np.random.default_rng(3)
    folders = {}
    for name, words in VOCABULARIES.items():
        folders[name] = tmp_path_factory.mktemp("mixed") / name
        folders[name].mkdir()
        for number in range(20 if name == "web" else 4):
            text = " ".join(random.choice(words.split(), 200))
            (folders[name] / f"{number:02d}.txt").write_text(text)
    return folders


def mixed(sources: dict[str, Path], run_dir: Path, *more: str) -> list[str]:
    mixture = ["data=mixture", "data.path=null"]  # null: of the text that tiny_overrides names
    for name, weight in (("web", 0.7), ("code", 0.3)):
        key = f"data.sources.{name}"
        mixture += [f"{key}.name=text", f"{key}.path={sources[name]}", f"{key}.weight={weight}"]
    return tiny_overrides(sources["web"], run_dir, *mixture, "trainer.global_batch=12", *more)


def test_shares_and_counters_are_exact_on_every_layout(
    sources: dict[str, Path], cluster: Cluster, tmp_path: Path
) -> None:
    """Ragged masks: the counters are of targets, not of samples. Stopped, and resumed on other ranks."""
    straight, pieces = tmp_path / "straight", tmp_path / "pieces"
    answer = cluster.run(1, "testing.runs:train_small", argv=mixed(sources, straight), ragged=True)[0].value
    ids = [sample for micro_batch in answer["sample_ids"] for sample in micro_batch]
    dealt = []
    for ranks, *how in ((2, "trainer.stop_at=2"), (3, "parallel=fsdp")):
        argv = mixed(sources, pieces, *how)
        answers = cluster.run(ranks, "testing.runs:train_small", argv=argv, ragged=True)
        dealt += [sample for each in answers for ids_ in each.value["sample_ids"] for sample in ids_]
    assert sorted(dealt) == sorted(ids)

    config = compose(mixed(sources, straight))
    recipe = CausalLM(config)
    recipe.open_data(recipe.prepare())
    training = recipe.dataset("train")
    assert isinstance(training, MixtureDataset)
    assert ids == sample_order(training, config.trainer.seed)(np.arange(72)).tolist()
    web = training.parts["web"].samples
    assert [sum(sample < web for sample in ids[:n]) for n in (10, 20, 70)] == [7, 14, 49]

    def targets(chosen: list[int]) -> int:
        return sum(sample * 7919 % 32 + 1 for sample in chosen)  # as the ragged recipe masks

    counts = {"web": targets([i for i in ids if i < web]), "code": targets([i for i in ids if i >= web])}
    for run_dir in (straight, pieces):
        assert metrics(run_dir)[-1]["source_tokens"] == counts
        assert all(sum(line["source_tokens"].values()) == line["tokens"] for line in metrics(run_dir))
        state = json.loads((checkpoint(run_dir) / "state.json").read_text())
        assert state["progress"]["source_tokens"] == counts


def test_plan_reports_epochs_of_each_source(sources: dict[str, Path], tmp_path: Path) -> None:
    long = run_here(mixed(sources, tmp_path / "long", "trainer.steps=1k", "trainer.stop_at=1"))
    assert f"web (text {sources['web']}) 70 %, code (text {sources['code']}) 30 % of the tokens" in long.printed
    assert re.search(r"; web [\d.]+, code 2[\d.]+ epochs in 1,000 steps\n", long.printed), long.printed
    assert re.search(r"WARNING    source code is repeated 2\d times in 1,000 steps", long.printed), long.printed
    assert "source web" not in long.printed
    single = tiny_overrides(sources["code"], tmp_path / "single", "trainer.steps=10k", "trainer.stop_at=1")
    assert re.search(r"the training data is repeated \d+ times in 10,000 steps", run_here(single).printed)


def test_changed_weights_and_sources_are_refused_on_resume(sources: dict[str, Path], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_here(mixed(sources, run_dir, "trainer.stop_at=2")).code == 75
    heavier = run_here(mixed(sources, run_dir, "data.sources.web.weight=0.8"))
    assert (heavier.code, heavier.printed.count("error:")) == (78, 1)
    assert "data.sources.web.weight 0.7 -> 0.8" in heavier.printed
    more = ["data.sources.held.name=text", f"data.sources.held.path={sources['held']}"]
    added = run_here(mixed(sources, run_dir, *more))
    assert (added.code, "data.sources.held is new" in added.printed) == (78, True), added.printed
    other = run_here(mixed(sources, run_dir, f"data.sources.code.path={sources['held']}"))
    assert (other.code, "was trained on different data" in other.printed) == (78, True)
    set_aside = [f"data.validation.held.{key}" for key in ("name=text", f"path={sources['held']}")]
    assert run_here(mixed(sources, run_dir, *set_aside, "trainer.stop_at=3")).code == 75, "evaluations change nothing"
    assert run_here(mixed(sources, run_dir, *more, "checkpoint.allow_changes=true")).code == 0


def test_validation_sets_have_names_and_the_first_decides(sources: dict[str, Path], tmp_path: Path) -> None:
    sets = ["data.validation.held.name=text", f"data.validation.held.path={sources['held']}"]
    ended = run_here(
        mixed(
            sources,
            tmp_path / "run",
            *sets,
            "trainer.eval_every=3",
            "trainer.eval_batches=20",
            "checkpoint.keep_best=true",
        )
    )
    assert ended.code == 0, ended.printed
    lines = metrics(tmp_path / "run", "eval")
    assert [(line["step"], line["set"]) for line in lines] == [
        (3, "validation"), (3, "held"), (6, "validation"), (6, "held"),
    ]  # fmt: skip
    assert [line.get("source_losses", {}).keys() for line in lines[:2]] == [{"web", "code"}, set()]
    own = lines[0]
    assert min(own["source_losses"].values()) < own["loss"] < max(own["source_losses"].values())
    assert f"eval 6/6  held loss {lines[3]['loss']:.4f}  over" in ended.printed
    state = json.loads((checkpoint(tmp_path / "run") / "state.json").read_text())
    assert state["validation_loss"] == lines[2]["loss"]
    held = sum(len(path.read_bytes()) + 1 for path in sources["held"].iterdir())
    assert 0.95 * held < lines[1]["tokens"] <= held, "all of the set is evaluated, whatever a split would keep back"


def test_evaluation_of_a_mixture_is_the_same_on_every_layout(
    sources: dict[str, Path], cluster: Cluster, tmp_path: Path
) -> None:
    losses = []
    for ranks in (1, 3):
        run_dir = tmp_path / f"{ranks}"
        argv = mixed(sources, run_dir, "trainer.eval_every=2", "trainer.eval_batches=2", "trainer.stop_at=2")
        cluster.run(ranks, "testing.runs:train_small", argv=argv)
        (line,) = metrics(run_dir, "eval")
        losses.append(line)
    assert losses[0]["tokens"] == losses[1]["tokens"] == 24 * 32
    assert math.isclose(losses[0]["loss"], losses[1]["loss"], rel_tol=1e-5)
    for name in ("web", "code"):
        assert math.isclose(losses[0]["source_losses"][name], losses[1]["source_losses"][name], rel_tol=1e-5)


def test_a_tokenizer_that_is_learned_from_a_source_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    ended = run_here(mixed(sources, tmp_path / "run", "data.tokenizer=chars"))
    assert (ended.code, ended.printed.count("error:")) == (78, 1)
    assert "data.tokenizer=chars is built from a single source" in ended.printed


def test_mistake_in_a_source_is_reported_with_its_name(sources: dict[str, Path], tmp_path: Path) -> None:
    missing = run_here(mixed(sources, tmp_path / "run", "data.sources.code.path=nowhere"))
    assert (missing.code, missing.printed.count("error:")) == (78, 1)
    assert "error: data.sources.code: data.sources.code.path=nowhere does not exist" in missing.printed
    short = run_here(mixed(sources, tmp_path / "run", "data.sequence_length=900"))
    assert "error: data.sources.code: data.sequence_length=900 needs 901 tokens" in short.printed, short.printed
    held = ["data.validation.held.name=text", "data.validation.held.path=nowhere"]
    assert (
        "data.validation.held.path=nowhere does not exist" in run_here(mixed(sources, tmp_path / "run", *held)).printed
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data=text", "data.path=nowhere.txt"], r"^data\.path=nowhere\.txt does not exist"),
        (["data=text", "data.path=~nobody-here/a"], r"^data\.path=~nobody-here/a does not exist"),
        (["data=tokens", "data.path=nowhere.bin"], r"^data\.path=nowhere\.bin does not exist"),
        (["data=hf", "data.path=~nobody-here/a"], r"^data\.path=~nobody-here/a is neither a folder on this machine"),
        (
            ["data=hf", f"data.path={300 * 'a'}/{300 * 'b'}/c"],
            r"^data\.path=a+/b+/c is neither a folder on this machine",
        ),
        (["data=hf", "data.path=./nowhere"], r"^data\.path=\./nowhere is neither a folder on this machine"),
        (
            ["data.validation.web.name=text", "data.validation.web.path=nowhere"],
            r"data\.validation\.web\.path=nowhere ",
        ),
    ],
)
def test_paths_are_looked_at_before_the_hub_is_asked_for_a_tokenizer(
    words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "serried.recipes.data.tokenizers.hugging_face_tokenizer.find_tokenizer",
        lambda _: pytest.fail("the Hub was asked"),
    )
    with pytest.raises(UserError, match=expected):
        CausalLM(compose([*words, "data.tokenizer=owner/name"])).prepare()


class Masked:
    """Samples of 10 tokens, of which the first ``targets`` are learned."""

    fingerprint = "masked"

    def __init__(self, targets: int) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return 50

    def describe(self) -> str:
        return ""

    def __getitem__(self, index: int) -> Sample:
        return Sample(np.zeros(10, np.int64), np.where(np.arange(10) < self.targets, 1, IGNORE))


def test_weights_of_tokens_become_weights_of_samples() -> None:
    sources, weights = {"long": Masked(10), "short": Masked(2)}, {"long": 0.5, "short": 0.5}
    by_tokens = MixtureDataset(sources, weights, "tokens")
    samples = sample_order(by_tokens, 1)(np.arange(6000))
    assert (samples >= 50).sum() == 5000, "five short samples for each long one: as many tokens"
    by_samples = MixtureDataset(sources, weights, "samples")
    assert (sample_order(by_samples, 1)(np.arange(6000)) >= 50).sum() == 3000
    assert by_tokens.fingerprint != by_samples.fingerprint


def test_weighing_by_size_uses_each_sample_once_per_epoch() -> None:
    sources = {"long": Masked(10), "short": Masked(2), "third": Masked(7)}
    together = MixtureDataset(sources, dict.fromkeys(sources, 1.0), "size")
    order = sample_order(together, 1)
    first, second = order(np.arange(150)), order(np.arange(150, 300))
    assert sorted(first) == sorted(second) == list(range(150))
    assert first.tolist() != second.tolist()
    assert 0 < (first[:75] < 50).sum() < 50, "the sources are shuffled together"
    by_samples = MixtureDataset(sources, dict.fromkeys(sources, 50.0), "samples")
    assert together.fingerprint != by_samples.fingerprint, "the order differs"
    assert passes(together, 300) == {"": 2.0}


def test_run_weighed_by_size_counts_targets_by_source(sources: dict[str, Path], tmp_path: Path) -> None:
    words = [word for word in mixed(sources, tmp_path / "run") if ".weight=" not in word]
    ended = run_here([*words, "data.weigh_by=size", "trainer.steps=2", "trainer.eval_batches=1"])
    assert ended.code == 0, ended.printed
    assert f"web (text {sources['web']}), code (text {sources['code']}) together, " in ended.printed
    assert re.search(r"validation [\d,]+ .*; [\d.]+ epochs in 2 steps", ended.printed), ended.printed
    counts = metrics(tmp_path / "run")[-1]["source_tokens"]
    assert counts["web"] > counts["code"] > 0
    weighted = run_here([*words, "data.weigh_by=size", "data.sources.web.weight=0.7"])
    assert weighted.code == 78
    assert (
        "data.sources.web.weight=0.7 with data.weigh_by=size, which uses every sequence once per epoch"
        in weighted.printed
    )


def test_validation_leaves_out_what_is_trained_on(sources: dict[str, Path], tmp_path: Path) -> None:
    """Copies of training files in a validation set, and of one source's held-out files in another source."""
    held = tmp_path / "held"
    shutil.copytree(sources["held"], held)
    web = sorted(sources["web"].iterdir())
    for number, path in enumerate(web):
        shutil.copy(path, held / f"copy-{number}.txt")
    sets = ["data.validation.held.name=text", f"data.validation.held.path={held}", "trainer.eval_batches=50"]
    code = tmp_path / "code"
    shutil.copytree(sources["code"], code)
    for path in web:
        shutil.copy(path, code / f"web-{path.name}")
    sets += [f"data.sources.code.path={code}", "data.validation_fraction=0.3"]
    config = compose(mixed(sources, tmp_path / "run", *sets))
    recipe = CausalLM(config)
    place = recipe.prepare()
    recipe.open_data(place)
    trained_on = {name: prepared.stream("train") for name, prepared in recipe._text.sources.items()}
    own = len(list(sources["held"].iterdir()))
    (left,) = re.findall(r"; held without (\d+) documents of the training data", recipe.describe_data())
    assert len(web) // 2 < int(left) <= len(web)
    evaluated = recipe._text.held_out["held"].stream("validation")
    assert evaluated.documents == own + len(web) - int(left)
    assert "validation/web without" in recipe.describe_data(), "held out of web, and all of it trained on as code"
    kept = {text_of(stream, i) for stream in trained_on.values() for i in range(stream.documents)}
    for name, prepared in recipe._text.held_out.items():
        stream = prepared.stream("validation")
        assert not kept & {text_of(stream, i) for i in range(stream.documents)}, name
    assert CausalLM(config).prepare() == place, "found again"


def text_of(stream: TokenStream, document: int) -> bytes:
    bounds = [*stream.all_document_starts().tolist(), stream.tokens]
    return stream.read(bounds[document], bounds[document + 1]).tobytes()
