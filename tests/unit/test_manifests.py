"""The Kubernetes manifests of deploy/cluster, checked without a cluster: by schemas of Kubernetes and of our own."""

import copy
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

MANIFESTS = Path(__file__).parents[2] / "deploy/cluster/kubernetes"
VERSIONS = ("1.31", kubernetes_validate.latest_version())  # podFailurePolicy is stable since 1.31


def strict(**properties):
    return {"type": "object", "properties": properties, "additionalProperties": False}


COUNT = {"type": "integer", "minimum": 0}
REPLICAS = {
    **strict(
        replicas=COUNT,
        restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        template=strict(metadata={"type": "object"}, spec={"type": "object"}),  # a pod's: Kubernetes' own schema
    ),
    "required": ["template"],
}
# What the CRD of the Kubeflow training operator (v1) says, as far as a manifest is written by hand.
PADDLE_JOB = {
    **strict(
        apiVersion={"const": "kubeflow.org/v1"},
        kind={"const": "PaddleJob"},
        metadata={"type": "object", "required": ["name"]},
        spec={
            **strict(
                runPolicy=strict(
                    activeDeadlineSeconds=COUNT,
                    backoffLimit=COUNT,
                    cleanPodPolicy={"enum": ["All", "Running", "None"]},
                    schedulingPolicy={"type": "object"},
                    suspend={"type": "boolean"},
                    ttlSecondsAfterFinished=COUNT,
                ),
                elasticPolicy=strict(
                    minReplicas=COUNT, maxReplicas=COUNT, maxRestarts=COUNT, metrics={"type": "array"}
                ),
                paddleReplicaSpecs={**strict(Master=REPLICAS, Worker=REPLICAS), "minProperties": 1},
            ),
            "required": ["paddleReplicaSpecs"],
        },
    ),
    "required": ["apiVersion", "kind", "metadata", "spec"],
}


def check(manifest):
    """Raises where Kubernetes, or the operator, would refuse it."""
    if manifest["kind"] != "PaddleJob":
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
        return
    Draft202012Validator(PADDLE_JOB).validate(manifest)
    for replicas in manifest["spec"]["paddleReplicaSpecs"].values():
        template = replicas["template"]
        if "paddle" not in [container["name"] for container in template["spec"]["containers"]]:
            raise ValidationError("the operator looks for a container of the name paddle")
        check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "worker"}, **template})


def load(name):
    return {each["kind"]: each for each in yaml.safe_load_all((MANIFESTS / name).read_text())}


JOB, PADDLE = load("job.yaml"), load("paddlejob.yaml")


@pytest.mark.parametrize("manifest", [*JOB.values(), *PADDLE.values()], ids=lambda each: each["kind"])
def test_it_is_accepted(manifest):
    check(manifest)


@pytest.mark.parametrize(
    ("manifest", "path", "value"),
    [
        (JOB["Job"], "spec completions", "2"),
        (JOB["Job"], "spec completionsMode", "Indexed"),
        (JOB["Job"], "spec podFailurePolicy rules 0 action", None),
        (JOB["Job"], "spec template spec containers 0 comand", ["sh"]),
        (JOB["Service"], "spec clusterIp", "None"),
        (JOB["PersistentVolumeClaim"], "spec accessModes", "ReadWriteMany"),
        (PADDLE["PaddleJob"], "spec paddleReplicaSpecs Worker replicas", "2"),
        (PADDLE["PaddleJob"], "spec paddleReplicaSpecs Workers", {}),
        (PADDLE["PaddleJob"], "spec paddleReplicaSpecs Worker restartPolicy", "onFailure"),
        (PADDLE["PaddleJob"], "spec paddleReplicaSpecs Worker template spec containers 0 name", "train"),
        (PADDLE["PaddleJob"], "spec paddleReplicaSpecs Worker template spec containers 0 arguments", []),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_broken_one_is_not(manifest, path, value):
    broken = place = copy.deepcopy(manifest)
    *parents, last = path.split()
    for name in parents:
        place = place[int(name) if name.isdecimal() else name]
    place[last] = value
    with pytest.raises((ValidationError, kubernetes_validate.ValidationError)):
        check(broken)


def test_what_no_schema_knows():
    """Names and numbers that must agree."""
    job, service = JOB["Job"]["spec"], JOB["Service"]
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    assert job["completions"] == job["parallelism"] == int(container["env"][0]["value"])
    assert container["env"][0]["name"] == "NODES"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": JOB["Job"]["metadata"]["name"]}
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == container["name"]
    assert pod["restartPolicy"] == "Never"  # a podFailurePolicy takes no other
    claim = JOB["PersistentVolumeClaim"]["metadata"]["name"]
    for spec in (pod, PADDLE["PaddleJob"]["spec"]["paddleReplicaSpecs"]["Worker"]["template"]["spec"]):
        assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim
