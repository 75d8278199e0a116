"""The report while runs go on: a small server whose page asks for news, on this machine alone unless told otherwise.

It serves the page and its numbers, and nothing else of the disk.  A page of another site cannot read it: names that
are not this machine's own are refused (DNS rebinding), and no other origin is allowed.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from selffl.errors import ConfigError, SelfFLError
from selffl.reports import page
from selffl.reports.collect import Collection, collect, run_folders
from selffl.reports.record import RECORD
from selffl.runs import folder as files

WATCHED = (files.CONFIG, files.HISTORY, files.PARTICIPATION, files.CLIENTS, files.SUMMARY, files.PARTITION)

IDLE_SECONDS = 30.0  # that a reader may be silent; a live page asks every two
MAX_CONNECTIONS = 64  # at once; one more ends the oldest


class Watched:
    """Folders, read again only when one of their files has changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = list(folders)
        self._lock = Lock()
        self._tag = ""
        self._found = Collection()

    def tag(self) -> str:
        """A name for the state of the files: another as soon as one of them changes."""
        digest = hashlib.sha256()
        for folder in self.folders:
            paths = [*folder.glob(RECORD), *folder.glob(f"*/{RECORD}")]
            paths += [run_folder / name for run_folder in run_folders(folder) for name in WATCHED]
            for path in sorted(paths):
                try:
                    about = path.stat()
                except OSError:
                    continue
                digest.update(f"{path} {about.st_mtime_ns} {about.st_size};".encode())
        return f'"{digest.hexdigest()[:24]}"'

    def look(self) -> tuple[str, Collection]:
        """The state of the files and what they hold."""
        with self._lock:
            tag = self.tag()  # before reading: what changes meanwhile is news
            if tag != self._tag:
                try:
                    self._found = collect(self.folders, may_wait=True)
                    self._tag = tag
                except (SelfFLError, OSError, ValueError):
                    return self._tag, self._found  # caught between two files; the next look sees both
            return tag, self._found


def state(collection: Collection) -> str:
    """How far the runs are, in a few words."""
    runs = [run for group in collection.groups for run in group.runs]
    if not runs:
        return "waiting for the first round"
    if len(runs) == 1:
        run = runs[0]
        if run.status != "running":
            return run.status
        return f"round {run.round_number:,} of {run.config.rounds:,}"
    done = sum(run.status != "running" for run in runs)
    return f"{done} of {len(runs)} runs finished"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """The page, or its numbers if they are others than those the asker has."""
        if not self.server.is_own_name(self.headers.get("Host", "")):
            self._answer(HTTPStatus.FORBIDDEN, b"this server answers to its own address only\n", "text/plain")
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/data.json"):
            self._answer(HTTPStatus.NOT_FOUND, b"there is nothing here; the report is at /\n", "text/plain")
            return
        tag, collection = self.server.watched.look()
        if path == "/":
            text = page.render(collection, tag=tag, state=state(collection))
            self._answer(HTTPStatus.OK, text.encode(), "text/html; charset=utf-8", tag)
        elif self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", "application/json", tag)
        else:
            self._answer(HTTPStatus.OK, page.news(collection, state(collection)), "application/json", tag)

    do_HEAD = do_GET  # noqa: N815 (likewise)

    def _answer(self, status: HTTPStatus, body: bytes, kind: str, tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        """Whose server it is, without the interpreter's version."""
        return "selffl"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a terminal with a line every two seconds is no help."""


class ReportServer(ThreadingHTTPServer):
    """Serves the report of some folders; `serve_forever` runs it, `url` is where."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], host: str = "127.0.0.1", port: int = 0) -> None:
        self.watched = Watched(folders)
        self.host = host
        self._open: dict[Any, None] = {}  # connections, oldest first
        self._open_lock = Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot listen at {host}, port {port} ({reason}); give another --host or --port."
            ) from None

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; where there are too many, the oldest makes room for it."""
        with self._open_lock:
            while len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # it has just ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and count it no longer."""
        with self._open_lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader who closes the page while it loads is no fault of anybody's."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self.server_address[1]}/"

    @property
    def is_on_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(str(self.server_address[0])).is_loopback

    def is_own_name(self, asked: str) -> bool:
        """Whether a Host header names this server: by address, or by a name that no other machine can point here."""
        name = asked.rpartition(":")[0] if not asked.endswith("]") and ":" in asked else asked
        name = name.strip("[]").lower()
        if name in ("localhost", self.host.lower()) or (
            not self.is_on_loopback and name == socket.gethostname().lower()
        ):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self.is_on_loopback
