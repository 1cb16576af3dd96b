"""The files of docs/examples: what they start is what the command line and Ray Serve accept."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from invariant_rag.cli import app as command_line
from invariant_rag.errors import InvalidChoice
from invariant_rag.server.middleware import OPEN

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
FILES = ["compose.yaml", "kubernetes.yaml", "rayservice.yaml"]


def objects(name):
    return list(yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8")))


def of_kind(name, kind):
    (found,) = (each for each in objects(name) if each["kind"] == kind)
    return dict(found)


def options_of(script):
    """Return the options that a script gives to `invariant-rag serve`, by the parser of the command line."""
    (arguments,) = re.findall(r"exec invariant-rag serve (.*)$", script)
    command = get_command(command_line)
    return command.commands["serve"].make_context("serve", shlex.split(arguments)).params


def test_every_file_is_checked_and_every_image_has_a_version():
    assert sorted(each.name for each in EXAMPLES.iterdir()) == FILES
    for name in FILES:
        images = re.findall(r"image: (\S+)", (EXAMPLES / name).read_text(encoding="utf-8"))
        assert images
        assert all(re.fullmatch(r"[a-z/-]+:\d[\w.-]+", image) for image in images), images


def test_compose_starts_a_server_at_the_port_that_it_publishes():
    compose = objects("compose.yaml")[0]["services"]["invariant-rag"]
    options = options_of(compose["command"][0].replace("$$", "$"))
    assert options["host"] == "0.0.0.0"
    assert compose["ports"] == [f"127.0.0.1:{options['port']}:{options['port']}"]
    assert f"127.0.0.1:{options['port']}/ready" in compose["healthcheck"]["test"][-1]
    assert float(compose["stop_grace_period"].removesuffix("s")) > options["timeout"]
    assert {"MODEL", "INVARIANT_RAG_API_KEY"} == compose["environment"].keys()


def test_the_pod_starts_a_server_that_its_probes_reach_and_its_service_selects():
    deployment, service = (of_kind("kubernetes.yaml", kind)["spec"] for kind in ("Deployment", "Service"))
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    options = options_of(container["args"][0])
    (port,) = container["ports"]
    assert (options["host"], options["port"]) == ("0.0.0.0", port["containerPort"])
    assert pod["terminationGracePeriodSeconds"] > options["timeout"]
    probes = [container[f"{each}Probe"]["httpGet"] for each in ("startup", "readiness", "liveness")]
    assert {each["path"] for each in probes} <= OPEN
    assert {each["port"] for each in probes} == {port["name"]} == {each["targetPort"] for each in service["ports"]}
    folders = {each["mountPath"] for each in container["volumeMounts"] if each["name"] == "keys"}
    assert {str(options["keys"].parent)} == folders
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
    claims = {of_kind("kubernetes.yaml", "PersistentVolumeClaim")["metadata"]["name"]}
    claimed = [each["persistentVolumeClaim"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert {each["claimName"] for each in claimed} == claims


def test_ray_serve_accepts_the_configuration_and_the_cluster_has_room_and_the_same_keys_everywhere(
    tmp_path, monkeypatch
):
    from ray.serve import schema

    from invariant_rag import server

    spec = of_kind("rayservice.yaml", "RayService")["spec"]
    (application,) = schema.ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"])).applications
    assert application.import_path == "invariant_rag.server:app"
    given, keys = application.args, tmp_path / "keys"
    keys.write_text("ada key-of-ada\n", encoding="utf-8")
    monkeypatch.delenv("INVARIANT_RAG_API_KEY", raising=False)
    assert type(server.app({**given, "keys": str(keys)})).__name__ == "Application"
    for wrong in ({"replica_gpu": 1}, {"together": "many"}, {"ingresses": 0}, {"replica_gpus": None}):
        with pytest.raises(InvalidChoice):
            server.app({**given, "keys": str(keys), **wrong})
    cluster = spec["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    mount = {"name": "keys", "mountPath": str(Path(given["keys"]).parent), "readOnly": True}
    for pod in pods:
        (container,) = pod["containers"]
        assert container["image"].startswith(f"rayproject/ray:{cluster['rayVersion']}-")
        assert mount in container["volumeMounts"]
    resources = container["resources"]
    assert (
        workers["maxReplicas"] * resources["limits"]["nvidia.com/gpu"] >= given["max_replicas"] * given["replica_gpus"]
    )
    assert int(resources["requests"]["cpu"]) >= given["replica_cpus"] + 1  # a replica, and perhaps an ingress
    assert pod["terminationGracePeriodSeconds"] > given["timeout"]
