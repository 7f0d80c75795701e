"""How long a step takes: the timeline of a pipeline, and step times against published ones."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import pipelining

from serried import cli
from serried.commands import plan_runs
from serried.configs.compose import compose, config_yaml
from serried.parallel.layout.mesh import Layout, resolve_layout
from serried.planner.devices import DEVICES, Cluster
from serried.planner.memory_formula import Sizes
from serried.planner.step_plan import plan_step
from serried.planner.time.pipeline_timeline import Cost, Slot, duration, play
from serried.planner.time.published_rates import ADAPTERS, FLOAT8, OUTSIDE, RATES, SEEN, WITHIN
from serried.planner.time.step_work import doubts, shape_of
from serried.planner.time.time_model import Job, Shape, step_of
from serried.program import main
from serried.recipes.text.causal_lm import CausalLM
from serried.trainer.model import build_model
from tools.published import Row, errors, rows, table

H100 = Cluster(DEVICES["h100"])
LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256)


def pipeline(schedule, ranks, per_rank=1):
    return Layout("fsdp", pipeline=ranks, schedule=schedule, stages=ranks * per_rank)


# timelines -----------------------------------------------------------------------------------------------------------


def test_timeline_of_two_stages_and_three_micro_batches_as_by_hand():
    timeline = play(pipeline("1f1b", 2), 3, [Cost(1, 2), Cost(1, 3)], transfer=0.5)
    f, b = "forward", "backward"
    assert [[(Slot(*slot), start) for slot, start in rank] for rank in timeline.slots] == [
        [((f, 0, 0), 0), ((f, 0, 1), 1), ((b, 0, 0), 6), ((f, 0, 2), 8), ((b, 0, 1), 10), ((b, 0, 2), 14)],
        [((f, 1, 0), 1.5), ((b, 1, 0), 2.5), ((f, 1, 1), 5.5), ((b, 1, 1), 6.5), ((f, 1, 2), 9.5), ((b, 1, 2), 10.5)],
    ]
    assert timeline.seconds == 16


@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 5), ("looped_bfs", 2)]
)
@pytest.mark.parametrize("ranks", [2, 8])
def test_bubble_of_equal_stages_is_the_closed_form(schedule, per_rank, ranks):
    layout, micro_batches = pipeline(schedule, ranks, per_rank), 2 * ranks
    costs = [Cost(1 / per_rank, 2 / per_rank)] * layout.stages
    assert play(layout, micro_batches, costs).seconds == pytest.approx(3 * (micro_batches + (ranks - 1) / per_rank))


def test_zero_bubble_schedule_fills_gaps_with_gradients_of_weights():
    costs = [Cost(0.5, 1, weights=0.5)] * 8
    work, bubble_of_interleaved = 16 * 2 * 1.5, 3 * 3 / 2
    assert work < play(pipeline("zbv", 4, 2), 16, costs).seconds < work + bubble_of_interleaved / 2


@pytest.mark.parametrize("schedule", ["interleaved", "looped_bfs"])
@pytest.mark.parametrize(("ranks", "per_rank", "micro_batches"), [(4, 2, 8), (2, 3, 6), (3, 2, 9)])
def test_order_of_a_schedule_equals_that_of_torch(schedule, ranks, per_rank, micro_batches):
    name = {"interleaved": "ScheduleInterleaved1F1B", "looped_bfs": "ScheduleLoopedBFS"}[schedule]
    of_torch = SimpleNamespace(
        _stages=[None] * per_rank, n_local_stages=per_rank, pp_group_size=ranks, _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // max(1, micro_batches // ranks),
    )  # fmt: skip
    layout = pipeline(schedule, ranks, per_rank)
    timeline = play(layout, micro_batches, [Cost(1, 1)] * layout.stages)
    for rank, placed in enumerate(timeline.slots):
        order = getattr(pipelining, name)._calculate_single_rank_operations(of_torch, rank)
        wanted = [(each.computation_type.name, each.stage_index, each.microbatch_index) for each in order if each]
        kinds = {"forward": "FORWARD", "backward": "FULL_BACKWARD"}
        assert [(kinds[slot.kind], slot.stage, slot.micro_batch) for slot, _ in placed] == wanted


@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", 1), ("interleaved", 3), ("gpipe", 1)])
def test_duration_of_a_long_step_is_that_of_its_timeline(schedule, per_rank):
    layout = pipeline(schedule, 4, per_rank)
    costs = [Cost(1 + stage % 3 / 7, 2 + stage % 2) for stage in range(layout.stages)]
    assert duration(layout, 64, costs, 0.1) == pytest.approx(play(layout, 64, costs, 0.1).seconds)


# published runs ------------------------------------------------------------------------------------------------------


def of_use(use: str) -> list[Row]:
    return [row for row in rows() if row.use == use]


def test_held_out_runs_are_predicted_within_bounds():
    calibration, held_out = errors(of_use("calibration")), errors(of_use("held out"))
    assert calibration.median < 0.02
    assert held_out.rows == 64
    assert held_out.median <= 0.08
    assert held_out.p90 <= 0.20


def test_held_out_runs_are_ranked_as_measured():
    groups = {row.group for row in of_use("held out")} - {"Megatron-Core"}  # which states no micro-batch
    found = [errors([row for row in of_use("held out") if row.group == group]) for group in groups]
    assert min(each.spearman or 0.0 for each in found if each.rows >= 5) > 0.85


def test_ranges_are_the_quantiles_of_the_errors():
    def quantiles(of):
        ratios = sorted(1 + row.error(RATES[row.software]) for row in of)
        return ratios[int(0.1 * len(of))], ratios[int(0.9 * len(of))]

    longer = [row for row in of_use("blind") if row.software == "llm-foundry" and row.job.sequence > 4096]
    elsewhere = [row for row in of_use("blind") if row.cluster.device.name == "h200"]
    assert quantiles(of_use("held out")) == pytest.approx(WITHIN, abs=0.01)
    low, high = quantiles([*longer, *elsewhere])
    assert low == pytest.approx(OUTSIDE[0], abs=0.01)
    assert high >= OUTSIDE[1]


def test_ranges_of_fp8_and_adapters_are_those_of_their_rows_with_torchtitans_rates():
    def ratios(of):
        return sorted(1 + row.error(RATES["torchtitan"]) for row in of)

    others = [row for row in rows() if row.use != "calibration"]
    in_fp8 = [row for row in others if row.job.precision == "8bit" and not row.job.is_adapter]
    own, every = ratios(row for row in in_fp8 if row.software == "torchtitan"), ratios(in_fp8)
    assert every[int(0.1 * len(every))] == pytest.approx(FLOAT8[0], abs=0.01)
    assert own[int(0.9 * len(own))] == pytest.approx(FLOAT8[1], abs=0.01)
    adapters = ratios(row for row in others if row.job.is_adapter and row.software == "torchtitan")
    assert len(adapters) == 6
    assert (adapters[0], adapters[-1]) == pytest.approx(ADAPTERS, abs=0.01)


@pytest.mark.parametrize(
    ("words", "low", "high", "text"),
    [
        (["precision=float8"], FLOAT8[0], FLOAT8[1], "FP8 runs is 8% (median) to 29% (p90)"),
        (["adapter=lora"], ADAPTERS[0], ADAPTERS[1], "with adapters took 0.75 times (one device) to 1.67"),
    ],
)
def test_trust_covers_fp8_and_adapters(words, low, high, text):
    config = compose(["recipe=llama8b", "data.tokenizer=bytes", "dry_run=true", "plan.device=h100", *words])
    task, layout = CausalLM(config), resolve_layout(config.parallel, 8)
    built = build_model(config, task)
    sizes, accumulation = Sizes(config, layout, built.module, built.plan), 64
    time = plan_step(config, task, accumulation, sizes, None, is_timed=True).time
    assert time.range == pytest.approx((low * time.step.seconds, high * time.step.seconds))
    assert text in time.trust


def test_range_covered_by_rates_matches_the_published_rows():
    for software, seen in SEEN.items():
        known = [row for row in rows() if row.software == software and row.cluster.device.name in seen.devices]
        assert any(row.job.sequence == seen.sequence for row in known)
        assert seen.sharding == max(row.job.layout.shard * row.job.layout.context for row in known)


def test_documentation_shows_the_table_as_computed():
    assert table() in Path("docs/evidence/plan-accuracy.md").read_text("utf-8")


# a step --------------------------------------------------------------------------------------------------------------


def job(**changes):
    layout = {axis: changes.pop(axis) for axis in ("shard", "tensor", "replicate") if axis in changes}
    values = {"sequence": 8192, "micro_batch": 1, "accumulation": 2, **changes}
    return Job(LLAMA_8B, Layout("hsdp" if "replicate" in layout else "fsdp", **layout), **values)


def test_parts_add_up_to_the_step():
    step = step_of(job(shard=8, tensor=2), H100, RATES["torchtitan"])
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert step.parts["products"] > step.parts["tensor"] > 0


def test_muon_adds_products_that_ranks_share_and_exchanges():
    def update(orthogonalizes, **layout):
        step = step_of(job(orthogonalizes=orthogonalizes, **layout), H100, RATES["torchtitan"])
        return step.parts["optimizer"]

    added = [update(True, **layout) - update(False, **layout) for layout in ({}, {"shard": 8}, {"shard": 512})]
    flops = (
        5 * 32 * sum(4 * m * m * n + 2 * m**3 for m, n in [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3)
    )
    assert added[0] == pytest.approx(flops / 989e12 / RATES["torchtitan"].products, rel=0.15)
    assert added[0] / 8 < added[1] < added[0] / 4
    assert added[2] > added[0] / 224, "one matrix at least"


def test_recomputing_every_second_block_takes_half_as_long():
    every, second = (
        step_of(job(shard=8, recompute="full", recomputing=share), H100, RATES["torchtitan"]) for share in (1, 0.5)
    )
    assert second.parts["recomputed"] == every.parts["recomputed"] / 2


def test_tensor_ranks_on_nodes_of_one_device_exchange_slowly():
    inside, across = (step_of(job(tensor=8), Cluster(H100.device, size), RATES["torchtitan"]) for size in (8, 1))
    assert across.parts["tensor"] > 5 * inside.parts["tensor"]


def test_sharding_over_more_ranks_than_were_ever_measured_costs_time():
    seconds = [step_of(job(shard=ranks), H100, RATES["torchtitan"]).parts for ranks in (512, 4096)]
    assert "stragglers" not in seconds[0]
    assert seconds[1]["stragglers"] > 0.05 * seconds[1]["products"]


def test_plan_prints_time_rate_cost_and_how_far_to_trust_them(capsys):
    words = ["recipe=llama70b", "launch.processes=512", "parallel.tensor=8", "dry_run=true"]
    assert main([*words, "plan.device=h100", "plan.tokens=15T", "plan.price=2.5"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    seconds, low, high = map(
        float, re.match(r"([\d.]+) s \(([\d.]+) to ([\d.]+)\) on 512 h100: ", lines["step"]).groups()
    )
    assert 10 < low < seconds < high < 25
    tokens_a_second = int(re.match(r"([\d,]+) tokens/s per device", lines["rate"])[1].replace(",", ""))
    assert tokens_a_second == pytest.approx(512 * 8192 / seconds / 512, rel=0.01)
    days, cost = map(
        float, re.search(r"15\.0T tokens: (\d+) days, .* ([\d.]+)M at 2.5 per hour", lines["rate"]).groups()
    )
    assert days == pytest.approx(15e12 / tokens_a_second / 512 / 86400, rel=0.01)
    assert cost == pytest.approx(days * 24 * 512 * 2.5 / 1e6, rel=0.01)
    assert "tensor-parallel communication" in lines["step"]
    assert lines["bottleneck"].startswith("matrix products")
    assert "torchtitan" in lines["trust"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dry_run=true", "plan.memory=24"], "plan.memory=24 is not the memory of a device; e.g. plan.memory=24GiB"),
        (
            ["dry_run=true", "plan.device=h10"],
            "plan.device=h10 is not in the catalogue .* did you mean plan.device=h100",
        ),
        (["plan.tokens=15T"], "plan.tokens=15000000000000 is only read by serried plan and dry_run=true; leave it out"),
    ],
)
def test_mistake_in_what_a_plan_assumes_is_one_line(words, message, capsys):
    assert main(["recipe=llama8b", "launch.processes=8", *words]) == 78
    assert re.fullmatch(f"error: {message}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(("kind", "is_known"), [("llama", True), ("gpt_neox", True), ("olmoe", False)])
def test_time_of_a_model_of_transformers_is_known_if_its_sizes_explain_its_parameters(kind, is_known, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 640}
    transformers.AutoConfig.for_model(kind, vocab_size=512, **sizes).save_pretrained(tmp_path)
    words = ["model=hf", "model.pretrained=false", f"model.path={tmp_path}", "data.tokenizer=bytes", "dry_run=true"]
    config = compose(words)
    task = CausalLM(config)
    built = build_model(config, task)
    shape = shape_of(config, built.module, built.plan)
    parameters = sum(each.numel() for each in built.module.parameters() if each.ndim >= 2)
    assert (shape is not None) == is_known
    assert shape is None or (shape.parameters == parameters and not shape.gathers_fp32)


def test_time_of_training_on_pairs_is_unknown(capsys):
    words = ["recipe=dpo", "task.loss=orpo", "data.tokenizer=bytes", "dry_run=true", "plan.device=h100"]
    assert main(words) == 0
    assert "\nstep       unknown: there are no rates for this kind of model or task" in capsys.readouterr().out


def test_config_of_a_run_contains_no_plan_keys():
    assert "plan" not in config_yaml(compose(["dry_run=true", "plan.device=h100"]))


# search --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["precision=bf16", "launch.processes=4"],
        pytest.param(["recipe=llama8b", "launch.processes=16"], marks=pytest.mark.slow),
    ],
)
def test_each_layout_that_a_search_lists_is_a_plan_of_the_time_listed(words, capsys, tmp_path):
    words, page = [*words, "plan.device=h100"], tmp_path / "layouts.html"
    assert plan_runs.plan(["search", *words, f"out={page}"]) == 0
    printed = capsys.readouterr().out
    listed = re.findall(r"^\d +([\d.]+ m?s) +[\d,]+ +[\d.]+[GM]iB +(.*)", printed, re.MULTILINE)
    assert len(listed) == 8
    assert f"page       {page}, " in printed
    shown = json.loads(re.search(r'id="data">(.*)</script>', page.read_text())[1])
    assert [each["words"] for each in shown["fastest"]] == [overrides.strip() for _, overrides in listed]
    every = {each["words"] for name in ("fastest", "covered", "smaller", "others") for each in shown[name]}
    assert len(every) == shown["fitting"]
    for seconds, overrides in listed[::3]:
        assert main([*words, "dry_run=true", *overrides.replace("(no change)", "").split()]) == 0
        assert f"step       {seconds} (" in capsys.readouterr().out


def test_a_search_lists_nothing_that_the_compiler_refuses(capsys):
    assert (
        plan_runs.plan(["search", "model=moe_tiny", "trainer.compile=true", "launch.processes=4", "plan.device=h100"])
        == 0
    )
    listed = capsys.readouterr().out
    assert "parallel." in listed
    assert "activation_checkpoint" not in listed, "recomputation of compiled blocks with experts"


def test_search_says_which_groups_are_larger_than_any_measured():
    def of(ranks):
        return [*doubts(job(shard=ranks), H100, "torchtitan")]

    assert of(512) == []
    assert of(4096) == ["gathers over more than 512 ranks for each block"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["recipe=llama70b", "launch.processes=2"],
            "none of [\\d,]+ valid layouts of 2 h100 fits 67.1GiB, nor with optim=adamw8bit, .*=512; the nearest is "
            ".* [\\d.]+GiB are missing; use more processes",
        ),
        (["recipe=llama8b", "plan.memory=24GiB"], "plan.memory=24GiB does not give the speed of the device; add"),
        (["recipe=llama8b", "launch.processes=101"], "no layout of 101 processes is possible: parallel degrees must"),
        (["precision=fp32", "plan.device=b200"], "there are no rates for precision=fp32 on b200"),
        (["recipe=llama8b", "out=none/layouts.html"], "out=none/layouts.html is not a file in an existing folder"),
    ],
)
def test_search_without_a_result_is_one_line(words, message, capsys):
    assert cli.main(["plan", "search", *words]) == 78
    assert re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)
