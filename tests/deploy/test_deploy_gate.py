"""The gate: calls of nodes pass as they are, and nothing else does."""

import asyncio
import logging
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx", reason="no httpx here: pip install 'selffl[flower]'")

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
sys.path.insert(0, str(DEPLOY))

import gate as module  # noqa: E402


@pytest.fixture
def behind():
    """What the SuperLink gets to see."""
    return []


@pytest.fixture
def gate(monkeypatch, behind):
    def answer(request):
        behind.append(request)
        if request.url.path.endswith("/gone"):
            raise httpx.ConnectError("refused")
        status = 412 if request.url.path.endswith("/activate-node") else 200
        return httpx.Response(status, content=b"back " + request.content, headers={"content-type": "application/x"})

    class Behind(httpx.AsyncClient):
        def __init__(self, **options):
            assert options["verify"] is None  # what is patched below
            assert options["trust_env"] is False
            super().__init__(base_url=options["base_url"], transport=httpx.MockTransport(answer))

    monkeypatch.setattr(ssl, "create_default_context", lambda cafile: None)
    with monkeypatch.context() as patch:
        patch.setattr(httpx, "AsyncClient", Behind)
        return module.Gate("https://127.0.0.1:9091", Path("ca.crt"), max_bytes=1000)


def call(gate, method, path, content=b"", headers=None):
    async def once():
        transport = httpx.ASGITransport(gate)
        async with httpx.AsyncClient(transport=transport, base_url="https://gate:9092") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(once())


def test_calls_of_nodes_pass_with_their_signature(gate, behind):
    signed = {"flwr-public-key": "a", "flwr-signature": "b", "accept-encoding": "identity"}
    answer = call(gate, "POST", "/v1/fleet/pull-messages", b"\x00protobuf", signed)
    assert (answer.status_code, answer.content) == (200, b"back \x00protobuf")
    assert answer.headers["content-type"] == "application/x"
    (request,) = behind
    assert str(request.url) == "https://127.0.0.1:9091/v1/fleet/pull-messages"
    assert request.headers["flwr-signature"] == "b"
    assert request.headers["host"] == "127.0.0.1:9091"


def test_a_refusal_of_the_superlink_is_passed_on(gate):
    assert call(gate, "POST", "/v1/fleet/activate-node").status_code == 412


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/control/register-node"),
        ("POST", "/v1/runtime/acquire-task"),
        ("GET", "/v1/fleet/pull-messages"),
        ("POST", "/v1/fleet/../control/start-run"),
        ("POST", "/v1/fleet/%2e%2e/control/start-run"),
        ("POST", "/v1/fleet/..%2fcontrol%2fstart-run"),
        ("POST", "/v1/fleet/pull-messages/"),
        ("POST", "/v1/fleet/pull-messages?a=b"),
        ("POST", "/v1/fleet/pull-messages%0a"),
        ("POST", "//v1/fleet/pull-messages"),
        ("POST", "/v1/fleet/"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/"),
    ],
)
def test_nothing_else_passes(gate, behind, caplog, method, path):
    with caplog.at_level(logging.WARNING, logger="gate"):
        assert call(gate, method, path).status_code == 404
    assert behind == []
    assert f"refused {method} " in caplog.text


def test_health_is_the_gates_own(gate, behind):
    assert call(gate, "GET", "/health").status_code == 200
    assert behind == []


def test_what_is_too_large_is_refused(gate, behind):
    assert call(gate, "POST", "/v1/fleet/push-object", b"x" * 1001).status_code == 413
    assert behind == []
    assert call(gate, "POST", "/v1/fleet/push-object", b"x" * 1000).status_code == 200


def test_nodes_are_told_to_try_again_while_the_superlink_is_gone(gate):
    assert call(gate, "POST", "/v1/fleet/gone").status_code == 503  # which Flower's nodes retry


def test_missing_certificates_are_named(tmp_path):
    result = subprocess.run(
        [sys.executable, DEPLOY / "gate.py", "--certificates", tmp_path], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert f"no server.key in {tmp_path}; expected it there." in result.stderr
