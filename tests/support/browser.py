"""A real browser without a window, for pages that commands write."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from support.timeouts import LIMIT

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_ANSWER = re.compile(r'<pre id="answer">(.*?)</pre>', re.DOTALL)
_ASK = """<script>
addEventListener("load", async () => {
  const tell = (value) => {
    const answer = document.createElement("pre");
    answer.id = "answer";
    answer.textContent = JSON.stringify(value);
    document.body.append(answer);
  };
  addEventListener("error", (event) => tell({error: event.message}));
  try { tell(await (async () => { %s })()); } catch (error) { tell({error: String(error)}); }
});
</script></body>"""


def browse(page: Path, folder: Path, *options: str) -> str:
    """What a browser prints of a page; the test is skipped where there is no browser. `folder`: for its profile."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"pages are not shown in a real browser: none of {', '.join(BROWSERS)} is installed")
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}"]
    command = [program, "--headless", "--no-sandbox", *quiet, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT).stdout


def ask(page: Path, folder: Path, script: str, width: int = 1200) -> Any:
    """What JavaScript that runs on a copy of the page returns, from JSON."""
    copy = folder / "asked.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", _ASK % script), encoding="utf-8")
    shown = browse(copy, folder, "--dump-dom", "--virtual-time-budget=2000", f"--window-size={width},900")
    found = _ANSWER.search(shown)
    assert found, shown[-2000:]
    value = json.loads(unescape(found[1]))
    assert not (isinstance(value, dict) and "error" in value), value
    return value
