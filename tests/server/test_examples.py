"""The files of docs/examples: what they start is what the command line and Ray Serve accept."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from invariant_rag.cli import app as command_line
from invariant_rag.errors import InvalidChoice
from invariant_rag.server.middleware import OPEN

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
FILES = ["compose.yaml", "kubernetes.yaml", "rayservice.yaml"]


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8")))


def of_kind(name: str, kind: str) -> dict[str, Any]:
    (found,) = (each for each in objects(name) if each["kind"] == kind)
    return found


def options_of(script: str) -> dict[str, Any]:
    """Return the options that a script gives to `invariant-rag serve`, by the parser of the command line."""
    (arguments,) = re.findall(r"exec invariant-rag serve (.*)$", script)
    command: Any = get_command(command_line)
    parsed: dict[str, Any] = command.commands["serve"].make_context("serve", shlex.split(arguments)).params
    return parsed


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    (services,) = objects("compose.yaml")
    service: dict[str, Any] = services["services"]["invariant-rag"]
    return service


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    spec: dict[str, Any] = of_kind("kubernetes.yaml", "Deployment")["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def ray_service() -> dict[str, Any]:
    spec: dict[str, Any] = of_kind("rayservice.yaml", "RayService")["spec"]
    return spec


def test_every_file_is_checked() -> None:
    assert sorted(each.name for each in EXAMPLES.iterdir()) == FILES


@pytest.mark.parametrize("name", FILES)
def test_every_image_has_a_version(name: str) -> None:
    images = re.findall(r"image: (\S+)", (EXAMPLES / name).read_text(encoding="utf-8"))
    assert images
    assert all(re.fullmatch(r"[a-z/-]+:\d[\w.-]+", image) for image in images), images


def test_compose_starts_a_server_at_the_port_that_it_publishes(compose: dict[str, Any]) -> None:
    (script,) = compose["command"]
    options = options_of(script.replace("$$", "$"))
    assert options["host"] == "0.0.0.0"
    assert compose["ports"] == [f"127.0.0.1:{options['port']}:{options['port']}"]
    assert f"127.0.0.1:{options['port']}/ready" in compose["healthcheck"]["test"][-1]
    assert float(compose["stop_grace_period"].removesuffix("s")) > options["timeout"]
    assert {"MODEL", "INVARIANT_RAG_API_KEY"} == compose["environment"].keys()


def test_the_pod_starts_a_server_that_its_probes_reach(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    options = options_of(container["args"][0])
    (port,) = container["ports"]
    assert (options["host"], options["port"]) == ("0.0.0.0", port["containerPort"])
    assert pod["terminationGracePeriodSeconds"] > options["timeout"]
    probes = [container[f"{each}Probe"]["httpGet"] for each in ("startup", "readiness", "liveness")]
    assert {each["path"] for each in probes} <= OPEN
    assert {each["port"] for each in probes} == {port["name"]}
    folders = {each["mountPath"] for each in container["volumeMounts"] if each["name"] == "keys"}
    assert {str(options["keys"].parent)} == folders


def test_the_service_selects_the_pod() -> None:
    deployment, service = (of_kind("kubernetes.yaml", kind) for kind in ("Deployment", "Service"))
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    ports = {each["name"] for each in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports
    claims = {of_kind("kubernetes.yaml", "PersistentVolumeClaim")["metadata"]["name"]}
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    assert {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each} == claims


def test_ray_serve_and_the_application_accept_the_configuration(
    ray_service: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.serve import schema

    config = schema.ServeDeploySchema.model_validate(yaml.safe_load(ray_service["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == "invariant_rag.server:app"
    from invariant_rag import server

    keys = tmp_path / "keys"
    keys.write_text("ada key-of-ada\n", encoding="utf-8")
    monkeypatch.delenv("INVARIANT_RAG_API_KEY", raising=False)
    built = server.app({**application.args, "keys": str(keys)})
    assert type(built).__name__ == "Application"
    for wrong in ({"replica_gpu": 1}, {"together": "many"}, {"ingresses": 0}, {"replica_gpus": None}):
        with pytest.raises(InvalidChoice):
            server.app({**application.args, "keys": str(keys), **wrong})


def test_the_ray_cluster_has_room_and_the_same_keys_everywhere(ray_service: dict[str, Any]) -> None:
    cluster = ray_service["rayClusterConfig"]
    arguments = yaml.safe_load(ray_service["serveConfigV2"])["applications"][0]["args"]
    (workers,) = cluster["workerGroupSpecs"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    for spec in pods:
        (container,) = spec["containers"]
        assert container["image"].startswith(f"rayproject/ray:{cluster['rayVersion']}-")
        assert {"name": "keys", "mountPath": str(Path(arguments["keys"]).parent), "readOnly": True} in container[
            "volumeMounts"
        ]
    limits = pods[1]["containers"][0]["resources"]["limits"]
    requests = pods[1]["containers"][0]["resources"]["requests"]
    assert workers["maxReplicas"] * limits["nvidia.com/gpu"] >= arguments["max_replicas"] * arguments["replica_gpus"]
    assert int(requests["cpu"]) >= arguments["replica_cpus"] + 1  # a replica, and perhaps an ingress
    assert pods[1]["terminationGracePeriodSeconds"] > arguments["timeout"]
