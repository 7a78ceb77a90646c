"""Dockerfile, compose and Kubernetes files: what their schemas take, and what is shared.

Nothing here starts a container.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from broker import VERSION
from broker.configuration import configure
from broker.limits import DEFAULTS
from tests.deploy.files import DEPLOY, DOCKERFILE, check_command, loaded
from tests.support.clock import SCALE
from tests.test_observability import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DIRECTORY = "/run/weight-broker"
UID = 1000
VALIDATE = shutil.which("kubernetes-validate")
WITHOUT_TORCH = {"torch", "tomli"}
"""What the broker's image leaves out: torch, and what its Python has itself."""


def compose(file: str = "compose.yaml") -> dict[str, Any]:
    services: dict[str, Any] = loaded(f"docker/{file}")["services"]
    return services


def pod(file: str) -> dict[str, Any]:
    spec: dict[str, Any] = loaded(f"kubernetes/{file}")["spec"]["template"]["spec"]
    return spec


def container(file: str) -> dict[str, Any]:
    (only,) = pod(file)["containers"]
    found: dict[str, Any] = only
    return found


def run(*command: str) -> None:
    """A checker that must be content."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=40 * SCALE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- images -------------------------------------------------------------------------------------


def test_packages_of_the_image() -> None:
    """The image installs what pyproject.toml asks for, torch left out, and what metrics need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["metrics"]]
    wanted = {each for each in asked if re.split(r"[>=;]", each)[0] not in WITHOUT_TORCH}
    stage = DOCKERFILE.partition(" AS broker\n")[2].partition(" AS engine\n")[0]
    assert set(re.findall(r'^ +"(.*)" \\$', stage, re.MULTILINE)) == wanted


def test_what_the_image_runs() -> None:
    """The commands are ours, and files that it copies are there."""
    for words in re.findall(r'CMD \["weight-broker", (.*)\]', DOCKERFILE):
        assert check_command(re.findall(r'"([^"]*)"', words))["command"].__name__ == "ping_once"
    assert re.findall(r'^CMD \["(\w+)"\]$', DOCKERFILE, re.MULTILINE) == ["serve"]
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists(), name
    assert f"WEIGHT_BROKER_DIR={DIRECTORY}" in DOCKERFILE


# --- compose ------------------------------------------------------------------------------------


def test_compose_files_fit_the_schema() -> None:
    """Both are what the Compose specification describes."""
    files = [str(DEPLOY / "docker" / name) for name in ("compose.yaml", "compose.gpu.yaml")]
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files)


def test_what_containers_share() -> None:
    """One volume with the sockets, which engines need not write to, and one user; no namespace and
    no network."""
    services = compose()
    assert set(services) == {"broker", "engine-a", "engine-b"}
    for name, service in services.items():
        (mount,) = service["volumes"]
        assert (mount["source"], mount["target"]) == ("run", DIRECTORY)
        assert mount.get("read_only", False) is (name != "broker")
        assert service["user"] == f"{UID}:{UID}"
        assert not {"ipc", "pid", "shm_size", "privileged"} & set(service)
        if name != "broker":
            assert service["network_mode"] == "none"
            assert service["depends_on"]["broker"]["condition"] == "service_healthy"
    options = loaded("docker/compose.yaml")["volumes"]["run"]["driver_opts"]["o"]
    assert {"mode=0700", f"uid={UID}", f"gid={UID}"} <= set(options.split(","))


def test_what_compose_runs() -> None:
    """The broker's arguments are ours; with GPUs nothing is simulated, and each has all of them."""
    simulated = check_command(compose()["broker"]["command"])
    assert simulated["device"] == ["simulated"]
    assert f"{simulated['memory_limit']}" == "1g"
    overlay = compose("compose.gpu.yaml")
    assert set(overlay) == set(compose())
    for service in overlay.values():
        assert "simulated" not in service["command"]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
    check_command(overlay["broker"]["command"])


# --- Kubernetes ---------------------------------------------------------------------------------

FILES = ["broker.yaml", "engine.yaml"]


@pytest.mark.skipif(VALIDATE is None, reason="there is no kubernetes-validate here (108 MB, PyPI)")
@pytest.mark.parametrize("file", FILES)
def test_kubernetes_takes_them(file: str) -> None:
    """The API's schema has every field."""
    run(str(VALIDATE), "--strict", str(DEPLOY / "kubernetes" / file))


@pytest.mark.parametrize("file", FILES)
def test_what_pods_share(file: str) -> None:
    """A directory of the node where the variable says, and one user; no namespace of the node, and
    no fsGroup, which would open the directory."""
    spec, main = pod(file), container(file)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["name"]: mount for mount in main["volumeMounts"]}
    assert set(mounts) == set(volumes)
    assert volumes["run"]["hostPath"]["path"] == mounts["run"]["mountPath"] == DIRECTORY
    assert mounts["run"].get("readOnly", False) is (file == "engine.yaml")
    environ = {variable["name"]: variable["value"] for variable in main["env"]}
    assert environ["WEIGHT_BROKER_DIR"] == DIRECTORY
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsNonRoot"]) == (
        UID,
        True,
    )
    assert "fsGroup" not in spec["securityContext"]
    assert not [key for key in spec if key.startswith("host")]
    assert main["image"].endswith(f":{VERSION}")


@pytest.mark.parametrize("file", FILES)
def test_labels_match(file: str) -> None:
    """A selector that does not choose its own pods is refused by the API."""
    whole = loaded(f"kubernetes/{file}")["spec"]
    chosen = whole["selector"]["matchLabels"]
    assert chosen.items() <= whole["template"]["metadata"]["labels"].items()


def test_the_brokers_pod() -> None:
    """Its arguments and variables are ours; only its first container is root, to own the directory;
    a pod is replaced by hand only."""
    main = container("broker.yaml")
    environ = {each["name"]: each["value"] for each in main["env"]}
    config = configure(check_command(main["args"]), environ, None).broker_config()
    assert (config.memory_limit, config.log_format) == ("60%", "json")
    assert config.metrics == f"0.0.0.0:{main['ports'][0]['containerPort']}"
    (first,) = pod("broker.yaml")["initContainers"]
    assert (first["securityContext"]["runAsUser"], first["command"][-1].count("/run")) == (0, 2)
    assert loaded("kubernetes/broker.yaml")["spec"]["updateStrategy"]["type"] == "OnDelete"


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes(probe: str) -> None:
    """Each asks by `ping`, which gives up before the probe does."""
    found = container("broker.yaml")[probe]
    program, *words = found["exec"]["command"]
    assert program == "weight-broker"
    assert check_command(words)["timeout"] < found["timeoutSeconds"]


def test_liveness_is_patient() -> None:
    """A server that dies again and again is replaced many times before the pod, and with it the
    weights, are given up."""
    found = container("broker.yaml")["livenessProbe"]
    assert found["periodSeconds"] * found["failureThreshold"] > 10 * DEFAULTS.restart_seconds
