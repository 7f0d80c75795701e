"""``launch=kubernetes``: create the pods of a run with kubectl."""

import math
import posixpath
import re
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import yaml

import serried
from serried.configs.errors import UserError
from serried.configs.schema.sections import RunConfig
from serried.launch.kubernetes.manifests import WORKSPACE, Manifest, manifests
from serried.runtime.process import processes_per_node, say, training_command

_PATIENCE_SECONDS = 120
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MOST_NAME = 40
"""Maximum length of the name of a run. Kubernetes appends to it for the names of pods, which have at most 63."""
_NOT_IN_POD = re.compile(r"(launch=|launch\.(name|nodes|processes)=|kubernetes\.|run\.dir=)")
PROGRAM = ("-m", "serried.program")
"""Arguments of the interpreter that start training with the built-in tasks."""
_END_SECONDS = 30
_DEFAULT_GRACE_SECONDS = 300


def submit(argv: Sequence[str], config: RunConfig, grace_seconds: Callable[[], float | None]) -> int:
    """Create the pods of the run, or print their manifests. Return the exit code.

    Args:
        grace_seconds: Returns the planned time from a request to stop until the run is saved; None if unknown.

    Raises:
        UserError: The run cannot work in pods, or the cluster refuses it.
    """
    _check(config)
    section = config.kubernetes
    if section.claim is None:
        refuse_relative_files(argv, "the pods", "kubernetes.claim=NAME, a volume with that path")
    run_dir = config.run.url or _on_volume(config.run.dir)
    if config.run.url is None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": run_dir})})
    planned = grace_seconds()
    seconds = _DEFAULT_GRACE_SECONDS if planned is None else math.ceil(_END_SECONDS + planned)
    words = [
        *(word for word in argv if not _NOT_IN_POD.match(word)),
        f"run.name={config.run.name}",
        f"run.dir={run_dir}",
    ]
    program = program_there("on the volume kubernetes.claim")
    if section.claim is None and program != PROGRAM:
        raise UserError(
            f"{program[0] if program[:2] != PROGRAM else program[2]} would not be in the pods; use "
            "kubernetes.claim=NAME, a PersistentVolumeClaim that has it at the same relative path"
        )
    found = manifests(config, program, list(dict.fromkeys(words)), seconds)
    text = yaml.safe_dump_all(found, sort_keys=False)
    if section.dry_run:
        return say(text)
    if section.kind == "runtime":
        _kubectl("apply", found[0], config)
        return say(_created_runtime(found[0]["metadata"]["name"]))
    namespace = f" --namespace {section.namespace}" if section.namespace else ""
    for manifest in found[:-1]:
        _kubectl("apply", manifest, config)
    _kubectl("create", found[-1], config)
    name, nodes = config.run.name, config.launch.nodes or 1
    processes = processes_per_node(config.launch)
    kind = section.kind
    selector = f"serried/run={name}" if kind != "trainjob" else f"jobset.sigs.k8s.io/jobset-name={name}"
    created = f"{kind}/{name}" + (f" service/{name}" if kind == "job" else "")
    lines = [
        (
            "submitted",
            f"{kind} {name}: {_counted(nodes, 'pod', 'pods')} x {_counted(processes, 'process', 'processes')}",
        ),
        ("grace", f"a pod has {seconds} s to save when it is asked to end"),
        (
            "watch",
            f"kubectl logs{namespace} --follow --selector {selector} --prefix --max-log-requests {nodes}",
        ),
        ("", f"kubectl get pods{namespace} --selector {selector}"),
        ("cancel", f"kubectl delete{namespace} {created}"),
    ]
    return say("\n".join(f"{label:<10} {line}" for label, line in lines))


def _created_runtime(name: str) -> str:
    return (
        f"created    ClusterTrainingRuntime {name}, for runs with kubernetes.kind=trainjob kubernetes.runtime={name}\n"
        f"remove     kubectl delete clustertrainingruntime {name}"
    )


def _on_volume(path: Path) -> PurePosixPath:
    """Return the absolute path in the pods, which may be outside the volume."""
    return PurePosixPath(posixpath.normpath(PurePosixPath(WORKSPACE) / path))


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def check_name(name: str) -> None:
    """Raise ``UserError`` if ``name`` cannot be the name of a job."""
    if not _NAME.fullmatch(name) or len(name) > _MOST_NAME:
        usable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:_MOST_NAME].strip("-") or "run"
        raise UserError(
            f"run.name={name} cannot be the name of a job: Kubernetes allows at most {_MOST_NAME} of a-z, 0-9 and -, "
            f"beginning with a letter; use run.name={usable}"
        )


def refuse_relative_files(argv: Sequence[str], where: str, cure: str) -> None:
    """Raise ``UserError`` if an override names a local file by a relative path, since the run is ``where``."""
    for word in argv:
        key, _, value = word.partition("=")
        if not value or Path(value).is_absolute() or not key.endswith((".path", ".tokenizer", ".teacher", ".resume")):
            continue
        with suppress(ValueError):  # no pattern
            if next(Path().glob(value), None) is None:
                continue
            raise UserError(f"{word} is a file of this machine, not of {where}; use {key}=s3://BUCKET/PATH, or {cure}")


def _check(config: RunConfig) -> None:
    """Raise ``UserError`` if the run cannot work in pods."""
    section, name = config.kubernetes, config.run.name
    check_name(name)
    if section.image is None:
        raise UserError(
            "launch=kubernetes needs a container image with serried; build one from the Dockerfile, push it to your "
            "registry, and use kubernetes.image=REGISTRY/serried:TAG"
        )
    if section.claim is None and config.run.url is None:
        raise UserError(
            f"run.dir={config.run.dir} would be inside the pods and vanish with them; use run.dir=s3://BUCKET/runs/"
            f"{name}, or kubernetes.claim=NAME, a PersistentVolumeClaim that all pods can write (ReadWriteMany)"
        )
    if section.kind == "trainjob" and section.secret is not None:
        raise UserError(
            f"kubernetes.secret={section.secret} cannot be used with kubernetes.kind=trainjob, which cannot pass a "
            "Secret to its pods; create a runtime that does (kubernetes.kind=runtime kubernetes.secret="
            f"{section.secret}), then use kubernetes.runtime=serried instead; or use kubernetes.kind=job"
        )
    if config.run.url is None and WORKSPACE not in map(str, _on_volume(config.run.dir).parents):
        raise UserError(
            f"run.dir={config.run.dir} is not on the volume kubernetes.claim={section.claim}, mounted in the pods at "
            f"{WORKSPACE}; use run.dir=runs/{name}, relative to it"
        )


def program_there(where: str) -> Sequence[str]:
    """Return the arguments of the interpreter in a pod, with the flags of this command. Scripts and config folders of
    the user are at the same relative path there, in the folder that ``where`` describes."""
    first, *rest = training_command()
    flags = [
        f"--config-dir={_relative(Path(word.partition('=')[2]), where)}" if word.startswith("--config-dir=") else word
        for word in rest
    ]
    if first == "-m" or Path(first) == (Path(serried.__file__).parents[1] / "train.py").resolve():
        return (*PROGRAM, *(flags[1:] if first == "-m" else flags))
    return (_relative(Path(first), where), *flags)


def _relative(path: Path, where: str) -> str:
    here = Path.cwd().resolve()
    if not path.resolve().is_relative_to(here):
        raise UserError(
            f"{path} is not in the current folder, but it must be at the same relative path {where}; cd {path.parent}"
        )
    return str(path.resolve().relative_to(here))


def _kubectl(verb: str, manifest: Manifest, config: RunConfig) -> None:
    name = config.run.name
    try:
        done = subprocess.run(
            ["kubectl", verb, "-f", "-"], input=yaml.safe_dump(manifest, sort_keys=False), capture_output=True,
            encoding="utf-8", errors="replace", timeout=_PATIENCE_SECONDS, check=False, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError(
            "launch=kubernetes needs kubectl, which is not on the PATH of this machine; install it, or print the YAML "
            "with kubernetes.dry_run=true"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"the cluster has not answered for {_PATIENCE_SECONDS} s; check `kubectl get nodes`, and run the same "
            "command again"
        ) from None
    if done.returncode:
        said = " ".join(done.stderr.split())
        if "AlreadyExists" in said:
            kind, space = config.kubernetes.kind, config.kubernetes.namespace
            namespace = f" --namespace {space}" if space else ""
            raise UserError(
                f"a {kind} named {name} exists already; if it has ended, delete it (kubectl delete{namespace} {kind} "
                f"{name}) and run the same command to resume, or use {config.another_run}"
            )
        raise UserError(
            f"Kubernetes refused the {manifest['kind']}: {said}; to print the YAML: kubernetes.dry_run=true"
        )
