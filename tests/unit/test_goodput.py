"""Division of a run's wall-clock time into parts."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serried.launch.show_status import describe_run, run_values
from serried.records.goodput import PARTS, goodput
from serried.records.run_folder import RunFolder

Event = dict[str, Any]


def start(time: float, since: float, resumed: int | None = None) -> Event:
    return {"event": "start", "time": time, "since_process_seconds": since, "resumed_from": resumed}


def steps(first: int, last: int, time: float, seconds: float, data: float = 0.0) -> list[Event]:
    """Return one line per step. Step ``first`` ends at ``time``."""
    return [
        {"event": "step", "step": step, "time": time + (step - first) * seconds, "step_seconds": seconds,
         "data_seconds": data} for step in range(first, last + 1)
    ]  # fmt: skip


def parts(**seconds: float) -> dict[str, Any]:
    return {name: pytest.approx(seconds.get(name.replace(" ", "_"), 0.0), abs=1e-6) for name in PARTS}


def test_run_without_incidents_has_each_second_in_its_part() -> None:
    first_step = {"event": "step", "step": 1, "time": 119.0, "step_seconds": 9.0, "data_seconds": 1.0}
    later = steps(2, 10, 121.0, 2.0, data=0.5)
    ends = [
        {"event": "eval", "step": 10, "time": 141.0, "seconds": 4.0},
        {"event": "checkpoint", "step": 10, "time": 142.0, "stall_seconds": 0.75},
        {"event": "stop", "step": 10, "time": 142.5},
    ]
    found = goodput([start(110.0, 10.0), first_step, *later, *ends])
    assert found.seconds == parts(
        start=10.0, compile=6.0, productive=2.0 + 9 * 1.5, data=1.0 + 9 * 0.5, evaluation=4.0, save_stall=0.75,
        other=0.75,
    )  # fmt: skip
    assert (
        found.line()
        == "36.5% of 42s: start 23.5%, compile 14.1%, data 12.9%, evaluation 9.4%, save stall 1.8%, other 1.8%"
    )


def test_steps_after_the_checkpoint_of_a_killed_start_are_lost() -> None:
    killed = [start(10.0, 0.0), *steps(1, 8, 11.0, 1.0), {"event": "checkpoint", "step": 5, "time": 15.0}]
    resumed = [start(30.0, 3.0, resumed=5), *steps(6, 10, 31.0, 1.0)]
    found = goodput([*killed, *resumed])
    assert found.seconds == parts(productive=10.0, lost_steps=3.0, gap=9.0, start=3.0)
    assert [part["gap"] for part in found.starts] == [0.0, pytest.approx(9.0)]


def test_steps_before_a_rollback_and_the_rollback_itself_are_lost() -> None:
    undone = [start(0.0, 0.0), *steps(1, 6, 1.0, 1.0)]
    rollback = {"event": "rollback", "step": 4, "from_step": 6, "time": 8.0}
    found = goodput([*undone, rollback, *steps(5, 7, 9.0, 1.0)])
    assert found.seconds == parts(productive=7.0, lost_steps=4.0)


def test_time_since_the_last_line_is_productive_until_the_run_may_be_hanging() -> None:
    running = [start(0.0, 0.0), *steps(1, 3, 1.0, 1.0)]
    assert goodput(running, now=4.5).seconds == parts(productive=4.5)
    assert goodput(running, now=3600.0).seconds == parts(productive=5.0, other=3595.0)


def test_time_from_a_loss_until_training_continues_is_recovery() -> None:
    before = [start(0.0, 0.0), *steps(1, 4, 1.0, 1.0)]
    recovered = {"event": "recovered", "step": 5, "time": 6.5, "seconds": 2.0}
    assert goodput([*before, recovered, *steps(5, 7, 7.5, 1.0)]).seconds == parts(
        productive=7.0, recovery=2.0, other=0.5
    )
    redone = {"event": "step", "step": 4, "time": 7.0, "step_seconds": 0.5}
    found = goodput([*before, recovered, redone, *steps(5, 7, 8.0, 1.0)])
    assert found.seconds == parts(productive=7.0, recovery=2.0, other=1.0)


def test_steps_undone_by_a_later_start_are_lost_in_every_start_before() -> None:
    first = [start(0.0, 0.0), *steps(1, 10, 1.0, 1.0)]
    second = [start(10.0, 0.0, resumed=10), *steps(11, 12, 11.0, 1.0)]
    third = [start(12.0, 0.0, resumed=5), *steps(6, 8, 13.0, 1.0)]  # the newest checkpoint was damaged
    assert goodput([*first, *second, *third]).seconds == parts(productive=8.0, lost_steps=7.0)


def test_evaluation_between_skipped_steps_is_no_training() -> None:
    skipped = [
        {"event": "step", "step": step, "time": time, "step_seconds": None} for step, time in ((4, 4.0), (5, 35.0))
    ]
    evaluation = {"event": "eval", "step": 4, "time": 34.0, "seconds": 30.0}
    found = goodput([start(0.0, 0.0), *steps(1, 3, 1.0, 1.0), *skipped, evaluation])
    assert found.seconds == parts(productive=5.0, evaluation=30.0)


def test_start_that_ended_before_its_first_checkpoint_is_lost() -> None:
    found = goodput([{**start(100.0, 2.0), "earlier_seconds": 40.0}, *steps(1, 2, 101.0, 1.0)])
    assert found.seconds == parts(lost_steps=40.0, start=2.0, productive=2.0)


_number = st.one_of(st.none(), st.floats(0, 1e6), st.floats(-10, 10), st.just(math.nan), st.text(max_size=2))
_NUMBERS = ("step_seconds", "data_seconds", "seconds", "stall_seconds", "resumed_from", "since_process_seconds")
_events = st.lists(
    st.fixed_dictionaries(
        {"event": st.sampled_from(["start", "step", "eval", "checkpoint", "lost", "recovered", "rollback", "stop"]),
         "time": st.floats(0, 1e4), "step": st.integers(0, 50)},
        optional=dict.fromkeys(_NUMBERS, _number),
    ), max_size=40,
)  # fmt: skip


@given(events=_events, now=st.one_of(st.none(), st.floats(0, 2e4)))
def test_parts_of_any_records_add_up_to_the_wall_clock_time(events: list[Event], now: float | None) -> None:
    found = goodput(events, now=now)
    assert all(seconds >= 0 for seconds in found.seconds.values())
    history = sorted(events, key=lambda event: event["time"])
    begins = [number for number, event in enumerate(history) if event["event"] == "start"]
    if not begins:
        assert found.total_seconds == 0
        return
    first, last = history[begins[0]], history[-1]
    since = first.get("since_process_seconds")
    since = max(0.0, since) if isinstance(since, float) and math.isfinite(since) else 0.0
    end = max(last["time"], now) if now is not None and last["event"] != "stop" else last["time"]
    assert math.isclose(found.total_seconds, end - first["time"] + since, abs_tol=1e-6)


def test_stop_event_and_status_have_the_goodput(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin("trainer:\n  steps: 2\n", {}, 0)
    folder.record("start", hosts=["elsewhere"], since_process_seconds=1.0)
    folder.record("step", step=1, step_seconds=0.0, loss=2.0)
    folder.record_stop(1, "stopped", "SIGTERM")
    folder.status("stopped", step=1, reason="SIGTERM", exit_code=75)
    folder.close()
    recorded = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["goodput"]
    assert list(recorded) == list(PARTS)
    assert recorded["start"] == pytest.approx(1.0, abs=0.5)
    assert "\ngoodput 0.0% of 1s: start" in describe_run(tmp_path)
    values = run_values(tmp_path)
    assert values["goodput_seconds"] == pytest.approx(recorded, abs=0.01)
    assert {key: values[key] for key in ("state", "reason", "exit_code", "step", "steps", "loss")} == {
        "state": "stopped", "reason": "SIGTERM", "exit_code": 75, "step": 1, "steps": 2, "loss": 2.0,
    }  # fmt: skip
