"""Start of a run: from scratch, its own checkpoint, another run's checkpoint, or the weights of a model folder."""

import json
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from serried.configs.bucket_paths import with_urls
from serried.configs.bucket_urls import check_bucket_url, is_bucket_url
from serried.configs.errors import UserError
from serried.configs.hugging_face.adapter_folder import ADAPTER_CONFIG
from serried.configs.hugging_face.model_folder import adapters_alone
from serried.configs.messages.invalid_values import shown
from serried.configs.messages.keys import all_keys
from serried.configs.messages.suggestions import nearest
from serried.configs.plain_data import NotPlainData, expanded, flatten, read_if_there, value_at
from serried.configs.renamed_keys import read_saved_config
from serried.configs.schema.fields import AUTO, Section
from serried.configs.schema.run_config import CHOSEN
from serried.configs.schema.sections import RunConfig
from serried.records.run_folder import RunFolder
from serried.runtime.session import Session
from serried.trainer.checkpoint.bucket_checkpoints import set_aside
from serried.trainer.checkpoint.checkpoints import (
    CHECKPOINTS,
    Checkpoints,
    checkpoints_of,
    damage,
    origin_of,
)
from serried.trainer.checkpoint.kept_state import KeptState
from serried.trainer.checkpoint.manifest import MANIFEST, fsync_folder, read_manifest
from serried.trainer.checkpoint.resume_from_bucket import CheckpointsAtUrl
from serried.trainer.checkpoint.retention import STEMS, named, step_of, weights_alone
from serried.trainer.checkpoint.saved_state import STATE, read_state, taking_from


@dataclass(frozen=True)
class Start:
    """Starting point of a run. Without ``checkpoint`` and ``weights``, it starts at step 0 with initial weights."""

    checkpoint: Path | None = None
    """Checkpoint to resume from. The checksums of all its files were verified."""
    weights: Path | None = None
    """Model folder from which only the weights are loaded."""
    adapters: Path | None = None
    """Folder from which a new run loads its adapters. None if it initializes them, and before they are checked."""
    origin: str | None = None
    """Path in ``checkpoint.resume`` of this run, or of the run that it resumes."""
    state: dict[str, Any] = field(default_factory=dict)
    """Content of the checkpoint's state.json."""
    notes: list[str] = field(default_factory=list)
    """Lines to print for the user."""
    kept: KeptState | None = None
    """State in memory to continue from after a loss, with its plain data in ``state``."""
    first_step: int | None = None
    """Step after which the processes started, if it is not ``step``."""
    newest_checkpoint: int = 0
    """Step of the run's newest checkpoint, if the state is in memory. 0 if there is none."""
    changed: Sequence[str] = ()
    """Settings that affect the results of the run and differ from the settings of ``checkpoint``."""

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return int(self.state.get("step", 0))

    @property
    def resumes(self) -> bool:
        """Whether the run continues from a checkpoint or from memory."""
        return self.checkpoint is not None or self.kept is not None

    @property
    def source(self) -> Path | None:
        """Folder that the weights are read from. None for initial weights."""
        return self.checkpoint or self.weights

    def continues(self, run_dir: Path) -> bool:
        """Return whether the run resumes in its own folder, with its own records."""
        is_here = self.checkpoint is not None and self.checkpoint.parent == run_dir / CHECKPOINTS
        return is_here or self.kept is not None

    def saved_step(self, run_dir: Path) -> int:
        """Return the step of the run's newest checkpoint. 0 if there is none."""
        if self.kept is not None:
            return self.newest_checkpoint
        return self.step if self.continues(run_dir) else 0


class DamagedCheckpoint(UserError):
    """Raised on all ranks if a checkpoint turns out to be damaged while it is read."""

    def __init__(self, path: Path, damage: str) -> None:
        super().__init__(f"{damage}; use checkpoint.resume=PATH for another checkpoint")
        self.path, self.damage = path, damage


def find_start(
    config: RunConfig, session: Session, pretrained: Callable[[], Path | None] = lambda: None,
    folder: RunFolder | None = None, known_damage: Mapping[Path, str] = MappingProxyType({}),
) -> Start:  # fmt: skip
    """Choose the starting point of a run, and verify it. This is a collective call: the ranks share the reading.

    Args:
        pretrained: Called on one rank, returns the folder of the initial weights of a new run, if any.
        folder: The run folder on rank 0. Needed only for a run in a bucket.
        known_damage: Damage of checkpoints that was found when they were read.

    Raises ``UserError`` if there is no checkpoint but ``checkpoint.resume`` requires one, all are damaged, or
    resuming would silently change the run.
    """
    checkpoints = checkpoints_of(config, session, folder)
    given = CheckpointsAtUrl(config, session) if is_bucket_url(config.checkpoint.resume) else None
    chosen = session.once(partial(_candidates, config, checkpoints, pretrained, given))
    parent = given.folder if given is not None and chosen["is_given"] else config.run.dir / CHECKPOINTS
    notes, damages = list(chosen["notes"]), []
    # Scratch folders may differ between nodes, so the run's own checkpoints are identified by name.
    for path in (parent / name for name in chosen["candidates"]):
        problem = known_damage.get(path)
        if problem is None and path.parent == config.run.dir / CHECKPOINTS:
            problem = checkpoints.open(path)
        elif problem is None:
            problem = damage(path, session) if given is None else given.open(path)
        if problem is not None:
            damages.append(problem)
            continue
        state = session.once(partial(_state, path))
        if damages:
            notes.append(
                f"damaged: {'; '.join(damages)}; resuming from the newest complete checkpoint, {config.run.shown(path)}"
            )
        if chosen["is_given"] and _takes_weights_only(state, config):
            return _with_weights(path, chosen["origin"], state, [*notes], config)
        with taking_from(path):
            changed = _allowed_changes(path, state["config"], config)
            notes += changes(state, config, session.world_size)
            if path.parent == config.run.dir / CHECKPOINTS:
                notes += session.once(partial(_edits, state, config))
        return Start(path, origin=chosen["origin"], state=state, notes=notes, changed=changed)
    if damages:
        raise UserError(
            f"no checkpoint is complete: {'; '.join(damages)}; use checkpoint.resume=never to start again (the damaged "
            "checkpoints are kept), or checkpoint.resume=PATH for another checkpoint"
        )
    weights = Path(chosen["weights"]) if chosen["weights"] else None
    if weights is not None and not chosen["is_given"]:
        download_on_all_nodes(weights, pretrained, session)
    return Start(weights=weights, origin=chosen["origin"], notes=notes)


def download_on_all_nodes(folder: Path, find: Callable[[], Path | None], session: Session) -> None:
    """Call ``find`` on the other nodes too, if it downloaded ``folder`` from a bucket on rank 0. This is a collective
    call.

    Raises ``UserError`` if the nodes have different versions, or different folders for downloads.
    """
    url = session.once(lambda: with_urls(str(folder)))
    if url != str(folder):
        session.same_everywhere(f"the copy of {url}", session.once_per_node(lambda: str(find())))


def _candidates(
    config: RunConfig, checkpoints: Checkpoints, pretrained: Callable[[], Path | None],
    given: CheckpointsAtUrl | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the checkpoints to try, newest first, or a folder of weights. Called on one rank."""
    resume, own_folder = config.checkpoint.resume, config.run.dir / CHECKPOINTS
    try:
        own = [path.name for path in checkpoints.saved()]
        if resume == "must" and not own:
            place = own_folder if config.run.url is None else config.run.url
            raise UserError(f"checkpoint.resume=must but {place} has no checkpoint; use checkpoint.resume=auto")
        if resume in ("auto", "must", "never"):
            own = [] if resume == "never" else own
            weights = pretrained() if not own else None
            return {
                "candidates": own, "weights": str(weights) if weights else None,
                "origin": checkpoints.origin() if own else None, "notes": [], "is_given": False,
            }  # fmt: skip
        origin = _origin(resume)
        if own and checkpoints.origin() == origin:
            # The same command was run before. That run started from ``origin`` and has its own checkpoints now.
            note = f"this run started from {resume} and has its own checkpoints now: resuming from the newest"
            return {"candidates": own, "weights": None, "origin": origin, "notes": [note], "is_given": False}
        if given is not None:
            return {"candidates": given.names(), "weights": None, "origin": origin, "notes": [], "is_given": True}
        return {"origin": origin, "notes": [], "is_given": True, **_open(expanded(resume).absolute(), config)}
    except OSError as error:
        raise _not_read(error, own_folder) from None


def _origin(resume: str) -> str:
    """Return the path or URL in ``checkpoint.resume``, the same for every spelling; links are not resolved."""
    if is_bucket_url(resume):
        return check_bucket_url(resume, "checkpoint.resume")
    return os.path.normpath(expanded(resume).absolute())


def _takes_weights_only(state: Mapping[str, Any], config: RunConfig) -> bool:
    """Return whether a run uses only the weights of the checkpoint in ``checkpoint.resume``. ``state``: content of the
    checkpoint's state.json."""
    return config.checkpoint.weights_only or value_at("config.task.name", state) not in (None, config.task.name)


def _with_weights(
    path: Path, origin: str | None, state: Mapping[str, Any], notes: Sequence[str], config: RunConfig
) -> Start:
    """Return the start of a new run with the weights of the checkpoint ``path``. ``state``: its state.json."""
    if path.parent == config.run.dir / CHECKPOINTS:
        raise UserError(
            f"{config.run.shown(path)} is a checkpoint of this run, but a start from its weights would move it aside; "
            f"add {config.another_run}"
        )
    if (path / ADAPTER_CONFIG).is_file():
        raise UserError(adapters_alone(config.checkpoint.resume))
    if not config.checkpoint.weights_only:
        name = value_at("config.task.name", state)
        notes = [
            *notes,
            f"{config.run.shown(path)} was trained by task.name={name}: only its weights are used, from step 0",
        ]
    return Start(weights=path, origin=origin, notes=[*notes])


def _not_read(error: OSError, folder: Path) -> UserError:
    return UserError(f"cannot read {error.filename or folder}: {error.strerror}")


def _open(path: Path, config: RunConfig) -> dict[str, Any]:
    if found := _checkpoints_in(path):
        own_folder = config.run.dir / CHECKPOINTS
        if found[0].resolve().parent == own_folder.resolve():  # a checkpoint of this run, however its path is spelled
            found = [Path(checkpoint.resolve().name) for checkpoint in found]
        return {"candidates": [str(checkpoint) for checkpoint in found], "weights": None}
    if (path / STATE).exists():
        raise UserError(
            f"{path} is a checkpoint without {MANIFEST}, so it may be incomplete; use another checkpoint, or remove "
            f"{STATE} and optimizer* from it to start from its weights only"
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
        f"checkpoint.resume={config.checkpoint.resume} is not auto, never, must or an existing folder; {hint}"
    )


def _newest_first(checkpoints: Path) -> list[Path]:
    return named(checkpoints)[::-1]


def _checkpoints_in(path: Path) -> list[Path]:
    """Return the checkpoints in ``path``, newest first.

    ``path``: a checkpoint, a run folder, or its folder of checkpoints.
    """
    return [path] if (path / MANIFEST).is_file() else _newest_first(path / CHECKPOINTS) or _newest_first(path)


def resumed_checkpoints(config: RunConfig) -> list[Path]:
    """Return the checkpoints that ``find_start`` would try, newest first, without verifying them.

    Empty if the run starts from scratch or only from weights. Raises ``UserError`` if the folder cannot be read.
    """
    resume, own_folder = config.checkpoint.resume, config.run.dir / CHECKPOINTS
    try:
        own = _newest_first(own_folder)
        if resume in ("auto", "must", "never"):
            return [] if resume == "never" else own
        if own and origin_of(own) == _origin(resume):
            return own
        if is_bucket_url(resume):
            return []
        found = _checkpoints_in(expanded(resume).absolute())
        states = (read_if_there(checkpoint / STATE) for checkpoint in found)
        return [] if any(_takes_weights_only(state, config) for state in states) else found
    except OSError as error:
        raise _not_read(error, own_folder) from None


def _state(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint.

    Raises ``UserError`` if the folder has files that would be loaded but are not in the manifest.
    """
    records = read_manifest(path)
    for stem in STEMS:
        for name in (f"{stem}.safetensors", f"{stem}.safetensors.index.json"):
            if (path / name).exists() and name not in records:
                raise UserError(f"{path / name} is not part of the checkpoint ({MANIFEST} does not list it); remove it")
    return read_state(path)


def make_room(folder: RunFolder, start: Start) -> list[str]:
    """Move files in the run folder that belong to an earlier run aside. Called on one rank.

    Returns notes for the user. Raises ``UserError`` if checkpoints cannot be written.
    """
    checkpoints = folder.path / CHECKPOINTS
    notes: list[str] = []
    if folder.head is not None:
        notes += set_aside(folder, folder.head, start.step if start.continues(folder.path) else None)
    elif start.continues(folder.path):
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
        raise UserError(f"cannot write {checkpoints}: {error.strerror}; use {folder.another_disk}") from None
    return notes


def check_data(start: Start, fingerprint: str, config: RunConfig, earlier: Collection[str] = ()) -> bool:
    """Return whether the checkpoint was trained on other data.

    ``fingerprint``: fingerprint of the data now. ``earlier``: fingerprints of the same data in earlier versions. Raises
    ``UserError`` if the data differs and this is not allowed.
    """
    if start.checkpoint is None or start.state["data_fingerprint"] in (fingerprint, *earlier):
        return False
    keys = [key for key in flatten(plain(config)) if is_free(key, config, by_content=True)]
    # Keys that the fingerprint depends on, in addition to the content.
    own = (*(f"{section}." for section in _own_sections(config)), "trainer.global_batch", "trainer.seed")
    paths = [key for key in keys if key.endswith(".path") and ".validation." not in key] or keys
    is_allowed = config.checkpoint.allow_changes is True or any(map(config.checkpoint.allows, paths))
    if is_allowed or any(key.startswith(own) for key in start.changed):
        return True
    prepared = " (for conversations prepared by another version: data=tokens data.path=FOLDER)"
    raise UserError(
        f"{config.run.shown(start.checkpoint)} was trained on different data (fingerprint "
        f"{start.state['data_fingerprint']}, now {fingerprint}); use {config.another_run} to keep both, the same "
        f"data{prepared if keys else ''}, or {_allowing(paths[:1], config)} to resume with the new data"
    )


def steps_before_changes(start: Start, has_other_data: bool, run_dir: Path) -> list[int]:
    """Return the steps of the checkpoints to keep because the run's settings or data changed after them."""
    earlier = list(start.state.get("changed_after") or [])
    is_changed = start.continues(run_dir) and (has_other_data or bool(start.changed))
    return [start.step] if is_changed else earlier


# changed settings -----------------------------------------------------------------------------------------------------


def differences(earlier: dict[str, Any], now: dict[str, Any], schema: type[RunConfig]) -> dict[str, str]:
    """Return ``key: old -> new`` for all settings that differ between two resolved configs of ``schema``."""
    before, after = flatten(earlier), flatten(now)
    before = {key: _default(key, schema) for key in after} | before  # an older version may lack keys
    # Ignore keys of an optimizer or schedule that is not selected now: the change of its name is already reported.
    before = {key: value for key, value in before.items() if key in after or key.partition(".")[0] not in CHOSEN}
    named_before, named_now = _named(earlier), _named(now)
    whole = {name: f"{name} is {'new' if name in named_now else 'gone'}" for name in named_before ^ named_now}
    return whole | {
        key: f"{key} {shown(before.get(key))} -> {shown(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key.rpartition(".")[0] not in whole
    }


def _named(config: dict[str, Any]) -> set[str]:
    """Return the sections whose keys are user-defined names: sources, validation sets, parameter groups."""
    return {f"{path}.{name}" for path in all_keys().named for name in value_at(path, config) or {}}


def _default(key: str, schema: type[RunConfig]) -> Any:
    """Return the default of ``key`` as JSON data, which is how versions without ``key`` behave. None if it has none."""
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
    """Return the task-specific sections, starting with ``data``."""
    return ["data", *(section for section in type(config).model_fields if section not in RunConfig.model_fields)]


def _allowing(keys: Sequence[str], config: RunConfig) -> str:
    """Return the override that allows ``keys`` to change, in addition to keys that may change already."""
    allowed = config.checkpoint.allow_changes
    listed = [*(() if isinstance(allowed, bool) else allowed), *keys]
    return shlex.quote(f"checkpoint.allow_changes=[{','.join(listed)}]") if listed else "checkpoint.allow_changes=true"


def _allowed_changes(path: Path, earlier: dict[str, Any], config: RunConfig) -> list[str]:
    """Return the keys that affect the results and differ from the ``earlier`` config of checkpoint ``path``.

    Raises ``UserError`` if one of them is not allowed to change.
    """
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
    own = _own_sections(config)  # listed first
    named.sort(key=lambda key: own.index(key.partition(".")[0]) if key.partition(".")[0] in own else len(own))
    if path.parent == config.run.dir / CHECKPOINTS:
        ways = [f"{config.another_run} to keep both", "checkpoint.resume=never to start again here"]
    else:
        ways = [weights_alone(path)]
    of_model = [key for key in named if key.startswith("model.")]
    if of_model and before.get("model.path") and "model.path" not in of_model:
        # Keys that config.json does not set may have another meaning in this version.
        parents = {key: key.rpartition(".")[0] for key in of_model}  # in before, if the full section was null
        settable = dict.fromkeys(parents[key] if parents[key] in before else key for key in of_model)
        ways.append(" ".join(f"{key}={shown(before.get(key))}" for key in settable) + " to resume as it began")
    # The weights would not fit another model, so its keys cannot be allowed to change.
    if not any(key.startswith("model.") and key != "model.path" for key in named):
        ways.append(f"{_allowing(named, config)} to resume with the new settings")
    told = "; ".join(changed[key] for key in named)
    raise UserError(f"resuming from {config.run.shown(path)} would change the run: {told}; use {', or '.join(ways)}")


def _edits(state: dict[str, Any], config: RunConfig) -> list[str]:
    """Return a warning about values in the run folder's ``config.yaml`` that differ from both the checkpoint and this
    command. Such values mean that the file was edited."""
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
        f"WARNING    {config.run.shown(path)} has {told}, but this file is not read when the run resumes; to apply the "
        "change, add it to the command"
    ]


def is_free(key: str, config: RunConfig, *, by_content: bool = False) -> bool:
    """Return whether ``key`` may change without affecting the results of a run, as its section declares.

    With ``by_content``, return whether ``key`` names a resource whose content is compared instead.
    """
    section: Any = config
    for part in key.split("."):
        if isinstance(section, Section) and section.has_free(part, by_content=by_content):
            return True
        section = section.get(part) if isinstance(section, dict) else getattr(section, part, None)
    return False


def changes(state: dict[str, Any], config: RunConfig, world_size: int) -> list[str]:
    """Return a line that lists the changes since a checkpoint's ``state``, except settings that do not affect training.

    Empty if there are none.
    """
    changed = differences(state["config"], plain(config), type(config))
    chosen = ["trainer.micro_batch"] if config.trainer.micro_batch == AUTO else []
    silent = ("run.", "checkpoint.", "slurm.", "dry_run", "trainer.stop_at", "trainer.max_minutes", *chosen)
    told = [text for key, text in changed.items() if not key.startswith(silent)]
    for name, now in (("torch", torch.__version__), ("world_size", world_size)):
        if state.get(name) != now:
            told.append(f"{name} {state.get(name)} -> {now}")
    return [f"changed since the checkpoint: {'; '.join(told)}"] if told else []
