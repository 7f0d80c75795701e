"""The command ``serried``, as it is typed."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from serried.cli import main
from serried.launch.sweep.sweep_table import Outcome, write_summary
from serried.trainer.checkpoint.manifest import MANIFEST
from testing.forked_runs import typed
from testing.rank_pool import ROOT, Cluster
from testing.runs import overrides, weights


def serried(*arguments: str, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return typed("-m", "serried", *arguments, cwd=where)


@pytest.fixture(scope="module")
def run_dir(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    argv = overrides(text, folder, "parallel=fsdp", "trainer.steps=4", "trainer.micro_batch=9", "checkpoint.every=2")
    cluster.run(2, "testing.runs:train_small", argv=argv)
    return folder


@pytest.fixture
def refused(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], str]:
    """What a mistaken command prints; typed in a folder of its own, with ``{run}`` for a run."""
    monkeypatch.chdir(tmp_path)

    def type_it(arguments: list[str]) -> str:
        assert main([word.replace("{run}", str(run_dir)) for word in arguments]) == 78
        return capsys.readouterr().err

    return type_it


def test_an_exported_model_and_its_tokenizer_open(run_dir: Path, tmp_path: Path) -> None:
    done = serried("export", f"run.dir={run_dir}", "out=model", "dtype=bf16", "shard_size=20kB", where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step-00000004" in done.stdout
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    for name, tensor in model.state_dict().items():
        assert tensor.equal(weights(run_dir)[name].to(torch.bfloat16)), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("né")["input_ids"] == list("né".encode())
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    assert not {"state.json", "MANIFEST.json"} & {path.name for path in (tmp_path / "model").iterdir()}


def test_an_earlier_step_can_be_exported(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", f"run.dir={run_dir}", f"out={tmp_path / 'model'}", "checkpoint=2"]) == 0
    assert "step-00000002" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["exprot"], "serried export"),
        (["exprot", "--help"], "serried export"),
        (["help", "exprot"], "serried export"),
        (["--help", "exprot"], "serried export"),
        (["recipes", "recipe=tiny"], "serried plan recipe=tiny"),
        (["plan", "trainer.stps=3"], "trainer.steps=3"),
        (["export", "run.dir={run}"], "out=FOLDER, the folder to write, is missing"),
        (["export", "out=x", "run.dir=nowhere"], "there is no folder nowhere; runs in runs: runs/run"),
        (["status", "run.dir=nowhere"], "there is no run in nowhere; runs in runs: runs/run"),
        (["evaluate", "run.dir=runs/rum"], "there is no folder runs/rum; did you mean runs/run?"),
        (["status", "run.name=rum"], "there is no run in runs/rum; did you mean runs/run?"),
        (["export", "out=x", "run.dri={run}"], "did you mean run.dir="),
        (["export", "out=x", "run.dir={run}", "dtype=int8"], "fp32, bf16, fp16"),
        (["export", "run.dir={run}", "out=x", "out"], "'out' is neither key=value"),
        (
            ["export", "out=x", "run.dir={run}", "checkpoint=3"],
            "there is no checkpoint of step 3; use checkpoint=2 or checkpoint=4",
        ),
        (["export", "out=x", "run.dir={run}", "checkpoint=last"], "checkpoint=last is not a step"),
        (["export", "out=x", "run.dir={run}", "shard_size=0"], "shard_size=0"),
        (["export", "out={run}", "run.dir={run}"], "not empty"),
        (["export", "out=x", "{run}", "checkpoint=3"], "use checkpoint=2 or checkpoint=4"),
        (["export", "out=x", "run", "checkpoint=3"], "use checkpoint=2 or checkpoint=4"),
        (["export", "out=x", "{run}/checkpoints", "checkpoint=3"], "use checkpoint=2 or checkpoint=4"),
        (["export", "out=x", "plain"], "plain is already a plain model folder; export a run"),
        (["export", "out=x", "adapters"], "adapters contains adapters without a run; export a run"),
        (["generate", "nosuch"], "'nosuch' is neither key=value nor an existing folder"),
        (["evaluate", "nosuch"], "'nosuch' is neither key=value nor an existing folder"),
        (["evaluate", "--config-dir"], "--config-dir needs a folder"),
        (
            ["export", "out=x", "{run}/checkpoints/step-00000002", "checkpoint=2"],
            "is a single model, not a run; leave it out",
        ),
        (["generate", "{run}", "max_new_tokens=20"], "did you mean tokens=20?"),
        (["generate", "{run}", "--max-new-tokens=20"], "write tokens=20"),
        (["generate", "run.dir={run}", "--prompt", "two words"], "have no dashes; write 'prompt=two words'"),
        (["generate", "run.dir=unsaved"], "the run in unsaved has no checkpoint yet"),
        (["evaluate", "run.dir=unsaved"], "the run in unsaved has no checkpoint yet"),
        (["export", "run.dir=unsaved", "out=x"], "the run in unsaved has no checkpoint yet"),
        (["evaluate", "run.dir=empty"], "the run in empty has no checkpoint yet"),
        (["evaluate", "run.dir=a-sweep"], "a-sweep is the folder of a sweep; its runs are {run}\n"),
        (["evaluate", "run.dir=here"], "there is no run with a checkpoint in here\n"),
        (["generate", "{run}", "temperature=warm"], "temperature=warm is not a number from 0 to 1000"),
        (["generate", "{run}", "temperature=-1"], "temperature=-1 is not"),
        (["generate", "{run}", "top_p=0"], "use temperature=0 for the most likely"),
        (["generate", "{run}", "top_p=1.5"], "top_p=1.5 is not"),
        (["generate", "{run}", "tokens=2.5"], "tokens=2.5 is not a whole number"),
        (["generate", "{run}", "tokens=0"], "tokens=0 is not"),
        (["generate", "{run}", "temprature=1"], "did you mean temperature=1"),
        (["generate", "{run}", "checkpoint=7"], "use checkpoint=2 or checkpoint=4"),
        (["generate", "{run}", "model.dim=64"], "the run was trained with model.dim=32"),
        (["generate", "{run}", "optim.lr=1"], "optim.lr=1 has no effect here"),
        (["generate", "{run}", "precisoin=bf16"], "did you mean precision=bf16"),
        (["generate", "{run}", "precision=bf17"], "no precision 'bf17'"),
        (["generate", "{run}", "device=tpu"], "launch.device=tpu (command line) is not one of auto, cpu, cuda"),
        (["chat", "{run}"], "trained on plain text, not on conversations; use serried generate"),
        (["evaluate", "{run}", "json=yes"], "json=yes is not true or false"),
        (["evaluate", "{run}", "checkpoint=3"], "use checkpoint=2 or checkpoint=4"),
        (["evaluate", "{run}", "model.layers=9"], "the run was trained with model.layers=3"),
        (["evaluate", "{run}", "recipe=llama1b"], "the run was trained with recipe=tiny"),
        (["evaluate", "{run}", "data.tokenizer=chars"], "the run was trained with data.tokenizer=bytes"),
        (["evaluate", "{run}", "trainer.steps=9"], "trainer.steps=9 has no effect here"),
        (["evaluate", "{run}", "trainer.eval_batchs=9"], "did you mean trainer.eval_batches=9"),
        (["evaluate", "{run}", "launch=local"], "launch=local has no effect here"),
        (["evaluate", "{run}", "data=text", "data.path=nowhere.txt"], "nowhere.txt"),
        (["evaluate", "{run}", "data=mixture", "data.sources.a.name=stdlib"], "one source at a time"),
        (["evaluate", "{run}", "trainer.eval_batches=0"], "trainer.eval_batches=0 (command line) is out of range"),
        (["evaluate", "{run}", "chekpoint=3"], "did you mean checkpoint=3"),
        (["evaluate", "{run}", "parallel=fsdp", "parallel.shard=2"], "the mesh needs 2 processes"),
        (["report", "nowhere"], "there is no folder nowhere"),
        (["report", "run"], "did you mean runs/run?"),
        (["report", "here"], "is not a run"),
        (["report", "{run}", "out=."], "out=. is a folder"),
        (["report", "{run}", "out=nowhere/x.html"], "cannot write out=nowhere/x.html: No such file or directory"),
        (["report", "{run}", "out=ftp://host/x.html"], "out=ftp://host/x.html is an address, but only local files"),
        (["export", "{run}", "out=ftp://host/model"], "out=ftp://host/model is an address, but only local files"),
        (["report", "{run}", "out=s3://"], "no bucket in out=s3://; use s3://BUCKET/PATH"),
        (["plan", "calibrate", "out=s3://bucket/rates"], "out=s3://bucket/rates is an address, but only local files"),
        (["status", "run.dir=ftp://bucket/run"], "run.dir=ftp://bucket/run (command line) is an address"),
        (["report", "{run}", "oot=x"], "did you mean out=x"),
        (["report", "{run}", "--out"], "--out: keys have no dashes; write out=OUT"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(
    arguments: list[str], expected: str, run_dir: Path, tmp_path: Path, refused: Callable[[list[str]], str]
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run").symlink_to(run_dir)
    unsaved = ("unsaved/status.json", "empty/config.yaml", "empty/checkpoints/none", "here/slurm/script")
    for file in (*unsaved, "plain/config.json", "adapters/adapter_config.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    write_summary(tmp_path / "a-sweep", ["optim.lr"], [Outcome(run_dir, {"optim.lr": "0.1"}, "finished")])
    printed = refused(arguments)
    assert printed.startswith("error: ")
    assert len(printed.splitlines()) == 1
    assert expected.replace("{run}", str(run_dir)) in printed
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["help"]])
def test_help_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "  export " in printed
    assert "serried COMMAND --help" in printed
    assert "plan, prepare, preflight, submit and status take the overrides of train.py" in printed
    assert len(printed.splitlines()) <= 60


@pytest.mark.parametrize("arguments", [["export", "--help"], ["export", "run.dir=x", "-h"], ["help", "export"]])
def test_help_of_a_command_shows_only_that_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: serried export RUN out=PLACE")
    assert "shard_size   largest file" in printed
    assert "tokenize the data" not in printed


@pytest.mark.parametrize("command", ["generate", "evaluate", "export", "report"])
@pytest.mark.parametrize("named", [[], ["run.dir=runs/tny"]], ids=str)
def test_existing_runs_are_named_if_the_run_is_not_found(
    command: str, named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("books", "poems", "a-search/trial-0"):
        saved = Path("runs", name, "checkpoints", "step-00000001")
        saved.mkdir(parents=True)
        (saved / MANIFEST).touch()
        Path("runs", name, "config.yaml").touch()
    trials = [Outcome(Path("runs/a-search/trial-0"), {"optim.lr": "0.1"}, "finished")]
    write_summary(Path("runs/a-search"), ["optim.lr"], trials)
    write_summary(Path("runs/a-grid"), ["optim.lr"], [Outcome(Path("runs/books"), {"optim.lr": "0.1"}, "finished")])
    Path("runs/submitted/slurm").mkdir(parents=True)
    if command != "report":
        Path("runs/failed").mkdir()
        Path("runs/failed/status.json").touch()
    assert main([command, *named]) == 78
    printed = capsys.readouterr().err
    assert "runs in runs: runs/books runs/poems runs/a-search/trial-0\n" in printed
    assert "there is no folder runs/tny" in printed if named else f"serried {command} needs a run" in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "tokns=3", "precisoin=bf16", "--device", "cpu"], ["tokens=3", "device=cpu"]),
        (["evaluate", "run.dir={run}", "trainer.stps=3", "model.dim=3"], ["trainer.stps=3", "model.dim=3"]),
        (["report", "otu=x", "run.dri=x"], ["out=x", "run.dir=x"]),
    ],
    ids=lambda value: value[0],
)
def test_several_mistakes_are_reported_at_once(
    arguments: list[str], expected: list[str], refused: Callable[[list[str]], str]
) -> None:
    first, *lines = refused(arguments).splitlines()
    assert first == f"error: {len(expected)} mistakes:"
    assert [part in line for part, line in zip(expected, lines, strict=True)] == [True] * len(expected)


def test_requests_to_a_run_in_a_folder_are_in_its_control_file(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", str(run_dir)]) == 78
    assert f"no process is training in {run_dir}, so there is nothing to stop" in capfd.readouterr().err
    ended = (run_dir / "status.json").read_text()
    (run_dir / "status.json").write_text(ended.replace("finished", "running"))
    assert main(["save", str(run_dir)]) == 0
    assert (run_dir / "control").read_text() == "save\n"
    assert main(["stop", f"run.dir={run_dir}"]) == 0
    assert (run_dir / "control").read_text() == "stop\n"
    (run_dir / "control").unlink()
    (run_dir / "status.json").write_text(ended)
    capfd.readouterr()
    assert main(["logs", str(run_dir)]) == 0
    assert capfd.readouterr().out == (run_dir / "log/rank-0.log").read_text()
    assert main(["fetch", str(run_dir), "out=x"]) == 78
    assert "serried fetch needs a run in a bucket; e.g. serried fetch s3://BUCKET/runs/NAME" in capfd.readouterr().err
