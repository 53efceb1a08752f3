"""A real browser without a window, for pages that commands write."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from subprocess import DEVNULL
from threading import Thread
from typing import Any

import pytest

from support.timeouts import LIMIT, SOON

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_ASK = """<script>
const until = async (isSo) => {
  for (const start = Date.now(); !isSo(); await new Promise((done) => setTimeout(done, 20)))
    if (Date.now() - start > %d) throw new Error("never became true: " + isSo);
};
addEventListener("load", async () => {
  const tell = (value) => fetch("/answer", {method: "POST", body: JSON.stringify(value)});
  addEventListener("error", (event) => tell({error: event.message}));
  try { tell(await (async () => { %s })()); } catch (error) { tell({error: String(error)}); }
});
</script></body>"""


def browse(page: Path, folder: Path, *options: str) -> str:
    """What a browser prints of a page; the test is skipped where there is no browser. `folder`: for its profile."""
    command = [*_headless(folder), *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT).stdout


def ask(page: Path, folder: Path, script: str, width: int = 1200) -> Any:
    """What JavaScript that runs in a copy of the page returns, from JSON; it may wait: `await until(() => condition)`.

    The page stays open in real time until it has answered: frames, which observers wait for, come when they can.
    """
    answers: Queue[Any] = Queue()
    copy = page.read_text(encoding="utf-8").replace("</body>", _ASK % (1000 * SOON, script))
    with _serve(copy, answers) as address:
        options = ("--remote-debugging-port=0", f"--window-size={width},900", address)
        with subprocess.Popen([*_headless(folder), *options], stdout=DEVNULL, stderr=DEVNULL) as browser:
            try:
                value = answers.get(timeout=LIMIT)
            finally:
                browser.terminate()
    assert not (isinstance(value, dict) and "error" in value), value
    return value


def _headless(folder: Path) -> list[str]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"pages are not shown in a real browser: none of {', '.join(BROWSERS)} is installed")
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}"]
    return [program, "--headless", "--no-sandbox", *quiet]


@contextmanager
def _serve(page: str, answers: Queue[Any]) -> Iterator[str]:
    """The address of a page that may post its answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(page.encode())

        def do_POST(self) -> None:
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._reply(b"")

        def _reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Leave the tests' output alone."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
