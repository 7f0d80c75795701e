"""Every command of the quickstart and the tutorials runs, in the order of the page, on miniature data and models."""

import json
import re
import shlex
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from testing.forked_runs import typed
from testing.rank_pool import ROOT
from testing.runs import write_text
from testing.s3_server import S3Server
from tests.cli.docs.test_docs import BLOCK
from tests.runs.fine_tuning.test_sft import write_chats
from tests.support.chat_templates import QWEN3

PAGES = ("quickstart", *sorted(f"tutorials/{path.stem}" for path in (ROOT / "docs/tutorials").glob("*.md")))
NOT_RUN = ("cd", "echo", "git", "pip", "python3", "scancel", "source")
SMALL = (
    "model.dim=32", "model.layers=1", "model.heads=2", "data.sequence_length=32", "trainer.eval_batches=1",
    "trainer.sample_tokens=4", "trainer.global_batch=8", "trainer.micro_batch=4",
)  # fmt: skip


def blocks(page: str, language: str) -> list[str]:
    """Return the content of the blocks in ``language``."""
    text = (ROOT / f"docs/{page}.md").read_text("utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [content for named, content in found if named == language]


def commands(page: str) -> list[list[str]]:
    """Return the words of each command in blocks that name no language."""
    lines = "".join(blocks(page, "")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def shortened(words: list[str], where: Path) -> list[str]:
    """Return the arguments of Python for the command ``words``: fewer steps, small sizes, and a plan for many GPUs."""
    program, *rest = words
    arguments = ["-m", "serried"] if program == "serried" else []
    for word in rest:
        word = re.sub(r"^trainer\.steps=\d+$", "trainer.steps=4", word)
        word = re.sub(r"^trainer\.stop_at=\d+$", "trainer.stop_at=2", word)
        word = re.sub(r"^profile\.steps=.*", "profile.steps=[2,3]", word)
        is_glob = "*" in word and "=" not in word
        arguments += sorted(str(path.relative_to(where)) for path in where.glob(word)) if is_glob else [word]
    if words[:2] == ["serried", "plan"]:
        arguments.append("plan.mode=formula")
    is_plan = {"dry_run=true", "slurm.dry_run=true", "--help"} & {*arguments} or program == "serried"
    if "launch.processes=8" in arguments and not is_plan:
        return [*arguments, "dry_run=true"]
    if is_plan or "use_model.py" in arguments:
        return arguments
    short = [] if any(word.startswith(("trainer.steps=", "trainer.epochs=")) for word in rest) else ["trainer.steps=4"]
    sizes = SMALL if "train.py" in arguments and not any("recipe=" in word for word in rest) else ()
    return [*arguments, *short, *sizes, "launch.device=cpu"]


def test_commands_are_parsed_from_pages() -> None:
    for page in PAGES:
        found = commands(page)
        assert {words[0] for words in found} <= {"python", "serried", *NOT_RUN}, page
        assert sum(words[0] not in NOT_RUN for words in found) >= 5, page


def write_agent_chats(page: str, file: Path) -> None:
    """Write conversations that begin like the example with tools on ``page``, if it has one."""
    rows = [row for block in blocks(page, "json") if "tools" in (row := json.loads(block))]
    lines = [json.dumps(row).replace("is 42", f"is 42, {number}") for row in rows for number in range(24)]
    file.write_text("\n".join(lines), "utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen commands, on a busy machine
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_tutorial_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() if page == "tutorials/spot" else nullcontext() as server:
        for name, value in (server.environment if server else {}).items():
            monkeypatch.setenv(name, value)
        _run_commands(page, tmp_path)


def _run_commands(page: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "train.py", tmp_path)
    write_text(tmp_path / "books")
    write_chats(tmp_path / "chats.jsonl", 24)
    write_agent_chats(page, tmp_path / "agent.jsonl")
    for match in BLOCK.finditer((ROOT / f"docs/{page}.md").read_text("utf-8")):
        (tmp_path / match["name"]).write_text(match["code"], "utf-8")
    # The model to fine-tune, and the run that would be in the queue.
    base = ["train.py", "trainer.steps=1", "trainer.eval_every=0", "launch.device=cpu", "run.name=long", *SMALL]
    for arguments in (base, ["-m", "serried", "export", "runs/long", "out=models/base"]):
        done = typed(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    if page == "tutorials/finetune":
        (tmp_path / "models/base/chat_template.jinja").write_text(QWEN3, "utf-8")
    if page != "tutorials/slurm":
        shutil.rmtree(tmp_path / "runs/long")
    printed = ""
    for words in commands(page):
        if words[0] in NOT_RUN or words[:2] == ["serried", "preflight"]:  # test_slurm.py has a cluster
            continue
        done = typed(*shortened(words, tmp_path), cwd=tmp_path)
        assert done.returncode == (75 if any("stop_at=" in word for word in words) else 0), (words, done.stderr)
        printed += done.stdout
    for shown in blocks(page, "text"):
        assert shown in printed
