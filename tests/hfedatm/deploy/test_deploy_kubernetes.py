"""The Kubernetes manifests are what Kubernetes and Flower's SuperExec accept."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from flwr.supercore.superexec.executor.kubernetes_executor import KubernetesExecutorConfig

from hfedatm.base.trust.policy import Policy

kubernetes_validate = pytest.importorskip("kubernetes_validate")

FILES = sorted((Path(__file__).resolve().parents[3] / "deploy/kubernetes").glob("*.yaml"))
VERSION = "1.31"
OBJECTS = [o for file in FILES for o in yaml.safe_load_all(file.read_text())]


@pytest.mark.parametrize("thing", OBJECTS, ids=lambda o: f"{o['kind']}-{o['metadata']['name']}")
def test_every_object_has_its_schema(thing):
    kubernetes_validate.validate(thing, VERSION, strict=True)


def test_a_wrong_field_is_found():
    wrong = {**OBJECTS[0], "kind": "Service", "spec": {"ports": [{"prot": 1}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_superexec_accepts_its_configuration():
    config = config_map("superexec")
    KubernetesExecutorConfig(**yaml.safe_load(config["data"]["executor.yaml"]))


def config_map(name):
    (found,) = [o for o in OBJECTS if (o["kind"], o["metadata"]["name"]) == ("ConfigMap", name)]
    return found


def test_a_run_finds_a_policy_that_can_be_read(tmp_path):
    (tmp_path / "policy.toml").write_text(config_map("policy")["data"]["policy.toml"])
    assert Policy.load(tmp_path / "policy.toml").code.allowed == ()
    pod = yaml.safe_load(config_map("superexec")["data"]["executor.yaml"])
    (where,) = [entry["value"] for entry in pod["env"] if entry["name"] == "HFEDATM_POLICY"]
    assert where.removesuffix("/policy.toml") in [m["mountPath"] for m in pod["volume_mounts"]]


@pytest.mark.parametrize(
    ("deployment", "program"), [("superexec", "flower-superexec"), ("server", "flower-superlink")]
)
def test_flower_knows_the_options(deployment, program):
    (pod,) = [
        o for o in OBJECTS if (o["kind"], o["metadata"]["name"]) == ("Deployment", deployment)
    ]
    arguments = pod["spec"]["template"]["spec"]["containers"][0]["args"]
    options = {argument.split("=")[0] for argument in arguments if argument.startswith("--")}
    # What a container's link is given is handed on, one option under a name of our own.
    options = {{"--superexec-secret": "--superexec-auth-secret-file"}.get(o, o) for o in options}
    program = Path(sys.executable).with_name(program)
    known = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    assert options and all(option in known.split() for option in options), options


def test_what_is_mounted_is_there():
    claims = {o["metadata"]["name"] for o in OBJECTS if o["kind"] == "PersistentVolumeClaim"}
    for thing in (o for o in OBJECTS if o["kind"] == "Deployment"):
        pod = thing["spec"]["template"]["spec"]
        volumes = {v["name"]: v for v in pod["volumes"]}
        for container in pod["containers"]:
            assert {m["name"] for m in container["volumeMounts"]} <= volumes.keys()
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        used = filter(None, (v.get("persistentVolumeClaim") for v in volumes.values()))
        assert {claim["claimName"] for claim in used} <= claims
