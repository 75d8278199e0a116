"""Fetching from a server on this machine that serves well, cuts off, serves rubbish, or knows no ranges."""

import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from selffl.data import fetch as module
from selffl.data import registry
from selffl.data.dataset import Remote
from selffl.data.registry import DATA_SETS
from selffl.errors import ConfigError, DataError

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves ``server.content``; what it does with it depends on the server's mood."""

    def do_GET(self):
        server = self.server
        server.asked.append(self.headers.get("Range"))
        start = 0
        wanted = self.headers.get("Range")
        if wanted and server.knows_ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(server.content):
                self.send_error(416)
                return
        if server.status:
            self.send_error(server.status)
            return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        if server.says_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cut_after] if server.cut_after is not None else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        found.content, found.asked, found.cut_after, found.status = CONTENT, [], None, None
        found.knows_ranges = found.says_length = True
        found.url = f"http://127.0.0.1:{found.server_port}/set/file.gz"
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def download(server, path, sha256=SHA256, on_progress=None):
    return module.download(Remote(server.url, sha256), path, on_progress)


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_file_comes_whole_and_says_how_far_it_is(server, tmp_path):
    heard = []
    path = download(server, tmp_path / "file.gz", on_progress=lambda *how_far: heard.append(how_far))
    assert path.read_bytes() == CONTENT
    assert names(tmp_path) == ["file.gz"]
    assert heard[0] == ("file.gz", 0, len(CONTENT))
    assert heard[-1] == ("file.gz", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in heard] == sorted(done for _, done, _ in heard)
    assert server.asked == [None]


def test_what_was_cut_off_goes_on_from_where_it_was(server, tmp_path):
    server.cut_after = 300_000
    with pytest.raises(
        DataError, match=r"could not be fetched to its end \(it was cut off\)\. 300,000 bytes are kept"
    ) as e:
        download(server, tmp_path / "file.gz")
    assert "Run the same command again" in str(e.value)
    assert "\n" not in str(e.value)
    assert names(tmp_path) == ["file.gz.part"]
    assert (tmp_path / "file.gz.part").read_bytes() == CONTENT[:300_000]
    with pytest.raises(DataError, match="600,000 bytes are kept"):
        download(server, tmp_path / "file.gz")
    server.cut_after = None
    heard = []
    download(server, tmp_path / "file.gz", on_progress=lambda *how_far: heard.append(how_far))
    assert (tmp_path / "file.gz").read_bytes() == CONTENT
    assert heard[0] == ("file.gz", 600_000, len(CONTENT))
    assert server.asked == [None, "bytes=300000-", "bytes=600000-"]
    assert names(tmp_path) == ["file.gz"]


def test_a_server_without_ranges_begins_again(server, tmp_path):
    server.knows_ranges = False
    (tmp_path / "file.gz.part").write_bytes(b"of another time" * 100)
    download(server, tmp_path / "file.gz")
    assert (tmp_path / "file.gz").read_bytes() == CONTENT
    assert server.asked == ["bytes=1500-"]


def test_a_server_that_does_not_say_the_length(server, tmp_path):
    server.says_length = False
    heard = []
    download(server, tmp_path / "file.gz", on_progress=lambda *how_far: heard.append(how_far))
    assert (tmp_path / "file.gz").read_bytes() == CONTENT
    assert heard[-1] == ("file.gz", len(CONTENT), None)
    server.cut_after = 1000  # cannot be told from the end, but the checksum can
    with pytest.raises(DataError, match="served a file of SHA-256"):
        download(server, tmp_path / "other")


def test_wrong_bytes_are_thrown_away(server, tmp_path):
    server.content = CONTENT[:-1] + b"!"
    with pytest.raises(
        DataError, match=rf"served a file of SHA-256 [0-9a-f]{{64}}; expected {SHA256}\. It was thrown away"
    ):
        download(server, tmp_path / "file.gz")
    assert names(tmp_path) == []


def test_a_wrong_part_is_thrown_away_too(server, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(b"of another file")
    with pytest.raises(DataError, match="served a file of SHA-256"):
        download(server, tmp_path / "file.gz")
    assert names(tmp_path) == []
    download(server, tmp_path / "file.gz")
    assert (tmp_path / "file.gz").read_bytes() == CONTENT


def test_a_part_that_is_whole_already_is_only_checked(server, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(CONTENT)
    download(server, tmp_path / "file.gz")
    assert names(tmp_path) == ["file.gz"]
    (tmp_path / "other.part").write_bytes(CONTENT + b"more")
    with pytest.raises(DataError, match="thrown away"):
        download(server, tmp_path / "other")
    assert names(tmp_path) == ["file.gz"]


def test_a_file_that_is_here_whole_is_not_fetched_again_and_a_damaged_one_is(server, tmp_path):
    (tmp_path / "file.gz").write_bytes(CONTENT)
    download(server, tmp_path / "file.gz")
    assert server.asked == []
    (tmp_path / "file.gz").write_bytes(CONTENT[1:])
    download(server, tmp_path / "file.gz")
    assert (tmp_path / "file.gz").read_bytes() == CONTENT


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_a_refusal_is_one_line_and_keeps_the_part(server, tmp_path, status):
    server.status = status
    (tmp_path / "file.gz.part").write_bytes(CONTENT[:10])
    with pytest.raises(DataError, match=rf"answers {status} .*; expected the file\. Try later"):
        download(server, tmp_path / "file.gz")
    assert names(tmp_path) == ["file.gz.part"]


def test_no_server_at_all_is_one_line(server, tmp_path):
    remote = Remote(server.url, SHA256)
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError, match=r"could not be fetched to its end \(.*refused.*\)\. Check the network"):
        module.download(remote, tmp_path / "file.gz")
    assert names(tmp_path) == []


# --------------------------------------------------------------------------------------------------------- by name


def offered(monkeypatch, server, members=(), sha256=None):
    """MNIST, as if its home were the server."""
    from dataclasses import replace

    remote = Remote(server.url, sha256 or hashlib.sha256(server.content).hexdigest(), members)
    monkeypatch.setitem(registry.DATA_SETS, "mnist", replace(DATA_SETS["mnist"], remotes=(remote,)))


def test_a_data_set_is_fetched_once(server, tmp_path, monkeypatch):
    offered(monkeypatch, server)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        assert module.fetch("mnist") == [tmp_path / "selffl" / "mnist" / "file.gz"]
    assert server.asked == [None]
    assert module.fetch("mnist", tmp_path / "elsewhere") == [tmp_path / "elsewhere" / "mnist" / "file.gz"]


def tar_of(files, links=()):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name, to in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, to
            tar.addfile(info)
    return content.getvalue()


def zip_of(files):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as packed:
        for name, data in files.items():
            packed.writestr(name, data)
    return content.getvalue()


FILES = {"in/a.bin": b"a" * 1000, "in/b.bin": b"b", "in/readme": b"not wanted", "../outside": b"never"}


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_an_archive_is_unpacked_and_goes(server, tmp_path, monkeypatch, pack):
    server.content = pack(FILES)
    offered(monkeypatch, server, ("in/a.bin", "in/b.bin"))
    for _ in range(2):
        found = module.fetch("mnist", tmp_path)
        assert [path.read_bytes() for path in found] == [b"a" * 1000, b"b"]
    assert names(tmp_path) == ["mnist/in/a.bin", "mnist/in/b.bin"]
    assert len(server.asked) == 1
    (tmp_path / "mnist" / "in" / "b.bin").unlink()
    module.fetch("mnist", tmp_path)
    assert names(tmp_path) == ["mnist/in/a.bin", "mnist/in/b.bin"]


@pytest.mark.parametrize(
    ("content", "members"),
    [
        (tar_of({"in/a.bin": b"a"}), ("in/a.bin", "in/c.bin")),
        (zip_of({"in/a.bin": b"a"}), ("in/a.bin", "in/c.bin")),
        (tar_of({"in/a.bin": b"a"}, [("in/c.bin", "/etc/passwd")]), ("in/c.bin",)),
        (tar_of({"in/a.bin": b"a"}, [("in/c.bin", "a.bin")]), ("in/c.bin",)),
        (b"no archive at all", ("in/a.bin",)),
        (tar_of(FILES)[:60], ("in/a.bin",)),
    ],
    ids=["tar without", "zip without", "link outside", "link", "no archive", "half a tar"],
)
def test_an_archive_that_is_not_what_it_should_be_is_refused(server, tmp_path, monkeypatch, content, members):
    server.content = content
    offered(monkeypatch, server, members)
    with pytest.raises(DataError, match=r"file\.gz cannot be unpacked \(.*\); expected in/") as error:
        module.fetch("mnist", tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "mnist" / "in" / "c.bin").exists()


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_what_needs_no_files_says_so(name):
    with pytest.raises(DataError, match=f"^{name} needs no files, so that there is nothing to fetch"):
        module.fetch(name)


def test_the_stand_in_says_that_it_cannot_be_fetched():
    with pytest.raises(DataError, match=r"^letters has no home that serves it in this form; expected ocr_letters\.npz"):
        module.fetch("letters")


def test_unknown_names_and_bad_folders_are_refused(server, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="unknown data set 'minst'"):
        module.fetch("minst")
    offered(monkeypatch, server)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be made"):
        module.fetch("mnist", tmp_path / "file")


def test_the_homes_are_public_ones():
    hosts = {remote.url.split("/")[2] for entry in DATA_SETS.values() for remote in entry.remotes}
    assert hosts == {"ossci-datasets.s3.amazonaws.com", "biometrics.nist.gov", "www.cs.toronto.edu"}
