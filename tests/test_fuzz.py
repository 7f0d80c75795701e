"""Hostile configurations: whatever is typed, the program plans a run or refuses in one line."""

import random

import pytest

from serried.configs.help import choices_of
from serried.configs.keys import all_keys
from serried.program import main

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
@pytest.mark.parametrize("seed", range(10))
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
