"""systemd's units and the compose file: what has to be in them for a federation to survive and keep its secrets."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


class Unit(configparser.RawConfigParser):
    """A unit file; of a name that comes several times all values are kept."""

    def __init__(self, path):
        super().__init__(strict=False, delimiters="=", dict_type=dict, empty_lines_in_values=False)
        self.optionxform = str
        self.all = {}
        section = None
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif "=" in line and not line.startswith(("#", ";")):
                name, _, value = line.partition("=")
                self.all.setdefault((section, name), []).append(value)
        self.read(path, encoding="utf-8")


def test_there_is_a_unit_for_each_part():
    assert [path.name for path in UNITS] == [
        "selffl-gate.service", "selffl-superlink.service", "selffl-supernode@.service"
    ]  # fmt: skip


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_starts_again_for_ever_and_is_locked_in(path):
    unit = Unit(path)
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    service = unit["Service"]
    assert service["Restart"] == "always"
    assert int(service["RestartSec"]) >= 5
    assert service["User"] == service["Group"] == "selffl"
    for name, value in {
        "ProtectSystem": "strict", "NoNewPrivileges": "yes", "ProtectHome": "yes", "PrivateTmp": "yes",
        "CapabilityBoundingSet": "", "UMask": "0077", "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
    }.items():  # fmt: skip
        assert service[name] == value, name
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_state_is_kept_where_the_service_may_write():
    link, node = (Unit(DEPLOY / "systemd" / f"selffl-{name}.service") for name in ("superlink", "supernode@"))
    assert link["Service"]["StateDirectory"] == "selffl/superlink"
    assert "--state /var/lib/selffl/superlink" in link["Service"]["ExecStart"]
    assert "--host" not in link["Service"]["ExecStart"]  # 127.0.0.1: the gate is the door
    assert node["Service"]["StateDirectory"] == "selffl/%i"
    assert "--memory /var/lib/selffl/%i/memory " in node["Service"]["ExecStart"]
    for unit in (link, node):
        assert unit["Service"]["StateDirectoryMode"] == "0700"
        environment = unit.all["Service", "Environment"]
        assert "FLWR_TELEMETRY_ENABLED=0" in environment
        assert any(value.startswith("PATH=/opt/selffl/venv/bin:") for value in environment)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_takes_the_unit(path, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    text = path.read_text(encoding="utf-8")
    text = text.replace("/opt/selffl/deploy", str(DEPLOY)).replace("/opt/selffl/venv/bin/python", sys.executable)
    copy = tmp_path / path.name.replace("@", "@site-0")
    copy.write_text(text, encoding="utf-8")
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, check=False, timeout=60
    )
    said = [line for line in result.stderr.splitlines() if path.name.split("@")[0].split(".")[0] in line]
    assert (result.returncode, said) == (0, [])


def test_options_in_units_and_compose_are_those_of_the_scripts():
    texts = {
        "superlink": [UNITS[1].read_text(), _command("superlink")],
        "supernode": [UNITS[2].read_text(), _command("site-0")],
        "gate.py": [UNITS[0].read_text(), _command("gate")],
    }
    for script, uses in texts.items():
        known = set(re.findall(r"--[a-z]+", (DEPLOY / script).read_text()))
        for text in uses:
            line = next(line for line in text.splitlines() if f"deploy/{script}" in line)
            used = set(re.findall(r"--[a-z]+", line.partition(f"deploy/{script}")[2]))
            assert used, script
            assert used <= known, script


# ------------------------------------------------------------------------------------------------------------ compose


def _compose():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def _command(service):
    return " ".join(_compose()["services"][service]["command"])


def test_only_the_gate_is_published_and_the_superlink_is_inside():
    services = _compose()["services"]
    assert {name for name, service in services.items() if "ports" in service} == {"gate"}
    assert services["gate"]["ports"] == ["${SELFFL_LISTEN:-127.0.0.1}:9092:9092"]
    assert services["superlink"]["networks"] == ["inside"]
    assert _compose()["networks"]["inside"] == {"internal": True}
    sites = [service for name, service in services.items() if name.startswith("site-")]
    assert len(sites) == 3
    assert all(service["networks"] == ["outside"] for service in sites)


def test_services_survive_and_have_little_power():
    for name, service in _compose()["services"].items():
        assert service["restart"] == "always", name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["user"] == "10001:10001", name


def test_each_site_has_its_own_memory_and_key():
    compose = _compose()
    sites = {name: service for name, service in compose["services"].items() if name.startswith("site-")}
    for number, (name, service) in enumerate(sorted(sites.items())):
        assert service["environment"]["CLIENT"] == str(number)
        assert service["volumes"] == [f"memory-{number}:/var/lib/selffl"]
        assert f"memory-{number}" in compose["volumes"]
        assert {secret["source"] for secret in service["secrets"]} == {"ca-certificate", f"key-{number}"}, name
    for name, secret in compose["secrets"].items():
        assert set(secret) == {"file"}, name
    used = {secret["source"] for service in compose["services"].values() for secret in service["secrets"]}
    assert used == set(compose["secrets"])
    assert "key-0" not in {secret["source"] for secret in compose["services"]["superlink"]["secrets"]}


def test_the_image_holds_no_secret():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert {"**/*.key", "**/*.crt", "**/.env"} <= set(ignored)
    assert "deploy/keys" not in " ".join(line for line in ignored if line.startswith("!"))
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (.*)$", dockerfile, re.MULTILINE)
    root = DEPLOY.parent
    for line in copied:
        for word in line.split()[:-1]:
            assert f"!{word}" in ignored, word
            assert (root / word).exists(), word
    assert "\nUSER selffl\n" in dockerfile


def test_compose_takes_the_file(tmp_path):
    if shutil.which("docker") is None:
        pytest.skip("no docker here")
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("no docker compose here")
    subprocess.run(["docker", "compose", "--file", DEPLOY / "compose.yaml", "config", "--quiet"], check=True)


def test_no_registry_is_named():
    for path in DEPLOY.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and os.access(path, os.R_OK):
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not re.search(r"pypi|docker\.io|ghcr|quay\.io|conda-forge", text), path
