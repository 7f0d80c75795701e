"""Hostile configurations and run folders: whatever is typed or found, the program works or refuses in one line."""

import random
from pathlib import Path

import pytest

from serried.cli import main as serried
from serried.configs.help import choices_of
from serried.configs.messages.keys import all_keys
from serried.program import main
from testing.runs import run_here, tiny_overrides

GROUPS = choices_of()
VALUES = [
    "", "null", "true", "false", "0", "1", "-1", "2", "7", "1e3", "0.5", "1e18", "9e18", "1e300", "1e-300", "-1e300",
    "nan", "inf", "9223372036854775808", "[]", "[1]", "[1,2]", "[0.9,0.95]", "{}", "{a:1}", "a", "x" * 300, "../..",
    "/", "~", "${recipe}", "${nope}", "${oc.env:HOME}", "${", "'", '"', "a=b", "a,b", "1,2", "\n", "\x00", "é",
    "\udc80", "日本", "%s", "{value}", "***", "!!python/object:os.system", "&a *a", "1k", "1M", "bytes", "chars",
    "train", "never", "must", "auto", "cuda", "[[[[]]]]", "range(1,3)", "interval(0,1)", "tag(a,b)", "???",
]  # fmt: skip
SYNTAX = [
    "{key}={value}", "+{key}={value}", "++{key}={value}", "~{key}", "~{key}={value}", "{key}", "{key}=", "={value}",
    "--{key}={value}", "--{key}", "{key}:{value}", "{key}.x={value}", "{key}x={value}", "{value}", "{key}[0]={value}",
]  # fmt: skip


def command_line(random_: random.Random) -> list[str]:
    words = []
    for _ in range(random_.choice([1, 1, 1, 2, 3])):
        key = random_.choice([*all_keys(), *GROUPS, "nowhere.key", "data.sources.a.weight", "data.validation.b.path"])
        syntax = SYNTAX[0] if random_.random() < 0.7 else random_.choice(SYNTAX)
        value = random_.choice([*VALUES, *GROUPS.get(key, ())])
        words.append(syntax.replace("{key}", key).replace("{value}", value))
    return words


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_mutated_command_line_is_planned_or_refused_without_a_traceback(
    seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    random_ = random.Random(seed)
    for _ in range(50):
        words = [*command_line(random_), "dry_run=true"]
        code = main(words)
        printed, refused = capfd.readouterr()
        assert code in (0, 78), words
        assert "Traceback" not in printed + refused, words
        if code == 78:
            assert sum(line.startswith("error: ") for line in refused.splitlines()) == 1, (words, refused)


ODD_CONTENT = (
    b"", b"[]", b"3", b"null", b"\x00", b"\xff\xfe", b"[" * 5000, b"{" * 5000, b"a: &a [*a]", b"- " * 500,
    b"{1: {2: 3}}", b'{"event": "step", "step": 1e999}', b'{"event": "start", "mesh": 3, "hosts": {}, "time": "x"}',
    b"9" * 5000,
)  # fmt: skip


def damaged(content: bytes, random_: random.Random) -> bytes:
    place = random_.randrange(len(content) + 1)
    match random_.randrange(5):
        case 0:
            return random_.choice(ODD_CONTENT)
        case 1:
            return content[:place]
        case 2:
            return content[:place] + bytes([random_.randrange(256)]) + content[place + 1 :]
        case 3:
            return content[:place] + random_.choice(ODD_CONTENT) + content[place:]
        case _:
            return content[place:] + content[:place]


@pytest.mark.slow
def test_mutated_run_folder_is_reported_and_refused_in_one_line(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = tiny_overrides(text, tmp_path / "run")
    assert run_here([*argv, "trainer.stop_at=2"]).code == 75
    names = ("config.yaml", "status.json", "metrics.jsonl", "environment.json")
    good = {name: (tmp_path / "run" / name).read_bytes() for name in names}
    random_ = random.Random(1)
    capfd.readouterr()
    for _ in range(100):
        name = random_.choice(names)
        for file, content in good.items():
            (tmp_path / "run" / file).write_bytes(damaged(content, random_) if file == name else content)
        odd = (tmp_path / "run" / name).read_bytes()[:200]
        for words in (["report", str(tmp_path / "run")], ["status", f"run.dir={tmp_path / 'run'}"]):
            assert serried(words) == 0, (name, odd)
        printed = "".join(capfd.readouterr())
        assert "Traceback" not in printed, (name, odd)
        assert "\x00" not in printed, (name, odd)
