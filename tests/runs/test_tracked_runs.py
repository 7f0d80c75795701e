"""Whole runs with trackers: nothing of training depends on them."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from serried.trainer.trainer import Trainer
from testing.disturb import family, is_alive, last_step, send, started
from testing.runs import checkpoint, different_tensors, losses, metrics, run_here, tiny_overrides
from tests.support.tracked import await_trackers, scalars, trackers, wait_for, wandb_run

_NUMBERS = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "skipped")


@pytest.fixture(autouse=True)
def _nobodys_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["no key", "refused", "never answers"])
def test_run_with_unreachable_wandb_has_the_same_bits_and_keeps_offline_files(
    how: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, tracked = tmp_path / "plain", tmp_path / "tracked"
    argv = ("trainer.deterministic=true", "trainer.eval_every=3")
    assert run_here(tiny_overrides(text, plain, *argv)).code == 0

    def see_priority_and_offline_files(_: Trainer, step: int) -> None:
        if step == 3:
            wait_for(lambda: trackers(tracked))
            (tracker,) = trackers(tracked)
            wait_for(lambda: list(tracked.glob("wandb/offline-run-*/*.wandb")))
            wait_for(lambda: os.getpriority(os.PRIO_PROCESS, tracker) == 10)

    with socket.socket() as waiting:
        waiting.bind(("127.0.0.1", 0))
        if how == "never answers":
            waiting.listen()
        if how != "no key":
            monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{waiting.getsockname()[1]}")
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
        argv = (*argv, "track.wandb=online")
        ended = run_here(tiny_overrides(text, tracked, *argv), see_priority_and_offline_files)
        await_trackers(tracked)
    assert ended.code == 0, ended.printed
    (warning,) = [line for line in ended.printed.splitlines() if line.startswith("WARNING    W&B")]
    assert f"To send later: serried send run.dir={tracked}" in warning
    numbers = [[{key: line[key] for key in _NUMBERS} for line in metrics(each)] for each in (plain, tracked)]
    assert numbers[0] == numbers[1]
    assert losses(plain, "eval") == losses(tracked, "eval")
    assert not different_tensors(plain, tracked)
    assert [row["step"] for row in wandb_run(tracked)["history"]] == list(range(1, 7))


@pytest.mark.slow
def test_run_killed_with_its_trackers_and_resumed_shows_each_step_once(text: Path, tmp_path: Path) -> None:
    """The launcher, both ranks and all trackers at once, between two checkpoints."""
    run_dir, every = tmp_path / "run", 50
    argv = ["parallel=ddp", "trainer.steps=100000", f"checkpoint.every={every}", "trainer.log_every=1"]
    argv = tiny_overrides(text, run_dir, *argv, "track.wandb=offline", "track.tensorboard=true")

    def is_between_and_shown() -> bool:
        wandb_files = run_dir.glob("wandb/offline-run-*/*.wandb")
        is_shown = list(run_dir.glob("tensorboard/events*")) and [path for path in wandb_files if path.stat().st_size]
        return bool(is_shown) and last_step(run_dir) > every and 10 < last_step(run_dir) % every < every - 10

    with started(2, argv, tmp_path / "first", launch="local") as agent:
        wait_for(lambda: agent.poll() is not None or is_between_and_shown())
        processes = family(agent.pid)
        assert len(processes) > 4, (tmp_path / "first").read_text()
        for pid in processes:
            send(pid, signal.SIGKILL)
        agent.wait()
    wait_for(lambda: not any(map(is_alive, processes)))
    killed = last_step(run_dir)
    with started(2, [*argv, f"trainer.stop_at={killed + 5}"], tmp_path / "second", launch="local") as agent:
        assert agent.wait(240) != 0, "stopped: there is more to train"
    await_trackers(run_dir)
    (_, start) = metrics(run_dir, "start")
    assert every <= start["resumed_from"] < killed, "some steps were trained twice"
    truth = [(line["step"], line["loss"]) for line in metrics(run_dir)]
    assert [step for step, _ in truth] == list(range(1, killed + 6))
    assert scalars(run_dir) == [(step, pytest.approx(loss)) for step, loss in truth]
    assert [(row["step"], row["train/loss"]) for row in wandb_run(run_dir)["history"]] == truth


@pytest.mark.slow
def test_resumed_run_keeps_its_tracker_id_and_a_fork_gets_another(text: Path, tmp_path: Path) -> None:
    run_dir, fork = tmp_path / "run", tmp_path / "fork"
    stopped = run_here(tiny_overrides(text, run_dir, "track.tensorboard=true", "trainer.stop_at=3"))
    assert stopped.code == 75
    assert "status.json, tensorboard/; the model, opens in" in stopped.printed
    (first,) = (line["tracker_run_id"] for line in metrics(run_dir, "start"))
    assert json.loads((checkpoint(run_dir) / "state.json").read_text())["tracker_run_id"] == first
    assert run_here(tiny_overrides(text, run_dir, "track.tensorboard=true")).code == 0
    assert [line["tracker_run_id"] for line in metrics(run_dir, "start")] == [first, first]
    await_trackers(run_dir)
    assert [step for step, _ in scalars(run_dir)] == [1, 2, 3, 4, 5, 6]
    resume = f"checkpoint.resume={run_dir / 'checkpoints' / 'step-00000004'}"
    assert run_here(tiny_overrides(text, fork, resume)).code == 0
    (other,) = (line["tracker_run_id"] for line in metrics(fork, "start"))
    assert other != first
    assert len(other) == 8
