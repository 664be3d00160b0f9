"""`lockstep render`: the schemas of Kubernetes, JobSet and Kubeflow allow its YAML, and bash runs its batch script."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.__main__ import _parser, main
from lockstep.engines.kubernetes import KINDS
from lockstep.engines.yaml_text import Noted, documents, plain

KUBERNETES = ["kubernetes", "--image", "train:1", "-n", "16", "--gpus-per-worker", "1", "--cpu", "32"]
KUBERNETES += ["--memory", "64Gi", "--checkpoint-claim", "checkpoints", "--namespace", "research", "--user", "1000"]
SCRIPT = ["--", "train.py", "--lr", "0.1", "--text", "it's $(HOME)"]
WHOLE = st.recursive(
    st.text() | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def rendered(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[Any]:
    assert main(["render", *arguments]) == 0
    return list(yaml.safe_load_all(capfd.readouterr().out))


def of_kind(objects: list[Any], kind: str) -> list[Any]:
    return [each for each in objects if each["kind"] == kind]


def jobs(objects: list[Any]) -> dict[str, Any]:
    """The specs of the Jobs, whatever contains them, by "head" and "agents"."""
    found = {each["metadata"]["name"].rpartition("-")[2]: each["spec"] for each in of_kind(objects, "Job")}
    for each in of_kind(objects, "JobSet"):
        found |= {job["name"]: job["template"]["spec"] for job in each["spec"]["replicatedJobs"]}
    for each in of_kind(objects, "TrainingRuntime"):
        found |= {job["name"]: job["template"]["spec"] for job in each["spec"]["template"]["spec"]["replicatedJobs"]}
    return {"head": found["head"], "agents": found.get("agents") or found["node"]}


@settings(deadline=None)  # the machine may be busy
@given(st.dictionaries(st.text(), WHOLE, min_size=1))
def test_yaml_is_read_back_as_it_was(value: dict[str, Any]) -> None:
    assert yaml.safe_load(documents([value])) == value


def test_notes_are_comments() -> None:
    value = {"a": Noted([1, {"b": Noted("no", "second")}], "first " * 40)}
    text = documents([value, {"c": "0400"}], "of the file")
    assert list(yaml.safe_load_all(text)) == [plain(value), {"c": "0400"}] == [{"a": [1, {"b": "no"}]}, {"c": "0400"}]
    assert text.startswith("# of the file\n")
    assert max(map(len, text.splitlines())) < 120


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("version", ["1.31", "1.34", "1.37"])
def test_the_schemas_of_kubernetes_allow_it(kind: str, version: str, capfd: pytest.CaptureFixture[str]) -> None:
    validation = pytest.importorskip("kubernetes_validate")
    objects = rendered(capfd, *KUBERNETES, "--kind", kind, *SCRIPT)
    for each in objects:
        if each["kind"] in ("JobSet", "TrainingRuntime", "TrainJob"):  # no kinds of Kubernetes itself
            continue
        validation.validate(each, version, strict=True)
    for part, spec in jobs(objects).items():
        validation.validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": part}, "spec": spec}, version, strict=True
        )


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("JobSet", "JobsetV1alpha2JobSet"),
        ("TrainingRuntime", "TrainerV1alpha1TrainingRuntime"),
        ("TrainJob", "TrainerV1alpha1TrainJob"),
    ],
)
def test_the_types_of_jobset_and_kubeflow_have_every_field(kind: str, model: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The classes of Kubeflow's client are made from its schemas and those of JobSet. They drop fields that they do not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    rendered_kind = "jobset" if kind == "JobSet" else "trainjob"
    (value,) = of_kind(rendered(capfd, *KUBERNETES, "--kind", rendered_kind, *SCRIPT), kind)
    assert getattr(models, model).from_dict(value).to_dict() == value


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_is_in_it(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    objects = rendered(capfd, *KUBERNETES, "--kind", kind, *SCRIPT)
    assert {each["metadata"]["namespace"] for each in objects} == {"research"}
    (secret,), (service,), (budget,) = (of_kind(objects, name) for name in ("Secret", "Service", "PodDisruptionBudget"))
    assert len(bytes.fromhex(secret["stringData"]["token"])) == 32
    head, agents = jobs(objects)["head"], jobs(objects)["agents"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == head["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"] == agents["template"]["metadata"]["labels"]
    assert budget["spec"]["minAvailable"] == 1
    assert (agents["completionMode"], agents["completions"], agents["parallelism"]) == ("Indexed", 2, 2)
    assert agents["backoffLimitPerIndex"] == head["backoffLimit"] == 3
    for spec in (head, agents):
        pod = spec["template"]["spec"]
        assert pod["restartPolicy"] == "Never"
        assert pod["terminationGracePeriodSeconds"] > 300
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert volumes["token"]["secret"] == {"secretName": secret["metadata"]["name"], "defaultMode": 0o400}
        assert pod["securityContext"]["fsGroup"] == 1000
        assert {each["name"] for each in pod["containers"][0]["volumeMounts"]} == set(volumes)
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory"}
    assert volumes["checkpoints"]["persistentVolumeClaim"] == {"claimName": "checkpoints"}
    container = agents["template"]["spec"]["containers"][0]
    if kind == "trainjob":
        (train_job,), (runtime,) = of_kind(objects, "TrainJob"), of_kind(objects, "TrainingRuntime")
        trainer = train_job["spec"]["trainer"]
        assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
        assert (trainer["numNodes"], container["name"]) == (2, "node")
        container = {"command": trainer["command"], "resources": trainer["resourcesPerNode"]}
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 8}
    command = container["command"]
    assert command[:4] == ["lockstep", "agent", "--head", f"{service['metadata']['name']}:29400"]
    assert command[-5:] == ["train.py", "--lr", "0.1", "--text", "it's $$(HOME)"]
    begin = head["template"]["spec"]["containers"][0]["command"]
    assert begin[:4] == ["lockstep", "head", "--listen", "0.0.0.0:29400"]
    for words in (command, begin):  # the commands take these options
        assert _parser().parse_args(words[1:]).grace == 300


def test_a_secret_that_exists_and_a_file_that_others_cannot_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("old")
    file.chmod(0o644)
    arguments = [
        "kubernetes",
        "--image",
        "i",
        "-n",
        "3",
        "--token-secret",
        "mine",
        "-o",
        str(file),
        "-m",
        "package.My_Train",
        "--x",
    ]
    assert rendered(capfd, *arguments) == []
    assert file.stat().st_mode & 0o777 == 0o600
    objects = list(yaml.safe_load_all(file.read_text()))
    assert [each["kind"] for each in objects] == ["Service", "JobSet"], "one agent: a budget would only keep its node from a drain"
    assert {each["metadata"]["name"] for each in objects} == {"my-train-head", "my-train"}
    agent = jobs(objects)["agents"]["template"]["spec"]
    assert agent["containers"][0]["command"][-3:] == ["-m", "package.My_Train", "--x"]
    assert agent["volumes"][0]["secret"]["secretName"] == "mine"


def test_slurm(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["-n", "16", "--nodes", "4", "--gpus-per-worker", "1", "--time", "1-12:00:00", "--partition", "long"]
    assert main(["render", "slurm", *arguments, "train.py", "--name", "it's $x"]) == 0
    script = capfd.readouterr().out
    options = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}
    assert options >= {"--nodes=4", "--gpus-per-node=4", "--time=1-12:00:00", "--partition=long", "--requeue", "--signal=B:TERM@60"}
    program = tmp_path / "lockstep"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["run", "--engine", "slurm", "-n", "4", "train.py", "--name", "it's $x"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no cluster was named"),
        (["kubernets"], "Did you mean kubernetes?"),
        (["kubernetes", "-n", "4", "train.py"], "--image"),
        (["kubernetes", "--image", "i", "-n", "4"], "no script was given"),
        (["kubernetes", "--image", "i", "-n", "4", "-m"], "-m needs the name of a module"),
        (["kubernetes", "--image", "i", "-n", "20", "train.py"], "-n 20 is not a multiple of --workers-per-pod 8"),
        (["kubernetes", "--image", "i", "-n", "4", "--min-workers", "5", "train.py"], "the run would never begin"),
        (["kubernetes", "--image", "i", "-n", "4", "--memory", "lots", "train.py"], "'lots' is not a quantity"),
        (["kubernetes", "--image", "i", "-n", "4", "--name", "My Run", "train.py"], "'My Run' is not a name"),
        (["kubernetes", "--image", "i", "-n", "4", "-o", "/nowhere/x", "train.py"], "/nowhere/x cannot be written"),
        (["kubernetes", "--image", "i", "-n", "4", "train.py", "\udcff"], "is not UTF-8 text"),
        (["slurm", "-n", "4", "train.py"], "--nodes"),
        (["slurm", "-n", "4", "--nodes", "3", "train.py"], "use -n 3 or -n 6, or another --nodes"),
        (["slurm", "-n", "4", "--nodes", "2", "--time", "soon", "train.py"], "'soon' is not a time limit"),
        (["slurm", "-n", "4", "--nodes", "2", "--partition", "a b", "train.py"], "`sinfo` lists them"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["render", *arguments]) == 2
    said = capfd.readouterr()
    assert said.err.startswith("lockstep: ")
    assert said.err.count("\n") == 1
    assert says in said.err
    assert not said.out
