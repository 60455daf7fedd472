"""A real chromium for tests: just enough of the W3C WebDriver protocol."""

import base64
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WAIT_S = 300
AXE = """
const done = arguments[arguments.length - 1];
document.querySelectorAll('tbody').forEach(body => { while (body.rows.length > 30) body.deleteRow(-1); });
axe.run(document, {resultTypes: ['violations']}).then(
  found => done(found.violations.map(one => [one.impact, one.id, one.nodes[0].html.slice(0, 200)])),
  error => done([['critical', String(error), '']]));
"""


class Browser:
    """One window of chromium."""

    def __init__(self, driver: str, profile: Path, width: int = 1400, height: int = 900) -> None:
        self.address = driver
        options = {
            "args": [
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--no-first-run",
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
            ]
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        session = self.call("POST", "session", {"capabilities": {"alwaysMatch": wanted}})
        self.address = f"{driver}/session/{session['sessionId']}"
        self.call("POST", "timeouts", {"script": WAIT_S * 1000, "pageLoad": WAIT_S * 1000})

    def call(self, method: str, path: str, content: dict[str, Any] | None = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self.address}/{path}".removesuffix("/."), data, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=WAIT_S + 10) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script that calls its last argument with a result."""
        return self.call("POST", "execute/async", {"script": script, "args": list(arguments)})

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression."""
        return self.call("POST", "execute/sync", {"script": f"return {expression}", "args": []})

    def open(self, address: str) -> None:
        self.call("POST", "url", {"url": address})

    def command(self, name: str, **parameters: Any) -> Any:
        """Run a command of the DevTools protocol."""
        content = {"cmd": name, "params": parameters}
        return self.call("POST", "goog/cdp/execute", content)

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Return and forget the entries of a log: browser (the console) or performance."""
        found: list[dict[str, Any]] = self.call("POST", "se/log", {"type": kind})
        return found

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """Ask pages for light or dark colours."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.command("Emulation.setEmulatedMedia", media="", features=[feature])

    def picture(self, width: int, height: int) -> bytes:
        """Return a PNG of the page from its top."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(found["data"])

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.2)

    def close(self) -> None:
        self.call("DELETE", ".")


@contextmanager
def run_driver(log: Path) -> Iterator[str]:
    """Start chromedriver on a free port and give its address; skip where there is no chromium."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        ["chromedriver", f"--port={port}", f"--log-path={log}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=20)


def read_axe(folder: Path) -> str:
    """Return axe-core, out of a package that carries it, installed into a folder; skip where it cannot be."""
    words = ["--quiet", "--no-deps", "--target", str(folder), "--requirement", "envs/browser.lock"]
    run = subprocess.run([sys.executable, "-m", "pip", "install", *words], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"axe-core cannot be installed: {run.stderr.strip()[-200:]}")
    return (folder / "axe_playwright_python/axe.min.js").read_text(encoding="utf-8")


def list_faults(browser: Browser, axe: str) -> list[list[str]]:
    """Return what axe-core calls serious or critical: impact, rule and the first element.

    Rows of a table beyond the thirtieth, which are made as those before, are taken out of the page: on
    38,000 cells axe ran for more than ten minutes.
    """
    browser.call("POST", "execute/sync", {"script": axe, "args": []})
    return [one for one in browser.run(AXE) if one[0] in ("serious", "critical")]


def list_requests(browser: Browser) -> list[str]:
    """Return every address that our page asked for: the browser's own tab of a start asks too, late or never."""
    events = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    return [
        str(event["params"]["request"]["url"])
        for event in events
        if event["method"] == "Network.requestWillBeSent" and not event["params"]["documentURL"].startswith("chrome:")
    ]
