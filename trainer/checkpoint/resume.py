"""Start of a run: from scratch, from its own checkpoint, from another run's, or from the weights of a model folder."""

import json
import os
import shlex
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from serried.configs.errors import UserError
from serried.configs.messages.invalid_values import shown
from serried.configs.messages.keys import all_keys
from serried.configs.messages.suggestions import nearest
from serried.configs.plain_data import NotPlainData, expanded, flatten, value_at
from serried.configs.renamed_keys import read_saved_config
from serried.configs.schema.fields import AUTO, Section
from serried.configs.schema.run_config import CHOSEN
from serried.configs.schema.sections import RunConfig
from serried.records.run_folder import RunFolder
from serried.runtime.session import Session
from serried.trainer.checkpoint.manifest import MANIFEST, Damaged, check_file, fsync_folder, read_manifest
from serried.trainer.checkpoint.retention import STEMS, named, step_of, weights_alone
from serried.trainer.checkpoint.saved_state import STATE, read_state, taking_from

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, in its run folder."""


@dataclass(frozen=True)
class Start:
    """Starting point of a run. Without ``checkpoint`` and ``weights``, it starts at step 0 with initial weights."""

    checkpoint: Path | None = None
    """Checkpoint to resume from. Every file was compared with its checksum."""
    weights: Path | None = None
    """Model folder of which only the weights are loaded."""
    origin: str | None = None
    """Path in ``checkpoint.resume`` of this run, or of the run that it continues."""
    state: dict[str, Any] = field(default_factory=dict)
    """Content of the checkpoint's state.json."""
    notes: list[str] = field(default_factory=list)
    """Lines to print for the user."""
    changed: Sequence[str] = ()
    """Settings that change the numbers of the run and differ from the settings of ``checkpoint``."""

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return int(self.state.get("step", 0))

    @property
    def source(self) -> Path | None:
        """Folder that weights are read from; None for initial weights."""
        return self.checkpoint or self.weights

    def continues(self, run_dir: Path) -> bool:
        """Whether the run continues in its own folder, with its own records."""
        return self.checkpoint is not None and self.checkpoint.parent == run_dir / CHECKPOINTS


def find_start(config: RunConfig, session: Session, pretrained: Callable[[], Path | None] = lambda: None) -> Start:
    """Choose where to start, and check it. A collective: the ranks share the reading.

    ``pretrained`` returns the initial weights of a new run, on one rank.

    Raises ``UserError`` if there is no checkpoint and ``checkpoint.resume`` requires one, all are damaged, or
    resuming would silently change the run.
    """
    chosen = session.once(partial(_candidates, config, pretrained))
    notes, damage = list(chosen["notes"]), []
    for path in map(Path, chosen["candidates"]):
        problem = _damage(path, session)
        if problem is not None:
            damage.append(problem)
            continue
        state = session.once(partial(_state, path))
        if damage:
            notes.append(f"damaged: {'; '.join(damage)}; continuing from the newest complete one, {path}")
        with taking_from(path):
            changed = _allowed_changes(path, state["config"], config)
            notes += changes(state, config, session.world_size)
            if path.parent == config.run.dir / CHECKPOINTS:
                notes += session.once(partial(_edits, state, config))
        return Start(path, origin=chosen["origin"], state=state, notes=notes, changed=changed)
    if damage:
        raise UserError(
            f"no checkpoint is complete: {'; '.join(damage)}; use checkpoint.resume=never to start again (keeps them "
            "aside), or checkpoint.resume=PATH for another one"
        )
    weights = Path(chosen["weights"]) if chosen["weights"] else None
    return Start(weights=weights, origin=chosen["origin"], notes=notes)


def _candidates(config: RunConfig, pretrained: Callable[[], Path | None]) -> dict[str, Any]:
    """Return the checkpoints to try, newest first, or a folder of weights. Called on one rank."""
    resume, own_folder = config.checkpoint.resume, config.run.dir / CHECKPOINTS
    try:
        own = [str(path) for path in _newest_first(own_folder)]
        if resume == "must" and not own:
            raise UserError(f"checkpoint.resume=must but {own_folder} holds no checkpoint; use checkpoint.resume=auto")
        if resume in ("auto", "must", "never"):
            own = [] if resume == "never" else own
            weights = pretrained() if not own else None
            return {
                "candidates": own, "weights": str(weights) if weights else None, "origin": _origin(own), "notes": [],
            }  # fmt: skip
        given = expanded(resume).absolute()
        origin = os.path.normpath(given)  # with any spelling; a link keeps its name, wherever it points now
        if own and _origin(own) == origin:
            # The same command again: the run started there once, and has its own checkpoints since.
            note = f"this run began at {resume} and has checkpoints of its own since: continuing from the newest"
            return {"candidates": own, "weights": None, "origin": origin, "notes": [note]}
        return {"origin": origin, "notes": [], **_open(given, config)}
    except OSError as error:
        raise _not_read(error, own_folder) from None


def _not_read(error: OSError, folder: Path) -> UserError:
    return UserError(f"cannot read {error.filename or folder}: {error.strerror}")


def _open(path: Path, config: RunConfig) -> dict[str, Any]:
    if found := _checkpoints_in(path):
        own_folder = config.run.dir / CHECKPOINTS
        if found[0].resolve().parent == own_folder.resolve():  # by the path that the run uses for it
            found = [own_folder / checkpoint.resolve().name for checkpoint in found]
        return {"candidates": [str(checkpoint) for checkpoint in found], "weights": None}
    if (path / STATE).exists():
        raise UserError(
            f"{path} is a checkpoint that has lost its {MANIFEST}: whether it is complete cannot be checked; use "
            f"another, or remove {STATE} and optimizer* from it to begin with its weights alone"
        )
    if path.is_dir():
        return {"candidates": [], "weights": str(path)}
    hint = "give a checkpoint, a run folder, or a folder with a Hugging Face model"
    if close := nearest(config.checkpoint.resume, ("auto", "never", "must")):
        hint = f"did you mean checkpoint.resume={close[0]}?"
    with suppress(OSError):
        if beside := named(path.parent):
            there = " ".join(checkpoint.name for checkpoint in beside)
            hint = f"in {path.parent} there are {there}; use checkpoint.resume={beside[-1]}"
    raise UserError(
        f"checkpoint.resume={config.checkpoint.resume} is neither auto, never or must, nor an existing folder; {hint}"
    )


def _newest_first(checkpoints: Path) -> list[Path]:
    return named(checkpoints)[::-1]


def _checkpoints_in(path: Path) -> list[Path]:
    """Return the checkpoints that ``path`` names, newest first. ``path``: a checkpoint, a run folder, or its folder of
    checkpoints."""
    return [path] if (path / MANIFEST).is_file() else _newest_first(path / CHECKPOINTS) or _newest_first(path)


def resumed_checkpoints(config: RunConfig) -> list[Path]:
    """Return the checkpoints that ``find_start`` would try, newest first, before it looks for damage; none if the run
    starts from scratch or with weights alone. Raises ``UserError`` if the folder cannot be read."""
    resume, own_folder = config.checkpoint.resume, config.run.dir / CHECKPOINTS
    try:
        own = _newest_first(own_folder)
        if resume in ("auto", "must", "never"):
            return [] if resume == "never" else own
        given = expanded(resume).absolute()
        is_continued = own and _origin(list(map(str, own))) == os.path.normpath(given)
        return own if is_continued else _checkpoints_in(given)
    except OSError as error:
        raise _not_read(error, own_folder) from None


def _origin(own: list[str]) -> str | None:
    """Return the path from which the run of the newest own checkpoint was started."""
    for path in own:
        try:
            check_file(Path(path), STATE, read_manifest(Path(path))[STATE])
            origin = _state(Path(path)).get("origin")
        except (Damaged, KeyError, UserError):
            continue
        return str(origin) if origin else None
    return None


def _damage(path: Path, session: Session) -> str | None:
    """Return the damage of a checkpoint in words, None if it is intact. All ranks read a share of its files."""

    def check() -> str | None:
        try:
            records = read_manifest(path)
            if STATE not in records:
                return f"{path / MANIFEST} does not list {STATE}"
            by_size = sorted(records, key=lambda name: -records[name].size)
            for name in by_size[session.rank :: session.world_size]:
                check_file(path, name, records[name])
        except Damaged as error:
            return str(error)
        return None

    seen = session.gather(path.is_dir())
    if any(seen) and not all(seen):
        raise UserError(
            f"rank {seen.index(True)} sees {path} and rank {seen.index(False)} does not; it must be on a disk that all "
            "nodes share"
        )
    return next((problem for problem in session.gather(check()) if problem), None)


def _state(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint. Refuses files that a reader would load but its manifest does not list: they
    were added later."""
    records = read_manifest(path)
    for stem in STEMS:
        for name in (f"{stem}.safetensors", f"{stem}.safetensors.index.json"):
            if (path / name).exists() and name not in records:
                raise UserError(f"{path / name} is not part of the checkpoint ({MANIFEST} does not list it); remove it")
    return read_state(path)


def make_room(folder: RunFolder, start: Start) -> list[str]:
    """Set aside files in the run folder that belong to an earlier run. Called on one rank. Returns notes for the
    user. Raises ``UserError`` if checkpoints cannot be written."""
    checkpoints = folder.path / CHECKPOINTS
    notes: list[str] = []
    if start.continues(folder.path):
        newer = [path.name for path in named(checkpoints) if (step_of(path) or 0) > start.step]
        if newer:
            aside = folder.set_aside([f"{CHECKPOINTS}/{name}" for name in newer])
            notes.append(f"newer checkpoints ({', '.join(newer)}) are kept in {aside}")
    elif folder.holds_a_run():
        end = folder.earlier_end()
        notes.append(f"an earlier run here ({end}) is kept in {folder.set_run_aside()}; starting from step 0")
    try:
        checkpoints.mkdir(exist_ok=True)
        fsync_folder(folder.path)
    except OSError as error:
        raise UserError(f"cannot write {checkpoints}: {error.strerror}; use run.dir=FOLDER") from None
    return notes


def check_data(start: Start, fingerprint: str, config: RunConfig, earlier: Collection[str] = ()) -> bool:
    """Return whether the checkpoint was trained on data with another fingerprint than ``fingerprint`` or an
    ``earlier`` one of the same data. Raises ``UserError`` if so and not allowed."""
    if start.checkpoint is None or start.state["data_fingerprint"] in (fingerprint, *earlier):
        return False
    keys = [key for key in flatten(plain(config)) if is_free(key, config, by_content=True)]
    # Keys that the fingerprint depends on, in addition to the content.
    own = (*(f"{section}." for section in _own_sections(config)), "trainer.global_batch", "trainer.seed")
    paths = [key for key in keys if key.endswith(".path") and ".validation." not in key] or keys
    is_allowed = config.checkpoint.allow_changes is True or any(map(config.checkpoint.allows, paths))
    if is_allowed or any(key.startswith(own) for key in start.changed):
        return True
    prepared = " (for conversations that another version prepared: data=tokens data.path=FOLDER)"
    raise UserError(
        f"{start.checkpoint} was trained on other data (fingerprint {start.state['data_fingerprint']}, now "
        f"{fingerprint}); use {config.another_run} to keep both, the same data{prepared if keys else ''}, or "
        f"{_allowing(paths[:1], config)} to resume with these"
    )


def steps_before_changes(start: Start, has_other_data: bool, run_dir: Path) -> list[int]:
    """Return the step of the run's last checkpoint before its settings or data changed, if they did; retention keeps
    it."""
    earlier = list(start.state.get("changed_after") or [])
    is_changed = start.continues(run_dir) and (has_other_data or bool(start.changed))
    return [start.step] if is_changed else earlier


# what changed ---------------------------------------------------------------------------------------------------------


def differences(earlier: dict[str, Any], now: dict[str, Any], schema: type[RunConfig]) -> dict[str, str]:
    """Return ``key: old -> new`` for all settings that differ between two resolved configs of ``schema``."""
    before, after = flatten(earlier), flatten(now)
    before = {key: _default(key, schema) for key in after} | before  # an older version did not know all keys
    # Keys of an optimizer or schedule that is not chosen now: the change of its name is reported already.
    before = {key: value for key, value in before.items() if key in after or key.partition(".")[0] not in CHOSEN}
    named_before, named_now = _named(earlier), _named(now)
    whole = {name: f"{name} is {'new' if name in named_now else 'gone'}" for name in named_before ^ named_now}
    return whole | {
        key: f"{key} {shown(before.get(key))} -> {shown(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key.rpartition(".")[0] not in whole
    }


def _named(config: dict[str, Any]) -> set[str]:
    """Return the sections whose keys are the user's names: sources, validation sets, parameter groups."""
    return {f"{path}.{name}" for path in all_keys().named for name in value_at(path, config) or {}}


def _default(key: str, schema: type[RunConfig]) -> Any:
    """Return the behavior of a version without ``key``, as JSON data: the default; None if there is none."""
    *sections, last = key.split(".")
    model: Any = schema
    for name in sections:
        model = model.model_fields[name].annotation if name in getattr(model, "model_fields", {}) else None
    knob = getattr(model, "model_fields", {}).get(last)
    return None if knob is None or knob.is_required() else json.loads(json.dumps(knob.get_default(), default=str))


def plain(config: RunConfig) -> dict[str, Any]:
    """Return ``config`` as JSON data for state.json."""
    return dict(json.loads(config.model_dump_json()))


def _own_sections(config: RunConfig) -> list[str]:
    """Return the sections that only some tasks have, data first."""
    return ["data", *(section for section in type(config).model_fields if section not in RunConfig.model_fields)]


def _allowing(keys: Sequence[str], config: RunConfig) -> str:
    """Return the override that allows ``keys`` to change, in addition to keys that may change already."""
    allowed = config.checkpoint.allow_changes
    listed = [*(() if isinstance(allowed, bool) else allowed), *keys]
    return shlex.quote(f"checkpoint.allow_changes=[{','.join(listed)}]") if listed else "checkpoint.allow_changes=true"


def _allowed_changes(path: Path, earlier: dict[str, Any], config: RunConfig) -> list[str]:
    """Return the keys that change the numbers and differ from the ``earlier`` config of checkpoint ``path``. Raises
    ``UserError`` if one of them must not change."""
    changed = differences(earlier, plain(config), type(config))
    before, after = flatten(earlier), flatten(plain(config))
    if config.adapter.method != "none":  # the base model may have moved: its content is compared
        for key in ("model.path", "data.tokenizer"):
            if before.get(key) == before.get("model.path") and after.get(key) == after.get("model.path"):
                changed.pop(key, None)
    if before.get("schedule.name") == after["schedule.name"] == "constant":
        changed.pop("trainer.steps", None)
    counting = [key for key in changed if not is_free(key, config)]
    if all(map(config.checkpoint.allows, counting)):
        return counting
    named = [key for key in changed if key in counting or is_free(key, config, by_content=True)]
    named = [key for key in named if not config.checkpoint.allows(key)]
    own = _own_sections(config)  # first
    named.sort(key=lambda key: own.index(key.partition(".")[0]) if key.partition(".")[0] in own else len(own))
    if path.parent == config.run.dir / CHECKPOINTS:
        ways = [f"{config.another_run} to keep both", "checkpoint.resume=never to start again here"]
    else:
        ways = [weights_alone(path)]
    of_model = [key for key in named if key.startswith("model.")]
    if of_model and before.get("model.path") and "model.path" not in of_model:
        # Keys that its config.json leaves out may be interpreted differently since then.
        parents = {key: key.rpartition(".")[0] for key in of_model}  # in before, if the whole section was null
        settable = dict.fromkeys(parents[key] if parents[key] in before else key for key in of_model)
        ways.append(" ".join(f"{key}={shown(before.get(key))}" for key in settable) + " to resume as it began")
    # The weights would not fit another model.
    if not any(key.startswith("model.") and key != "model.path" for key in named):
        ways.append(f"{_allowing(named, config)} to resume with the new settings")
    told = "; ".join(changed[key] for key in named)
    raise UserError(f"resuming from {path} would change the run: {told}; use {', or '.join(ways)}")


def _edits(state: dict[str, Any], config: RunConfig) -> list[str]:
    """Return a line about values in the run folder's ``config.yaml`` that neither the checkpoint nor this command
    has, which means that somebody edited the file."""
    path = config.run.dir / "config.yaml"
    try:
        recorded = flatten(read_saved_config(path))
    except (OSError, NotPlainData):
        return []
    saved, now = flatten(state["config"]), flatten(plain(config))
    only_there = [f"{key}={shown(it)}" for key, it in recorded.items() if it not in (saved.get(key), now.get(key))]
    if not only_there:
        return []
    told = " ".join(only_there)
    return [
        f"WARNING    {path} has {told}, which this command does not set; the file is not read: add it to the command"
    ]


def is_free(key: str, config: RunConfig, *, by_content: bool = False) -> bool:
    """Return whether a change of ``key`` leaves the numbers of a run unchanged, as its section declares. With
    ``by_content``, return whether ``key`` names something whose content is compared instead."""
    section: Any = config
    for part in key.split("."):
        if isinstance(section, Section) and section.has_free(part, by_content=by_content):
            return True
        section = section.get(part) if isinstance(section, dict) else getattr(section, part, None)
    return False


def changes(state: dict[str, Any], config: RunConfig, world_size: int) -> list[str]:
    """Return a line about differences from the run of a checkpoint's ``state``, if they affect more than the end of
    the run."""
    changed = differences(state["config"], plain(config), type(config))
    chosen = ["trainer.micro_batch"] if config.trainer.micro_batch == AUTO else []
    silent = ("run.", "checkpoint.", "slurm.", "dry_run", "trainer.stop_at", "trainer.max_minutes", *chosen)
    told = [text for key, text in changed.items() if not key.startswith(silent)]
    for name, now in (("torch", torch.__version__), ("world_size", world_size)):
        if state.get(name) != now:
            told.append(f"{name} {state.get(name)} -> {now}")
    return [f"changed since the checkpoint: {'; '.join(told)}"] if told else []
