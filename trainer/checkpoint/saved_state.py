"""Read ``state.json`` of a checkpoint. It may come from an untrusted source and is validated before use."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, is_count, read_json, value_at
from serried.configs.renamed_keys import with_new_names

STATE = "state.json"
VERSION = 1
_REQUIRED = ("step", "samples", "config", "progress", "step_state", "data_fingerprint")
_KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "samples", "rollbacks", "world_size"), is_count),
    **dict.fromkeys(("config", "progress", "step_state", "stream"), lambda value: isinstance(value, dict)),
    **dict.fromkeys(("data_fingerprint", "torch", "tracker_run_id"), lambda value: isinstance(value, str)),
    "changed_after": lambda value: isinstance(value, list) and all(map(is_count, value)),
    **dict.fromkeys(("base", "teacher_keys"), lambda value: value is None or isinstance(value, dict)),
    "origin": lambda value: value is None or isinstance(value, str),
}


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of ``state.json`` in ``checkpoint``.

    Raises ``UserError`` if it cannot be read or has an invalid format.
    """
    path = checkpoint / STATE
    try:
        state = read_json(path)
    except (OSError, NotPlainData) as error:
        raise UserError(f"{path} cannot be read: {error}; use another checkpoint") from None
    if (version := state.get("version")) != VERSION:
        raise UserError(
            f"{path} has version {version}, but this version of serried reads version {VERSION}; use the version of "
            "serried that wrote it, or another checkpoint"
        )
    wrong = [key for key in _REQUIRED if key not in state]
    wrong += [key for key, fits in _KINDS.items() if key in state and not fits(state[key])]
    last = value_at("config.trainer.steps", state)
    if not wrong and is_count(last) and state["step"] > last:
        wrong.append(f"step {state['step']} exceeds trainer.steps={last} of its config")
    if wrong:
        raise UserError(f"{path} has invalid values: {', '.join(wrong)}; use another checkpoint")
    return state | {"config": with_new_names(state["config"])}


@contextmanager
def taking_from(checkpoint: Path | None) -> Iterator[None]:
    """Context manager that converts errors caused by invalid values in ``state.json`` into a one-line ``UserError``.

    A value is invalid if no run would write its type, length or name.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"{checkpoint}/{STATE} has invalid values ({type(error).__name__}: {what}); use another checkpoint"
        ) from error
