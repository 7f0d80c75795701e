"""The page of a run: what ``serried report`` writes, looked at and touched in a real browser."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import yaml

import serried.trainer.run
from serried.cli import main
from serried.launch.sweep.sweep_table import Outcome, write_summary
from serried.records.goodput import goodput_of
from serried.records.report import write_report
from serried.records.report.page import render
from serried.records.report.run_records import Curve, read_records
from serried.records.report.thinning import means, thinned
from testing.rank_pool import ROOT
from testing.runs import metrics, run_here, status, tiny_overrides
from tests.support.browser import Browser, Page, browser

LIMIT_BYTES = 3_000_000
SPIKE_STEP, SPIKE = 61_803, 17.25


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


def write_run(folder: Path, steps: int, *, seed: int = 0, config: dict[str, Any] | None = None) -> Path:
    """Records of a run of 16 ranks on 2 hosts as a trainer writes them, with all that can happen to one."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    noise = random.normal(0, 0.05, steps + 1).tolist()
    lines: list[dict[str, Any]] = []
    time = 1_790_000_000.0

    def start(resumed_from: int | None) -> dict[str, Any]:
        return {
            "event": "start", "unit": "images", "world_size": 16, "mesh": {"replicate": 4, "shard": 4},
            "parameters": 1_235_814_400,
            "resumed_from": resumed_from, "device": "NVIDIA H200", "hosts": ["node-a"] * 8 + ["node-b"] * 8,
            "peak_flops_per_device": 989e12, "flops_per_sample": 7.5e9, "tracker_run_id": "abcd1234", "time": time,
        }  # fmt: skip

    lines.append(start(None))
    for step in range(1, steps + 1):
        time += 0.5
        loss = 2 + 8 / math.sqrt(1 + step / 50) + noise[step]
        if step == SPIKE_STEP:
            loss = SPIKE
        is_bad = step == steps // 5
        rate, whole = 1 + noise[step], 0.4 * (1 + noise[step])
        line = {
            "event": "step", "step": step, "accuracy": step / (9 + step), "loss": None if is_bad else loss,
            "grad_norm": None if is_bad else loss / 7,
            "lr": 3e-4, "lr_by_group": {"matrices": 3e-4, "norms": 1e-4 * min(1, step / 100)},
            "samples": 64 * step, "tokens": 131_072 * step,
            "source_tokens": {"web": 90_000 * step, "code": 41_072 * step},
            "step_seconds": 0.5, "tokens_per_second": 262_144 * rate, "mfu": 0.41 * rate, "memory_bytes": 70 << 30,
            "memory_reserved_bytes": 75 << 30, "data_seconds": 0.002, "slowest_rank": 3, "slowest_share": 1.01,
            "eta_seconds": (steps - step) * 0.5, "skipped": is_bad, "scale": None,
            "time_split": {
                "data": 0.002, "forward": whole * 0.3, "backward": whole * 0.6, "optimizer": 0.02, "host": 0.01,
            } if step % 10 == 0 else None,
            "time": time,
        }  # fmt: skip
        lines.append({**line, "nonfinite": True} if is_bad else line)
        if step % max(steps // 20, 1) == 0:
            common = {"step": step, "time": time}
            sources = {"web": loss + 0.1, "code": loss - 0.2}
            evaluation = {"event": "eval", **common, "tokens": 65_536}
            lines.append(
                {**evaluation, "set": "validation", "loss": loss + 0.1, "source_losses": sources, "accuracy": 0.8721}
            )
            lines.append({**evaluation, "set": "books", "loss": loss + 0.3})
            lines.append({"event": "checkpoint", **common, "path": f"x/step-{step}", "seconds": 1.0, "bytes": 1})
        if step == steps // 2:
            lines.append({"event": "stop", "step": step, "state": "stopped", "reason": "SIGTERM", "time": time})
            time += 86_400  # in a queue
            lines.append(start(step))
        if step == steps // 3:
            left = {"step": step + 1, "total_replicas": 4, "time": time}
            lines += [
                {"event": "lost", "nodes": ["node-b"], "ranks": [7], "reason": "killed", "replicas": 3, **left},
                {"event": "recovered", "step": step + 1, "generation": 1, "seconds": 0.1, "time": time},
                {"event": "joined", "node": "node-c", "replicas": 4, **left},
            ]
        if step == steps * 3 // 4:
            lines.append(
                {"event": "spike", "step": step, "loss": 9.0, "grad_norm": 50.0, "skipped": False, "time": time}
            )
            lines.append({"event": "rollback", "step": step, "from_step": step + 7, "samples": 1, "left_out": 2,
                          "reason": "the loss jumped", "time": time})  # fmt: skip
    lines.append({"event": "stop", "step": steps, "state": "finished", "reason": "all steps done", "time": time})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "lost.jsonl").write_text(json.dumps({"event": "step", "step": steps * 3 // 4 + 1, "loss": 9.5}) + "\n")
    status = {"state": "finished", "step": steps, "reason": "all steps done", "exit_code": 0}
    (folder / "status.json").write_text(json.dumps(status))
    shown = {"run": {"name": folder.name}, "optim": {"lr": 3e-4}, "trainer": {"steps": steps, "stop_at": None}}
    (folder / "config.yaml").write_text(yaml.safe_dump({**shown, **(config or {})}))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "gpus": ["NVIDIA H200"] * 8, "cuda": None}))
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "one", 240)


@pytest.fixture(scope="module")
def page_file(run_dir: Path) -> Path:
    assert main(["report", str(run_dir)]) == 0
    return run_dir / "report.html"


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of 100,000 logged steps each, of the same records: writing and reading them takes long."""
    folder = tmp_path_factory.mktemp("long")
    records = read_records(write_run(folder / "a", 100_000))
    others = [
        replace(records, path=folder / name, config={**records.config, "optim.lr": rate})
        for name, rate in (("b", 0.0001), ("c", 0.0002))
    ]
    (folder / "report.html").write_text(render([records, *others]), encoding="utf-8")
    return folder / "report.html"


def colours_drawn(page: Page, chart: str) -> int:
    """How many pixels of the canvas have one of the curves' colours: those of text and grid are all but grey."""
    count: int = page.js(
        f"(() => {{ const canvas = document.querySelector('#chart-{chart} canvas');"
        " const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height); let count = 0;"
        " for (let i = 0; i < data.length; i += 4)"
        "   if (data[i + 3] > 100 && Math.max(data[i], data[i + 1], data[i + 2])"
        "       - Math.min(data[i], data[i + 1], data[i + 2]) > 60) count++;"
        " return count; })()"
    )
    return count


def plot(chart: str) -> str:
    return f"charts.find((chart) => chart.spec.id === '{chart}').plot"


def hover(page: Page, chart: str, step: float) -> str:
    """Text of what shows with the pointer at ``step``."""
    box = page.box(f"#chart-{chart} .u-over")
    left = page.js(f"{plot(chart)}.valToPos({step}, 'x')")
    page.mouse("mouseMoved", box["x"] + 2, box["y"] + box["height"] / 2)
    page.drawn()
    page.mouse("mouseMoved", box["x"] + left, box["y"] + box["height"] / 2)
    page.drawn()
    text: str = page.js(f"document.querySelector('#chart-{chart} .tip').innerText")
    return text


@pytest.mark.page
def test_every_curve_is_drawn(chromium: Browser, page_file: Path, run_dir: Path) -> None:
    with chromium.page(page_file) as page:
        charts = page.js("charts.map((chart) => chart.spec.id)")
        assert charts == [
            "loss", "validation", "source_loss", "metric-0", "grad_norm", "lr", "throughput", "mfu", "memory",
            "time_split", "data_share", "source_tokens", "slowest",
        ]  # fmt: skip
        for chart in charts:
            assert colours_drawn(page, chart) > 100, chart
        text = page.js("document.body.innerText")
    last = metrics(run_dir)[-1]["loss"]
    for told in (
        "finished", f"{last:.4f}", "31.5M", "1 restart", "1 lost replica",
        "1 joined node", "1 rollback", "1 skipped step", "1 spike", "20 checkpoints",
        "books", "node-b", "4 replicas of the model", "NVIDIA H200", "serried export run.dir=", "1.24B",
        "1 logged step discarded", "accuracy", "0.8721", "images/s, median",
    ):  # fmt: skip
        assert told in text, told


@pytest.mark.page
def test_the_pointer_shows_exact_values(chromium: Browser, page_file: Path, run_dir: Path) -> None:
    line = next(line for line in metrics(run_dir) if line["step"] == 96)
    evaluation = next(line for line in metrics(run_dir, "eval") if line["step"] == 96)
    with chromium.page(page_file) as page:
        text = hover(page, "loss", 96)
        assert f"step 96 · {line['tokens']:,} images" in text
        assert str(line["loss"]) in text
        assert str(evaluation["loss"]) in text
        assert "checkpoint of step 96" in text
        assert str(line["grad_norm"]) in hover(page, "grad_norm", 96)
        assert str(line["memory_bytes"]) in hover(page, "memory", 96).replace(",", "")
        split = next(line for line in metrics(run_dir) if line["step"] == 100)["time_split"]
        text = hover(page, "time_split", 100)
        assert all(str(seconds) in text and part in text for part, seconds in split.items())
        assert "not finite" in hover(page, "loss", 48)
        assert "from step 187: the loss jumped" in hover(page, "loss", 180)


@pytest.mark.page
def test_log_scale_smoothing_and_axis_can_be_changed(chromium: Browser, page_file: Path) -> None:
    with chromium.page(page_file) as page:
        assert page.js(f"{plot('loss')}.scales.y.distr") == 1
        page.click("#chart-loss .buttons [title^=log]")
        assert page.js(f"{plot('loss')}.scales.y.distr") == 3
        assert colours_drawn(page, "loss") > 100

        assert page.js(f"{plot('loss')}.data.length") == 5, "steps, training, smoothed, undone, validation"
        box = page.box("#smoothing")
        for kind in ("mousePressed", "mouseReleased"):
            page.mouse(kind, box["x"] + 1, box["y"] + box["height"] / 2, button="left", clickCount=1)
        page.drawn()
        assert page.js("document.querySelector('.smoothing output').value") == "0.00"
        assert page.js(f"{plot('loss')}.data.length") == 4

        page.click(".choice [data-value=tokens]")
        assert page.js(f"{plot('loss')}.scales.x.max") == 240 * 131_072
        page.click(".choice [data-value=seconds]")
        assert page.js(f"{plot('loss')}.scales.x.max") == 120, "the day in the queue is not training"
        page.click(".choice [data-value=step]")
        assert page.js(f"{plot('loss')}.scales.x.max") == 240


@pytest.mark.page
def test_curves_and_marks_can_be_hidden(chromium: Browser, page_file: Path) -> None:
    with chromium.page(page_file) as page:
        before = colours_drawn(page, "loss")
        page.click(".marks .toggle")
        without_marks = colours_drawn(page, "loss")
        assert 0 < without_marks < before
        page.click("#chart-loss .legend .toggle")
        assert 0 < colours_drawn(page, "loss") < without_marks
        assert "training" not in hover(page, "loss", 96)
        page.click("#chart-loss .legend .toggle")
        assert colours_drawn(page, "loss") == without_marks


@pytest.mark.page
def test_dragging_zooms_all_charts_and_resets(chromium: Browser, page_file: Path) -> None:
    with chromium.page(page_file) as page:
        box = page.box("#chart-grad_norm .u-over")
        middle = box["y"] + box["height"] / 2
        ends = [box["x"] + page.js(f"{plot('grad_norm')}.valToPos({step}, 'x')") for step in (60, 120)]
        page.mouse("mouseMoved", ends[0], middle)
        page.mouse("mousePressed", ends[0], middle, button="left", clickCount=1)
        page.mouse("mouseMoved", ends[1], middle, button="left", buttons=1)
        page.mouse("mouseReleased", ends[1], middle, button="left", clickCount=1)
        page.drawn()
        for chart in ("grad_norm", "loss", "time_split"):
            low, high = page.js(f"[{plot(chart)}.scales.x.min, {plot(chart)}.scales.x.max]")
            assert (low, high) == (pytest.approx(60, abs=1), pytest.approx(120, abs=1)), chart
        page.click("#chart-loss .buttons [title^=log]")
        assert page.js(f"{plot('loss')}.scales.x.max") == pytest.approx(120, abs=1), "a redrawn chart stays zoomed"
        page.click("#reset")
        assert page.js(f"{plot('loss')}.scales.x.max") == 240
        assert page.js("document.getElementById('reset').hidden")


@pytest.mark.page
def test_theme_can_be_switched(chromium: Browser, page_file: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with chromium.page(page_file) as page:
        light = page.js(ground)
        page.click("#theme")
        dark = page.js(ground)
        assert light != dark
        assert colours_drawn(page, "loss") > 100
    with chromium.page(page_file, dark=True) as page:
        assert page.js(ground) == dark, "as the system is set"
        page.click("#theme")
        assert page.js(ground) == light


@pytest.mark.page
def test_page_on_a_phone_scrolls_only_vertically(chromium: Browser, page_file: Path, long_page: Path) -> None:
    for file in (page_file, long_page):
        with chromium.page(file, width=360, height=740) as page:
            assert page.js("document.documentElement.scrollWidth") == 360
            assert page.js("charts.every((chart) => chart.plot.width <= 340)")
            box = page.box("#chart-loss .u-over")
            point = {"x": box["x"] + box["width"] / 2, "y": box["y"] + 50}
            page.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[point])
            page.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
            page.drawn()
            tip = page.js(
                "(() => { const b = document.querySelector('#chart-loss .tip').getBoundingClientRect();"
                " return [b.left, b.right]; })()"
            )
            assert 0 <= tip[0] < tip[1] <= 360
            page.resize(740, 360)
            page.drawn()
            assert page.js(f"{plot('loss')}.width") > 600, "turned on its side"


@pytest.mark.page
def test_long_runs_are_thinned_and_keep_their_spikes(chromium: Browser, long_page: Path) -> None:
    assert long_page.stat().st_size < LIMIT_BYTES
    with chromium.page(long_page) as page:
        assert page.js("runs.every((run) => run.curves.every((curve) => curve.y.length <= 3100))")
        step, highest = page.js(
            "(() => { const {x, curves} = runs[0]; const {at, y} = curves.find((curve) => curve.chart === 'loss');"
            " const top = y.reduce((a, b) => Math.max(a, b ?? 0)); return [x.step[at[y.indexOf(top)]], top]; })()"
        )
        assert (step, highest) == (SPIKE_STEP, SPIKE)
        for at, shown in ((SPIKE_STEP, str(SPIKE)), (20_000, "not finite")):
            page.js(f"zoomTo([{at - 500}, {at + 500}])")
            page.drawn()
            assert shown in hover(page, "loss", at)


@pytest.mark.parametrize(
    ("count", "charts", "drawn", "told"),
    [
        (40, 13, 40, ""),
        (400, 2, 400, "Only the loss charts are drawn for so many runs."),
        (1000, 2, 100, "Only the loss charts of the best 100 runs are drawn"),
    ],
)
def test_many_runs_fit_a_page(count: int, charts: int, drawn: int, told: str, run_dir: Path) -> None:
    records = read_records(run_dir)
    best = {key: Curve(curve.steps, [value - 1 for value in curve.values]) for key, curve in records.curves.items()}
    runs = [
        replace(
            records,
            path=Path(f"run-{number}"),
            config={**records.config, "optim.lr": number / 1000},
            curves=best if number >= count - 100 else records.curves,
        )
        for number in range(count)
    ]
    html = render(runs)
    assert len(html.encode()) < LIMIT_BYTES
    page = json.loads(re.findall(r'<script[^>]* id="data"[^>]*>(.*?)</script>', html, re.DOTALL)[0])
    assert page["left_out"].startswith(told)
    assert bool(page["left_out"]) == bool(told)
    assert len(page["runs"]) == len(page["differences"]["optim.lr"]) == count
    assert {run["best_validation"]["step"] for run in page["runs"]}, "in the table all are there"
    having = [number for number, run in enumerate(page["runs"]) if run["curves"]]
    assert having == list(range(count - drawn, count))
    assert len({curve["chart"] for curve in page["runs"][-1]["curves"]}) == charts
    assert all(len(curve["y"]) >= 10 for curve in page["runs"][-1]["curves"] if curve["name"] != "undone")


@pytest.mark.page
def test_report_of_many_runs_shows_charts_of_the_best_and_a_table_of_all(
    chromium: Browser, run_dir: Path, tmp_path: Path
) -> None:
    records = read_records(run_dir)
    file = tmp_path / "report.html"
    file.write_text(render([replace(records, path=Path(f"run-{number}")) for number in range(800)]), encoding="utf-8")
    with chromium.page(file) as page:
        assert "Only the loss charts of the best" in page.js("document.getElementById('summary').innerText")
        assert page.js("charts.map((chart) => chart.spec.id)") == ["loss"]
        assert colours_drawn(page, "loss") > 100
        assert page.js("document.querySelectorAll('.results tbody tr').length") == 800
        page.click(".choice [data-value=tokens]")
        assert colours_drawn(page, "loss") > 100


@pytest.mark.page
def test_goodput_has_a_bar_for_each_start_with_its_parts_to_scale(
    chromium: Browser, page_file: Path, run_dir: Path
) -> None:
    starts = goodput_of(run_dir).starts
    with chromium.page(page_file) as page:
        widths = page.js(
            "[...document.querySelectorAll('.stack')].map((bar) => Object.fromEntries([...bar.children].map((part) =>"
            " [part.title.replace(/ [^ ]*$/, ''), part.getBoundingClientRect().width / bar.clientWidth])))"
        )
    longest = max(sum(parts.values()) for parts in starts)
    assert len(widths) == len(starts) == 2
    for bar, parts in zip(widths, starts, strict=True):
        shares = {name: seconds / longest for name, seconds in parts.items() if seconds >= 0.005}
        assert bar == {name: pytest.approx(share, abs=0.01) for name, share in shares.items()}
    assert widths[1]["gap"] > 0.9  # a day in the queue


@pytest.mark.page
def test_single_spike_does_not_change_the_scale(chromium: Browser, long_page: Path) -> None:
    with chromium.page(long_page) as page:
        assert page.js(f"{plot('loss')}.scales.y.max") < 12
        page.click("#chart-loss .buttons [title*=spikes]")
        assert page.js(f"{plot('loss')}.scales.y.max") > SPIKE
        page.js("zoomTo([1000, 50000])")
        assert page.js(f"{plot('loss')}.scales.y.max") < 5


@pytest.mark.page
def test_runs_are_compared(chromium: Browser, long_page: Path) -> None:
    with chromium.page(long_page) as page:
        assert page.js("[...document.querySelectorAll('.results tbody tr')].map((row) => row.cells[0].innerText)") == [
            "a", "b", "c",
        ]  # fmt: skip
        assert page.js("Object.entries(page.differences)") == [["optim.lr", ["0.0003", "0.0001", "0.0002"]]]
        assert "0.0001" in page.js("document.querySelector('.results').innerText")
        colours = page.js("[...new Set(charts[0].shown.map((line) => line.color))]")
        assert len(colours) == 3
        lines = page.js("charts[0].shown.length")
        page.click(".results [data-run='1']")
        assert page.js("charts[0].shown.length") == lines * 2 // 3
        assert colours[1] not in page.js("charts[0].shown.map((line) => line.color)")
        page.click(".results th:last-child button")
        assert page.js("[...document.querySelectorAll('.results tbody tr')].map((row) => row.cells[0].innerText)") == [
            "b", "c", "a",
        ]  # fmt: skip


_VISION = {  # of linear RGB, row by row; Machado, Oliveira and Fernandes 2009, severity 1
    "all cones": [1, 0, 0, 0, 1, 0, 0, 0, 1],
    "no red": [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
    "no green": [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881],
    "no blue": [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.3039],
}
_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


@pytest.mark.page
def test_colours_differ_for_every_kind_of_colour_vision(chromium: Browser, page_file: Path) -> None:
    """By CIE76, where 2.3 is just noticeable; and against the ground a contrast of 3, as WCAG wants of graphics."""
    with chromium.page(page_file) as page:
        palettes = page.js("PALETTES")
    grounds = {"light": "#ffffff", "dark": "#181c22"}
    for theme, palette in palettes.items():
        shades = np.array([[int(each[i : i + 2], 16) / 255 for i in (1, 3, 5)] for each in [grounds[theme], *palette]])
        linear = np.where(shades <= 0.04045, shades / 12.92, ((shades + 0.055) / 1.055) ** 2.4)
        light = linear @ _XYZ[1] + 0.05
        assert (np.maximum(light, light[0]) / np.minimum(light, light[0]))[1:].min() >= 3, theme
        for vision, matrix in _VISION.items():
            xyz = np.clip(linear[1:] @ np.reshape(matrix, (3, 3)).T, 0, 1) @ _XYZ.T / [0.95047, 1, 1.08883]
            x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116).T
            lab = np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)
            apart = np.linalg.norm(lab[:, None] - lab, axis=2) + 1000 * np.eye(len(lab))
            assert apart.min() > 18, (theme, vision)


def _unwritten(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()


def _empty(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("")


def _torn(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text()[:-400])


def _headless(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text()[40:])


def _running(folder: Path) -> None:
    text = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(text[:8]))
    (folder / "status.json").write_text('{"state": "running", "step": 7, "reason": null, "exit_code": null}')


def _one_step(folder: Path) -> None:
    text = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(text[:2]))


def _only_not_finite(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:4]]
    lines = [{**line, "loss": None, "grad_norm": None, "nonfinite": True} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _killed(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    (folder / "status.json").write_text(
        '{"state": "failed", "step": 90, "reason": "rank 3 was killed", "exit_code": 70}'
    )


def _of_wrong_kinds(folder: Path) -> None:
    odd = [
        '{"event": "step", "step": "x"}', "[]", "7", '{"event": "eval", "step": 3}', '{"event": "rollback", "step": 9}',
        '{"event": "step", "step": 241, "loss": "low", "lr": {"a": 1}}',
        '{"event": "start", "mesh": 3, "hosts": "a", "world_size": null, "time": "late"}',
        '{"event": "step", "step": 243, "tokens": "many", "samples": NaN, "source_tokens": {"a": 1}}',
        '{"event": "eval", "step": 244, "set": "validation", "loss": 1, "source_losses": {"web": "x"}}',
        '{"event": "start", "mesh": {"shard": "x"}, "hosts": [1], "world_size": 1e9, "parameters": [], "device": 7}',
        '{"event": "stop", "step": 245, "state": ["odd"], "reason": 12}',
        '{"event": "step", "step": 242, "loss": NaN, "time_split": [1]}',
    ]  # fmt: skip
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join(odd) + "\n")
    (folder / "status.json").write_text("[]")
    (folder / "config.yaml").write_text("a: [")
    (folder / "environment.json").write_text("null")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (_unwritten, "finished"),
        (_empty, "finished"),
        (_torn, "restart"),
        (_headless, "finished"),
        (_running, "running"),
        (_one_step, "step"),
        (_only_not_finite, "Nothing to draw"),
        (_killed, "Rank 3 was killed"),
        (_of_wrong_kinds, "rollbacks"),
    ],
)
@pytest.mark.page
def test_records_in_any_state_have_their_page(harm: Any, told: str, chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "harmed", 40)
    harm(folder)
    assert main(["report", str(folder)]) == 0
    with chromium.page(folder / "report.html") as page:
        assert told in page.js("document.body.innerText")
        for axis in ("tokens", "seconds"):
            if page.js("charts.length"):
                page.js(f"document.querySelector('[data-value={axis}]').click()")


@pytest.mark.page
def test_names_and_values_are_escaped(chromium: Browser, tmp_path: Path) -> None:
    harm = "</script><img src=x onerror=alert(1)><!-- {{data}} ' \" & \u2028"
    folder = write_run(
        tmp_path / "<b>run<", 12, config={"run": {"name": harm}, harm: harm, "uri": "http://me:hush@host/x"}
    )
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(
        lines.replace('"web"', json.dumps(harm)).replace('"node-a"', json.dumps(harm))
    )
    other = write_run(tmp_path / "other", 12)
    write_report([folder, other], tmp_path / "report.html")
    write_report([folder], tmp_path / "alone.html")
    for name in ("report.html", "alone.html"):
        text = (tmp_path / name).read_text()
        assert "onerror=" not in re.sub(r"\\u003c.*?\\u003e", "", text.replace(json.dumps(harm)[1:-1], ""))
        assert "hush" not in text
        with chromium.page(tmp_path / name) as page:
            assert page.js("document.images.length") == 0
            assert page.js("document.querySelectorAll('b').length") == 0
            page.js("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            assert "onerror=alert(1)" in page.js("document.body.innerText"), "shown as it is"


@pytest.mark.page
def test_the_page_may_fetch_nothing_and_run_nothing_else(chromium: Browser, page_file: Path) -> None:
    text = page_file.read_text()
    assert not re.findall(r"""(?:src|href)=["']?(?!data:,)[^"'\s>]""", text.split("<script")[0])
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy[1]
    with chromium.page(page_file) as page:
        assert page.js(
            "(() => { const script = document.createElement('script'); script.textContent = 'window.harmed = true';"
            " addEventListener('securitypolicyviolation', (event) => { window.refused = true; });"
            " document.body.append(script); return new Promise((done) => setTimeout(() => done("
            " [Boolean(window.harmed), Boolean(window.refused)]), 0)); })()"
        ) == [False, True]
        chromium.events[:] = [event for event in chromium.events if event["method"] != "Log.entryAdded"]


def test_bundled_library_has_the_recorded_checksum(page_file: Path) -> None:
    folder = ROOT / "records" / "report" / "uplot"
    told = re.findall(r"\| ([0-9a-f]{64}) \| (\S+) \|", (folder / "README.md").read_text())
    assert len(told) == 2
    for digest, name in told:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert (folder / "LICENSE").read_text() in page_file.read_text(), "its licence goes where it goes"


def test_a_run_leaves_its_page_however_it_ends(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "run" / "report.html"
    ended = run_here(tiny_overrides(text, tmp_path / "run", "trainer.stop_at=4"))
    assert "run: report.html, metrics.jsonl" in ended.printed
    assert '"state":"stopped"' in path.read_text()

    def crash(_: Any, step: int) -> None:
        if step == 5:
            raise ZeroDivisionError("here")

    assert run_here(tiny_overrides(text, tmp_path / "run"), crash).code == 70
    assert "ZeroDivisionError: here" in path.read_text()
    assert run_here(tiny_overrides(text, tmp_path / "run")).code == 0
    assert '"state":"finished"' in path.read_text()
    run_here(tiny_overrides(text, tmp_path / "run", "checkpoint.resume=never"))
    assert (tmp_path / "run" / "earlier-1" / "report.html").exists()


def test_a_page_that_fails_is_one_warning(text: Path, tmp_path: Path) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("here")

    with patch.object(serried.trainer.run, "write_report", broken):
        ended = run_here(tiny_overrides(text, tmp_path / "run"))
    assert ended.code == 0
    (line,) = [line for line in ended.printed.splitlines() if line.startswith("WARNING")]
    assert "KeyError: 'here'" in line
    assert f"serried report {tmp_path / 'run'}" in line
    assert status(tmp_path / "run")["state"] == "finished"


def test_the_folder_of_the_sweep_among_its_runs_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / f"sweep-{name}", 4) for name in "ab"]
    write_summary(tmp_path / "sweep-lr", ["optim.lr"], [Outcome(runs[0], {"optim.lr": "0.1"}, "finished")])
    given = sorted(str(path) for path in tmp_path.glob("sweep-*"))
    assert len(given) == 3
    assert main(["report", *given, f"out={tmp_path / 'x.html'}"]) == 0
    assert "2 runs compared" in capsys.readouterr().out


@pytest.mark.page
def test_a_sweep_of_long_names_fits_a_phone(chromium: Browser, tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"optim.lr=0.000{number},model.layers={number},x=long", 30) for number in range(1, 9)
    ]
    write_report(folders, tmp_path / "report.html")
    with chromium.page(tmp_path / "report.html", width=360) as page:
        page.js("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        page.drawn()
        assert page.js("document.documentElement.scrollWidth") == 360


@pytest.mark.page
def test_a_page_of_layouts_has_a_dot_for_each_and_a_row_for_the_best(chromium: Browser, tmp_path: Path) -> None:
    out = tmp_path / "layouts.html"
    words = ["search", "precision=bf16", "launch.processes=4", "plan.device=h100", "data.tokenizer=bytes"]
    assert main(["plan", *words, f"out={out}"]) == 0
    for width, dark in ((360, False), (1280, True)):
        with chromium.page(out, width=width, dark=dark) as page:
            data = json.loads(page.js("document.getElementById('data').textContent"))
            best = data["fastest"][0]["words"]
            assert page.js("document.querySelectorAll('circle').length") >= data["fitting"] > 100
            titles = page.js("[...document.querySelectorAll('.listed title')].map((each) => each.textContent)")
            assert titles[0].endswith(f": {best}")
            assert best in page.js("document.querySelector('tbody tr').innerText")
            assert page.js("document.documentElement.scrollWidth") == width


def test_runs_of_one_name_are_distinguished(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / sweep / "run", 4) for sweep in ("x", "y")]
    write_report(folders, tmp_path / "report.html")
    assert "<title>x/run, y/run · serried</title>" in (tmp_path / "report.html").read_text()


def test_thinning_keeps_ends_extremes_and_gaps() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=10_007)
    values[[17, 5_000]] = 99.0, -99.0
    values[7_000:7_003] = np.nan
    kept = thinned(values, 100)
    assert {0, 17, 5_000, 7_000, 10_006} <= set(kept.tolist())
    assert len(kept) <= 203
    assert (np.diff(kept) > 0).all()
    at, mean = means(values, 100)
    assert len(at) == len(mean) == 100
    assert np.isclose(np.average(mean[:98], weights=np.full(98, 101)), np.nanmean(values[: 98 * 101]), atol=1e-3)
    assert thinned(values[:200], 100).tolist() == list(range(200))
    assert thinned(np.full(500, np.nan), 10).size < 30
