"""What a run is in Kubernetes: a Secret, a Service, a head, agents and a PodDisruptionBudget. Makes values; talks to no cluster.

    Secret                  the token, mounted as a file
    Service, headless       one DNS name for the head, whichever pod it is in
    head                    a Job with one pod: `lockstep head`
    agents                  an Indexed Job with a pod for each machine: `lockstep agent`
    PodDisruptionBudget     one agent at a time is taken away by a drain

The two Jobs stand alone (``job``), are the replicated jobs of a JobSet (``jobset``), or those of a Kubeflow TrainingRuntime that a
TrainJob uses (``trainjob``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.engines.yaml_text import Noted

HEAD_PORT = 29400
_TOKEN_FOLDER = "/etc/lockstep"
_RUN_FOLDER = "/lockstep"
CHECKPOINT_FOLDER = "/checkpoints"
_CONNECT_TIMEOUT_S = 1800
"""How long an agent waits for its head: pods start in any order, and an image may have to be pulled."""
_GRACE_MARGIN_S = 30

Object = Mapping[str, Any]


@dataclass(frozen=True)
class KubernetesRun:
    """What `lockstep render kubernetes` was asked for. Every field has been checked."""

    name: str
    image: str
    entrypoint: tuple[str, ...]
    """The script and its arguments, or "-m", the module and its arguments."""
    workers: int
    workers_per_pod: int
    min_workers: int
    gpus_per_worker: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    namespace: str | None = None
    cpu: str | None = None
    memory: str | None = None
    checkpoint_claim: str | None = None
    token_secret: str | None = None
    token: str | None = None
    """The value of the Secret that is rendered. None if ``token_secret`` names one that exists."""
    user: int | None = None
    grace_s: int = 300
    max_restarts: int = 3

    @property
    def pods(self) -> int:
        return self.workers // self.workers_per_pod


def render(run: KubernetesRun, kind: str) -> list[Object]:
    """Returns the objects, in the order in which they should be created. ``kind``: a key of ``KINDS``."""
    secret = [] if run.token is None else [_object(run, "v1", "Secret", f"{run.name}-token", stringData={"token": run.token})]
    return [*secret, _service(run), *_disruption_budget(run), *KINDS[kind](run)]


def _jobs(run: KubernetesRun) -> list[Object]:
    return [
        _object(run, "batch/v1", "Job", f"{run.name}-{part}", _labels(run, part), spec=spec(run))
        for part, spec in (("head", _head_job), ("agents", _agents_job))
    ]


def _jobset(run: KubernetesRun) -> list[Object]:
    return [_object(run, "jobset.x-k8s.io/v1alpha2", "JobSet", run.name, spec=_jobset_spec(run, "agents", {}))]


def _trainjob(run: KubernetesRun) -> list[Object]:
    """A TrainingRuntime says how Lockstep runs; the TrainJob says what is trained, on how many machines.

    Kubeflow finds the agents by the label, and their container by the name "node".
    """
    group, runtime = "trainer.kubeflow.org", f"{run.name}-runtime"
    jobset = _jobset_spec(run, "node", {f"{group}/trainjob-ancestor-step": "trainer"})
    trainer: dict[str, Any] = {"image": run.image, "command": _agent_command(run), "numNodes": run.pods}
    if resources := _agent_resources(run):
        trainer["resourcesPerNode"] = resources
    runtime_spec = {"mlPolicy": {"numNodes": run.pods}, "template": {"spec": jobset}}
    reference = {"apiGroup": group, "kind": "TrainingRuntime", "name": runtime}
    return [
        _object(run, f"{group}/v1alpha1", "TrainingRuntime", runtime, spec=runtime_spec),
        _object(run, f"{group}/v1alpha1", "TrainJob", run.name, spec={"runtimeRef": reference, "trainer": trainer}),
    ]


KINDS: dict[str, Callable[[KubernetesRun], list[Object]]] = {"jobset": _jobset, "job": _jobs, "trainjob": _trainjob}


def _service(run: KubernetesRun) -> Object:
    spec = {
        "clusterIP": "None",
        "selector": _labels(run, "head"),
        "ports": [{"name": "lockstep", "port": HEAD_PORT, "protocol": "TCP"}],
        "publishNotReadyAddresses": Noted(True, "Agents may look up the name before the head is ready."),
    }
    return _object(run, "v1", "Service", f"{run.name}-head", spec=Noted(spec, "Headless: a DNS name for the head's pod."))


def _disruption_budget(run: KubernetesRun) -> list[Object]:
    """None for one agent: nothing could be taken away, and its node could never be drained."""
    if run.pods == 1:
        return []
    note = "A number, because Kubernetes knows maxUnavailable and percentages for Deployments and the like, not for Jobs."
    spec = {"minAvailable": Noted(run.pods - 1, note), "selector": {"matchLabels": _labels(run, "agents")}}
    return [_object(run, "policy/v1", "PodDisruptionBudget", f"{run.name}-agents", spec=spec)]


def _jobset_spec(run: KubernetesRun, agents: str, agent_labels: Mapping[str, str]) -> Object:
    """``agents``: the name of the agents' replicated job."""
    head: dict[str, Any] = {"name": "head", "replicas": 1, "template": {"spec": _head_job(run)}}
    labels = {"metadata": {"labels": agent_labels}} if agent_labels else {}
    others = {"name": agents, "replicas": 1, "template": {**labels, "spec": _agents_job(run, agents)}}
    success = {"operator": "All", "targetReplicatedJobs": ["head"]}
    return {
        "network": Noted({"enableDNSHostnames": False}, f"The Service {run.name}-head has the only name that is needed."),
        "successPolicy": Noted(
            success, "The head's exit code is that of the run. There is no failurePolicy with restarts: it would restart all pods."
        ),
        "replicatedJobs": [head, others],
    }


def _head_job(run: KubernetesRun) -> Object:
    # A pod does not know its address before it runs. Connections begin with the token, wherever they come from.
    command = ["lockstep", "head", "--listen", f"0.0.0.0:{HEAD_PORT}", "--token-file", f"{_TOKEN_FOLDER}/token"]
    command += ["--min-workers", str(run.min_workers), "--grace", str(run.grace_s), "--run-dir", f"{_RUN_FOLDER}/run"]
    resources = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "512Mi"}}
    container = {
        "image": run.image,
        "command": command,
        "ports": [{"name": "lockstep", "containerPort": HEAD_PORT, "protocol": "TCP"}],
    }
    return {
        "backoffLimit": Noted(run.max_restarts, "A new pod for a head that failed. Meanwhile workers keep training."),
        "podFailurePolicy": _failure_policy(),
        "template": _pod(run, "head", {**container, "resources": resources}),
    }


def _agents_job(run: KubernetesRun, container_name: str = "agents") -> Object:
    container: dict[str, Any] = {}
    if container_name == "agents":  # in a TrainJob, the TrainJob names these
        container = {"image": run.image, "command": _agent_command(run)}
        if resources := _agent_resources(run):
            container["resources"] = resources
    note = "One pod is restarted, not all: each index has its own limit. A pod that reaches it stays away, and the others go on."
    return {
        "completionMode": "Indexed",
        "completions": run.pods,
        "parallelism": run.pods,
        "backoffLimitPerIndex": Noted(run.max_restarts, note),
        "podFailurePolicy": _failure_policy(),
        "template": _pod(run, "agents", container, container_name),
    }


def _failure_policy() -> Noted:
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
    ]
    return Noted(
        {"rules": rules},
        "A drain, a preemption or a lost node does not count as a failure. Exit code 2 is a wrong command line: no restart helps.",
    )


def _agent_command(run: KubernetesRun) -> list[str]:
    command = ["lockstep", "agent", "--head", f"{run.name}-head:{HEAD_PORT}", "--token-file", f"{_TOKEN_FOLDER}/token"]
    command += [
        "-n",
        str(run.workers_per_pod),
        "--connect-timeout",
        str(_CONNECT_TIMEOUT_S),
        "--grace",
        str(run.grace_s),
        "--run-dir",
        f"{_RUN_FOLDER}/run",
    ]
    return [*command, *(word.replace("$(", "$$(") for word in run.entrypoint)]  # Kubernetes would replace $(NAME)


def _agent_resources(run: KubernetesRun) -> dict[str, Any]:
    """Of one pod. Memory and GPUs are limits too; CPU is not, because a limit makes the kernel stop threads for milliseconds."""
    gpus = {run.gpu_resource: run.gpus_per_worker * run.workers_per_pod} if run.gpus_per_worker else {}
    memory = {"memory": run.memory} if run.memory else {}
    requests = {**({"cpu": run.cpu} if run.cpu else {}), **memory, **gpus}
    limits = {**memory, **gpus}
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _pod(run: KubernetesRun, part: str, container: Mapping[str, Any], container_name: str | None = None) -> Object:
    secret = {"secretName": run.token_secret or f"{run.name}-token", "defaultMode": Noted(0o400, "0400 in octal.")}
    volumes: list[Object] = [{"name": "token", "secret": secret}, {"name": "run", "emptyDir": {}}]
    mounts: list[Object] = [
        {"name": "token", "mountPath": _TOKEN_FOLDER, "readOnly": True},
        {"name": "run", "mountPath": _RUN_FOLDER},
    ]
    if part == "agents":
        shared = {"medium": Noted("Memory", "Without it /dev/shm has 64 MB, too little for the loader processes of torch.")}
        volumes.append({"name": "shm", "emptyDir": shared})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        if run.checkpoint_claim is not None:
            volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": run.checkpoint_claim}})
            mounts.append({"name": "checkpoints", "mountPath": CHECKPOINT_FOLDER})
    spec: dict[str, Any] = {
        "restartPolicy": Noted("Never", "A failed pod is replaced by a new one, maybe on another node; podFailurePolicy needs it."),
        "terminationGracePeriodSeconds": Noted(run.grace_s + _GRACE_MARGIN_S, "Time to end the step and to write a checkpoint."),
    }
    if run.user is not None:  # fsGroup lets this user read the token, which belongs to root
        user = {"runAsUser": run.user, "runAsGroup": run.user, "fsGroup": run.user, "runAsNonRoot": run.user != 0}
        spec["securityContext"] = user
    spec["containers"] = [{"name": container_name or part, **container, "volumeMounts": mounts}]
    return {"metadata": {"labels": _labels(run, part)}, "spec": {**spec, "volumes": volumes}}


def _labels(run: KubernetesRun, part: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/instance": run.name, "app.kubernetes.io/component": part}


def _object(
    run: KubernetesRun, version: str, kind: str, name: str, labels: Mapping[str, str] | None = None, **content: Any
) -> Object:
    labels = labels or {key: value for key, value in _labels(run, "").items() if value}
    metadata = {"name": name, **({"namespace": run.namespace} if run.namespace else {}), "labels": dict(labels)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}
