"""The numbers that a run tells of itself, beside a stopwatch and a count by hand."""

import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import serried.recipes.models.families.llama
import serried.recipes.models.layers.lm_head
import serried.trainer.metrics.meter
import serried.trainer.trainer
from serried.configs.compose import compose
from serried.parallel.step_phases import PHASES, PIPELINE
from serried.recipes.models.families.llama import Llama, Transformer
from serried.runtime.session import open_session
from serried.trainer.metrics.meter import PROFILING, SAVING, Meter, _NumbersOfAllRanks, eta_seconds
from serried.trainer.metrics.peak_flops import PEAK_FLOPS, peak_flops
from serried.trainer.step import TrainStep
from testing.rank_pool import Cluster
from testing.runs import metrics, overrides, run_here, tiny_overrides, train_small


@pytest.mark.parametrize("more", [[], ["model.tie_embeddings=true"], ["model.kv_heads=4", "model.layers=1"]])
def test_flops_per_token_are_those_of_the_matrix_products(more: list[str], tmp_path: Path) -> None:
    config = compose(overrides(tmp_path, tmp_path, "model.dim=64", "model.hidden_dim=160", "model.heads=4", *more))
    model = Transformer(config.model, vocab_size=257).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    tokens = torch.zeros(2, 48, dtype=torch.int64)
    # Products in place are products too; and the kernel that multiplies plainly, since others compute scores a second
    # time in backward, which is not a model FLOP.
    in_place = {torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * math.prod(left) * right[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counted, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    said = Llama(config.model, 257).flops_per_token(parameters, 48)
    # The formula also has 6 for each weight of a norm, which is in no product.
    assert said * tokens.numel() == pytest.approx(counted.get_total_flops(), rel=0.02)


def test_rates_equal_those_of_a_stopwatch_without_pauses() -> None:
    clock = SimpleNamespace(perf_counter=lambda: 100.0)
    with patch.object(serried.trainer.metrics.meter, "time", clock):
        meter = Meter(torch.device("cpu"), 1, 6e9, 1e12)
        meter.start_at(10, 1000)
        clock.perf_counter = lambda: 104.0
        meter.pause("validation", 1.0)
        rates = meter.rates(20, 4000, 0.6, None)
    told = {key: rates[key] for key in ("step_seconds", "tokens_per_second", "mfu", "data_seconds")}
    assert told == pytest.approx({"step_seconds": 0.3, "tokens_per_second": 1000, "mfu": 0.02, "data_seconds": 0.06})


def test_steps_of_a_run_take_no_longer_than_the_run(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_here(tiny_overrides(text, run, "trainer.steps=31", "trainer.log_every=10")).code == 0
    ended = time.time()
    (start,), (stop,), lines = metrics(run, "start"), metrics(run, "stop"), metrics(run)
    assert start["time"] <= stop["time"] <= ended + 0.001
    assert [line["step"] for line in lines] == [1, 10, 20, 30, 31]
    assert all(line["tokens_per_second"] * line["step_seconds"] == pytest.approx(4 * 32) for line in lines)
    trained = sum(steps * line["step_seconds"] for steps, line in zip([1, 9, 10, 10, 1], lines, strict=True))
    assert trained < ended - start["time"] + 0.001


def test_utilisation_is_what_the_model_takes_over_what_the_devices_could(text: Path, tmp_path: Path) -> None:
    with patch.object(
        serried.trainer.trainer, "peak_flops", lambda _, precision: 1e12 if precision == "bf16" else None
    ):
        for precision in ("bf16", "fp32"):
            assert run_here(tiny_overrides(text, tmp_path / precision, f"precision={precision}")).code == 0
    assert {line["mfu"] for line in metrics(tmp_path / "fp32")} == {None}
    (start,) = metrics(tmp_path / "bf16", "start")
    assert start["peak_flops_per_device"] == 1e12
    for line in metrics(tmp_path / "bf16"):
        assert line["mfu"] * 1e12 * line["step_seconds"] == pytest.approx(start["flops_per_sample"] * 4)


def test_peaks_are_those_of_the_precision_and_of_dense_products() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.5e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") == 67e12
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16") is None
    assert peak_flops("cpu", "fp32") is None
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 156e12
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # after which torch does not answer for all devices
        assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 156e12
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    finally:
        torch.set_float32_matmul_precision(before)
    for name, peaks in PEAK_FLOPS.items():
        assert peaks["fp16"] > peaks.get("tf32", 0), name
        assert all(1e12 < peak < 3e15 for peak in peaks.values()), name


def test_remaining_time_counts_evaluations_and_saves_by_their_duration(tmp_path: Path) -> None:
    def left(step: int, *more: str) -> float:
        config = compose(overrides(tmp_path, tmp_path, "trainer.steps=100", "trainer.eval_every=40", *more))
        return eta_seconds(config, step, 2.0, {"validation": 10.0, "other": 5.0, SAVING: 1.0, PROFILING: 7.0})

    evaluations, save = 15, 1
    assert left(1, "checkpoint.every=30") == 99 * 2 + 3 * evaluations + 4 * save
    assert left(40, "checkpoint.every=30") == 60 * 2 + 3 * evaluations + 3 * save, "that of step 40 is to come"
    assert left(41, "checkpoint.every=0") == 59 * 2 + 2 * evaluations + 1 * save
    assert left(41, "checkpoint.every=0", "trainer.eval_every=0") == 59 * 2 + 1 * save
    assert left(100, "checkpoint.every=50") == evaluations + save
    assert left(10, "checkpoint.every=0", "trainer.stop_at=20") == 10 * 2 + evaluations + save


def train_exchanging(argv: list[str]) -> dict[str, Any]:
    """Train with ranks that exchange their numbers for each line of the log, however fast they come."""
    with patch("serried.trainer.metrics.meter._EXCHANGE_SECONDS", 0.0):
        return train_small(argv)


def test_start_and_step_events_have_the_fields_that_readers_need(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path, "trainer.steps=12", "trainer.eval_every=4", "parallel=fsdp")
    assert [
        answer.value["code"] for answer in cluster.run(2, "tests.unit.test_numbers:train_exchanging", argv=argv)
    ] == [
        0,
        0,
    ]
    (start,) = metrics(tmp_path, "start")
    assert start["device"] == "cpu"
    assert start["hosts"] == [os.uname().nodename] * 2
    assert start["peak_flops_per_device"] is None
    assert start["flops_per_sample"] > 32 * 6 * 257 * 16
    for line in metrics(tmp_path):
        assert line["lr_by_group"] == {"matrices": line["lr"], "norms": line["lr"]}
        assert line["memory_reserved_bytes"] is None
        assert line["tokens_per_second_per_device"] == line["tokens_per_second"] / 2
        assert line["eta_seconds"] >= (12 - line["step"]) * line["step_seconds"]
    assert [line["step"] for line in metrics(tmp_path) if line["time_split"]] == [10]


def test_the_parts_of_a_step_add_up_to_its_time(text: Path, tmp_path: Path) -> None:
    inside: list[float] = []
    boundaries: list[float] = []
    train = TrainStep.__call__

    def timed(self: TrainStep, *arguments: Any) -> Tensor:
        started = time.perf_counter()
        result = train(self, *arguments)
        inside.append(time.perf_counter() - started)
        return result

    with patch.object(TrainStep, "__call__", timed):
        argv = tiny_overrides(text, tmp_path, "trainer.steps=31", "trainer.log_every=5")
        assert run_here(argv, lambda *_: boundaries.append(time.perf_counter())).code == 0
    marked = {line["step"]: line["time_split"] for line in metrics(tmp_path) if line["time_split"]}
    assert list(marked) == [10, 20, 30]
    for step, split in marked.items():
        assert list(split) == [phase for phase in PHASES if phase != PIPELINE]
        assert inside[step - 1] <= sum(split.values()) <= boundaries[step - 1] - boundaries[step - 2]
        assert min(split.values()) > 0


def test_pause_before_a_rollback_is_not_subtracted_after_it() -> None:
    meter = Meter(torch.device("cpu"), 1, 1.0, None)
    meter.pause("validation", 3600.0)
    meter.start_at(5, 100)
    time.sleep(0.01)
    assert meter.rates(6, 200, 0.0, None)["step_seconds"] >= 0.01


def test_ranks_exchange_metrics_only_at_some_steps_and_every_log_line_has_values(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    batch = ["trainer.global_batch=8", "trainer.micro_batch=4"]
    argv = tiny_overrides(text, tmp_path, "trainer.steps=30", "trainer.log_every=1", *batch)
    first, second = (answer.value for answer in cluster.run(2, "tests.unit.test_numbers:steps_of_exchanges", argv=argv))
    assert first == second, "or a rank would wait for ever"
    lines = metrics(tmp_path)
    assert first[0] == 1
    assert len(first) < len(lines) == 30
    for line in lines:
        assert min(line["memory_bytes"], line["step_seconds"], line["tokens_per_second"], line["slowest_share"]) > 0
        assert line["data_seconds"] >= 0


def data_shares(waited: list[float]) -> list[float]:
    """Shares of waiting for data in the lines of a run of ranks, of which the first waits so long before each."""
    shares = []
    with open_session(compose([]).launch) as session, patch("serried.trainer.metrics.meter._EXCHANGE_SECONDS", 1000.0):
        meter = Meter(torch.device("cpu"), session.world_size, 1.0, None)
        for step, seconds in enumerate(waited, start=1):
            time.sleep(0.02)
            rates = meter.rates(step, step, seconds if session.is_main else 0.0, None)
            shares.append(rates["data_seconds"] / rates["step_seconds"])
    return shares


def test_share_of_waiting_for_data_is_relative_to_the_measured_time(cluster: Cluster) -> None:
    for answer in cluster.run(2, "tests.unit.test_numbers:data_shares", waited=[0.0, 0.01, *[0.0] * 28]):
        line = next(line for line, share in enumerate(answer.value) if share)
        assert line == 21, "the first exchange after that of the first line"
        assert answer.value[line] <= 0.01 / (0.02 * line)
        assert answer.value[line:] == [pytest.approx(answer.value[line])] * (30 - line)


def steps_of_exchanges(argv: list[str]) -> list[int]:
    """After which steps of a run ranks exchanged their numbers."""
    found: list[int] = []
    rates, exchange, steps = Meter.rates, _NumbersOfAllRanks._exchange, [0]

    def noted(self: Meter, step: int, *arguments: Any) -> dict[str, Any]:
        steps.append(step)
        return rates(self, step, *arguments)

    def watched(self: _NumbersOfAllRanks, seconds: float) -> None:
        found.append(steps[-1])
        exchange(self, seconds)

    with patch.object(Meter, "rates", noted), patch.object(_NumbersOfAllRanks, "_exchange", watched):
        train_small(argv)
    return found
