"""``serried.fit``, ``serried.load_model`` and a user's own task, from a folder outside the checkout."""

import importlib.util
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pandas
import pytest
import torch
from torch import nn

import serried
from serried import cli, program
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.plain_data import read_yaml
from serried.configs.schema.declaration import declaring
from serried.configs.schema.fields import Section
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.configs.schema.registry import optimizers, register_optimizer, tasks
from serried.runtime.console import Console
from serried.runtime.process import remember_flags, remember_words
from serried.runtime.session import Session
from serried.task_class import declaration
from serried.trainer.checkpoint.checkpoints import CHECKPOINTS
from serried.trainer.run_data import Data
from serried.trainer.task import task_for_run
from testing.forked_runs import typed
from testing.rank_pool import ROOT, Cluster
from testing.runs import different_tensors, losses, metrics, status, steps_saved

PUBLIC = [
    "Task", "TextTask", "Callback", "Run", "Event", "Inputs", "LossTerms", "ParallelPlan", "Section", "main", "fit",
    "load_model", "Result", "UserError", "TrainingFailed", "TrainingStopped", "register_model", "register_optimizer",
    "register_schedule", "register_source", "ModelFamily", "CausalLM",
]  # fmt: skip


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's script in a folder of its own."""
    return Path(shutil.copy(ROOT / "tests" / "support" / "own_task.py", tmp_path_factory.mktemp("own")))


def task_of(script: str | Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location("own_task", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_task"] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def fit(script: str, name: str, argv: list[str]) -> dict[str, Any]:
    """``serried.fit`` on this rank: how it ended, and which hooks were called."""
    task = task_of(script, name)()
    result = serried.fit(task, argv)
    return {"state": result.state, "step": result.step, "metrics": result.metrics, "called": task.called}


# A user's task --------------------------------------------------------------------------------------------------------


def test_task_with_two_losses_dict_batches_and_dropout_resumes_bitwise_and_has_one_curve(
    cluster: Cluster, script: Path, tmp_path: Path
) -> None:
    def run(ranks: int, name: str, *more: str) -> list[Any]:
        argv = [f"run.dir={tmp_path / name}", *more]
        answers = cluster.run(ranks, "tests.cli.test_api:fit", script=str(script), name="Points", argv=argv)
        return [answer.value for answer in answers]

    (whole,) = run(1, "whole")
    (stopped,) = run(1, "parts", "trainer.stop_at=3")
    assert (stopped["state"], stopped["step"]) == ("stopped", 3)
    (resumed,) = run(1, "parts")
    assert resumed["state"] == "finished"
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert not different_tensors(tmp_path / "parts", tmp_path / "whole")
    first, second = run(2, "ddp", "parallel=ddp")
    assert losses(tmp_path / "ddp") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    for kind in ("step", "eval"):
        for mine, theirs in zip(metrics(tmp_path / "ddp", kind), metrics(tmp_path / "whole", kind), strict=True):
            for key in ("loss", "class_loss", "size_loss", "accuracy"):
                assert mine[key] == pytest.approx(theirs[key], rel=1e-5), key
    assert set(whole["metrics"]) == {"class_loss", "size_loss", "accuracy"}
    assert first["metrics"] == second["metrics"] == pytest.approx(whole["metrics"], rel=1e-5)
    assert first["state"] == second["state"] == "finished"
    assert second["called"] == [], "hooks are called on rank 0 alone"
    named = ["accuracy", "class_loss", "loss", "size_loss"]
    steps = [["step", step, named] for step in range(1, 9)]
    evaluated = [["evaluate validation", step, named] for step in (4, 8)]
    saved = [[f"save step-{step:08d}", step, []] for step in (4, 8)]
    called = first["called"]
    assert called[0] == ["start", 0, []]
    assert called[-1] == ["end", 8, named]
    assert sorted(called[1:-1]) == sorted([*steps, *evaluated, *saved])
    assert [each for each in called if each in steps] == steps


@pytest.mark.parametrize("named", [True, False])
def test_batches_may_be_tuples_and_named_tuples(script: Path, tmp_path: Path, named: bool) -> None:
    result = serried.fit(
        task_of(script, "Tuples"),
        {"run": {"dir": tmp_path / "a=b,c"}, "task": {"named": named}, "trainer.steps": 3, "trainer.eval_every": 0},
    )
    assert (result.state, result.step, result.run_dir) == ("finished", 3, tmp_path / "a=b,c")
    assert result.validation is None
    assert result.loss == losses(result.run_dir)[-1]


def test_early_stopping_and_keep_best_follow_a_metric(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        f"run.dir={tmp_path}", "trainer.steps=12", "trainer.micro_batch=12", "trainer.eval_batches=1",
        "trainer.eval_every=2", "checkpoint.every=2", "checkpoint.keep=1", "trainer.early_stopping_patience=2",
        "checkpoint.keep_best=true", "checkpoint.best_metric=accuracy", "checkpoint.best_mode=max",
    ]  # fmt: skip
    task = task_of(script, "Scores")
    result = serried.fit(task, argv)
    assert (result.state, result.step) == ("finished", 8)
    assert result.metrics == pytest.approx({"accuracy": 0.7})
    assert steps_saved(tmp_path) == [4, 8]
    best = tmp_path / CHECKPOINTS / "step-00000004"
    assert (result.best, result.best_value) == (best, pytest.approx(0.9))
    printed = capsys.readouterr().out
    assert "; the best: checkpoints/step-00000004 (accuracy 0.9)\n" in printed
    assert "finished   8 steps, 96 samples" in printed
    assert status(tmp_path)["state"] == "finished"
    capsys.readouterr()
    assert serried.fit(task, argv).step == 8
    assert "Nothing to do" in capsys.readouterr().out


def test_command_that_takes_the_weights_of_an_own_module_alone_works_when_pasted(script: Path, tmp_path: Path) -> None:
    task = task_of(script, "Points")
    first = serried.fit(task, [f"run.dir={tmp_path / 'a'}", "trainer.steps=4"])
    other = [f"run.dir={tmp_path / 'b'}", "trainer.steps=4", "optim=sgd"]
    with pytest.raises(UserError, match="use its weights alone: ") as refused:
        serried.fit(task, [*other, f"checkpoint.resume={first.checkpoint}"])
    offered = shlex.split(str(refused.value).partition("its weights alone: ")[2].partition(", or ")[0])
    assert offered == [f"checkpoint.resume={first.checkpoint}", "checkpoint.weights_only=true"]
    assert serried.fit(task, [*other, *offered]).step == 4


# fit ------------------------------------------------------------------------------------------------------------------

TWICE = """
import gc, signal, sys
import serried
import torch, torch.distributed as dist
from own_task import Points
from serried.runtime.import_signals import ASKING

def settings():
    return (
        [signal.getsignal(number) for number in ASKING], signal.set_wakeup_fd(-1), gc.isenabled(),
        dist.is_initialized(), sys.excepthook,
        torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory, torch.get_rng_state().sum().item(),
    )

torch.set_num_threads(3)
gc.disable()
before = settings()
results = [serried.fit(Points, [f"run.dir={name}", "launch.threads=1"]) for name in ("first", "second")]
assert settings() == before, (settings(), before)
first, second = results
assert first.state == second.state == "finished"
assert (first.loss, first.validation, first.metrics) == (second.loss, second.validation, second.metrics)
model, again = (serried.load_model(path, task=Points) for path in (first.run_dir, second.checkpoint))
assert not model.training
assert all(a.equal(b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
print("all equal")
"""


def test_fit_twice_in_a_process_gives_one_result_and_leaves_its_settings(script: Path, tmp_path: Path) -> None:
    shutil.copy(script, tmp_path)
    done = typed("-c", TWICE, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all equal\n")


@pytest.mark.slow
def test_fit_trains_in_a_jupyter_kernel(script: Path, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    shutil.copy(script, tmp_path)
    cells = [
        "import serried\nfrom own_task import Points",
        "results = [serried.fit(Points, {'run.dir': f'run{n}', 'trainer.steps': 4}) for n in range(2)]",
        "assert results[0].loss == results[1].loss\nresults[1].state",
        "serried.fit(Points, {'run.dir': 'run0', 'trainer.stps': 4})",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    _, trained, state, mistake = (cell.outputs for cell in notebook.cells)
    assert "finished" in "".join(output.get("text", "") for output in trained)
    assert state[0]["data"]["text/plain"] == "'finished'"
    assert (mistake[0]["ename"], "trainer.steps=4" in mistake[0]["evalue"]) == ("UserError", True)
    assert mistake[0]["traceback"] == [f"error: {mistake[0]['evalue']}"], "one line, as on a command line"


class Tiny(serried.Task):
    """The smallest task."""

    defaults: ClassVar = {
        "trainer.steps": 2,
        "trainer.global_batch": 4,
        "trainer.micro_batch": 2,
        "trainer.eval_every": 0,
    }

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def dataset(self, split: str) -> list | None:
        return [torch.full((4,), float(i)) for i in range(20)] if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> serried.LossTerms:
        return serried.LossTerms(model(batch).square().sum(), len(batch))


class FromNumPy(Tiny):
    """Its samples have the dtype that NumPy and pandas give."""

    def dataset(self, split: str) -> list | None:
        return [numpy.full(4, float(i)) for i in range(20)] if split == "train" else None


def test_an_error_of_float64_samples_says_what_to_return(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Double") as error:
        serried.fit(FromNumPy, {"run.dir": tmp_path / "run"})
    assert "return samples with .float()" in error.value.__notes__[0]


class WithValidation(Tiny):
    """Validates on as many samples as ``samples``."""

    samples = 4

    def dataset(self, split: str) -> list | None:
        return super().dataset("train")[: self.samples] if split == "validation" else super().dataset(split)


class Asked(Session):
    """Keeps what ranks would compare."""

    def same_everywhere(self, what: str, value: str) -> None:
        self.compared = {**getattr(self, "compared", {}), what: value}


def test_ranks_compare_their_validation_data_which_a_resume_does_not() -> None:
    found = []
    for samples in (4, 5):
        task, session = task_for_run(WithValidation()), Asked((0, 0, 1, 1), torch.device("cpu"), LaunchSection())
        task.samples = samples
        found.append((Data(task, session, Console(False, 0)).fingerprint, session.compared))
    (first, compared), (second, others) = found
    assert first == second == compared["the training data"] == "list-20"
    assert compared["the validation data"] != others["the validation data"]


class Growing(Tiny):
    """With as many samples as one asks for."""

    samples = 20

    def dataset(self, split: str) -> list | None:
        return [torch.ones(4)] * self.samples if split == "train" else None


def test_other_data_of_an_own_task_are_allowed_as_the_refusal_says(tmp_path: Path) -> None:
    same = [f"run.dir={tmp_path / 'run'}", "trainer.steps=4"]
    serried.fit(Growing(), [*same, "trainer.stop_at=2"])
    grown = Growing()
    grown.samples = 40
    with pytest.raises(
        UserError, match=r"different data .* the same data, or checkpoint\.allow_changes=true to resume"
    ):
        serried.fit(grown, same)
    assert serried.fit(grown, [*same, "checkpoint.allow_changes=true"]).step == 4


class WrongDefault(Tiny):
    """With a mistyped key."""

    defaults: ClassVar = {"optim.lrr": 0.1}


class NoData(Tiny):
    """Without training data."""

    def dataset(self, split: str) -> None:
        del split


class NoLoss(Tiny):
    """Without a loss."""

    loss = serried.Task.loss


class NoSection(Tiny):
    """``Config`` is not a section."""

    class Config:
        """No section."""

        dim: int = 1


class Loader(Tiny):
    """Makes batches itself."""

    def dataset(self, split: str) -> Any:
        return torch.utils.data.DataLoader(super().dataset(split) or [])


class Unresolved(Tiny):
    """A key of a type that is defined nowhere."""

    class Config(serried.Section):
        """A key."""

        layers: "Layers" = 3  # type: ignore[name-defined]  # noqa: F821


class NoTerms(Tiny):
    """The loss is a mean, as other libraries want it."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch).loss_sum


class NegativeWeight(Tiny):
    """Would train away from the minimum."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch)._replace(weight=-1)


class Frame(Tiny):
    """Its data is a table of pandas, which has numbers for columns."""

    def dataset(self, split: str) -> Any:
        return pandas.DataFrame([[1.0, 2.0, 3.0, 4.0]] * 20) if split == "train" else None


class FloatLoss(Tiny):
    """The loss is a number, as for a log."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        terms = super().loss(model, batch)
        return terms._replace(loss_sum=terms.loss_sum.item())


class DetachedLoss(Tiny):
    """The loss has lost its graph."""

    def loss(self, model: nn.Module, batch: Any) -> serried.LossTerms:
        terms = super().loss(model, batch)
        return terms._replace(loss_sum=terms.loss_sum.detach())


class Ragged(Tiny):
    """Samples of different lengths."""

    def dataset(self, split: str) -> Any:
        return [torch.ones(4 + number % 2) for number in range(64)] if split == "train" else None


class Unlike(Tiny):
    """Samples of which two in a micro-batch differ."""

    defaults: ClassVar = {**Tiny.defaults, "trainer.global_batch": 16, "trainer.micro_batch": 16}

    class Config(serried.Section):
        second: str

    def dataset(self, split: str) -> Any:
        x = torch.ones(4)
        of = {"more": {"x": x, "y": 1}, "none": {"x": None}, "text": {"x": "abc"}, "tuple": (x,)}
        return [{"x": x}, of[self.config.second]] * 32 if split == "train" else None


class Nested(Unlike):
    """Samples with a list of dicts, one of which has another key in some samples."""

    class Config(serried.Section):
        pass

    def dataset(self, split: str) -> Any:
        x = torch.ones(4)
        return [([{"x": x}], 1), ([{"x": x, "y": 1}], 1)] * 32 if split == "train" else None


class PlainMetric(Tiny):
    """A metric is a mean."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch)._replace(metrics={"accuracy": 0.5})


class VectorMetric(Tiny):
    """A metric has one value for each sample."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch)._replace(metrics={"error": (torch.ones(4), 4)})


class NumberedMetric(Tiny):
    """A metric is named by a number."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch)._replace(metrics={5: (1, 1)})


class VectorWeight(Tiny):
    """The weight is a mask."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch)._replace(weight=torch.ones(len(batch)))


class OwnOptimizer(Tiny):
    """Takes a step with a second optimizer."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        super().loss(model, batch).loss_sum.backward()
        optimizer.step()
        return super().loss(model, batch)


class Splits(Tiny):
    """Returns all splits, as a DatasetDict of the library datasets."""

    def dataset(self, split: str) -> Any:
        del split
        return {"train": super().dataset("train"), "test": []}


class NoModel(Tiny):
    """Forgets to return it."""

    def build_model(self) -> Any:
        nn.Linear(4, 1)


class ChangingNames(Tiny):
    """Names of metrics differ between batches."""

    def loss(self, model: nn.Module, batch: Any) -> serried.LossTerms:
        return super().loss(model, batch)._replace(metrics={f"first_{int(batch[0, 0])}": (1, 1)})


class TakenName(Tiny):
    """A metric named as a value that every run records."""

    def loss(self, model: nn.Module, batch: Any) -> serried.LossTerms:
        return super().loss(model, batch)._replace(metrics={"lr": (1, 1)})


@pytest.mark.parametrize(
    ("task", "overrides", "expected"),
    [
        (Tiny, "trainer.steps=2", "must be a list of key=value strings or a dict, not 'trainer.steps=2'"),
        (Tiny, [2], "must be a list of key=value strings or a dict"),
        (Tiny, 5, "must be a list of key=value strings or a dict, not 5"),
        (Tiny, ["trainer.stepz=2"], r"unknown key trainer.stepz=2 .*did you mean trainer.steps=2\?$"),
        (Tiny, {"trainer": {"stepz": 2}}, r"did you mean trainer.steps=2\?$"),
        (Tiny, ["model.dim=3"], "unknown key model.dim=3 .*; --help lists the keys$"),
        (Tiny, ["model=tiny"], "model=tiny: this task defines its own model; leave it out$"),
        (Tiny, ["width"], "width: an override is key=value; e.g. trainer.steps=1000$"),
        (Tiny, ["launch=local"], "so launch=local is not supported; use serried.main"),
        (Tiny, ["dry_run=true"], "so dry_run=true is not supported; use serried.main"),
        (nn.Linear, [], "Linear is not a task; give a subclass of serried.Task"),
        (nn.Identity(), [], r"Identity\(\) is not a task; give a subclass of serried.Task"),
        (Loader, [], r"Loader.dataset\('train'\) returned a DataLoader; return the data set itself"),
        (Unresolved, [], "Unresolved.Config.layers: Layers is not supported as the type of a key"),
        (WrongDefault, [], r"optim.lrr=0.1 \(defaults of the task\); did you mean optim.lr=0.1"),
        (NoData, [], r"NoData.dataset\('train'\) returned None"),
        (NoLoss, [], r"NoLoss must define loss\(model, batch\)"),
        (NoSection, [], r"NoSection.Config is not a section; write: class Config\(serried.Section\)"),
        (NoTerms, [], r"must return serried.LossTerms\(loss_sum, weight\), .*; it returned Tensor of shape \[\]"),
        (NegativeWeight, [], r"loss\(\) returned the weight -1; return 0 or more"),
        (
            Frame,
            [],
            r"returned a DataFrame; return its rows: torch.tensor\(frame.to_numpy\(\)",
        ),
        (FloatLoss, [], "with loss_sum a scalar tensor; it returned a loss_sum of type float"),
        (DetachedLoss, [], r"loss\(\) returned a loss_sum without a gradient"),
        (PlainMetric, [], r"loss\(\) returned the metric accuracy as 0.5; return it as \(sum, weight\)"),
        (VectorMetric, [], r"the metric error with a value of shape \[4\]; return two numbers"),
        (NumberedMetric, [], "a metric with the name 5; use a string"),
        (VectorWeight, [], r"a weight of shape \[\d+\]; return one number, such as mask.sum\(\)"),
        (OwnOptimizer, [], r"loss\(\) called backward\(\); return the sum of all losses in serried.LossTerms"),
        (Splits, [], r"Splits.dataset\('train'\) returned a dict with the keys train, test; return a data set"),
        (Ragged, [], r"sample is of shape \[5\] in .*, but of shape \[4\] in .*, or define Ragged.collate\(samples\)"),
        (Unlike, ["task.second=more"], r"sample\['y'\] is missing in \d+ of 16 samples: dataset\[\d*[02468]\]"),
        (
            Unlike,
            ["task.second=none"],
            r"sample\['x'\] is (None|of shape \[4\]) in .*, but (None|of shape \[4\]) in data",
        ),
        (Unlike, ["task.second=text"], r"sample\['x'\] is .*a str .*or define Unlike.collate\(samples\)"),
        (Unlike, ["task.second=tuple"], r"sample is .*a tuple of 1 .*or define Unlike.collate\(samples\)"),
        (Nested, [], r"sample\[0\]\[0\]\['y'\] is missing in"),
        (NoModel, ["trainer.steps=many"], r"trainer.steps=many \(overrides\) is not a whole number"),
        (NoModel, [], r"NoModel.build_model\(\) returned None"),
        (ChangingNames, [], "return the same names from every batch"),
        (TakenName, [], "the task has a metric named lr, but every run records its own value with this name"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_is_one_clear_error(task: Any, overrides: Any, expected: str, tmp_path: Path) -> None:
    given = [*overrides, f"run.dir={tmp_path}"] if isinstance(overrides, list) and overrides != [2] else overrides
    with pytest.raises(UserError, match=expected) as raised:
        serried.fit(task, given)
    assert len(str(raised.value).splitlines()) == 1


class TrainedBefore(Tiny):
    """Its model comes out of a plain loop, with a frozen bias and gradients of everything."""

    def build_model(self) -> nn.Module:
        model = nn.Linear(4, 1)
        model(torch.ones(1, 4)).sum().backward()
        model.bias.requires_grad_(False)
        return model


def test_gradients_that_a_model_has_before_a_run_are_dropped(tmp_path: Path) -> None:
    overrides = ["trainer.steps=1", "optim=sgd", f"run.dir={tmp_path}"]
    assert serried.fit(TrainedBefore(), overrides).state == "finished"


def test_load_model_refuses_what_is_no_run_and_another_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="neither a run folder nor a checkpoint in one"):
        serried.load_model(tmp_path)
    with pytest.raises(UserError, match=r"nowhere does not exist \(looked in .*\); give a run folder"):
        serried.load_model(tmp_path / "nowhere")
    result = serried.fit(Tiny, [f"run.dir={tmp_path}"])
    assert result.checkpoint == tmp_path / CHECKPOINTS / "step-00000002"
    with pytest.raises(UserError, match=r"was trained by the task tiny; give its class"):
        serried.load_model(tmp_path)
    assert cli.main(["generate", str(tmp_path)]) == 78
    assert "was trained by the task tiny, which is not installed, so serried generate" in capsys.readouterr().err

    class Wide(Tiny):
        """Another shape."""

        def build_model(self) -> nn.Module:
            return nn.Linear(5, 1)

    with pytest.raises(UserError, match=r"weight has shape \[1, 4\], not \[1, 5\]"):
        serried.load_model(tmp_path, task=Wide)

    class Other(Tiny):
        """Has a key that no run of Tiny has."""

        class Config(serried.Section):
            depth: int

    with pytest.raises(UserError, match=r"by the task tiny, which other does not match: task\.depth: Field required"):
        serried.load_model(tmp_path, task=Other)


def test_optimizer_defaults_of_a_task_are_those_of_its_optimizer() -> None:
    class Tuned(Tiny):
        """With a learning rate for AdamW."""

        defaults = {"optim.lr": 0.02, "optim.betas": [0.8, 0.9], "schedule.warmup_steps": 3}  # noqa: RUF012

    with declaring(declaration(Tuned)):
        assert compose([]).optim.lr == compose(["optim=adamw"]).optim.lr == 0.02
        changed = compose(["optim=sgd"])
        assert (changed.optim.lr, changed.schedule.warmup_steps) == (0.1, 3)
        if "plain" not in optimizers.names():  # without a YAML file that sets its learning rate
            register_optimizer("plain")(print)
        assert compose(["optim=plain"]).optim.lr == 0.02
        with pytest.raises(UserError, match=r"'plane'.*Did you mean optim=plain"):
            compose(["optim=plane"])


def test_main_takes_an_instance_and_refuses_what_is_no_task_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serried.runtime.exit.leave", sys.exit)  # it ends the process
    for given, code in ((Tiny(), 0), (nn.Identity(), 78)):
        with pytest.raises(SystemExit) as ended:
            serried.main(given, [f"run.dir={tmp_path}", "dry_run=true"])
        assert ended.value.code == code
    assert capsys.readouterr().err == (
        "error: Identity() is not a task; give a subclass of serried.Task, or an instance of one\n"
    )


def test_installed_task_is_chosen_by_name_with_its_own_keys(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks.register("points", Section, lambda: task_of(script, "Points"))
    assert program.main(["task=points", "task.dim=8", "trainer.steps=2", f"run.dir={tmp_path}"]) == 0
    assert read_yaml(tmp_path / "config.yaml")["task"] == {"dim": 8, "share": 0.5, "name": "points"}
    assert metrics(tmp_path, "start")[0]["unit"] == "samples"
    assert isinstance(serried.load_model(tmp_path), nn.Module)
    capsys.readouterr()
    assert cli.main(["export", str(tmp_path), "format=torch_export", f"out={tmp_path / 'x.pt2'}"]) == 78
    assert "use format=hf, or load it in Python: " in capsys.readouterr().err
    assert program.main(["task=point"]) == 78
    assert "no task 'point' is registered; did you mean task=points?" in capsys.readouterr().err


def test_next_after_fit_is_a_call(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serried.fit(task_of(script, "Points"), [f"run.dir={tmp_path}", "trainer.steps=2"])
    assert "next       serried.fit with run.name=OTHER for another run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ranks", "launch", "starts"),
    [
        ((0, 0, 2, 2), "launch=local launch.processes=2 launch.device=cpu", "python train.py"),
        ((0, 0, 2, 1), "launch=slurm launch.nodes=2 slurm.partition=a", "python train.py"),
        ((0, 0, 2, 2), "launch.device=cpu launch.threads=3", "torchrun --standalone --nproc_per_node=2 train.py"),
        ((0, 0, 1, 1), "launch.device=cpu", "python train.py"),
    ],
)
def test_next_command_starts_a_run_as_this_one_was_started(
    ranks: tuple[int, int, int, int], launch: str, starts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    remember_flags([])  # of other tests in this process
    words = [*launch.split(), "optim=sgd", "optim.groups.x.parameters=0.*"]
    remember_words([*words, "run.name=a", "slurm.dependency=afterany:7", "checkpoint.resume=must"])
    session = Session(ranks, torch.device("cpu"), compose(words).launch)
    assert session.command() == f"{starts} {launch} optim=sgd 'optim.groups.x.parameters=0.*'"
    remember_words([])


@pytest.mark.slow
def test_next_command_of_a_resumed_run_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "my scripts"
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "support" / "own_task.py", folder / "points.py")

    def pasted(command: str) -> str:
        done = typed(*shlex.split(command)[1:], cwd=tmp_path)
        assert not done.stderr
        return done.stdout

    pasted("python 'my scripts/points.py' trainer.stop_at=3")
    said = pasted("python 'my scripts/points.py' launch=local launch.processes=2 checkpoint.resume=must")
    (following,) = re.findall(r"^next       (python .*) for another run$", said, re.MULTILINE)
    assert "finished   8 steps" in pasted(following)
    assert (tmp_path / "runs/OTHER/status.json").exists()
    there = pasted("python 'my scripts/points.py' checkpoint.resume=must")
    assert there.endswith("elsewhere: run.name=OTHER checkpoint.resume=auto\n")


def test_task_is_evaluated_ten_times_unless_told_otherwise() -> None:
    with declaring(declaration(Tiny)):
        trainers = [compose(["trainer.steps=25", f"trainer.eval_every={each}"]).trainer for each in ("null", "7", "0")]
    assert [trainer.evaluates_every for trainer in trainers] == [3, 7, 0]


def test_public_names_are_those_of_the_documentation() -> None:
    assert sorted(serried.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(serried, name)
