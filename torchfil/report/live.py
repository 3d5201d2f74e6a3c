"""A page that follows a run file while training writes it, served to this machine alone.

The numbers are confidential, so the server listens on 127.0.0.1 only. It answers only requests that
know a random address, name this machine as their host (a name that another site pointed here does
not), and do not come from another site's page. No site may embed or read what it answers.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import os
import secrets
import socket
import socketserver
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from torchfil.gate.policy import Policy
from torchfil.report.page import asset, digest_of, render, render_waiting, report_of
from torchfil.run.file import load
from torchfil.utils.text import visible

HOST, _PROBLEM = "127.0.0.1", '<b class="warn" id="problem">'
_MOST, _SECONDS = 16, 30.0  # connections at a time, and how long each may take
_HEADERS = asset("live.headers").replace("{{script}}", digest_of(asset("live.js"))).splitlines()


class LivePage:
    """The first screens of a run file's report, made again if the file was replaced when somebody
    asks.

    A file that is missing or damaged leaves the last numbers, with a message.

    Args:
        path: The run file; it need not exist yet.
        policy: Thresholds; None: the default ones.
        share: The largest share of the time that reading and drawing may take.
    """

    def __init__(self, path: Path, policy: Policy | None = None, share: float = 0.2) -> None:
        self.path, self.policy, self.share = path, policy, share
        self._lock, self._free_at, self._page = threading.Lock(), 0.0, render_waiting(path.name)
        self._file: tuple[int, int, int] | None = None  # which one was drawn
        self._problem = ""

    def html(self) -> str:
        """The page now."""
        with self._lock:
            start = time.monotonic()
            if start >= self._free_at:
                try:
                    found = self.path.stat()
                    file = found.st_mtime_ns, found.st_size, found.st_ino
                    if file != self._file:
                        self._page = render(report_of(load(self.path), self.policy), found.st_mtime)
                    self._file, self._problem = file, ""
                except Exception as error:
                    # whatever is wrong with this file, the next one may be whole
                    gone = (
                        f"There is no file {self.path.name}."
                        if isinstance(error, FileNotFoundError)
                        else str(error)
                    )
                    self._file, self._problem = None, html.escape(visible(gone))
                self._free_at = time.monotonic() + (time.monotonic() - start) / self.share
            return self._page.replace(_PROBLEM, _PROBLEM + self._problem, 1)

    def frame(self) -> str:
        """The page of this moment for a notebook: in a frame, without script, apart from the
        notebook's own style.
        """
        return (
            f'<iframe sandbox srcdoc="{html.escape(self.html())}" '
            'style="width:100%;height:640px;border:0"></iframe>'
        )


class LiveServer(socketserver.ThreadingTCPServer):
    """Serves a page on 127.0.0.1 at a random address.

    Any program on this machine can connect, even without the address, so connections are few and
    short: slow ones take neither threads nor open files from the training, and make room for others
    in time.

    Args:
        page: The page.
        port: The port; 0: a free one.

    Attributes:
        url: Where; whoever has it can read the page from this machine.
    """

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # elsewhere another program could take the port over

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self._ends = dict[object, threading.Timer]()  # by open connection
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            taken = (
                f"port {port} of {HOST} cannot be used ({error.strerror}); choose another, "
                "or leave it out"
            )
            raise OSError(error.errno, taken) from error
        self.page, self.secret, self.port = (
            page,
            f"/{secrets.token_urlsafe(32)}",
            self.server_address[1],
        )
        self.url = f"http://{HOST}:{self.port}{self.secret}"

    def start(self) -> None:
        """Serve in a thread that ends with the process."""
        threading.Thread(
            target=self.serve_forever, args=(0.1,), name="torchfil-watch", daemon=True
        ).start()

    def verify_request(self, request: Any, client_address: object) -> bool:
        """Whether there is room; what exceeds it is closed before it gets a thread."""
        if room := len(self._ends) < _MOST:  # a timeout would be put off by a byte now and then
            self._ends[request] = end = threading.Timer(
                _SECONDS, request.shutdown, [socket.SHUT_RDWR]
            )
            end.daemon = True
            end.start()
        return room

    def shutdown_request(self, request: Any) -> None:
        """As in the base class; there is room for another."""
        if request in self._ends:
            self._ends.pop(request).cancel()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: object) -> None:
        """Nothing: readers close their windows."""


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "torchfil", ""
    server: LiveServer

    def _refusal(self) -> HTTPStatus | None:
        """Why this is not answered; None: it is."""
        hosts = [[f"{name}:{self.server.port}"] for name in (HOST, "localhost", "[::1]")]
        if self.headers.get_all("Host") not in hosts:
            return HTTPStatus.MISDIRECTED_REQUEST
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return HTTPStatus.FORBIDDEN
        if self.command not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED
        known = hmac.compare_digest(self.path.encode(errors="replace"), self.server.secret.encode())
        return None if known else HTTPStatus.NOT_FOUND

    def do_GET(self) -> None:
        """The page, nothing if it has not changed, or why not."""
        refusal = self._refusal()
        if refusal is not None:
            self.send_error(refusal)
            return
        body = self.server.page.html().encode(errors="replace")
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        same = self.headers.get("If-None-Match") == etag
        self.send_response(HTTPStatus.NOT_MODIFIED if same else HTTPStatus.OK)
        self.send_header("ETag", etag)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not same and self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET  # noqa: N815

    def end_headers(self) -> None:
        """With what keeps other sites out, of errors as well."""
        for line in _HEADERS:
            self.send_header(*line.split(": ", 1))
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the address is secret."""
