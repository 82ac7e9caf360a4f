"""Kubernetes manifests against published schemas, and the probes' commands in a shell."""

import json
import os
import subprocess
import time
import warnings

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.conftest import ROOT

FOLDER = ROOT / "launch/kubernetes"
SCHEMAS = ROOT / "tests/launch/schemas"


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pod_templates():
    (job,) = documents("pytorchjob.yaml")
    runtime, _ = documents("trainjob.yaml")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return {
        "master": replicas["Master"]["template"],
        "worker": replicas["Worker"]["template"],
        "node": node["template"]["spec"]["template"],
    }


def check(document):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def as_pod(template):
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}


def test_volumes_secret_and_pods_fit_the_schemas_of_kubernetes():
    for document in [*documents("volumes.yaml"), *documents("wandb-secret.yaml")]:
        check(document)
    for template in pod_templates().values():
        check(as_pod(template))
        with pytest.raises(kubernetes_validate.ValidationError):  # so the check is one
            check(as_pod({"spec": {**template["spec"], "restart": "Always"}}))


@pytest.mark.parametrize(
    ("file", "kinds"),
    [("pytorchjob.yaml", ["pytorchjob"]), ("trainjob.yaml", ["trainingruntime", "trainjob"])],
)
def test_jobs_fit_the_custom_resources_of_kubeflow(file, kinds):
    for document, kind in zip(documents(file), kinds, strict=True):
        schema = json.loads((SCHEMAS / f"{kind}.json").read_text())
        jsonschema.validate(document, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, "spec": {**document["spec"], "nodes": 2}}, schema)


def test_pods_run_as_a_user_with_shared_memory_and_8_gpus_and_take_the_key_from_the_secret():
    (secret,) = documents("wandb-secret.yaml")
    assert set(secret["stringData"].values()) == {""}
    for template in pod_templates().values():
        spec = template["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert (
            f"USER {spec['securityContext']['runAsUser']}:"
            in (ROOT / "docker/Dockerfile").read_text()
        )
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        claims = {
            volumes[name].get("persistentVolumeClaim", {}).get("claimName")
            for name in mounts.values()
        }
        assert claims == {None, *(claim["metadata"]["name"] for claim in documents("volumes.yaml"))}
        (key,) = (entry for entry in container["env"] if entry["name"] == "WANDB_API_KEY")
        reference = key["valueFrom"]["secretKeyRef"]
        assert reference["name"] == secret["metadata"]["name"]
        assert reference["key"] in secret["stringData"]
        assert (ROOT / container["command"][0]).exists()


def test_probes_pass_while_volumes_are_there_and_events_are_fresh(tmp_path):
    (container,) = pod_templates()["master"]["spec"]["containers"]

    def passes(probe):
        command = container[probe]["exec"]["command"]
        return (
            subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0
        )

    assert not passes("startupProbe")
    (tmp_path / "data").mkdir()
    events = tmp_path / "runs/llama2_7b/events.jsonl"
    events.parent.mkdir(parents=True)
    assert passes("startupProbe")
    assert not passes("livenessProbe")
    events.write_text("{}\n")
    assert passes("livenessProbe")
    old = time.time() - 31 * 60
    os.utime(events, (old, old))
    assert not passes("livenessProbe")
