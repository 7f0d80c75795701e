"""W&B, TensorBoard and MLflow show what ``metrics.jsonl`` has: every step once, whatever happened to the run."""

import json
import os
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serried.cli import main
from serried.configs.addresses import masked
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.requirements import check_trackers
from serried.records.goodput import PARTS
from serried.records.metrics import GrowingFile
from serried.records.trackers.rows import Rows
from testing.disturb import family, send
from testing.runs import metrics, tiny_overrides
from tests.support.tracked import Records, await_trackers, scalars, started_tracker, trackers, wait_for, wandb_run
from tests.support.wandb_server import WandbServer, serving

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc00000030101"
    "00c9fe92ef0000000049454e44ae426082"
)
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _nobodys_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB__FILE_STREAM_TRANSMIT_INTERVAL", "1")
        yield server


def truth(run_dir: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics(run_dir)]


@pytest.mark.slow
def test_killed_resumed_and_rolled_back_run_shows_each_step_once(text: Path, tmp_path: Path) -> None:
    """Killed at step 12 with its trackers, resumed at 10, rolled back from 15 to 13."""
    run_dir, store = tmp_path / "run", f"{tmp_path}/mlruns"
    argv = ("track.wandb=offline", "track.tensorboard=true", f"track.mlflow={store}")
    records = Records(text, run_dir, *argv)
    records.steps(1, 12)
    wait_for(lambda: scalars(run_dir) and list(run_dir.glob("wandb/offline-run-*/*.wandb")))
    for each in [pid for tracker in trackers(run_dir) for pid in family(tracker)]:
        send(each, signal.SIGKILL)
    records.trackers.end()
    records.folder.close()
    records = Records(text, run_dir, *argv, step=10)
    records.steps(11, 15, loss=2.0)
    wait_for(lambda: len(scalars(run_dir)) >= 14)  # the last row is complete when a later one begins
    records.go_back(13, from_step=15)
    records.steps(14, 16, loss=3.0)
    records.end("stopped")
    expected = truth(run_dir)
    assert [step for step, _ in expected] == list(range(1, 17))
    assert [loss for step, loss in expected if step in (12, 13, 14)] == [2 + 1 / 12, 2 + 1 / 13, 3 + 1 / 14]
    assert scalars(run_dir) == [(step, pytest.approx(loss)) for step, loss in expected]
    run = wandb_run(run_dir)
    assert [(row["step"], row["train/loss"]) for row in run["history"]] == expected
    assert (run["summary"]["state"], run["summary"]["rollbacks"]) == ("stopped", 1)
    from mlflow.tracking import MlflowClient  # which is long in being imported

    client = MlflowClient(tracking_uri=store)
    (stored,) = client.search_runs([client.get_experiment_by_name("serried").experiment_id])
    points = client.get_metric_history(stored.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in points] == expected
    assert (stored.info.status, stored.data.tags["tracker_run_id"]) == ("KILLED", "abcd1234")
    assert stored.data.params["optim.lr"] == "0.003"
    assert stored.data.tags["summary.starts"] == "2"


def test_trackers_get_names_config_summary_and_named_metrics_of_a_run(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    named = ("track.project=books", "track.group=sweep-7", "track.tags=[a,b]", "track.notes='first try'")
    records = Records(text, run_dir, "track.wandb=offline", "track.tensorboard=true", "run.name=mine", *named)
    records.steps(1, 3)
    records.folder.record("checkpoint", step=2, path="checkpoints/step-00000002", seconds=0.1)
    image = Path(records.folder.add_images("mean", 3, [PNG])[0])
    records.folder.record("log", step=3, metrics={"a b": 0.5}, texts={"said": "hello"}, images={"mean": [str(image)]})
    records.end()
    assert not records.warnings()
    run = wandb_run(run_dir)
    assert (run["id"], run["project"], run["group"], run["tags"]) == ("abcd1234", "books", "sweep-7", ["a", "b"])
    assert (run["name"], run["notes"], run["exit_code"]) == ("mine", "first try", 0)
    assert ("*", "step") in run["axes"], "steps may come again"
    assert run["config"]["optim"]["lr"] == 0.003
    assert run["config"]["run_facts"]["environment"]["torch"] == "2"
    assert run["summary"].items() >= {"state": "finished", "checkpoint": "checkpoints/step-00000002"}.items()
    numbers = {
        "validation/loss": 1.0,
        "validation/accuracy": 0.75,
        "train/accuracy": 0.25,
        "train/source_tokens/web": 3,
        "log/a b": 0.5,
        "log/said": "hello",
    }
    assert run["history"][2].items() >= {**numbers, "speed/tokens_per_second": 1280.0, "step": 3}.items()
    (shown,) = (run["folder"] / "files").glob("media/images/log/mean_*.png")
    assert shown.read_bytes() == PNG
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert board.Images("log/mean/0")[0].encoded_image_string == PNG
    assert board.Tensors("log/said")[0].tensor_proto.string_val[0] == b"hello"
    assert scalars(run_dir, "log/a b") == [(3, 0.5)]
    assert scalars(run_dir, "validation/accuracy") == [(3, 0.75)]
    assert scalars(run_dir, "train/accuracy") == [(1, 0.25), (2, 0.25), (3, 0.25)]


def _free_port() -> int:
    with socket.socket() as waiting:
        waiting.bind(("127.0.0.1", 0))
        return int(waiting.getsockname()[1])


def _samples(text: str) -> dict[str, float]:
    """Return the values of a Prometheus page by name, and by name and part for the goodput."""
    found = {}
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            assert (sample.labels["run"], sample.labels["run_id"]) == ("mine", "abcd1234")
            found["/".join([sample.name, *([part] if (part := sample.labels.get("part")) else [])])] = sample.value
    return found


def test_prometheus_scrapes_the_newest_values_from_loopback_while_the_run_trains(text: Path, tmp_path: Path) -> None:
    port = _free_port()
    records = Records(text, tmp_path / "run", f"track.prometheus={port}", "run.name=mine")
    records.steps(1, 3)

    def scraped() -> dict[str, float]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                return _samples(answer.read().decode())
        except OSError:
            return {}

    wait_for(lambda: scraped().get("serried_step") == 3)
    values = scraped()
    assert values["serried_train_loss"] == pytest.approx(4 / 3)
    assert values["serried_train_source_tokens_web"] == 3
    assert values["serried_up"] == 1
    addresses = {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
    assert f"0100007F:{port:04X}" in addresses, "listens on loopback"
    assert f"00000000:{port:04X}" not in addresses
    records.end()
    assert not records.warnings()


def test_prometheus_file_has_the_last_values_and_the_goodput(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "metrics" / "run.prom"
    records = Records(text, tmp_path / "run", f"track.prometheus={file}", "run.name=mine")
    records.steps(1, 3)
    records.end()
    values = _samples(file.read_text())
    assert values.items() >= {"serried_step": 3, "serried_validation_loss": 1.0, "serried_up": 0}.items()
    assert {f"serried_goodput_seconds/{part}" for part in PARTS} <= values.keys()


@pytest.mark.parametrize(("state", "said"), [("finished", "finished at step 3"), ("hung", "stopped at step 4: rank 1")])
def test_webhook_is_called_when_the_run_ends_or_hangs_and_its_address_stays_secret(
    state: str, said: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[dict[str, object]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/secret-path"
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OUR_HOOK", f"http://127.0.0.1:{server.server_port}/secret-path")
        records = Records(text, tmp_path / "run", "track.webhook=OUR_HOOK", "run.name=mine")
        records.steps(1, 3)
        if state == "hung":  # the watchdog writes the status alone
            records.folder.status("stopped", step=4, reason="rank 1 has not moved", exit_code=75)
            records.trackers.end(60)
            await_trackers(tmp_path / "run")
        else:
            records.end()
        server.shutdown()
    assert not records.warnings(), records.printed
    (values,) = received
    assert f"serried run mine {said}" in str(values["text"])
    assert values["run_dir"] == str(tmp_path / "run")
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"secret-path" not in path.read_bytes()


@pytest.mark.parametrize("address", ["http://127.0.0.1:{port}/secret-path", "http://127.0.0.1:secret-path/x"])
def test_webhook_that_refuses_is_one_warning_without_its_address(
    address: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_HOOK", address.format(port=_free_port()))
    records = Records(text, tmp_path / "run", "track.webhook=OUR_HOOK")
    records.steps(1, 1)
    records.end()
    (warning,) = records.warnings()
    assert warning.startswith("WARNING    webhook: cannot post to the address in OUR_HOOK: ")
    assert "secret-path" not in "".join(records.printed)
    assert b"secret-path" not in (tmp_path / "run" / "log" / "tracker-webhook.log").read_bytes()


def test_prometheus_port_in_use_is_one_warning_that_names_it(text: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        records = Records(text, tmp_path / "run", f"track.prometheus={port}")
        records.steps(1, 1)
        records.end()
    (warning,) = records.warnings()
    assert f"cannot listen at port {port} of 127.0.0.1: Address already in use" in warning


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("track.prometheus=later", "track.prometheus=later is not a port, HOST:PORT or a file that ends in .prom"),
        ("track.prometheus=s3://bucket/run.prom", "track.prometheus=s3://bucket/run.prom is not a port"),
        ("track.prometheus=70000", "track.prometheus=70000 is not a port"),
        ("track.webhook=https://hooks.example/T0/secret", "track.webhook is an address, and the config is kept"),
        ("track.webhook=NOT_SET_ANYWHERE", "the environment variable NOT_SET_ANYWHERE does not contain an address"),
    ],
)
def test_monitoring_that_cannot_work_is_one_line(argv: str, said: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        check_trackers(compose(tiny_overrides(text, tmp_path / "run", argv)).track)
    assert said in str(raised.value)
    assert "secret" not in str(raised.value).replace("stay secret", "")


def test_restart_and_rollback_send_steps_the_server_lacks(text: Path, tmp_path: Path, server: WandbServer) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.wandb=online")
    wait_for(lambda: any(line.startswith("tracking   W&B: http") for line in records.printed))
    records.steps(1, 6)
    records.end("stopped")
    stored = server.runs["abcd1234"]
    assert [row["step"] for row in stored.history] == list(range(1, 7))
    records = Records(text, run_dir, "track.wandb=online", step=4)
    records.steps(5, 9)
    wait_for(lambda: len(stored.history) == 8)
    records.go_back(5, from_step=9)
    records.steps(6, 7)
    records.end()
    assert [row["step"] for row in stored.history] == [*range(1, 10), 6, 7]
    assert (stored.starts > 1, stored.exit_code, stored.summary["state"]) == (True, 0, "finished")
    assert json.loads(stored.config)["optim"]["value"]["lr"] == 0.003
    for path in run_dir.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), f"the key is in {path}"


@pytest.mark.slow
def test_wandb_service_killed_keeps_every_record_offline(text: Path, tmp_path: Path, server: WandbServer) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.wandb=online")
    records.steps(1, 3)
    wait_for(lambda: server.runs and server.runs["abcd1234"].history)
    tracker = started_tracker(run_dir)
    for pid in family(tracker)[1:]:
        send(pid, signal.SIGKILL)
    records.steps(4, 6)
    records.end()
    (warning,) = records.warnings()
    assert f"records are kept in {run_dir}/wandb. To send later: serried send run.dir={run_dir}" in warning
    assert [row["step"] for row in wandb_run(run_dir)["history"]] == list(range(1, 7))
    assert main(["send", f"run.dir={run_dir}"]) == 0
    assert {row["step"] for row in server.runs["abcd1234"].history} == set(range(1, 7))


def test_tracker_process_ignores_signals_for_the_run_and_its_death_is_one_warning(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.tensorboard=true")
    records.steps(1, 3)
    wait_for(lambda: scalars(run_dir))
    tracker = started_tracker(run_dir)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL):
        os.kill(tracker, number)
    wait_for(lambda: "TensorBoard: its process was killed by signal 9" in "".join(records.warnings()))
    records.end()
    assert len(records.warnings()) == 1


def test_end_does_not_wait_for_a_tracker_that_hangs_and_it_takes_everything_later(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.tensorboard=true")
    records.steps(1, 3)
    tracker = started_tracker(run_dir)
    os.kill(tracker, signal.SIGSTOP)
    records.folder.record("stop", step=3, state="finished", reason="all steps done")
    records.trackers.end(seconds=0.1)
    (warning,) = records.warnings()
    assert "TensorBoard: not all records are sent yet" in warning
    os.kill(tracker, signal.SIGCONT)
    await_trackers(run_dir)
    records.folder.close()
    assert [step for step, _ in scalars(run_dir)] == [1, 2, 3]


def test_folder_that_cannot_be_written_is_one_warning(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "tensorboard").write_text("in the way")
    records = Records(text, run_dir, "track.tensorboard=true")
    records.steps(1, 3)
    records.end()
    (warning,) = records.warnings()
    assert "File exists" in warning


def test_send_writes_the_records_of_an_ended_run_from_any_folder(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Relative paths of the config begin where the run started."""
    run_dir = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    records = Records(text, run_dir, "track.tensorboard=true", "track.mlflow=./store", is_tracked=False)
    records.steps(1, 4)
    assert main(["send", f"run.dir={run_dir}"]) == 78
    assert f"another process is training in {run_dir}" in capsys.readouterr().err
    records.end()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["send", f"run.dir={run_dir}"]) == 0
    assert [step for step, _ in scalars(run_dir)] == [1, 2, 3, 4]
    assert (tmp_path / "store").exists()
    assert not any((tmp_path / "elsewhere").iterdir())
    printed = capsys.readouterr().out
    assert "tracking   TensorBoard has received all records\n" in printed
    assert "tracking   MLflow has received all records\n" in printed
    assert main(["send", f"run.dir={tmp_path / 'rum'}"]) == 78
    assert f"{run_dir}?" in capsys.readouterr().err


@pytest.mark.slow
def test_send_without_a_key_fails_with_one_warning(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.wandb=online")
    records.steps(1, 4)
    records.end()
    assert len(records.warnings()) == 1
    assert main(["send", f"run.dir={run_dir}"]) == 70
    assert capsys.readouterr().out.count("WARNING    W&B: ") == 1
    assert [row["step"] for row in wandb_run(run_dir)["history"]] == [1, 2, 3, 4], "they are in offline files"


def test_send_takes_a_run_of_a_task_that_is_not_installed(text: Path, tmp_path: Path) -> None:
    """As every run of a user's own script is for the command ``serried``."""
    records = Records(text, tmp_path / "run", "track.tensorboard=true", is_tracked=False)
    records.steps(1, 2)
    records.end()
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("name: causal_lm", "name: houses"))
    assert main(["send", f"run.dir={tmp_path / 'run'}"]) == 0
    assert [step for step, _ in scalars(tmp_path / "run")] == [1, 2]
    config.write_text("track: {wandb: perhaps}")
    assert main(["send", f"run.dir={tmp_path / 'run'}"]) == 78


def test_send_refuses_a_run_without_trackers(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Records(text, tmp_path / "run").end()
    assert main(["send", f"run.dir={tmp_path / 'run'}"]) == 78
    assert f"the run in {tmp_path / 'run'} has no trackers" in capsys.readouterr().err


def test_row_gathers_every_number_of_a_step(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    events = [
        {"event": "start", "time": 0},
        {"event": "step", "step": 1, "time": 1, "loss": None, "skipped": True, "mfu": 0.4, "metrics": {"recall": 0.5}},
        {"event": "spike", "step": 1, "time": 2, "loss_limit": 3.0},
        {"event": "eval", "step": 1, "time": 3, "set": "web", "loss": 2.0, "f1": 0.25, "source_losses": {"a": 1.0}},
        {"event": "checkpoint", "step": 0, "time": 3, "path": "p", "bytes": 7},
        {"event": "step", "step": 2, "time": 4, "loss": 1.0, "skipped": False},
    ]
    (row,) = [row for event in events for row in rows.feed(event)]
    assert (row.step, row.time) == (1, 1)
    assert row.values == {
        "train/skipped": True, "speed/mfu": 0.4, "train/metrics/recall": 0.5, "spike/loss_limit": 3.0,
        "validation/web/loss": 2.0, "validation/web/f1": 0.25, "validation/web/source_losses/a": 1.0,
    }  # fmt: skip
    assert [row.step for row in rows.rest()] == [2]
    assert rows.summary.items() >= {"starts": 1, "spikes": 1, "checkpoint": "p", "state": "running"}.items()


def test_growing_file_returns_whole_events_and_notices_its_replacement(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "a"}\n{"event":')
    file = GrowingFile(path)
    assert file.read() == [{"event": "a"}]
    with path.open("a") as more:
        more.write(' "b"}\ntorn\n')
    assert file.read() == [{"event": "b"}]
    assert not file.is_replaced()
    (tmp_path / "other").write_text("")
    (tmp_path / "other").rename(path)
    assert file.is_replaced()


def test_a_tracker_that_is_not_installed_is_named_before_anything_starts(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "serried.configs.requirements.find_spec",
        lambda name: None if name == "mlflow" else find_spec(name),
    )
    config = compose(tiny_overrides(text, tmp_path / "run", "track.wandb=offline", "track.mlflow=sqlite:///a.db"))
    with pytest.raises(UserError, match=r"^MLflow is not installed; pip install -e '.\[mlflow\]', or use "):
        check_trackers(config.track)


def test_incomplete_mlflow_address_is_refused_and_creates_no_folder(text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^track.mlflow=postgres is neither .* or track.mlflow=./postgres for"):
        check_trackers(compose(tiny_overrides(text, tmp_path / "run", "track.mlflow=postgres")).track)
    for address in ("./new", "sqlite:///a.db", "databricks", str(tmp_path)):
        check_trackers(compose(tiny_overrides(text, tmp_path / "run", f"track.mlflow={address}")).track)


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("https://me:secret@host/path", "track.mlflow=https://host/path,"),
        ("HTTPS://me:secret@host/", "track.mlflow=HTTPS://host/,"),
        ("https://:secret@host:5000", "track.mlflow=https://host:5000,"),
        ("https://dapi-secret@host/", "track.mlflow=https://host/,"),
        ("postgresql+psycopg2://me:se/cret@host/runs", "track.mlflow=postgresql+psycopg2://me@host/runs,"),
        ("postgresql://host:5432/runs?user=me&password=secret", "track.mlflow=postgresql://host:5432/runs?user=me,"),
        ("mysql://host/runs?PASSWD=secret&ssl_ca=x", "track.mlflow=mysql://host/runs?ssl_ca=x,"),
        ("https://host/?api_key=secret", "track.mlflow=https://host/,"),
        ("https://host/?access_token=secret#top", "without"),
        ("mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3Dsecret", "use an address without it,"),
    ],
)
def test_a_password_is_kept_out_of_the_config(address: str, advice: str, text: Path, tmp_path: Path) -> None:
    quoted = f"track.mlflow='{address}'"
    with pytest.raises(UserError, match=r"track\.mlflow contains a password") as caught:
        compose(tiny_overrides(text, tmp_path / "run", quoted))
    assert "secret" not in str(caught.value)
    assert advice in str(caught.value)
    if "%" not in address:
        assert "cret" not in masked(address), "nor is it on the page of a run that came by it otherwise"


@pytest.mark.parametrize(
    "address",
    [
        "http://host:5000/#/runs@home", "https://host/@me", "sqlite:////home/me/runs.db", "runs/mlflow",
        "postgresql://me@host:5432/runs?sslkey=/home/me/key&tokenizer=x", "databricks://profile",
    ],
)  # fmt: skip
def test_address_without_a_password_is_accepted(address: str, text: Path, tmp_path: Path) -> None:
    assert compose(tiny_overrides(text, tmp_path / "run", f"track.mlflow='{address}'")).track.mlflow == address
