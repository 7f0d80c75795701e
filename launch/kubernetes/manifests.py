"""Kubernetes manifests of a run: an Indexed Job with a headless Service, a JobSet, or a TrainJob and its runtime.

In each of them, a pod runs ``serried.launch.kubernetes.pod``. Its exit code decides what follows: 0 ends the pod, 75
(stopped, and resumable) replaces it without counting, and 70 (failed) and 78 (a mistake) end the run. A pod that lost
its node does not count. All other ends count towards ``kubernetes.retries``.

https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
"""

from collections.abc import Callable, Sequence
from typing import Any

from serried.configs.errors import EXIT_FAILED, EXIT_MISTAKE, EXIT_STOPPED
from serried.configs.schema.sections import RunConfig
from serried.launch.kubernetes.pod import GRACE_SECONDS, JOB, NODES, PORT, PROCESSES, RUN_DIR
from serried.runtime.process import processes_per_node

WORKSPACE = "/workspace"
"""Working folder of the pods, where ``kubernetes.claim`` is mounted."""
SCRATCH = "/scratch"
"""Folder on the disk of a node, for a run in a bucket. Without a claim, it is the working folder."""

_CACHES = {
    "SERRIED_SCRATCH": f"{SCRATCH}/runs", "HF_HOME": f"{SCRATCH}/huggingface", "XDG_CACHE_HOME": f"{SCRATCH}/cache",
}  # fmt: skip
_CONTAINER = "node"
"""Name of the container. Kubeflow Trainer requires it."""
_APP = {"app.kubernetes.io/name": "serried"}
_RUN = "serried/run"
_JOB_UIDS = {"job": "batch.kubernetes.io/controller-uid"}
"""Label of a pod with the identity of the run's Job. A JobSet replaces its Jobs at a restart."""
_JOBSET_UID = "jobset.sigs.k8s.io/jobset-uid"
KUBEFLOWS_RUNTIME, OWN_RUNTIME = "torch-distributed", "serried"
"""Name of Kubeflow's ClusterTrainingRuntime for torch, and default name of the one that ``kubernetes.kind=runtime``
creates."""

Manifest = dict[str, Any]


def manifests(
    config: RunConfig, program: Sequence[str], arguments: Sequence[str], grace_seconds: int
) -> list[Manifest]:
    """Return the manifests of the run, the last of which starts it.

    Args:
        program: Arguments of the Python interpreter that start training.
        arguments: Overrides of the run in a pod.
        grace_seconds: Time that a pod gets to save after it was asked to stop.
    """
    return _KINDS[config.kubernetes.kind](config, _Pod(config, program, arguments, grace_seconds))


class _Pod:
    """Template of the pods."""

    def __init__(self, config: RunConfig, program: Sequence[str], arguments: Sequence[str], grace_seconds: int) -> None:
        self._config, self._section = config, config.kubernetes
        self._words = [*program, "--", *arguments]
        self._grace_seconds = grace_seconds

    def template(self, first_pod: str, **spec: Any) -> Manifest:
        """Return the template.

        Args:
            first_pod: Host name of the first pod.
            spec: Further values of the pod's specification.
        """
        section = self._section
        full: Manifest = {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": self._grace_seconds,
            "containers": [self.container(first_pod)], "volumes": self.volumes(), **spec,
        }  # fmt: skip
        if section.gpus:
            full["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        if section.service_account:
            full["serviceAccountName"] = section.service_account
        if section.node_selector:
            full["nodeSelector"] = section.selected_labels
        return {"metadata": {"labels": {**_APP, _RUN: self._config.run.name}}, "spec": full}

    def container(self, first_pod: str) -> Manifest:
        """Return the container of a pod."""
        config, section = self._config, self._section
        container: Manifest = {
            "name": _CONTAINER, "image": section.image,
            "command": ["python", "-m", "serried.launch.kubernetes.pod"], "args": self._words,
            "workingDir": WORKSPACE if section.claim else SCRATCH, "env": self.environment(first_pod),
            "volumeMounts": self.mounts(),
            "ports": [{"containerPort": PORT, "name": "meeting"}],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "terminationMessagePolicy": "File",
        }  # fmt: skip
        if resources := self._resources():
            # The same for requests, so that nothing else takes the memory of a run.
            container["resources"] = {"limits": resources, "requests": dict(resources)}
        if config.kubernetes.secret:
            container["envFrom"] = [{"secretRef": {"name": section.secret}}]
        return container

    def environment(self, first_pod: str) -> list[Manifest]:
        """Return the variables that ``serried.launch.kubernetes.pod`` reads."""
        config = self._config
        plain = {
            NODES: config.launch.nodes or 1, PROCESSES: processes_per_node(config.launch), RUN_DIR: config.run.place,
            GRACE_SECONDS: self._grace_seconds,
            "MASTER_ADDR": first_pod,
            **(_CACHES if self._has_scratch else {}),
        }  # fmt: skip
        label = _JOB_UIDS.get(self._section.kind, _JOBSET_UID)
        job = {"name": JOB, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}
        return [*({"name": name, "value": str(value)} for name, value in plain.items()), job]

    def volumes(self) -> list[Manifest]:
        section = self._section
        memory = {"medium": "Memory", "sizeLimit": section.shared_memory}
        found: list[Manifest] = [{"name": "shared-memory", "emptyDir": memory}]
        if section.claim:
            found.append({"name": "workspace", "persistentVolumeClaim": {"claimName": section.claim}})
        if self._has_scratch:
            found.append({"name": "scratch", "emptyDir": {"sizeLimit": section.scratch}})
        return found

    def mounts(self) -> list[Manifest]:
        paths = {"shared-memory": "/dev/shm", "workspace": WORKSPACE, "scratch": SCRATCH}
        return [{"name": volume["name"], "mountPath": paths[volume["name"]]} for volume in self.volumes()]

    @property
    def _has_scratch(self) -> bool:
        return self._config.run.url is not None

    def _resources(self) -> dict[str, str]:
        section = self._section
        wanted = {
            "cpu": section.cpus, "memory": section.memory, "nvidia.com/gpu": section.gpus,
            "ephemeral-storage": section.scratch if self._has_scratch else None,
        }  # fmt: skip
        return {name: str(value) for name, value in wanted.items() if value is not None}


def _metadata(config: RunConfig, *, is_queued: bool = True) -> Manifest:
    section = config.kubernetes
    labels = {**_APP, _RUN: config.run.name}
    if section.queue and is_queued:
        labels["kueue.x-k8s.io/queue-name"] = section.queue
    namespace = {"namespace": section.namespace} if section.namespace else {}
    return {"name": config.run.name, **namespace, "labels": labels}


def _ends_with(*codes: int) -> Manifest:
    return {"onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [*codes]}}


_LOST_NODE = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
FAILURE_POLICY: Manifest = {
    "rules": [
        {"action": "FailJob", **_ends_with(EXIT_FAILED, EXIT_MISTAKE)},
        {"action": "Ignore", **_LOST_NODE},
        {"action": "Ignore", **_ends_with(EXIT_STOPPED)},
    ]
}
"""Rules of a Job for a pod that failed. The first that matches decides; without a match, the failure counts."""


def _job_spec(config: RunConfig, template: Manifest) -> Manifest:
    nodes = config.launch.nodes or 1
    return {
        "completionMode": "Indexed", "completions": nodes, "parallelism": nodes,
        "backoffLimit": config.kubernetes.retries,  # only the pod of a killed rank counts
        "podReplacementPolicy": "Failed",  # one pod at a time for each index
        "podFailurePolicy": FAILURE_POLICY, "template": template,
    }  # fmt: skip


def _job(config: RunConfig, pod: _Pod) -> list[Manifest]:
    name = config.run.name
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": _metadata(config, is_queued=False),
        "spec": {
            # Pods must find each other before they are ready.
            "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {_RUN: name},
            "ports": [{"port": PORT, "name": "meeting"}],
        },
    }  # fmt: skip
    spec = _job_spec(config, pod.template(f"{name}-0.{name}", subdomain=name))
    spec |= _suspended(config)
    return [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(config), "spec": spec}]


def _suspended(config: RunConfig) -> Manifest:
    """Return the value that lets Kueue start a job with a queue."""
    return {"suspend": True} if config.kubernetes.queue else {}


def _jobset(config: RunConfig, pod: _Pod) -> list[Manifest]:
    template = pod.template(f"{config.run.name}-node-0-0.{config.run.name}")
    return [{
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(config),
        "spec": _jobset_spec(config, template) | _suspended(config),
    }]  # fmt: skip


def _jobset_spec(config: RunConfig, template: Manifest, labels: Manifest | None = None) -> Manifest:
    """Return the specification of a JobSet, which replaces all pods if one fails: its child job fails at once, and the
    set decides whether that counts. ``labels``: labels of the child job."""
    rules = [
        {"action": "FailJob", **_ends_with(EXIT_FAILED, EXIT_MISTAKE, EXIT_STOPPED)},
        {"action": "FailJob", **_LOST_NODE},
    ]
    spec = _job_spec(config, template)
    spec |= {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}
    # The messages are those of Kubernetes' job controller.
    reason = {"onJobFailureReasons": ["PodFailurePolicy"]}
    ends = {"onJobFailureMessagePatterns": [f".*exit code {code}.*" for code in (EXIT_FAILED, EXIT_MISTAKE)]}
    policy = {
        "maxRestarts": config.kubernetes.retries,
        "rules": [
            {"name": "failed", "action": "FailJobSet", **reason, **ends},
            {"name": "stopped", "action": "RestartJobSetAndIgnoreMaxRestarts", **reason},
        ],
    }
    metadata = {"metadata": {"labels": labels}} if labels else {}
    subdomain = {} if labels else {"subdomain": config.run.name}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, **subdomain},
        "failurePolicy": policy,
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {**metadata, "spec": spec}}],
    }


def _trainjob(config: RunConfig, pod: _Pod) -> list[Manifest]:
    """Return a TrainJob, whose runtime sets the number and addresses of the pods.

    Its patches cannot set a pod failure policy, so every non-zero exit of a pod follows the runtime's policy. It sets
    no time to live: Kubeflow would start a failed one again (kubeflow/trainer#3737).
    """
    template = pod.template("")["spec"]
    container = template["containers"][0]
    given = {"MASTER_ADDR", NODES, PROCESSES}  # by the runtime
    patch = {
        "terminationGracePeriodSeconds": template["terminationGracePeriodSeconds"], "volumes": template["volumes"],
        "containers": [{"name": _CONTAINER, "volumeMounts": container["volumeMounts"]}],
        **{key: template[key] for key in ("serviceAccountName", "nodeSelector") if key in template},
    }  # fmt: skip
    node = {"name": "node", "template": {"spec": {"template": {"spec": patch}}}}
    trainer = {
        "numNodes": config.launch.nodes or 1, "numProcPerNode": processes_per_node(config.launch),
        "image": container["image"], "command": container["command"], "args": container["args"],
        "env": [variable for variable in container["env"] if variable["name"] not in given],
        **({"resourcesPerNode": container["resources"]} if "resources" in container else {}),
    }  # fmt: skip
    return [{
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": _metadata(config),
        "spec": {
            **_suspended(config),
            "runtimeRef": {
                "name": config.kubernetes.runtime or KUBEFLOWS_RUNTIME, "kind": "ClusterTrainingRuntime",
                "apiGroup": "trainer.kubeflow.org",
            },
            "trainer": trainer,
            "runtimePatches": [{
                "manager": "serried/submit",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
            }],
        },
    }]  # fmt: skip


def _runtime(config: RunConfig, pod: _Pod) -> list[Manifest]:
    """Return a ClusterTrainingRuntime with the settings that a TrainJob lacks: rules for failed pods, and secrets."""
    template = pod.template("")
    container = template["spec"]["containers"][0]
    for given in ("args", "env"):  # set by the TrainJob
        del container[given]
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    return [{
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "ClusterTrainingRuntime",
        "metadata": {
            "name": config.kubernetes.runtime or OWN_RUNTIME,
            "labels": {**_APP, "trainer.kubeflow.org/framework": "torch"},
        },
        "spec": {
            "mlPolicy": {"numNodes": config.launch.nodes or 1, "torch": {}},
            "template": {"spec": _jobset_spec(config, template, labels)},
        },
    }]  # fmt: skip


_KINDS: dict[str, Callable[[RunConfig, _Pod], list[Manifest]]] = {
    "job": _job, "jobset": _jobset, "trainjob": _trainjob, "runtime": _runtime,
}  # fmt: skip
