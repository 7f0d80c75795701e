"""serried generate: what a checkpoint writes is what transformers makes it write, token by token, and no slower."""

import io
import json
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from serried.cli import main
from serried.configs.errors import UserError
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.plan import Decoding
from serried.recipes.data.chat.conversations import CHATML, ask
from serried.recipes.data.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, train_tokenizer
from serried.recipes.data.tokenizers.tokenizer import BytesTokenizer, Tokenizer, hugging_face_files
from serried.recipes.models.families.llama import Llama, Transformer
from serried.recipes.models.layers.kv_cache import Cache
from serried.recipes.text.generation import Choose, Reply, TextStream, chooser
from testing.rank_pool import Cluster
from testing.runs import metrics, overrides, run_here, tiny_overrides
from tests.support.continuing import GREEDY, continued, on_one_process
from tests.unit.models.test_model import LLAMA31_SCALING, build, section


def prompt_of(length: int) -> list[int]:
    return torch.randint(131, (length,), generator=torch.Generator().manual_seed(3)).tolist()


@torch.no_grad()
def without_cache(model: Transformer, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def theirs(model: Transformer) -> Any:
    import transformers

    config = transformers.LlamaConfig(**Llama(model.config, 131).export_config(None), attn_implementation="eager")
    twin = transformers.LlamaForCausalLM(config).eval()
    state = {Llama(model.config, 131).export_name(name): parameter for name, parameter in model.named_parameters()}
    twin.load_state_dict(state, strict=False)
    return twin


@pytest.mark.parametrize(
    ("kv_heads", "tied", "scaling"), [(4, False, None), (2, True, LLAMA31_SCALING), (1, False, None)]
)
def test_with_a_cache_without_and_in_transformers_the_tokens_are_the_same(
    kv_heads: int, tied: bool, scaling: Any
) -> None:
    model = build(section(kv_heads=kv_heads, tie_embeddings=tied, rope_scaling=scaling))
    if tied:  # else its likeliest token is the one it has just read
        with torch.no_grad():
            model.embed_tokens.weight *= 0.2
            for name, parameter in model.named_parameters():
                parameter *= 3 if "proj" in name else 1
    prompt = prompt_of(9)
    (made,) = continued(on_one_process(model), Llama(model.config, 131), [prompt], 60)
    assert len(set(made)) > 5, "a model that repeats itself would compare equal to much"
    assert made == without_cache(model, prompt, 60)
    asked = torch.tensor([prompt])
    settings = {"attention_mask": torch.ones_like(asked), "do_sample": False, "max_new_tokens": 60, "pad_token_id": 0}
    expected = theirs(model).generate(asked, **settings)
    assert made == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("pieces", [[20], [1] * 20, [7, 1, 12], [19, 1], [1, 19]])
def test_cached_logits_are_the_same_for_pieces_of_any_size(pieces: list[int]) -> None:
    model = build(section(rope_scaling=LLAMA31_SCALING))
    tokens = torch.tensor([prompt_of(20), prompt_of(25)[5:]])
    with torch.no_grad():
        expected, cache, first = model(tokens), Cache(3, 24), 0
        for size in pieces:
            logits = model(tokens[:, first : first + size], cache=cache)
            first += size
            assert logits.shape == (2, 1, 131)
            torch.testing.assert_close(logits[:, 0], expected[:, first - 1], rtol=0, atol=1e-5)


# choosing -------------------------------------------------------------------------------------------------------------

logits = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=40).map(torch.tensor)


def drawn_by(choose: Choose, logits: torch.Tensor, times: int) -> list[int]:
    return choose(logits.expand(times, -1), range(times)).tolist()


@given(logits, st.floats(0.01, 1.0), st.floats(0.1, 3.0), st.integers(0, 5))
def test_only_tokens_of_the_nucleus_are_drawn(
    logits: torch.Tensor, top_p: float, temperature: float, seed: int
) -> None:
    drawn = drawn_by(chooser(temperature=temperature, top_p=top_p, seed=seed), logits, 20)
    probabilities = (logits / temperature).softmax(-1)
    for token in drawn:  # the likelier ones alone do not come to top_p
        assert probabilities[probabilities > probabilities[token]].sum() < top_p + 1e-5


def test_tokens_are_sampled_with_their_probabilities() -> None:
    probabilities = torch.tensor([0.4, 0.05, 0.3, 0.15, 0.1])
    choose = chooser(temperature=1, top_p=0.8, seed=1)
    drawn = torch.tensor([drawn_by(choose, probabilities.log(), 40) for _ in range(200)])
    expected = torch.tensor([0.4, 0, 0.3, 0.15, 0]) / 0.85
    for of_prompt in (drawn.flatten(), drawn[:, :20].flatten()):
        counts = torch.bincount(of_prompt, minlength=5) / of_prompt.numel()
        torch.testing.assert_close(counts, expected, rtol=0, atol=0.02)
        assert counts[1] == counts[4] == 0


def test_random_numbers_of_a_prompt_do_not_depend_on_its_batch() -> None:
    many = torch.randn(30, 50, generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 3}
    together, alone = chooser(**settings), chooser(**settings)
    found = [together(logits.expand(3, -1), [4, 0, 9]).tolist() for logits in many]
    assert [row[2] for row in found] == [int(alone(logits[None], [9])) for logits in many]
    assert len({tuple(row[number] for row in found) for number in range(3)}) == 3
    other = chooser(**settings | {"seed": 4})
    assert [row[2] for row in found] != [int(other(logits[None], [9])) for logits in many]


@given(logits)
def test_temperature_at_or_near_0_chooses_the_likeliest_token(logits: torch.Tensor) -> None:
    assert drawn_by(GREEDY, logits, 1) == [int(logits.argmax())]
    assert logits[drawn_by(chooser(temperature=1e-5, top_p=1, seed=1), logits, 1)[0]] >= logits.max() - 0.01


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tiny", [1e-20, 1e-38, 1e-45, 1e-300, 5e-324])
def test_tiny_temperature_or_top_p_chooses_the_likeliest_token(tiny: float, sign: int) -> None:
    logits = sign * torch.tensor([3.0, 5.0, 1.0])
    assert drawn_by(chooser(temperature=tiny, top_p=1, seed=1), logits, 1) == [int(logits.argmax())]
    assert drawn_by(chooser(temperature=1, top_p=tiny, seed=1), logits, 1) == [int(logits.argmax())]


@given(logits, st.floats(0.05, 0.95))
def test_nucleus_equals_that_of_transformers(logits: torch.Tensor, top_p: float) -> None:
    from transformers import TopPLogitsWarper

    warped = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.int64), logits[None].double())[0]
    drawn = drawn_by(chooser(temperature=1, top_p=top_p, seed=1), logits, 10)
    chances = logits.double().softmax(-1)
    # Of equals either may be in it, and of those that are equal but for the rounding of fp32.
    assert float(chances[drawn].min()) >= float(chances[warped.isfinite()].min()) - 1e-6


# where it ends --------------------------------------------------------------------------------------------------------


class Letters(BytesTokenizer):
    """Token 0 is "a", and so on."""

    def decode(self, ids: Iterable[int]) -> str:
        return super().decode([ord("a") + number for number in ids])


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 2), max_size=4))
def test_text_ends_at_the_end_mark_or_the_end_of_a_turn(tokens: list[int], ending: list[int]) -> None:
    expected = tokens[: tokens.index(3)] if 3 in tokens else tokens
    ends = [at for at in range(len(expected)) if ending and expected[at : at + len(ending)] == ending]
    expected = expected[: ends[0]] if ends else expected
    reply = Reply(Letters(), [], end_ids={3, 7}, end_of_turn=ending)
    pieces = [reply.add(token) for token in tokens]
    assert reply.is_ended == (3 in tokens or bool(ends))
    pieces.append(reply.finish())
    assert "".join(pieces) == reply.text == Letters().decode(expected)
    assert reply.tokens == len(expected)


@given(st.text("ab\N{GRINNING FACE}", max_size=20), st.lists(st.text("ab\N{GRINNING FACE}", max_size=3), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    reply = Reply(BytesTokenizer(), [], stops=stops)
    for token in text.encode():
        reply.add(token)
    reply.finish()
    stops = [stop for stop in stops if stop]
    until = (text[:length] for length in range(len(text) + 1))
    expected = next((start for start in until if any(stop in start for stop in stops)), text)
    for stop in stops:
        expected = expected.partition(stop)[0]
    assert reply.text == expected


@pytest.fixture(scope="module")
def learned() -> HuggingFaceTokenizer:
    return train_tokenizer(iter(["a b c, the cat sat on the mat; né à la carte " * 20]), 300)


@settings(max_examples=50)
@given(st.text(alphabet=string.ascii_letters + " néà€\N{GRINNING FACE}\n", max_size=40), st.booleans())
def test_streamed_pieces_make_up_the_text_and_split_no_character(
    learned: Tokenizer, text: str, is_learned: bool
) -> None:
    tokenizer = learned if is_learned else BytesTokenizer()
    prompt = [int(token) for token in tokenizer.encode("the cat né")]
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.add(int(token)) for token in tokenizer.encode(text)]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join([*pieces, stream.rest()]) == text


def test_invalid_bytes_are_shown_as_replacement_characters() -> None:
    stream = TextStream(BytesTokenizer(), [])
    assert "".join(stream.add(token) for token in [0xFF] * 40) + stream.rest() == "\N{REPLACEMENT CHARACTER}" * 40


def test_question_is_rendered_by_the_template_with_its_end_of_turn() -> None:
    tokenizer = BytesTokenizer()
    ids, end_of_turn = ask(CHATML, tokenizer, ["how?"])
    assert tokenizer.decode(ids) == "<|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(end_of_turn) == "<|im_end|>"


# the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    argv = overrides(
        text, folder, "trainer.steps=12", "trainer.micro_batch=12", "checkpoint.every=6", "optim.lr=0.02",
        "model.max_sequence_length=90",
    )  # fmt: skip
    assert run_here(argv).code == 0
    return folder


def files_of(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_the_command_writes_what_transformers_writes(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    before = files_of(run_dir)
    assert main(["generate", f"run.dir={run_dir}", "prompt=lorem ip", "tokens=50", "temperature=0", "device=cpu"]) == 0
    printed = capsys.readouterr()
    assert files_of(run_dir) == before, "nothing of the run is touched"
    assert main(["export", f"run.dir={run_dir}", f"out={tmp_path / 'model'}"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    asked = tokenizer("lorem ip", return_tensors="pt")
    expected = model.generate(**asked, do_sample=False, max_new_tokens=50, pad_token_id=0)
    assert printed.out == tokenizer.decode(expected[0], skip_special_tokens=True) + "\n"
    assert "step-00000012, fp32 on cpu" in printed.err
    assert "the model was trained on 32 tokens at a time" in printed.err


def test_text_ends_at_each_end_token_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    files = hugging_face_files(BytesTokenizer())  # its own end is 256
    for name in files:
        (tmp_path / name).write_text(files[name])
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=8, num_hidden_layers=1, intermediate_size=8, num_attention_heads=1,
        max_position_embeddings=64, eos_token_id=256,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # writes "a", "b", "c", ... after "a"
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight[97:105] = torch.eye(8)
        model.lm_head.weight[98:105] = torch.eye(8)[:7]
    model.save_pretrained(tmp_path)

    def written(**settings: Any) -> str:
        for name, ends in settings.items():
            path = tmp_path / f"{name}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
        assert main(["generate", str(tmp_path), "prompt=a", "tokens=5", "temperature=0"]) == 0
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        new = theirs.generate(torch.tensor([[97]]), do_sample=False, max_new_tokens=5, pad_token_id=0)[0].tolist()
        text = capsys.readouterr().out.rstrip("\n")
        assert text == bytes(new[: -1 if new[-1] in theirs.generation_config.eos_token_id else None]).decode()
        return text

    assert written(generation_config=[256, 103]) == "abcdef"
    assert written(generation_config=[256, 101, 102], config=[256, 98]) == "abcd"
    (tmp_path / "generation_config.json").unlink()
    assert written(config=[100, 256]) == "abc"


def test_the_seed_decides_and_an_earlier_checkpoint_writes_something_else(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(*more: str) -> str:
        assert main(["generate", f"run.dir={run_dir}", "prompt=sed ", "tokens=30", *more]) == 0
        return capsys.readouterr().out

    assert text() == text() == text("seed=1", "temperature=0.8", "top_p=1", "checkpoint=12", "precision=fp32")
    assert len({text(), text("seed=2"), text("checkpoint=6"), text("temperature=3")}) == 4


def test_each_prompt_of_a_file_gets_the_text_that_it_gets_alone(
    run_dir: Path, tmp_path: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["sed ", "lorem ipsum dolor", "a\u2028b\f", "né", "consectetur "]  # a line ends only with \n
    (tmp_path / "a.txt").write_text("\n\n".join(prompts))
    rows = [json.dumps({"prompt": prompt, "id": 3}, ensure_ascii=False) for prompt in prompts]
    (tmp_path / "a.jsonl").write_text("\r\n".join(rows))
    words = ["generate", str(run_dir), "tokens=30"]

    def texts(printed: str) -> list[str]:
        rows = [json.loads(line) for line in printed.split("\n") if line.startswith("{")]
        assert [row["prompt"] for row in rows] == prompts
        return [row["text"] for row in rows]

    assert main([*words, f"prompts={tmp_path / 'a.txt'}"]) == 0
    found = texts(capsys.readouterr().out)
    assert len({*found}) == 5
    assert main([*words, "prompt=sed "]) == 0
    assert capsys.readouterr().out == f"sed {found[0]}\n"  # the first has the random numbers of a single prompt
    words += [f"prompts={tmp_path / 'a.jsonl'}", "rows=2", "parallel=fsdp"]
    first, second = cluster.run(2, "serried.cli:main", arguments=words)
    assert texts(first.printed) == found
    assert "{" not in second.printed


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["prompts=absent.txt"],
            "prompts=absent.txt: No such file or directory; use a file with a prompt on each line",
        ),
        (["prompts=empty.txt"], "prompts=empty.txt has no prompt; write one on each line"),
        (["prompts=a.jsonl"], 'prompts=a.jsonl: line 2 has no prompt; write {"prompt": "..."} on each line'),
        (["prompts=half.jsonl"], "prompts=half.jsonl: line 1 contains an unpaired surrogate (half a character); fix"),
        (["prompts=long.txt"], "the prompt 2 has 95 tokens and leaves no room within model.max_sequence_length=90"),
        (["prompts=a.jsonl", "prompt=b"], "prompt=b and prompts=a.jsonl are both given; keep one"),
        (["rows=2"], "rows=2 has no effect on a single prompt; use prompts=FILE"),
        (["prompts=a.jsonl", "rows=0"], "rows=0 is not a whole number from 1 to"),
    ],
)
def test_file_of_prompts_that_cannot_be_used_is_refused(
    words: list[str], reason: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "long.txt").write_text("a\n" + "b" * 95)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (tmp_path / "half.jsonl").write_text(r'{"prompt": "\ud83d"}')
    assert main(["generate", str(run_dir), *words]) == 78
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"error: {reason}" in printed.err


def test_generation_ends_at_the_maximum_sequence_length(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", f"run.dir={run_dir}", f"prompt={'x' * 80}", "temperature=0", "tokens=50"]) == 0
    assert "after 10 tokens" in (printed := capsys.readouterr().err)
    assert "model.max_sequence_length=90" in printed
    assert main(["generate", f"run.dir={run_dir}", f"prompt={'x' * 90}"]) == 78
    assert capsys.readouterr().err.startswith(
        "error: the prompt has 90 tokens and leaves no room within model.max_sequence_length=90"
    )


def test_generate_uses_the_chat_template_of_a_run_on_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = tmp_path / "chats.jsonl"
    row = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes %d"}]}\n'
    chats.write_text("".join(row % number for number in range(40)))
    argv = tiny_overrides(tmp_path, tmp_path / "run", "recipe=sft", f"data.path={chats}", "data.sequence_length=96")
    argv += ["data.packing=best_fit", "trainer.eval_batches=1", "data.validation_fraction=0.3"]
    assert run_here([word for word in argv if word != "data=text"]).code == 0
    asked: list[str] = []

    def replied(_model: Any, prompts: list[list[int]], _limits: list[int], how: Decoding) -> list[list[int]]:
        asked.append(BytesTokenizer().decode(prompts[0]))
        tokens = list(b"aye<|im_<|im_end|>more")
        return [tokens[: next(count for count, token in enumerate(tokens, 1) if not how.goes_on(0, token))]]

    monkeypatch.setattr(DistributedModel, "generate", replied)
    capsys.readouterr()
    assert main(["generate", f"run.dir={tmp_path / 'run'}", "prompt=hi"]) == 0
    assert capsys.readouterr().out == "aye<|im_\n"
    first = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert asked == [first]

    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\nand?\n"))
    assert main(["chat", f"run.dir={tmp_path / 'run'}"]) == 0
    assert capsys.readouterr().out == "aye<|im_\naye<|im_\n"
    then = "aye<|im_<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert asked[1:] == [first, first + then]
    for errors in ("strict", "surrogateescape"):  # as in UTF-8, and in the locale C
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors))
        assert main(["chat", f"run.dir={tmp_path / 'run'}"]) == 78
        assert "\nerror: the message is not UTF-8 text; " in "\n" + capsys.readouterr().err


@pytest.mark.parametrize("tokenizer", ["chars", "train"])
def test_tokenizer_trained_on_the_text_is_saved_with_the_model(
    tokenizer: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [f"data.tokenizer={tokenizer}", *(["data.vocab_size=300"] if tokenizer == "train" else [])]
    assert run_here(tiny_overrides(text, tmp_path / "run", *more, "model.vocab_multiple=64")).code == 0
    capsys.readouterr()
    assert main(["generate", f"run.dir={tmp_path / 'run'}", "prompt=lorem", "tokens=5"]) == 0
    assert capsys.readouterr().out.startswith("lorem")
    if tokenizer == "chars":
        assert main(["generate", f"run.dir={tmp_path / 'run'}", "prompt=Ω"]) == 78
        assert "character 'Ω'" in capsys.readouterr().err


def test_bare_path_of_run_checkpoint_and_exported_model_gives_the_same_text(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run_dir), f"out={tmp_path / 'model'}"]) == 0
    capsys.readouterr()
    texts = []
    for place in (run_dir, run_dir / "checkpoints" / "step-00000012", tmp_path / "model"):
        assert main(["generate", str(place), "prompt=lorem", "tokens=20", "seed=3"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] != ""
    weights = tmp_path / "model/model.safetensors"
    tensors = load_file(weights)
    save_file({name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}, weights)
    assert main(["generate", str(tmp_path / "model")]) == 78
    assert "error: the logits of the model are NaN" in capsys.readouterr().err


@pytest.mark.parametrize("rows", ['"many"', "-1", "1.5", "null", "[]", "{}", "1" + "0" * 30, "1" * 5000, "NaN"])
def test_saved_model_with_an_invalid_vocabulary_size_is_refused(run_dir: Path, tmp_path: Path, rows: str) -> None:
    from serried.configs.hugging_face.model_folder import embedded_tokens

    saved = next((run_dir / "checkpoints").iterdir())
    keys = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(keys).replace('"vocab_size": 257', f'"vocab_size": {rows}'))
    with pytest.raises(UserError, match=r"config\.json.*; use another checkpoint$") as refused:
        embedded_tokens(tmp_path)
    assert len(str(refused.value)) < 400


def test_a_damaged_checkpoint_writes_nothing(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    shutil.copytree(run_dir, tmp_path / "run")
    weights = next((tmp_path / "run" / "checkpoints" / "step-00000012").glob("model*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert main(["generate", f"run.dir={tmp_path / 'run'}"]) == 78
    assert "has checksum" in capsys.readouterr().err


def test_the_sample_at_the_end_of_a_run_is_the_same_under_sharding(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    more = ["trainer.steps=3", "trainer.sample_tokens=12", "trainer.global_batch=4", "trainer.micro_batch=2"]
    samples = []
    for ranks, parallel in (
        (1, ["parallel=single"]),
        (2, ["parallel=fsdp"]),
        (2, ["parallel=fsdp", "parallel.tensor=2"]),
    ):
        folder = tmp_path / str(len(samples))
        argv = overrides(text, folder, *parallel, *more)
        cluster.run(ranks, "testing.runs:train_small", argv=argv)
        log = (folder / "log" / "rank-0.log").read_text()
        samples.append([line[20:] for line in log.splitlines() if "  | " in line])
        assert metrics(folder, "stop")[-1]["state"] == "finished"
    assert samples[0] == samples[1] == samples[2] != []
