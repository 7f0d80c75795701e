"""Callbacks: their hooks, state, records and failures."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import serried
from serried.callback_flag import callback_names, load_callback
from serried.configs.compose import compose
from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_MISTAKE
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.program import main
from serried.records.report import write_report
from serried.runtime.process import remember_flags, training_command
from serried.task_class import declaration
from serried.trainer.callbacks import Callbacks
from serried.trainer.monitor.heartbeat import LOG, Patience, Pulse
from serried.trainer.task import task_for_run
from testing.forked_runs import typed_on
from testing.runs import checkpoint, different_tensors, metrics, status, steps_saved
from tests.support.own_task import Points

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc00000030101"
    "00c9fe92ef0000000049454e44ae426082"
)
OVERRIDES = ["launch.device=cpu", "checkpoint.keep=9", "checkpoint.mode=sync"]


class Following(serried.Callback):
    """Counts checkpoints, and records the calls of its hooks."""

    def __init__(self) -> None:
        self.saved = 0
        self.calls: list[tuple[Any, ...]] = []

    def on_start(self, run: Any) -> None:
        self.calls.append(("start", run.step, run.steps, self.saved))

    def on_step(self, run: Any) -> None:
        assert run.config.optim.lr == 0.01
        run.log({"double": 2 * run.metrics["loss"], "note": f"after step {run.step}"})

    def on_evaluate(self, run: Any) -> None:
        self.calls.append(("evaluate", run.step, run.split))
        run.log_images("samples/x", [PNG])

    def on_save(self, run: Any) -> None:
        assert (run.checkpoint / "state.json").is_file()
        self.saved += 1
        self.calls.append(("save", run.step))

    def on_end(self, run: Any) -> None:
        self.calls.append(("end", run.step, run.folder.name))
        run.log({"last": 1.0})

    def state_dict(self) -> dict[str, Any]:
        return {"saved": self.saved}

    def load_state_dict(self, state: Any) -> None:
        self.saved = state["saved"]


class Raising(serried.Callback):
    """Raises in one hook."""

    def __init__(self, hook: str, step: int = 4) -> None:
        self._step = step
        setattr(self, hook, self._raise)

    def _raise(self, run: Any) -> None:
        if run.step == self._step:
            raise OSError("no network\nand more")


class Unplain(serried.Callback):
    """Has a state that is no plain data."""

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path()}


def test_callback_follows_a_run_and_its_state_resumes(tmp_path: Path) -> None:
    callback = Following()
    first = serried.fit(Points, [*OVERRIDES, f"run.dir={tmp_path}", "trainer.stop_at=6"], [callback])
    assert first.state == "stopped"
    assert callback.calls == [
        ("start", 0, 8, 0), ("evaluate", 4, "validation"), ("save", 4), ("evaluate", 6, "validation"), ("save", 6),
        ("end", 6, tmp_path.name),
    ]  # fmt: skip
    again = Following()
    serried.fit(Points, [*OVERRIDES, f"run.dir={tmp_path}"], [again])
    assert again.calls == [
        ("start", 6, 8, 1), ("evaluate", 8, "validation"), ("save", 8), ("end", 8, tmp_path.name),
    ]  # fmt: skip
    assert json.loads((checkpoint(tmp_path) / "state.json").read_text())["callbacks"] == {"Following": {"saved": 1}}
    lines = metrics(tmp_path, "log")
    assert [line["step"] for line in lines if "double" in line.get("metrics", {})] == list(range(1, 9))
    (image,) = next(line["images"]["samples/x"] for line in lines if "images" in line)
    assert (tmp_path / image).read_bytes() == PNG
    page = (tmp_path / "report.html").read_text()
    assert '"after step 8"' in page
    assert '"data:image/png;base64,' in page
    assert '"chart":"metric:double"' in page


def test_state_of_a_callback_that_is_missing_on_resume_is_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = [*OVERRIDES, f"run.dir={tmp_path}"]
    serried.fit(Points, [*argv, "trainer.stop_at=4"], [Following])
    serried.fit(Points, argv)
    assert "has the state of the callback Following, which this run does not have" in capfd.readouterr().out
    assert "callbacks" not in json.loads((checkpoint(tmp_path) / "state.json").read_text())


@pytest.mark.parametrize("hook", ["on_step", "on_evaluate", "on_save", "on_end"])
def test_exception_in_a_hook_ends_the_run_with_its_name_and_keeps_the_checkpoint(hook: str, tmp_path: Path) -> None:
    step = 8 if hook == "on_end" else 4
    argv = [*OVERRIDES, f"run.dir={tmp_path}"]
    with pytest.raises(serried.TrainingFailed, match=rf"^callback Raising.{hook}: OSError: no network \(.*line \d+\)$"):
        serried.fit(Points, argv, [Raising(hook, step)])
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("failed", EXIT_FAILED)
    assert steps_saved(tmp_path)[-1] == step
    assert serried.fit(Points, argv).state == "finished"


def test_state_that_is_no_plain_data_ends_the_run_after_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(serried.TrainingFailed, match=r"callback Unplain\.state_dict: TypeError"):
        serried.fit(Points, [*OVERRIDES, f"run.dir={tmp_path}"], [Unplain])
    assert steps_saved(tmp_path) == [4]


def callbacks(*given: Any) -> Callbacks:
    """Return callbacks beside those of a task."""
    made = Callbacks(compose(["run.name=x"]), None, Pulse(), print)
    made.make(task_for_run(Points()), given)
    return made


def test_state_in_a_checkpoint_is_a_copy() -> None:
    seen = [1]

    class Listing(serried.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": seen}

    state = callbacks(Listing).state_dict()
    seen.append(2)
    assert state == {"callbacks": {"Listing": {"seen": [1]}}}


@pytest.mark.parametrize("value", [Path(), float("nan"), {(1, 2): 3}])
def test_state_that_is_no_plain_finite_data_is_named(value: Any) -> None:
    class Odd(serried.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"step": 1, "odd": value}

    made = callbacks(Odd)
    assert made.state_dict() == {}
    with pytest.raises(
        serried.TrainingFailed, match=r"^callback Odd\.state_dict: TypeError: 'odd' is not plain, finite"
    ):
        made.raise_failure()


def test_first_failure_of_several_is_raised_and_the_others_are_logged(tmp_path: Path) -> None:
    given = [Raising("on_step"), Raising("on_save")]
    given[1].__class__ = type("Second", (Raising,), {})
    with pytest.raises(serried.TrainingFailed, match=r"^callback Raising\.on_step: OSError"):
        serried.fit(Points, [*OVERRIDES, f"run.dir={tmp_path}"], given)
    assert "callback Second.on_save: OSError: no network" in (tmp_path / "log" / "rank-0.log").read_text()


def test_end_is_recorded_before_on_end(tmp_path: Path) -> None:
    seen = []

    class Looking(serried.Callback):
        def on_end(self, run: Any) -> None:
            seen.extend([status(run.folder)["state"], metrics(run.folder, "stop")[-1]["state"]])

    serried.fit(Points, [*OVERRIDES, f"run.dir={tmp_path}", "trainer.stop_at=1"], [Looking, Following])
    assert seen == ["stopped", "stopped"]
    assert metrics(tmp_path, "log")[-1]["metrics"] == {"last": 1.0}
    assert '"chart":"metric:last"' in (tmp_path / "report.html").read_text()


def test_callbacks_that_are_no_list_are_a_mistake(tmp_path: Path) -> None:
    argv = [*OVERRIDES, f"run.dir={tmp_path / 'run'}"]
    for given in (Following, Following()):
        with pytest.raises(serried.UserError, match=r"use callbacks=\[Following\]"):
            serried.fit(Points, argv, given)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_checkpoint_of_two_ranks_is_complete_if_a_callback_on_one_of_them_raises(tmp_path: Path) -> None:
    for name, callbacks in (("whole", ""), ("raising", "Raising('on_step')")):
        (tmp_path / f"{name}.py").write_text(
            "import serried\nfrom tests.runs.test_callbacks import Raising\n"
            f"from tests.support.own_task import Points\nserried.main(Points, callbacks=[{callbacks}])\n"
        )

    def run(script: str, name: str) -> list[int]:
        argv = [f"run.dir={tmp_path / name}", "parallel=fsdp", *OVERRIDES[:2]]
        return [done.returncode for done in typed_on(2, f"{script}.py", *argv, cwd=tmp_path)]

    assert run("whole", "whole") == [EXIT_FINISHED] * 2
    assert run("raising", "failed") == [EXIT_FAILED] * 2
    assert steps_saved(tmp_path / "failed") == [4]
    assert status(tmp_path / "failed")["reason"].startswith("callback Raising.on_step: OSError: no network")
    assert run("whole", "failed") == [EXIT_FINISHED] * 2
    assert not different_tensors(tmp_path / "failed", tmp_path / "whole")


def test_flag_names_a_callback_that_processes_of_the_run_load_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hooks_of_a_test.py").write_text(
        "import serried\nclass Hello(serried.Callback):\n"
        "    def on_end(self, run):\n        run.log({'hello': run.config.run.name})\n"
    )
    argv = [*OVERRIDES, f"run.dir={tmp_path / 'run'}", "trainer.steps=2"]
    try:
        assert main(["--callback", "hooks_of_a_test:Hello", *argv], declaration(Points)) == EXIT_FINISHED
        assert "--callback=hooks_of_a_test:Hello" in training_command()
    finally:
        remember_flags([])
    assert [line["texts"] for line in metrics(tmp_path / "run", "log")] == [{"hello": "points"}]
    capfd.readouterr()
    for name, said in {
        "no_such_module:Hello": "cannot find the module no_such_module",
        "upload": "no callback with this name is installed; use --callback package.module:Class",
    }.items():
        assert main([f"--callback={name}", *argv], declaration(Points)) == EXIT_MISTAKE
        assert said in capfd.readouterr().err
    with pytest.raises(serried.UserError, match="module hooks_of_a_test has no Bye"):
        load_callback("hooks_of_a_test:Bye")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (":Hello", "use --callback package.module:Class"),
        ("raising_parent.sub:Hello", "raising_parent.sub:Hello cannot be imported: AttributeError: of the package"),
        ("incomplete_parent.sub:Hello", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ("empty_parent.sub:Hello", "cannot find the module empty_parent.sub;"),
        ("no_such_package.sub:Hello", "cannot find the module no_such_package.sub;"),
    ],
)
def test_wrong_name_of_a_callback_is_a_mistake(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for package, text in {
        "raising": "raise AttributeError('of the package')", "incomplete": "import no_such_package", "empty": "",
    }.items():  # fmt: skip
        (tmp_path / f"{package}_parent").mkdir()
        (tmp_path / f"{package}_parent" / "__init__.py").write_text(text)
    with pytest.raises(serried.UserError, match=re.escape(said)):
        callback_names(["--callback", name])


def test_error_of_a_module_on_import_is_not_a_missing_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "raising_module.py").write_text("class Hello: pass\nimport os\nos.no_such_name\n")
    with pytest.raises(serried.UserError, match="cannot be imported: AttributeError: module 'os' has no attribute"):
        load_callback("raising_module:Hello")


def test_installed_callback_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "package_of_a_test.py").write_text("import serried\nclass Hello(serried.Callback): pass\n")
    info = tmp_path / "package_of_a_test-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: package-of-a-test\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[serried.callbacks]\nhello = package_of_a_test:Hello\n")
    assert callback_names(["--callback", "hello", "trainer.steps=2"]) == (["trainer.steps=2"], ["hello"])
    assert load_callback("hello").__name__ == "Hello"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([Following, Following()], "two callbacks are named Following"),
        ([Points], "Points is not a callback"),
        ([Raising], "callback Raising cannot be created: TypeError"),
    ],
)
def test_wrong_callbacks_are_a_mistake(given: list[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(serried.UserError, match=said):
        serried.fit(Points, [*OVERRIDES, f"run.dir={tmp_path}"], given)


def test_heartbeat_names_the_callback_while_it_runs() -> None:
    section, pulse = LaunchSection(start_timeout_seconds=1800, step_timeout_seconds=300), Pulse()
    patience, alone = Patience(section, is_alone=False), Patience(section, is_alone=True)
    with pulse.during_callback("Upload.on_start"):
        assert patience.measure(pulse.now, 1.0)[1] == 1800
    pulse.enter(LOG, 7)
    with pulse.during_callback("Upload.on_save"):
        assert (pulse.now.phase, pulse.now.step) == ("callback Upload.on_save", 7)
        assert patience.measure(pulse.now, 1.0)[1] == 300, "the timeout with which the other ranks wait for it"
        assert alone.measure(pulse.now, 1.0)[1] is None
    assert (pulse.now.phase, pulse.now.step) == (LOG, 7)


def test_report_leaves_out_images_outside_the_run_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    run = tmp_path / "run"
    run.mkdir()
    event = {"event": "log", "step": 1, "time": 1, "images": {"x": ["../secret.png", str(tmp_path / "secret.png")]}}
    (run / "metrics.jsonl").write_text(json.dumps(event) + "\n")
    write_report([run], run / "report.html")
    assert "data:image/png" not in (run / "report.html").read_text()
