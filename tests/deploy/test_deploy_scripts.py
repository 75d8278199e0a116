"""The scripts of deploy/: what they make, what they refuse, and that they leave what is there alone."""

import datetime
import itertools
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SCRIPTS = ("make-ca", "make-server-certificate", "make-node-key", "connect", "nodes", "superlink", "supernode")

pytestmark = pytest.mark.skipif(
    not all(shutil.which(name) for name in ("openssl", "ssh-keygen", "sh")), reason="no openssl, ssh-keygen or sh here"
)


def run(script, *arguments, **environment):
    return subprocess.run(
        [DEPLOY / script, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=60, env=os.environ | environment,
    )  # fmt: skip


def done(script, *arguments, **environment):
    result = run(script, *arguments, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def certificates(tmp_path):
    done("make-ca", tmp_path / "ca", "--days", 40)
    done(
        "make-server-certificate", "--ca", tmp_path / "ca", "--out", tmp_path / "server", "--days", 30,
        "--host", "fl.example.org", "--host", "10.1.2.3", "--host", "fd00::5",
    )  # fmt: skip
    return tmp_path


# ------------------------------------------------------------------------------------------------------ all scripts


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_executable_and_sound(script):
    text = (DEPLOY / script).read_text(encoding="utf-8")
    assert text.startswith("#!/bin/sh\n")
    assert "\nset -eu\n" in text
    assert os.access(DEPLOY / script, os.X_OK)
    subprocess.run(["sh", "-n", DEPLOY / script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--external-sources", "--source-path", DEPLOY, DEPLOY / script], check=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_has_help_and_refuses_what_it_does_not_know(script):
    assert done(script, "--help").startswith(f"usage: {script} ")
    unknown = run(script, "--nonsense")
    assert unknown.returncode == 2
    assert re.match(rf"{script}: unknown (option|argument) --nonsense\.\n", unknown.stderr)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["make-ca"], "no folder; expected"),
        (["make-ca", "x", "--days", "0"], "--days is '0'; expected a whole number above 0"),
        (["make-ca", "x", "--days"], "--days has no value"),
        (["make-server-certificate", "--out", "x", "--host", "a"], "no --ca; expected"),
        (["make-server-certificate", "--ca", "x", "--host", "a"], "no --out; expected"),
        (["make-server-certificate", "--ca", "x", "--out", "y", "--host", "a b"], "--host is 'a b'; expected"),
        (["make-node-key", "x"], "no name; expected"),
        (["make-node-key", "x", "../y"], "NAME is '../y'; expected letters"),
        (["connect", "name", "host:1"], "too few arguments; expected"),
        (["connect", "name", "host", "ca.crt"], "the address is 'host'; expected HOST:PORT"),
        (["nodes"], "no command; expected register, unregister or list"),
        (["nodes", "register", "a"], "too few arguments; expected a name and a public key"),
        (["superlink", "--state", "x"], "no --certificates; expected"),
        (["superlink", "--certificates", "x"], "no --state; expected"),
        (["supernode", "--ca", "x"], "no --server; expected"),
        (["supernode", "--server", "a:1", "--ca", "x", "--key", "y", "--memory", "z"], "no --client; expected"),
        (
            ["supernode", "--server", "a:1", "--ca", "x", "--key", "y", "--memory", "z", "--client", 'a"b'],
            "--client is 'a\"b'; expected letters",
        ),
    ],
)
def test_arguments_that_are_missing_or_wrong(tmp_path, words, message):
    result = subprocess.run([DEPLOY / words[0], *words[1:]], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"{words[0]}: {message}")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ authority and server


def test_authority_may_sign_and_nothing_else(certificates):
    x509 = pytest.importorskip("cryptography.x509")
    ca = x509.load_pem_x509_certificate((certificates / "ca" / "ca.crt").read_bytes())
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.key_cert_sign
    assert not usage.digital_signature
    assert ca.public_key().curve.name == "secp384r1"
    left = ca.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=39) < left < datetime.timedelta(days=41)


def test_server_certificate_has_the_names_and_is_signed(certificates):
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    ca = x509.load_pem_x509_certificate((certificates / "ca" / "ca.crt").read_bytes())
    own = x509.load_pem_x509_certificate((certificates / "server" / "server.crt").read_bytes())
    own.verify_directly_issued_by(ca)
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"localhost", "fl.example.org"}
    addresses = {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    assert addresses == {"127.0.0.1", "10.1.2.3", "fd00::5"}
    assert not own.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    purposes = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [purpose.dotted_string for purpose in purposes] == ["1.3.6.1.5.5.7.3.1"]  # the server of a TLS connection
    left = own.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=29) < left < datetime.timedelta(days=31)
    key = load_pem_private_key((certificates / "server" / "server.key").read_bytes(), None)
    assert key.public_key() == own.public_key()
    assert (certificates / "server" / "ca.crt").read_bytes() == (certificates / "ca" / "ca.crt").read_bytes()


def test_secrets_are_their_owners(certificates):
    done("make-node-key", certificates / "keys", "site-a")
    for name in ("ca/ca.key", "server/server.key", "keys/site-a"):
        assert mode(certificates / name) == 0o600, name
    for name in ("ca", "server", "keys"):
        assert mode(certificates / name) == 0o700, name
    assert not list(certificates.rglob(".new*"))


def test_what_is_there_is_not_overwritten(certificates):
    done("make-node-key", certificates / "keys", "site-a")
    before = contents(certificates)
    server = ["--ca", certificates / "ca", "--out", certificates / "server", "--host", "other.example.org"]
    calls = [
        ("make-ca", [certificates / "ca"]),
        ("make-server-certificate", server),
        ("make-node-key", [certificates / "keys", "site-a"]),
    ]
    for script, arguments in calls:
        result = run(script, *arguments)
        assert result.returncode == 1, script
        assert "is there; expected none." in result.stderr
        assert result.stderr.count("\n") == 1  # one line
        assert done(script, *arguments, "--keep").startswith("kept ")
    assert contents(certificates) == before


def test_half_a_pair_is_not_completed(tmp_path):
    done("make-ca", tmp_path / "ca")
    (tmp_path / "ca" / "ca.crt").unlink()
    result = run("make-ca", tmp_path / "ca", "--keep")
    assert result.returncode == 1
    assert "no authority's certificate" in result.stderr
    done("make-node-key", tmp_path / "keys", "a")
    (tmp_path / "keys" / "a").unlink()
    assert run("make-node-key", tmp_path / "keys", "a").returncode == 1


def test_renewed_certificate_has_the_same_names_and_another_key(certificates):
    x509 = pytest.importorskip("cryptography.x509")
    path = certificates / "server" / "server.crt"
    before = x509.load_pem_x509_certificate(path.read_bytes())
    done(
        "make-server-certificate",
        "--ca",
        certificates / "ca",
        "--out",
        certificates / "server",
        "--days",
        35,
        "--renew",
    )
    after = x509.load_pem_x509_certificate(path.read_bytes())
    kind = x509.SubjectAlternativeName
    names = [set(found.extensions.get_extension_for_class(kind).value) for found in (before, after)]
    assert names[0] == names[1]
    assert before.public_key() != after.public_key()
    assert after.not_valid_after_utc > before.not_valid_after_utc
    assert mode(certificates / "server" / "server.key") == 0o600


def test_certificate_that_would_outlive_its_authority(certificates):
    result = run(
        "make-server-certificate", "--ca", certificates / "ca", "--out", certificates / "b", "--host", "a", "--days", 50
    )
    assert result.returncode == 1
    assert "ends within 50 days" in result.stderr
    assert not (certificates / "b").exists()


# ---------------------------------------------------------------------------------------------------------- the nodes


def test_node_key_is_what_flower_reads(tmp_path):
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    done("make-node-key", tmp_path, "site-a")
    private = serialization.load_ssh_private_key((tmp_path / "site-a").read_bytes(), None)
    public = serialization.load_ssh_public_key((tmp_path / "site-a.pub").read_bytes())
    assert private.curve.name == "secp384r1"
    assert private.public_key() == public


def test_connection_is_written_once(tmp_path):
    tomllib = pytest.importorskip("tomllib")
    (tmp_path / "ca.crt").write_text("a certificate")
    home = {"FLWR_HOME": str(tmp_path / "home")}
    done("connect", "first", "fl.example.org:9091", tmp_path / "ca.crt", **home)
    done("connect", "second", "127.0.0.1:9091", tmp_path / "ca.crt", **home)
    config = tmp_path / "home" / "config.toml"
    found = tomllib.loads(config.read_text())["superlink"]
    assert found["default"] == "first"
    assert found["second"] == {
        "address": "127.0.0.1:9091", "root-certificates": str(tmp_path / "ca.crt"), "insecure": False
    }  # fmt: skip
    before = config.read_bytes()
    assert done("connect", "first", "fl.example.org:9091", tmp_path / "ca.crt", **home).startswith("kept")
    result = run("connect", "first", "elsewhere.org:9091", tmp_path / "ca.crt", **home)
    assert (result.returncode, config.read_bytes()) == (1, before)
    assert "has another connection first; expected none." in result.stderr
    done("connect", "first", "elsewhere.org:9091", tmp_path / "ca.crt", "--replace", **home)
    found = tomllib.loads(config.read_text())["superlink"]
    assert found["first"]["address"] == "elsewhere.org:9091"
    assert found["second"]["address"] == "127.0.0.1:9091"


@pytest.fixture
def flower(tmp_path):
    """Commands of Flower's that write down how they were called; ``flwr`` gives numbers to nodes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("flower-superlink", "flower-supernode"):
        told = f'{name} "$FLWR_HOME" "$FLWR_TELEMETRY_ENABLED" "$PWD" "$@"'
        (folder / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {told} > {tmp_path}/called\n')
    (folder / "flwr").write_text(f"""#!/bin/sh
echo "$@" >> {tmp_path}/flwr-called
case "$2" in
    register)
        if grep -qxF "$(cat "$3")" {tmp_path}/registered 2> /dev/null; then
            echo '{{"success": false, "error-message": "Public key already in use"}}'; exit 1
        fi
        cat "$3" >> {tmp_path}/registered
        echo "{{ \\"success\\": true, \\"node-id\\": 1000$(wc -l < {tmp_path}/registered) }}" ;;
    unregister) echo '{{"success": true}}' ;;
    list) echo '{{"success": true, "nodes": [{{"node-id": "10001", "owner-name": "x", "status": "online"}}]}}' ;;
esac
""")
    for path in folder.iterdir():
        path.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "FLWR_HOME": str(tmp_path / "home")}


def test_nodes_are_known_by_name(tmp_path, flower):
    for name in ("site-a", "site-b"):
        done("make-node-key", tmp_path / "keys", name)
    (tmp_path / "ca.crt").write_text("a certificate")
    missing = run("nodes", "register", "site-a", tmp_path / "keys" / "site-a.pub", **flower)
    assert "expected superlink. Run: connect" in missing.stderr
    done("connect", "superlink", "127.0.0.1:9091", tmp_path / "ca.crt", **flower)
    assert (
        done("nodes", "register", "site-a", tmp_path / "keys" / "site-a.pub", **flower)
        == "registered site-a, node 10001\n"
    )
    assert done("nodes", "register", "site-a", tmp_path / "keys" / "site-a.pub", **flower).startswith(
        "kept site-a, node 10001"
    )
    taken = run("nodes", "register", "site-b", tmp_path / "keys" / "site-a.pub", **flower)
    assert (taken.returncode, "is that of site-a" in taken.stderr) == (1, True)
    other = run("nodes", "register", "site-a", tmp_path / "keys" / "site-b.pub", **flower)
    assert (other.returncode, "registered with another key" in other.stderr) == (1, True)
    assert re.search(r"^site-a +10001 +online$", done("nodes", "list", **flower), re.MULTILINE)
    assert "unregistered site-a, node 10001" in done("nodes", "unregister", "site-a", **flower)
    assert "supernode unregister 10001 superlink" in (tmp_path / "flwr-called").read_text()
    unknown = run("nodes", "unregister", "site-a", **flower)
    assert (unknown.returncode, "no node site-a" in unknown.stderr) == (1, True)


# ---------------------------------------------------------------------------------------------------- the two processes


def test_superlink_is_started_safely(certificates, flower):
    done("superlink", "--certificates", certificates / "server", "--state", certificates / "state", **flower)
    name, home, telemetry, place, *words = (certificates / "called").read_text().splitlines()
    assert (name, telemetry) == ("flower-superlink", "0")
    assert (home, place) == (str(certificates / "state" / "flwr"), str(certificates / "state"))
    assert "--enable-supernode-auth" in words
    assert "--disable-runtime-dependency-installation" in words
    assert "--insecure" not in words
    options = dict(itertools.pairwise(words))
    assert options["--host"] == "127.0.0.1"
    assert options["--database"] == str(certificates / "state" / "superlink.db")
    assert options["--ssl-keyfile"] == str(certificates / "server" / "server.key")
    assert mode(certificates / "state") == 0o700


def test_superlink_refuses_keys_that_others_may_read(certificates, flower):
    (certificates / "server" / "server.key").chmod(0o640)
    result = run("superlink", "--certificates", certificates / "server", "--state", certificates / "state", **flower)
    assert result.returncode == 1
    assert "expected mode 0600. Run: chmod 600" in result.stderr
    assert not (certificates / "called").exists()


@pytest.mark.parametrize(("client", "written"), [("3", "3"), ("site-a", '"site-a"'), ("007", '"007"')])
def test_supernode_is_started_with_its_key_and_memory(certificates, flower, client, written):
    done("make-node-key", certificates / "keys", "site-a")
    memory = certificates / "my memory"
    arguments = [
        "--server", "fl.example.org:9092", "--ca", certificates / "server" / "ca.crt",
        "--key", certificates / "keys" / "site-a", "--client", client, "--memory", memory, "--config", "size=3",
    ]  # fmt: skip
    done("supernode", *arguments, **flower)
    name, home, telemetry, _, *words = (certificates / "called").read_text().splitlines()
    assert (name, telemetry, home) == ("flower-supernode", "0", str(memory / "flwr"))
    options = dict(itertools.pairwise(words))
    assert options["--superlink"] == "fl.example.org:9092"
    assert options["--auth-supernode-private-key"] == str(certificates / "keys" / "site-a")
    assert options["--root-certificates"] == str(certificates / "server" / "ca.crt")
    assert options["--node-config"] == f'client-id={written} memory-dir="{memory}" size=3'
    assert mode(memory) == 0o700
    (certificates / "keys" / "site-a").chmod(0o644)
    assert "others may read the node's key" in run("supernode", *arguments, **flower).stderr


def test_flower_that_is_not_there_is_named(certificates):
    path = certificates / "few"
    path.mkdir()
    for name in ("sh", "dirname", "ls", "cat"):
        (path / name).symlink_to(shutil.which(name))
    result = run("superlink", "--certificates", certificates / "server", "--state", certificates / "s", PATH=str(path))
    assert result.returncode == 1
    assert "no flower-superlink on PATH; expected it from the environment of selffl[flower]." in result.stderr
