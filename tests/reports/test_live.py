"""The server of a live report: what it serves, to whom, and how little it does while nothing happens."""

import http.client
import json
import os
import shutil
import signal
import socket
import struct
import time
from contextlib import contextmanager
from threading import Thread, active_count

import pytest

import selffl
from programs import become_selffl, fork
from selffl.data import load
from selffl.errors import ConfigError
from selffl.reports import live
from selffl.reports.live import ReportServer, Watched


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    place = tmp_path_factory.mktemp("source") / "run"
    selffl.train("softmax", load("digits"), "self-fl", rounds=3, participation=0.3, out=place)
    return place


@pytest.fixture
def folder(source, tmp_path):
    shutil.copytree(source, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def server(folder):
    made = ReportServer([folder])
    thread = Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


def test_the_page_and_its_numbers(server):
    assert server.url.startswith("http://127.0.0.1:")
    assert server.is_on_loopback
    status, body, headers = ask(server)
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"self-fl on digits" in body
    status, body, headers = ask(server, "/data.json")
    assert status == 200
    (group,) = json.loads(body)["groups"]
    assert group["tables"]["methods"] == ["self-fl"]
    assert "self-fl reaches" in group["text"]["headline"]
    assert json.loads(body)["state"] == "finished"


@pytest.mark.parametrize(
    "path",
    [
        "/run",
        "/config.json",
        "/history.csv",
        "/../config.json",
        "/%2e%2e/config.json",
        "/data.json/",
        "/index.html",
    ],
)
def test_nothing_else_of_the_disk_is_served(server, path):
    status, body, _ = ask(server, path)
    assert status == 404
    assert b"softmax" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent(server, method):
    assert ask(server, method=method)[0] == 501


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:80", True),
        ("localhost:1234", True),
        ("LOCALHOST", True),
        ("[::1]:80", True),
        ("127.0.0.2", True),
        ("evil.example", False),
        ("evil.example:80", False),
        ("localhost.evil.example", False),
        ("192.168.0.1", False),
        ("", False),
    ],
)
def test_other_names_for_this_machine_are_refused(server, host, is_own):
    """A page of evil.example that points its name at 127.0.0.1 (DNS rebinding) still says its name."""
    for path in ("/", "/data.json"):
        status, body, _ = ask(server, path, Host=host)
        assert status == (200 if is_own else 403)
        assert (b"self-fl" in body) == is_own


def test_a_reader_who_leaves_early_is_no_fault(server, capfd):
    host = f"Host: 127.0.0.1:{server.server_address[1]}"
    for _ in range(3):
        with socket.create_connection(server.server_address[:2]) as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
            reader.sendall(f"GET / HTTP/1.1\r\n{host}\r\n\r\n".encode())
            reader.recv(100)
    assert ask(server)[0] == 200
    assert capfd.readouterr().err == ""


def test_no_other_origin_may_read_it(server):
    _, _, headers = ask(server, "/data.json", Origin="http://evil.example")
    assert "Access-Control-Allow-Origin" not in headers
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_while_nothing_happens_nothing_is_read_or_sent(server, folder, monkeypatch):
    _, _, headers = ask(server, "/data.json")
    tag = headers["ETag"]
    monkeypatch.setattr(live, "collect", lambda *_, **__: pytest.fail("read again"))
    for _ in range(2):
        status, body, headers = ask(server, "/data.json", If_None_Match=tag)
        assert (status, body, headers["ETag"]) == (304, b"", tag)
    monkeypatch.undo()
    with (folder / "history.csv").open("a", encoding="utf-8") as file:
        file.write("4,12")  # half a line
    status, body, headers = ask(server, "/data.json", If_None_Match=tag)
    assert status == 200
    assert headers["ETag"] != tag
    assert json.loads(body)["groups"][0]["tables"]["inside"][0]["rounds"] == [1, 2, 3]


def test_records_caught_in_the_middle_are_read_at_the_next_look(folder):
    watched = Watched([folder])
    tag, found = watched.look()
    text = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text("{", encoding="utf-8")
    assert watched.look() == (tag, found)
    (folder / "config.json").write_text(text + " ", encoding="utf-8")
    later, again = watched.look()
    assert later != tag
    assert len(again.groups) == 1


def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path, source):
    watched = Watched([tmp_path / "later"])
    tag, found = watched.look()
    assert live.state(found) == "waiting for the first round"
    shutil.copytree(source, tmp_path / "later")
    assert watched.tag() != tag
    assert live.state(watched.look()[1]) == "finished"


def test_how_far_it_is(folder):
    summary = json.loads((folder / "summary.json").read_text()) | {"status": "running"}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert live.state(Watched([folder]).look()[1]) == "round 3 of 3"
    shutil.copytree(folder, folder.parent / "other")
    assert live.state(Watched([folder.parent]).look()[1]) == "0 of 2 runs finished"


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen at 127\.0\.0\.1, port {port} \(.*\); give another"):
            ReportServer([], port=port)
    with pytest.raises(ConfigError, match=r"cannot listen at no\.such\.host\.invalid, port 0"):
        ReportServer([], host="no.such.host.invalid")


@contextmanager
def serving(*words):
    """`selffl serve WORDS...`, forked: its first line, and what signals it and has its exit code and the rest."""
    pipes = [os.pipe(), os.pipe()]

    def serve():
        for number, (_, end) in enumerate(pipes, 1):
            os.dup2(end, number)
        for pipe in pipes:
            for end in pipe:
                os.close(end)
        become_selffl(["serve", *map(str, words)])

    child = fork(serve)
    for _, end in pipes:
        os.close(end)
    with open(pipes[0][0]) as out, open(pipes[1][0]) as messages:

        def end(signalled):
            os.kill(child, signalled)
            said = out.read(), messages.read()
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *said

        yield out.readline(), end


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(folder):
    with serving(folder) as (line, end):
        port = int(line.split(":")[3].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/data.json")
        assert connection.getresponse().status == 200
        connection.close()
        found = end(signal.SIGINT)
    assert line.startswith("Report: http://127.0.0.1:")
    assert found == (0, "", "Stopped.\n")


@pytest.mark.slow
def test_a_server_that_others_can_reach_says_so(folder):
    with serving(folder, "--host", "0.0.0.0") as (line, end):
        time.sleep(0.2)
        found = end(signal.SIGTERM)  # as a service manager ends it
    assert line.startswith("Report: http://0.0.0.0:")
    said = "Anybody who can reach 0.0.0.0 can read this report: it has no password.\nStopped.\n"
    assert found == (0, "", said)


# ------------------------------------------------------------------------------------------- readers that do not read


def test_a_silent_reader_is_let_go(server, monkeypatch):
    assert live._Handler.timeout == 30.0
    monkeypatch.setattr(live._Handler, "timeout", 0.2)
    with socket.create_connection(server.server_address[:2], timeout=20) as silent:
        silent.sendall(b"GET / HT")
        assert silent.recv(1) == b""  # the server has closed it


@pytest.mark.slow
def test_however_many_stay_open_a_new_one_is_answered(server, monkeypatch):
    monkeypatch.setattr(live, "MAX_CONNECTIONS", 4)
    before = active_count()
    idle = [socket.create_connection(server.server_address[:2], timeout=20) for _ in range(20)]
    assert ask(server)[0] == 200
    ends = time.monotonic() + 20
    while active_count() > before + 4 and time.monotonic() < ends:
        time.sleep(0.01)
    assert active_count() <= before + 4
    assert idle[0].recv(1) == b""  # the oldest went first
    for one in idle:
        one.close()
