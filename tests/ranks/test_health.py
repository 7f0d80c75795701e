"""Spikes and broken numbers are met as the config says; a replica with one wrong bit is found before it is saved."""

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from serried.configs.errors import TrainingFailed
from serried.configs.schema.sections import HealthSection
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.shard_specs import ShardSpec, Slice
from serried.program import main
from serried.trainer.data.loader import BatchLoader
from serried.trainer.loop import Loop
from serried.trainer.monitor.spikes import SpikeWindow
from serried.trainer.replica_check import Alike, differing, digest, respond
from serried.trainer.step import StepResult
from testing.rank_pool import Cluster
from testing.runs import different_tensors, metrics, status, steps_saved, tiny_overrides, train_small

BATCH = 4
DDP2 = ["parallel=ddp", "health.spike_window=8", "trainer.steps=12", "checkpoint.every=3", "schedule=constant"]


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def filled(section: HealthSection, values: int) -> SpikeWindow:
    window = SpikeWindow(section, torch.device("cpu"))
    for step in range(values):
        window.add(scalar(2 + step % 3), scalar(1.0), torch.tensor(True))
    return window


def test_spike_limit_is_deviations_above_mean_of_accepted_steps() -> None:
    section = HealthSection(spike_window=6, spike_deviations=3)
    assert filled(section, 2).limits().tolist() == [math.inf, math.inf], "half of the window is not there yet"
    loss, norm = filled(section, 9).limits().tolist()
    assert loss == pytest.approx(3 + 3 * math.sqrt(2 / 3))
    assert norm == pytest.approx(1.003), "without any deviation a share of the mean stands for it"


def test_rejected_losses_never_enter_the_window() -> None:
    window = filled(HealthSection(spike_window=6), 9)
    before = window.limits()
    for value in (math.nan, math.inf, 1e9):
        window.add(scalar(value), scalar(value), torch.tensor(False))
    assert window.limits().equal(before)


@pytest.mark.parametrize("size", [4, 6, 20])
def test_spike_window_is_restored_from_saved_state(size: int) -> None:
    window = filled(HealthSection(spike_window=6), 9)
    again = SpikeWindow(HealthSection(spike_window=size, spike_deviations=6), torch.device("cpu"))
    again.load_state_dict(json.loads(json.dumps(window.state_dict())))
    newest = [2.0 + step % 3 for step in range(9)][-min(size, 6) :]
    mean = sum(newest) / len(newest)
    if size == 6:
        assert again.limits().equal(window.limits())
    elif size < 6:
        assert again.limits()[0] == pytest.approx(mean + 6 * torch.tensor(newest).std(correction=0).item())
    else:
        assert again.limits()[0] == math.inf, "6 of 20 are less than half"
    again.load_state_dict(None)
    assert again.limits()[0] == math.inf


def spike_at(*steps: int, value: float = 1e4) -> dict[str, Any]:
    """On rank 0, whose micro-batches are one a step."""
    return {"rank": 0, "forwards": list(steps), "value": value}


def run(cluster: Cluster, text: Path, run_dir: Path, *more: str, fault: dict[str, Any] | None = None) -> str:
    argv = tiny_overrides(text, run_dir, *DDP2, *more)
    answers = cluster.run(2, "testing.runs:train_reported", argv=argv, fault=fault)
    assert {answer.value for answer in answers} == {status(run_dir)["exit_code"]}
    assert "Traceback" not in "".join(answer.printed for answer in answers)
    return "".join(answer.printed for answer in answers)


def test_spike_is_reported_and_kept_by_default(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    printed = run(cluster, text, tmp_path, fault=spike_at(8))
    assert printed.count("WARNING    spike at step 8: loss ") == 1
    (event,) = metrics(tmp_path, "spike")
    assert event["step"] == 8
    assert event["grad_norm"] > event["norm_limit"]
    assert not any(line["skipped"] for line in metrics(tmp_path))


def test_skipped_spike_changes_nothing_and_resumed_run_decides_the_same(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    run(cluster, text, tmp_path / "whole", "health.spike=skip", fault=spike_at(8))
    run(cluster, text, tmp_path / "parts", "health.spike=skip", "trainer.stop_at=7")
    printed = run(cluster, text, tmp_path / "parts", "health.spike=skip", fault=spike_at(1))
    assert "SKIPPED: a spike, nothing changed" in printed
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [line["skipped"] for line in whole] == [step == 8 for step in range(1, 13)]
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole]
    assert [line["skipped"] for line in parts] == [line["skipped"] for line in whole]
    assert not different_tensors(tmp_path / "whole", tmp_path / "parts")


def test_rollback_skips_samples_since_the_checkpoint(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path, *DDP2, "health.spike=rollback")
    answers = cluster.run(2, "testing.runs:train_small", argv=argv, fault=spike_at(8))
    assert [answer.value["code"] for answer in answers] == [0, 0]
    assert "Rolled back to " in answers[0].printed
    assert "the 8 samples since then are skipped" in answers[0].printed
    (event,) = metrics(tmp_path, "rollback")
    assert (event["step"], event["from_step"], event["samples"], event["left_out"]) == (6, 8, 8 * BATCH, 2 * BATCH)
    steps = metrics(tmp_path)
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["samples"] for line in steps] == [BATCH * (step if step <= 6 else step + 2) for step in range(1, 13)]
    lost = [json.loads(line) for line in (tmp_path / "lost.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lost] == [7, 8]
    taken = [sample for answer in answers for ids in answer.value["sample_ids"] for sample in ids]
    state = json.loads((tmp_path / "checkpoints" / "step-00000012" / "state.json").read_text())
    assert (state["samples"], state["rollbacks"]) == (14 * BATCH, 1)
    assert len(taken) == len(set(taken)) == 14 * BATCH, "no sample was taken twice"


def spike_and_be_asked_to_stop(argv: list[str], at: int) -> dict[str, Any]:
    """Rank 1 is asked to in the very step that spikes."""
    acts = {at: lambda: os.kill(os.getpid(), signal.SIGTERM)} if os.environ["RANK"] == "1" else {}
    return train_small(argv, fault=spike_at(at), acts=acts)


def test_rollback_in_the_stopping_step_stops_after_the_spike(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path, *DDP2, "health.spike=rollback")
    answers = cluster.run(2, "tests.ranks.test_health:spike_and_be_asked_to_stop", argv=argv, at=8)
    assert [answer.value["code"] for answer in answers] == [75, 75]
    printed = answers[0].printed
    assert printed.count("stopping   SIGTERM on rank 1") == printed.count("Rolled back to ") == 1
    state = json.loads((tmp_path / "checkpoints" / "step-00000007" / "state.json").read_text())
    assert (state["samples"], state["rollbacks"]) == (9 * BATCH, 1), "the step that saves that it has gone back"
    again = cluster.run(2, "testing.runs:train_small", argv=argv)
    assert [answer.value["code"] for answer in again] == [0, 0]
    taken = [sample for answer in (*answers, *again) for ids in answer.value["sample_ids"] for sample in ids]
    assert len(taken) == len(set(taken)) == 14 * BATCH, "no sample was taken twice"


def spike_after_damage(argv: list[str], run_dir: str) -> dict[str, Any]:
    """Before step 8, which spikes, a byte of the newest checkpoint is flipped."""

    def damage() -> None:
        newest = Path(run_dir, "checkpoints", "step-00000006")
        while not newest.exists():  # it is saved while training continues
            time.sleep(0.1)
        path = max(newest.glob("*.safetensors"), key=lambda found: found.stat().st_size)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    acts = {8: damage} if os.environ["RANK"] == "0" else {}
    return train_small(argv, fault=spike_at(8), acts=acts)


def test_rollback_past_damaged_checkpoint_sets_it_aside_and_saves_the_step_again(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    argv = tiny_overrides(
        text, tmp_path, *DDP2, "health.spike=rollback", "checkpoint.keep=1", "checkpoint.keep_every=3"
    )
    answers = cluster.run(2, "tests.ranks.test_health:spike_after_damage", argv=argv, run_dir=str(tmp_path))
    assert [answer.value["code"] for answer in answers] == [0, 0], answers[0].printed
    assert "newer checkpoints (step-00000006) are kept in " in answers[0].printed
    assert metrics(tmp_path, "rollback")[0]["step"] == 3
    assert [event["step"] for event in metrics(tmp_path, "checkpoint")] == [3, 6, 9, 12]
    assert steps_saved(tmp_path) == [3, 6, 9, 12]


def test_rollbacks_are_limited_by_max_rollbacks(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    fault = spike_at(8, 10, 12, 14, 16)
    printed = run(cluster, text, tmp_path, "health.spike=rollback", "health.max_rollbacks=2", fault=fault)
    assert printed.count("Rolled back to ") == 2
    assert "stopped: spike at step 8" in printed
    assert "health.max_rollbacks=2 is reached" in printed
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("stopped", 75)
    assert steps_saved(tmp_path)[-1] == 6


def test_non_finite_loss_can_stop_or_roll_back_the_run(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    nan = math.nan
    printed = run(cluster, text, tmp_path / "a", "health.non_finite=stop", fault=spike_at(5, value=nan))
    assert "stopped: loss or gradient was not finite at step 5 (health.non_finite=stop)" in printed
    printed = run(cluster, text, tmp_path / "b", "health.non_finite=rollback", fault=spike_at(7, 8, 9, value=nan))
    assert "in 3 steps in a row, up to step 9. Rolled back to " in printed
    assert metrics(tmp_path / "b", "stop")[-1]["state"] == "finished"


def test_a_run_that_skipped_many_steps_ends_with_a_warning_and_names_their_samples(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    argv = tiny_overrides(text, tmp_path, *DDP2)
    answers = cluster.run(2, "testing.runs:train_small", argv=argv, fault=spike_at(5, 8, value=math.nan))
    assert [answer.value["code"] for answer in answers] == [0, 0]
    skipped = {line["step"]: sorted(line["sample_ids"]) for line in metrics(tmp_path) if line["skipped"]}
    taken = [answer.value["sample_ids"] for answer in answers]
    assert skipped == {step: sorted(id_ for rank in taken for id_ in rank[step - 1]) for step in (5, 8)}
    printed = answers[0].printed.splitlines()
    assert printed[-1].startswith("WARNING    2 of 12 steps (17%) were skipped and did not change the weights")
    assert sum("SKIPPED: not finite, nothing changed; its samples: " in line for line in printed) == 2
    ended = "all steps done, of which 2 of 12 (17%) were skipped"
    assert (status(tmp_path)["state"], status(tmp_path)["reason"]) == ("finished", ended)
    again = cluster.run(2, "testing.runs:train_reported", argv=argv)
    assert [answer.value for answer in again] == [0, 0]
    assert status(tmp_path)["reason"] == ended


def test_flipped_bit_at_any_position_changes_the_digest() -> None:
    tensors = [torch.randn(3, 700_000), torch.randn(5), torch.tensor(3.0), torch.randn(7).bfloat16()]
    whole = digest(tensors)
    for number, tensor in enumerate(tensors):
        for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
            for bit in (0, 8 * tensor.element_size() - 1):
                other = tensor.clone()
                flip(other, place, bit)
                changed = [*tensors[:number], other, *tensors[number + 1 :]]
                assert digest(changed) != whole, (number, place, bit)
    assert digest([tensor.clone() for tensor in tensors]) == whole
    assert digest([tensors[1], tensors[0], *tensors[2:]]) != whole


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    words = tensor.view(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    wide = int(words[place]) ^ (1 << bit)
    limit = 1 << (8 * tensor.element_size() - 1)
    words[place] = wide if -limit <= wide < limit else wide - 2 * limit if wide >= limit else wide + 2 * limit


def test_majority_of_replicas_is_right_and_two_replicas_are_undecided() -> None:
    assert differing([[(0, 5), (1, 5), (2, 5)]]) == ([], True)
    assert differing([[(0, 5), (1, 6), (2, 5)]]) == ([1], True)
    assert differing([[(0, 5), (1, 6)]]) == ([0, 1], False)
    assert differing([[(0, 1), (2, 1)], [(1, 2), (3, 3)]]) == ([1, 3], False)


def test_replicas_are_compared_along_every_axis_that_does_not_shard_a_tensor() -> None:
    layout = Layout("hsdp", pipeline=2, replicate=2, shard=2, tensor=2, stages=2)
    norm = Alike.of(ShardSpec("norm", (4,), (Slice(0, ("shard", "context")),), (1,)), layout)
    assert norm.copies(layout)[2:] == [[(8, 0), (9, 0), (12, 0), (13, 0)], [(10, 0), (11, 0), (14, 0), (15, 0)]]
    assert norm.along(layout) == "replicate and tensor"
    slices = (Slice(0, ("tensor",)), Slice(0, ("shard", "context")))
    tied = Alike.of(ShardSpec("embedding", (8, 4), slices, (0, 1)), layout)
    assert tied.copies(layout)[0] == [(0, 0), (4, 0), (8, 0), (12, 0)]
    assert tied.along(layout) == "tied stages and replicate"
    twice = Alike.of(ShardSpec("embedding", (8, 4), slices, (0, 0)), Layout("fsdp", pipeline=2, tensor=2, stages=4))
    assert twice.copies(Layout("fsdp", pipeline=2, tensor=2, stages=4)) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


def train_flipping(argv: list[str], rank: int, after_step: int, what: str) -> int:
    log = Loop._log

    def flipping(self: Loop, loader: BatchLoader) -> None:
        log(self, loader)
        if self.step == after_step and self._context.session.rank == rank:
            parameter = next(iter(self._state.module.parameters()))
            tensor = parameter if what == "weight" else self._state.optimizer.state[parameter]["exp_avg"]
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            flip(tensor.detach(), 3, 1)

    with patch.object(Loop, "_log", flipping):
        return main(argv)


@pytest.mark.parametrize(
    ("layout", "processes", "what", "named"),
    [
        ("parallel=ddp", 2, "weight", "rank 0 on HOST and rank 1 on HOST hold different bits"),
        ("parallel=ddp", 3, "exp_avg", "rank 1 on HOST holds other bits than the replicas"),
        ("parallel=hsdp parallel.replicate=2 parallel.shard=2", 4, "weight", "rank 1 on HOST and rank 3 on HOST hold"),
    ],
)
def test_replica_with_a_flipped_bit_is_named_and_not_saved(
    layout: str, processes: int, what: str, named: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    argv = tiny_overrides(
        text, tmp_path, *layout.split(), "trainer.global_batch=12", "trainer.micro_batch=1", "trainer.steps=8",
        "checkpoint.every=3", "health.replica_check_every=4",
    )  # fmt: skip
    for flipped_after, found_at in ((5, 6), (3, 3)) if processes == 2 else ((3, 3),):
        answers = cluster.run(
            processes, "tests.ranks.test_health:train_flipping", argv=argv, rank=1, after_step=flipped_after, what=what
        )
        assert {answer.value for answer in answers} == {75}
        now = status(tmp_path)
        assert (now["state"], now["step"], now["exit_code"]) == ("stopped", found_at, 75)
        assert f"silent corruption, detected at step {found_at}: " in now["reason"]
        host = now["reason"].split(" on ")[1].split()[0]
        assert named.replace("HOST", host) in now["reason"]
        assert "".join(answer.printed for answer in answers).count("stopped: silent corruption") == 1
        assert all(step < flipped_after for step in steps_saved(tmp_path))
        for path in (tmp_path / "checkpoints").glob("*"):
            path.rename(tmp_path / f"{path.name}-of-{flipped_after}")


def test_steps_without_a_target_are_reported() -> None:
    nothing = StepResult(math.nan, 0, math.nan, 1, 1, math.inf, math.inf, 3)
    with pytest.raises(
        TrainingFailed,
        match=r"because no sample had anything to predict .* in 3 steps in a row, up to step 5; .* Check the data",
    ):
        respond(HealthSection(), 5, nothing, "advice")
