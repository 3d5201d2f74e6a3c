"""The live page: whom the server answers, what the page says of its file, and both in a real
browser.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.report.run_cases import made_up
from torchfil.report import SavedRun, live, save
from torchfil.report.live import LivePage, LiveServer


def run_at(step: int, **changes: Any) -> SavedRun:
    run = made_up(300, **changes)
    return replace(run, about={**run.about, "mechanism": {**run.about["mechanism"], "steps": step}})


class Asked:
    """A server of a page, and questions to it."""

    def __init__(self, path: Path) -> None:
        self.server = LiveServer(LivePage(path, share=1.0))
        self.server.start()
        self.path = self.server.secret

    def __call__(
        self, path: str | None = None, method: str = "GET", host: str | None = None, **headers: str
    ) -> tuple[http.client.HTTPResponse, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        connection.putrequest(method, self.path if path is None else path, skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{self.server.port}")
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer, answer.read().decode()


def stopped(asked: Asked) -> None:
    asked.server.shutdown()
    asked.server.server_close()


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    asked = Asked(save(run_at(50), tmp_path / "run.parquet"))
    yield asked
    stopped(asked)


# ------------------------------------------------------------------ whom it answers


def test_it_listens_on_the_loopback_address_only(asked: Asked) -> None:
    assert asked.server.socket.getsockname()[0] == "127.0.0.1"
    listening = Path("/proc/net/tcp")
    if listening.exists():  # what the system says, of all interfaces
        port = f"{asked.server.port:04X}"
        places = [
            line.split()[1]
            for line in listening.read_text().splitlines()[1:]
            if line.split()[3] == "0A"
        ]
        assert [place for place in places if place.endswith(f":{port}")] == [f"0100007F:{port}"]
        over_ipv6 = [
            line.split()[1] for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]
        ]
        assert not [place for place in over_ipv6 if place.endswith(f":{port}")]


def test_only_the_secret_address_is_answered(asked: Asked) -> None:
    answer, page = asked()
    assert answer.status == 200
    assert "step 50 of this run" in page
    assert len(asked.path) >= 40
    other = "A" if asked.path[-1] != "A" else "B"
    for path in (
        "/",
        "/favicon.ico",
        asked.path[:-1],
        asked.path[:-1] + other,
        asked.path + "/..",
        "/../run.parquet",
    ):
        answer, page = asked(path)
        assert (answer.status, "step" in page) == (404, False), path
    twin = Asked(Path("nowhere.parquet"))
    assert twin.path != asked.path
    stopped(twin)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{}", "127.0.0.1", "127.0.0.1:1", "0.0.0.0:{}", ""]
)
def test_other_hosts_are_refused_even_with_the_secret(asked: Asked, host: str) -> None:
    answer, page = asked(host=host.format(asked.server.port))
    assert (answer.status, "Do not release" in page) == (421, False)


@pytest.mark.parametrize("site", ["cross-site", "same-site", "nonsense"])
def test_requests_from_pages_of_other_sites_are_refused(asked: Asked, site: str) -> None:
    assert asked(Sec_Fetch_Site=site)[0].status == 403
    assert (
        asked(Sec_Fetch_Site="same-origin")[0].status
        == asked(Sec_Fetch_Site="none")[0].status
        == 200
    )


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(asked: Asked, method: str) -> None:
    answer, page = asked(method=method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert "step 50" not in page


def test_every_answer_keeps_other_sites_out(asked: Asked) -> None:
    etag = asked()[0].headers["ETag"]
    answers = [
        asked(),
        asked("/"),
        asked(host="evil.example"),
        asked(method="POST"),
        asked(method="TRACE"),
    ]
    answers += [asked(method="HEAD"), asked(If_None_Match=etag)]
    assert [answer.status for answer, _ in answers] == [200, 404, 421, 405, 501, 200, 304]
    for answer, _ in answers:
        policy = answer.headers["Content-Security-Policy"].split("; ")
        assert {
            "default-src 'none'",
            "frame-ancestors 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        } <= {*policy}
        assert "unsafe" not in next(part for part in policy if part.startswith("script-src"))
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert "Python" not in answer.headers["Server"]


# ------------------------------------------------------------------ what it says of its file


def test_the_page_follows_its_file(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    page = LivePage(path, share=1.0)
    assert "No numbers yet" in page.html()
    assert "run.parquet" in page.html()
    save(run_at(50), path)
    first = page.html()
    assert "step 50 of this run" in first
    assert page.html() is first, "the same file is not drawn again"
    save(run_at(100), path)
    time.sleep(0.5)  # share=1: as long as the last took
    assert "step 100 of this run" in page.html()


@pytest.mark.parametrize("damage", ["cut short", "another file", "gone"])
def test_a_bad_file_leaves_the_last_numbers_and_says_so(tmp_path: Path, damage: str) -> None:
    path = save(run_at(50), tmp_path / "run.parquet")
    page = LivePage(path, share=1.0)
    assert 'id="problem"></b>' in page.html()
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-100] if damage == "cut short" else b"<script>")
    time.sleep(0.5)
    found = page.html()
    assert "step 50 of this run" in found
    assert 'id="problem"></b>' not in found
    path.write_bytes(whole)
    time.sleep(0.5)
    assert 'id="problem"></b>' in page.html()


# ------------------------------------------------------------------ in a browser


def waited(browser: Any, holds: Any, *, asking: bool = False) -> None:
    """Until it holds; asking as a window that comes to the front, before the page's own time."""
    from tests.report.in_browser import WebDriverWait

    if asking:
        browser.execute_script("dispatchEvent(new Event('visibilitychange'))")
    WebDriverWait(browser, 20).until(holds)


def test_the_page_renews_itself_and_keeps_its_place(
    browser: Any, asked: Asked, tmp_path: Path
) -> None:
    from tests.report.in_browser import complaints, text_of

    browser.get(asked.server.url)
    waited(browser, lambda _: "Training is writing" in text_of(browser, "#live"))
    histogram = browser.execute_script("return document.querySelector('#closeness').innerHTML")
    browser.execute_script(
        "window.here = true; scrollTo(0, 600); const h = document.querySelector('#most-exposed "
        "h2');h.tabIndex = 0; h.focus({ preventScroll: true });"
    )
    before = browser.execute_script("return scrollY")
    run = run_at(100, seed=1)
    columns = {**run.columns, "mse_bound_low": 1e-3 * run.columns["mse_bound_low"]}
    save(replace(run, columns=columns), tmp_path / "run.parquet")
    waited(browser, lambda _: "step 100 of this run" in text_of(browser, "#live"))
    assert (
        browser.execute_script("return document.querySelector('#closeness').innerHTML") != histogram
    )
    assert browser.execute_script("return [window.here, scrollY]") == [True, before], (
        "the page was not loaded again"
    )
    assert complaints(browser) == []

    # a file that is gone leaves the numbers; the verdict is spoken when it changes
    (tmp_path / "run.parquet").unlink()
    waited(browser, lambda _: "no file" in text_of(browser, "#live"), asking=True)
    assert "step 100 of this run" in text_of(browser, "#live")
    assert (
        browser.execute_script("return document.getElementById('said').getAttribute('role')")
        == "status"
    )
    stopped(asked)
    waited(browser, lambda _: "The watch has ended" in text_of(browser, "#live"), asking=True)
    asked.server = LiveServer(asked.server.page)
    asked.server.start()


def test_another_origin_can_neither_embed_nor_fetch_it(browser: Any, asked: Asked) -> None:
    class Evil(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(
                f'<iframe src="{asked.server.url}"></iframe><a '
                f'href="{asked.server.url}">x</a>'.encode()
            )

        def log_message(self, *_: Any) -> None:
            pass

    evil = ThreadingHTTPServer(("127.0.0.1", 0), Evil)
    threading.Thread(target=evil.serve_forever, daemon=True).start()
    try:
        for name in ("127.0.0.1", "localhost"):  # the same site on another port, and another site
            browser.get(f"http://{name}:{evil.server_port}/")
            browser.switch_to.frame(0)
            assert "step 50" not in browser.page_source
            assert browser.execute_script("return location.href") != asked.server.url
            browser.switch_to.default_content()
            for mode in ("cors", "no-cors"):
                fetched = browser.execute_async_script(
                    "const done = arguments[2]; fetch(arguments[0], { mode: arguments[1] "
                    "}).then((answer) => answer.text()).then((text) => done('read ' + "
                    "text)).catch(() => done('refused'))",
                    asked.server.url,
                    mode,
                )
                assert fetched in ("refused", "read ")
            browser.find_element("css selector", "a").click()  # not by a link, either
            assert "step 50" not in browser.page_source
    finally:
        evil.shutdown()
        evil.server_close()
    browser.get(asked.server.url)
    assert "step 50" in browser.page_source, "the address itself was right"
    browser.get_log("browser")


def test_the_page_is_accessible(browser: Any, asked: Asked) -> None:
    from tests.report.accessibility import violations
    from tests.report.in_browser import text_of

    browser.get(asked.server.url)
    waited(browser, lambda _: "Training is writing" in text_of(browser, "#live"))
    assert violations(browser) == []


def test_the_excess_is_closed_without_a_thread(asked: Asked) -> None:
    def serving() -> int:
        work = [
            getattr(each, "_target", None)
            for each in threading.enumerate()
            if "process_request" in each.name
        ]
        # other tests' may still end
        return sum(getattr(each, "__self__", None) is asked.server for each in work)

    def opened() -> socket.socket:
        return socket.create_connection(("127.0.0.1", asked.server.port), timeout=20)

    slow = []
    for count in range(1, 17):  # one by one: of many at once the system drops some for a second
        slow.append(opened())
        while serving() < count:
            time.sleep(0.01)
    for _ in range(24):
        with opened() as more:
            assert more.recv(1) == b""
    assert serving() == 16
    for each in slow:
        each.close()
    while serving():
        time.sleep(0.05)
    assert asked()[0].status == 200


def test_slow_requests_end_at_their_deadline_and_the_server_does_not_wait(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_SECONDS", 0.3)
    with (
        socket.create_connection(("127.0.0.1", asked.server.port)) as slow,
        pytest.raises(ConnectionError),
    ):
        while True:  # each byte comes in time
            slow.sendall(b"a")
            time.sleep(0.05)
    monkeypatch.setattr(live, "_SECONDS", 60.0)
    with socket.create_connection(("127.0.0.1", asked.server.port)):
        assert asked()[0].status == 200, "so the one before was accepted"
        stopped(asked)
    asked.server = LiveServer(asked.server.page)
    asked.server.start()
