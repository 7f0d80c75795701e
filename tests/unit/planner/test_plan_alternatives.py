"""Overrides that a plan names: faster ones where memory is left, and those with which a run fits that does not."""

import json
import re
from pathlib import Path

import pytest

from serried import cli
from serried.configs.compose import compose
from serried.configs.schema.launch_plan_track import PlanSection
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.mesh import gradient_accumulation, resolve_layout
from serried.planner.advice import Planned
from serried.planner.alternatives import Fitting, Search, faster
from serried.planner.devices import DEVICES, device_of
from serried.planner.memory_formula import Sizes
from serried.planner.plan_lines import plan_lines
from serried.planner.step_plan import StepPlan, plan_step
from serried.task_class import task_of
from serried.trainer.metrics.peak_flops import PEAK_FLOPS
from serried.trainer.model import model_to_train
from serried.trainer.task import Task

QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
"""config.json of Qwen2.5-7B."""
LLAMA = ("recipe=llama8b", "launch.processes=8", "plan.device=h100")


@pytest.fixture
def qwen(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return ["recipe=lora", f"model.path={tmp_path}", "data.tokenizer=bytes", "launch.processes=1"]


def planned(*words: str) -> tuple[RunConfig, Task, StepPlan]:
    config = compose([*words, "data.tokenizer=bytes", "plan.mode=formula", "dry_run=true"])
    task, layout = task_of(config), resolve_layout(config.parallel, config.launch.processes or 1)
    accumulation = gradient_accumulation(config.trainer, layout)
    model = model_to_train(config, task, "cuda")
    capacity = config.plan.memory_bytes or int(device_of(config.plan.device or "h100").memory_bytes)
    sizes = Sizes(config, layout, model.module, model.plan)
    return config, task, plan_step(config, task, accumulation, sizes, capacity, is_timed=True)


def lines(*words: str) -> list[tuple[str, str]]:
    return [*plan_lines(*planned(*words))]


def test_run_with_free_memory_gets_faster_overrides_that_fit() -> None:
    config, task, plan = planned(*LLAMA, "plan.memory=64GiB")
    found = faster(Planned(config, task, 8, "cuda"), plan)
    assert [each.override for each in found] == ["trainer.compile=true", "trainer.micro_batch=2"]
    *_, after = planned(*LLAMA, "plan.memory=64GiB", *(each.override for each in found))
    assert after.fits is not None
    assert plan.fits is not None
    assert after.fits.answer == "yes"
    assert after.fits.needed - plan.fits.needed == sum(each.bytes for each in found)
    left = (1 - found[0].saved) * (1 - found[1].saved)
    assert after.time.step.seconds == pytest.approx(left * plan.time.step.seconds)


def test_run_without_free_memory_gets_no_override_that_needs_memory() -> None:
    named = [text for name, text in lines(*LLAMA, "plan.memory=48GiB") if name == "faster"]
    assert len(named) == 1
    assert re.match("trainer.compile=true +about 11% less time, no more memory", named[0])


def test_suggested_overrides_for_a_small_gpu_fit_and_are_minimal(qwen: list[str]) -> None:
    words = [*qwen, "plan.device=rtx4090"]
    config, task, plan = planned(*words)
    assert plan.fits is not None
    assert plan.fits.answer == "no"
    search = Search(Planned(config, task, 1, "cuda"), task, plan)
    found, nearest = search.found(), search.nearest()
    assert [each.words() for each in found] == [
        "trainer.activation_checkpoint=selective", "adapter.quantize=nf4",
        "trainer.micro_batch=1 data.sequence_length=512",
    ]  # fmt: skip
    for each in found:
        *_, after = planned(*words, *each.words().split())
        assert after.fits is not None
        assert (after.fits.answer, after.fits.needed) == (each.fits.answer, each.fits.needed)
    assert nearest is not None
    *_, after = planned(*words, *nearest.words().split())
    assert after.fits is not None
    assert after.fits.margin == nearest.fits.margin < 0
    assert found[1].changes() == ["stores the base model in 4 bits"]


def test_plan_for_a_gpu_given_only_by_memory_has_no_time(qwen: list[str]) -> None:
    named = dict(reversed([(name, text) for name, text in lines(*qwen, "plan.memory=12GiB") if name]))
    assert "trainer.activation_checkpoint=full adapter.quantize=nf4 7.8GiB, 2.2GiB are left" in named["fits with"]
    assert named["nearest"].endswith(" are missing")
    assert named["step"].startswith(
        "unknown: plan.memory=12GiB does not give the speed of the device; add plan.device="
    )


def test_search_for_one_card_quantizes_the_base_model_where_nothing_fits_without(
    qwen: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "search", *qwen, "plan.device=rtx4090"]) == 0
    assert "changed" not in (printed := capsys.readouterr().out)
    assert re.search("\n1 .* trainer.activation_checkpoint=selective\n", printed)
    assert cli.main(["plan", "search", *qwen, "plan.device=rtx3090", "plan.memory=10GiB"]) == 0
    printed = capsys.readouterr().out
    assert (
        "\nchanged    adapter.quantize=nf4; stores the base model in 4 bits\nnearest    without this change: "
        in printed
    )
    assert re.search("\n1 .* adapter.quantize=nf4 trainer.micro_batch=4 ", printed)


def test_search_tries_optimizers_with_less_state_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama8b", "launch.processes=4", "plan.device=h100", "plan.memory=30GiB", "data.tokenizer=bytes"]
    assert cli.main(["plan", "search", *words]) == 0
    printed = capsys.readouterr().out
    assert "\nchanged    optim=adamw8bit; 8-bit moments: numerics differ from adamw\n" in printed
    overrides = re.findall(r"^\d .*?(optim=.*)", printed, re.MULTILINE)
    assert overrides
    *_, plan = planned(*words, *overrides[0].split())
    assert plan.fits is not None
    assert plan.fits.answer != "no"


def test_ddp_that_does_not_fit_gets_advice_to_shard() -> None:
    words = ["recipe=llama1b", "launch.processes=4", "parallel=ddp", "trainer.micro_batch=1", "plan.device=rtx4090"]
    config, task, plan = planned(*words)
    found = Search(Planned(config, task, 4, "cuda"), task, plan).found()
    assert found[0].words() == "parallel=fsdp trainer.activation_checkpoint=selective"
    *_, after = planned(*words, *found[0].words().split())
    assert after.fits is not None
    assert after.fits.needed == found[0].fits.needed


def test_suggested_optimizer_is_reported_to_change_numerics() -> None:
    for name in ("adamw8bit", "adamw_bf16", "adamw4bit"):
        (text,) = Fitting({"optim.name": name}, None).changes()  # type: ignore[arg-type]
        assert text.endswith("numerics differ from adamw")


# cards ---------------------------------------------------------------------------------------------------------------


def test_each_card_has_peaks_memory_and_a_source() -> None:
    for device in DEVICES.values():
        assert device.driver_name in PEAK_FLOPS
        assert device.peak("fp16")
        assert device.lacks_bf16 == (device.name in ("t4", "v100", "v100-16gb"))
        assert min(device.memory_bytes, device.memory_rate, device.link_rate) > 0
        assert "." in device.source.split("/")[0]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("A6000", "rtx-a6000"), ("H100", "h100"),
        ("RTX 6000 Ada", "rtx6000-ada"), ("5090", "rtx5090"), ("Tesla T4", "t4"),
    ],
)  # fmt: skip
def test_card_is_found_by_the_name_on_its_box(typed: str, name: str) -> None:
    assert device_of(typed).name == name


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("1.5 TiB", 3 * 2**39)])
def test_memory_of_a_card_is_read_with_its_unit(text: str, size: int) -> None:
    assert PlanSection(memory=text).memory_bytes == size


@pytest.mark.parametrize("device", ["t4", "v100"])
def test_bf16_on_a_card_without_it_is_one_line(qwen: list[str], device: str) -> None:
    named = [text for name, text in lines(*qwen, f"plan.device={device}") if name in ("step", "WARNING")]
    assert named == [
        f"unknown: {device} has no hardware support for bf16; use precision=fp16",
        f"precision=bf16: {device} has no hardware support for bf16, so a run is refused; use precision=fp16",
    ]
    assert not any(name == "WARNING" for name, _ in lines(*qwen, f"plan.device={device}", "precision=fp16"))


def test_time_of_several_nodes_of_cards_whose_network_is_unknown_is_unknown() -> None:
    words = ["recipe=llama8b", "launch.processes=16", "plan.device=rtx4090"]
    (text,) = [text for name, text in lines(*words) if name == "step"]
    assert text.startswith(
        "unknown: the network between nodes of 8 rtx4090 is unknown; use plan.per_node=16 for a single"
    )
    assert " s (" in dict(lines(*words, "plan.per_node=16"))["step"]
