"""``serried plan`` of a run folder, against what the run measured, and with rates that were measured."""

import gzip
import json
import math
import os
import re
from pathlib import Path

import pytest

from serried import cli
from serried.commands.plan_runs import _calibrate as calibrate
from serried.configs.compose import compose, compose_saved, config_yaml
from serried.configs.errors import UserError
from serried.configs.schema.declaration import declaring
from serried.planner.time.measured_rates import read_rates
from serried.planning import traced_products
from serried.task_class import installed
from testing.rank_pool import Cluster
from testing.runs import overrides

LINES = [
    {"event": "start", "world_size": 2, "hosts": ["a", "a"], "device": "cpu", "memory_bytes": 300_000_000},
    {"event": "step", "step": 1, "step_seconds": 9.0, "memory_bytes": 1, "time_split": None},
    {"event": "step", "step": 2, "step_seconds": 0.3, "memory_bytes": 310_000_000, "time_split": None},
    {
        "event": "step", "step": 3, "step_seconds": 0.2, "memory_bytes": 320_000_000,
        "time_split": {"data": 0.01, "forward": 0.05, "backward": 0.1, "optimizer": 0.03, "host": 0.01},
    },
    {"event": "step", "step": 4, "step_seconds": 0.1, "memory_bytes": 320_000_000, "time_split": None},
]  # fmt: skip
RATES = {
    "device": "A CPU", "type": "cpu", "memory_bytes": 2**34, "torch": "2.0", "date": "2026-01-02", "processes": 2,
    "per_node": 2, "precision": "fp32", "attention": 1e9, "memory": 1e10, "launch": 1e-6, "hidden": 0.5,
    "network": None, "links": {"bytes_per_second": 1e9, "seconds": 1e-4},
    "products": [[64, 64, 64, 2 * 80**3 / 1e10], [512, 256, 128, 2 * 528 * 272 * 144 / 1e10]],
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    argv = overrides(tmp_path / "text", folder, "parallel=fsdp", "precision=fp32", "data.tokenizer=bytes")
    (folder / "config.yaml").write_text(config_yaml(compose(argv)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"time": 1.0, **line}) + "\n" for line in LINES))
    return folder


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(RATES))
    return file


def printed(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert cli.main([str(word) for word in ("plan", *words)]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_the_plan_of_a_run_folder_is_for_its_own_processes_and_takes_overrides(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, run, "plan.mode=formula")
    assert "fsdp, shard 2, ZeRO-3 (reshards after forward); planned for 2 processes" in text
    text = printed(capsys, run, "plan.mode=formula", "parallel=ddp", "launch.processes=3")
    assert "planned for 3 processes" in text
    assert "ddp, replicate 3" in text


def test_a_run_of_a_task_without_recipes_takes_overrides(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    with declaring(installed("image_classification")):
        file.write_text(config_yaml(compose(["task.path=photos", "task.model=resnet18"])))
        assert compose_saved(file, ["parallel=fsdp", "trainer.steps=7"], ("",)).trainer.steps == 7


def test_run_without_known_rates_is_compared_by_memory_and_shown_how_to_get_them(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "compare", run, "plan.mode=formula")
    assert "19.1MiB" in next(line for line in text.splitlines() if line.startswith("peak memory")), "less the start's"
    assert "times      no rates are known for cpu; measure them there: serried plan calibrate" in text
    assert "200 ms" in next(line for line in text.splitlines() if line.startswith("step")), "the median after the first"


def test_formula_and_trace_take_the_same_attention_from_measured_rates(
    rates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rates are of fp32. Attention is made slow, so that the step is almost only that."""
    rates.write_text(json.dumps({**RATES, "attention": 1e5}))
    words = [f"plan.rates={rates}", "precision=fp32", "launch.processes=2", "launch.device=cpu", "parallel=ddp"]

    def seconds(mode: str) -> float:
        text = printed(capsys, *words, f"plan.mode={mode}")
        found = re.search(r"^step +([\d,]+) s ", text, re.MULTILINE)
        assert found, text
        return float(found[1].replace(",", ""))

    assert seconds("formula") == pytest.approx(seconds("trace"), rel=0.1)


@pytest.mark.slow
def test_exchanges_are_read_from_a_profile_with_the_part_that_computing_hides(
    run: Path, rates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(*words: object) -> str:
        text = printed(capsys, "compare", run, *words)
        return " ".join(next(line for line in text.splitlines() if "exposed communication" in line).split())

    assert row("plan.mode=formula").endswith("- - recorded in a run with 'profile.steps=[3,4]'")
    events = [("aten::mm", 0, 10_000), ("gloo:all_gather", 5_000, 20_000), ("gloo:send", 30_000, 9_000)]
    trace = {"traceEvents": [{"name": name, "ts": began, "dur": took} for name, began, took in events]}
    (run / "profile").mkdir()
    with gzip.open(run / "profile/steps-2-3-rank-0.json.gz", "wt") as file:
        json.dump(trace, file)
    assert "7.5 ms 10 ms in total, 25% hidden by computation: profile of steps 2 to 3" in row("plan.mode=formula")
    found = row(f"plan.rates={rates}")
    assert re.search(r"exposed communication [\d.]+ ms 7.5 ms [+-][\d.]+% ", found), found
    (run / "profile/steps-2-3-rank-0.json.gz").write_bytes(b"cut short")
    assert "profile.steps=[3,4]" in row("plan.mode=formula")


def test_measured_rates_time_each_term_of_a_run(run: Path, rates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("compare", run, f"plan.rates={rates}")
    table = printed(capsys, *words)
    found = json.loads(printed(capsys, *words, "json=true"))
    parts, seconds = found["plan"]["time"]["parts"], found["plan"]["time"]["seconds"]
    assert {"products", "attention", "memory", "data", "optimizer"} == {*parts}
    assert math.isclose(sum(parts.values()), seconds)
    assert found["run"]["phases"] == {"data": 0.01, "forward": 0.05, "backward": 0.1, "optimizer": 0.03, "host": 0.01}
    (step,) = (line for line in table.splitlines() if line.startswith("step"))
    assert f"{seconds / 0.2 - 1:+.1%}" in step
    assert "faster" not in step
    assert "measured with torch 2.0, but this is" in table


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["compare"], "serried plan compare needs a run folder"),
        (["compare", "{folder}"], "{folder} is not a run"),
        (["{folder}/none"], "there is no folder {folder}/none"),
        (
            ["search", "mine.py"],
            "mine.py is a script; serried plan search supports only built-in models; plan its",
        ),
        (["serach", "recipe=tiny"], "there is no folder serach; did you mean serried plan search?"),
        (["search", "recipe=tiny", "plan.mode=trace"], "serried plan search, which uses formulas; leave it out"),
        (["compare", "{run}", "parallel=ddp"], "parallel=ddp has no effect here"),
        (["compare", "{run}", "plan.rates={folder}/none.json"], "cannot read plan.rates={folder}/none.json: No such"),
        (
            ["compare", "{run}", "plan.rates={run}/metrics.jsonl"],
            "contains no rates; measure them with: serried plan calibrate",
        ),
        (
            ["plan.rates={rates}", "plan.device=h100"],
            "the rates of plan.rates={rates} were measured on A CPU, but plan.device=h100; leave",
        ),
        (["plan.rates={rates}", "launch.device=cuda"], "were measured on A CPU, but launch.device=cuda"),
        (["calibrate", "out={folder}"], "out={folder} is not a file in an existing folder; use out"),
        (["calibrate", "out={folder}/none/rates.json"], "is not a file in an existing folder"),
        (["calibrate", "out={pipe}"], "out={pipe} is a device or a pipe and would be replaced by a file"),
        (["search", "recipe=tiny", "launch.processes=2", "out={pipe}"], "out={pipe} is a device or a pipe"),
        (["calibrate", "launch=slurm", "launch.nodes=3", "trainer.global_batch=8"], "trainer.global_batch=8"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    words: list[str], text: str, run: Path, rates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"folder": run.parent, "run": run, "rates": rates, "pipe": tmp_path / "pipe"}
    os.mkfifo(tmp_path / "pipe")
    how = [] if "calibrate" in words or "plan.mode=trace" in words else ["plan.mode=formula"]
    error = printed(capsys, *(word.format(**names) for word in words), *how, code=78)
    assert text.format(**names) in error
    assert len(error.splitlines()) == 1
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    "damage",
    [{"products": []}, {"products": [[1, 2, 3, 0]]}, {"memory": 0}, {"attention": -1}, {"per_node": 0}, {"links": [1]}],
)
def test_damaged_rates_are_refused(damage: dict[str, object], rates: Path) -> None:
    rates.write_text(json.dumps(json.loads(rates.read_text()) | damage))
    with pytest.raises(UserError, match="contains no rates; measure them with: serried plan calibrate"):
        read_rates(rates)


def test_rates_of_another_device_than_the_runs_are_refused(
    run: Path, rates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (run / "metrics.jsonl").read_text().replace('"cpu"', '"NVIDIA A100-SXM4-80GB"')
    (run / "metrics.jsonl").write_text(lines)
    error = printed(capsys, "compare", run, "plan.mode=formula", f"plan.rates={rates}", code=78)
    assert f"plan.rates={rates} were measured on A CPU, but the run used NVIDIA A100-SXM4-80GB" in error


def test_a_step_that_cannot_be_traced_has_no_products_to_time() -> None:
    words = ["parallel=fsdp", "parallel.context=2", "parallel.context_method=ring", "launch.processes=2"]
    argv = [*words, "launch=local", "launch.device=cuda", "data.tokenizer=bytes", *(f"model.{each}" for each in TINY)]
    with pytest.raises(UserError, match="because the step cannot be traced: ring attention"):
        traced_products(compose(argv))


@pytest.mark.slow
def test_two_processes_write_rates_that_a_plan_reads(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rates.json"
    sizes = [f"model.{each}" for each in TINY]
    argv = ["launch.device=cpu", "precision=fp32", "data.tokenizer=bytes", "parallel=fsdp", *sizes]
    cluster.run(2, "tests.ranks.test_plan_of_runs:calibrated", argv=[*argv, f"out={out}"])
    found = read_rates(out)
    assert found.cluster.per_node == 2
    assert all(seconds > 0 for seconds in found.products.values())
    assert 0 <= found.hidden <= 1
    near = min(found.products)
    assert math.isclose(found.product_seconds(near), found.products[near])
    text = printed(capsys, *argv, "launch.processes=2", f"plan.rates={out}")
    assert "needs" in text, "no GPU that it might fit"
    assert f"on 2 {found.cluster.device.name}" in text
    assert f"time: rates measured on {found.date} in {out}" in text


TINY = ("dim=64", "layers=2", "heads=2", "kv_heads=2", "hidden_dim=96")


def calibrated(argv: list[str]) -> int:
    return calibrate(argv)


def test_json_has_numbers_of_plan_and_search(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama8b", "launch.processes=8", "plan.device=h100", "json=true"]
    plan = json.loads(printed(capsys, *words, "plan.mode=formula", "trainer.micro_batch=auto"))
    assert plan["fits"]["answer"] == "yes"
    assert 8 * plan["micro_batch"] * plan["accumulation"] == compose(words[:1]).trainer.global_batch
    assert sum(plan["memory"]["parts"].values()) == pytest.approx(plan["memory"]["bytes"], rel=1e-6)
    assert plan["time"]["low"] < plan["time"]["seconds"] < plan["time"]["high"]
    found = json.loads(printed(capsys, "search", *words))
    assert found["valid"] > found["fitting"] > 0
    assert found["fastest"][0]["seconds"] <= found["fastest"][1]["seconds"]
