"""``launch=skypilot``: create a managed job, which SkyPilot starts on another machine if the cloud takes one away.

Its nodes run ``serried.launch.kubernetes.pod``, as pods do. A run that stopped and can be resumed exits with 75, after
which SkyPilot starts it again.

https://docs.skypilot.co/en/latest/reference/yaml-spec.html
"""

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

import yaml

from serried.configs.errors import EXIT_STOPPED, UserError
from serried.configs.schema.sections import RunConfig
from serried.launch.kubernetes.pod import GRACE_SECONDS, JOB, NODES, PORT, PROCESSES, RUN_DIR
from serried.launch.kubernetes.submit import PROGRAM, check_name, program_there, refuse_relative_files
from serried.runtime.process import processes_per_node, say

_NOT_THERE = re.compile(r"(launch=|launch\.(name|nodes|processes)=|skypilot\.|run\.dir=)")
_WORKDIR = "in a copy of the current folder on each node"
_GRACE = 600
"""Time for the ranks to stop. The cloud may give less."""

Task = dict[str, Any]


def submit(argv: Sequence[str], config: RunConfig) -> int:
    """Create the managed job of the run, or print its task. Return the exit code.

    Raises:
        UserError: The run cannot work there, or SkyPilot refuses it.
    """
    _check(config)
    section, name = config.skypilot, config.run.name
    if program_there(_WORKDIR) == PROGRAM:
        refuse_relative_files(argv, "the nodes", "skypilot.file_mounts")
    words = [
        *(word for word in argv if not _NOT_THERE.match(word)),
        f"run.name={name}",
        f"run.dir={config.run.url}",
    ]
    text = yaml.dump(task(config, list(dict.fromkeys(words))), Dumper=_Dumper, sort_keys=False)
    if section.dry_run:
        return say(text)
    missing = [variable for variable in section.secrets if not os.environ.get(variable)]
    if missing:
        raise UserError(
            f"skypilot.secrets: {missing[0]} is not set in the environment of this machine; export {missing[0]}=..., "
            "or leave it out"
        )
    _launch(text, section.secrets)
    nodes, processes = config.launch.nodes or 1, processes_per_node(config.launch)
    lines = [
        ("submitted", f"managed job {name}: nodes {nodes}, processes per node {processes}"),
        ("watch", f"sky jobs logs --name {name}"),
        ("", f"serried status {config.run.url}"),
        ("cancel", f"sky jobs cancel --name {name}"),
    ]
    return say("\n".join(f"{label:<10} {line}" for label, line in lines))


def task(config: RunConfig, words: Sequence[str]) -> Task:
    """Return SkyPilot's task of the run. ``words``: overrides of the run on a node."""
    section = config.skypilot
    resources: Task = {
        "image_id": f"docker:{section.image}", "use_spot": section.spot, "disk_size": section.disk_gb,
        # SkyPilot accepts and ignores unknown keys here.
        "job_recovery": {"max_restarts_on_errors": section.retries, "recover_on_exit_codes": [EXIT_STOPPED]},
    }  # fmt: skip
    wanted = {
        "infra": section.infra,
        "accelerators": {section.accelerator: section.gpus} if section.gpus else None,
        "cpus": f"{section.cpus}+" if section.cpus else None,
        "memory": f"{section.memory_gb}+" if section.memory_gb else None,
    }
    resources |= {name: value for name, value in wanted.items() if value is not None}
    variables = {
        RUN_DIR: config.run.url, PROCESSES: processes_per_node(config.launch), GRACE_SECONDS: _GRACE,
        "MASTER_PORT": PORT,
    }  # fmt: skip
    program = program_there(_WORKDIR)
    run = (
        'export MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1) JOB_COMPLETION_INDEX=$SKYPILOT_NODE_RANK\n'
        f"export {NODES}=$SKYPILOT_NUM_NODES {JOB}=$SKYPILOT_TASK_ID\n"
        f"exec python -m serried.launch.kubernetes.pod {shlex.join([*program, '--', *words])}\n"
    )
    found: Task = {
        "name": config.run.name, "num_nodes": config.launch.nodes or 1, "resources": resources,
        "envs": {name: str(value) for name, value in variables.items()},
    }  # fmt: skip
    if program != PROGRAM:
        found["workdir"] = "."  # which contains the user's script
    if section.secrets:
        found["secrets"] = dict.fromkeys(section.secrets)
    if section.file_mounts:
        found["file_mounts"] = dict(section.file_mounts)
    return {**found, "run": _Script(run)}


class _Script(str):
    """Text that is written to YAML as a block of lines."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Script, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))


def _check(config: RunConfig) -> None:
    """Raise ``UserError`` if the run cannot work on SkyPilot's nodes."""
    section, name = config.skypilot, config.run.name
    check_name(name)
    if section.image is None:
        raise UserError(
            "launch=skypilot needs a container image with serried; build one from the Dockerfile, push it to your "
            "registry, and use skypilot.image=REGISTRY/serried:TAG"
        )
    if config.run.url is None:
        raise UserError(
            f"run.dir={config.run.dir} would be on the disk of a machine and vanish with it; use "
            f"run.dir=s3://BUCKET/runs/{name}"
        )


def _launch(text: str, secrets: Sequence[str]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        passed = [word for variable in secrets for word in ("--secret", variable)]
        command = ["sky", "jobs", "launch", "--yes", "--detach-run", *passed, file.name]
        try:
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", check=False, start_new_session=True
            )
        except FileNotFoundError:
            raise UserError(
                "launch=skypilot needs sky, which is not on the PATH of this machine; pip install skypilot, or print "
                "the YAML with skypilot.dry_run=true"
            ) from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no message"]
        raise UserError(f"SkyPilot refused the job: {said[-1].strip()}; to print the YAML: skypilot.dry_run=true")
