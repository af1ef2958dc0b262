"""Opens a page in a headless browser without a network, runs a script, takes a picture.

    python -m experiments.browser PAGE.html PICTURE.png [WIDTH HEIGHT]

The browser is an installed Chromium or Chrome (on Debian: `apt-get install
chromium-headless-shell`). This script talks to it over a pipe in the DevTools protocol
(https://chromedevtools.github.io/devtools-protocol), without a driver, a port or a package.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from experiments.command_line import parser_of

_NAMES = (
    "chromium-headless-shell",
    "chrome-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "microsoft-edge",
)
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
# the protocol is spoken on descriptors 3 and 4
_ON_PIPES = 'exec "$0" "$@" 3<&0 4>&1 0</dev/null 1>&2'
_POLL_S, _PATIENCE_S = 0.2, 60.0


@dataclass
class Seen:
    """What happened when a page was opened.

    Attributes:
        value: what the script returned as JSON text; None if it returned nothing.
        errors: exceptions in the page, and errors on its console.
        requests: addresses outside the page that it requested; all were refused.
    """

    value: Any = None
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def note(self, method: str, event: dict[str, Any]) -> None:
        """Keeps the errors and requests that an event of the browser reports."""
        if method == "Runtime.exceptionThrown":
            self.errors.append(
                event["exceptionDetails"]
                .get("exception", event["exceptionDetails"])
                .get("description", "")
            )
        elif method == "Runtime.consoleAPICalled" and event["type"] == "error":
            self.errors.append(
                " ".join(str(a.get("value", a.get("description", ""))) for a in event["args"])
            )
        elif method == "Network.requestWillBeSent" and not event["request"]["url"].startswith(
            ("file:", "data:", "blob:")
        ):
            self.requests.append(event["request"]["url"])


def installed_browser() -> str | None:
    """Returns the path of an installed browser that this script can drive, or None."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


def look(
    page: Path, script: str, picture: Path | None = None, *, width: int = 1280, height: int = 1600
) -> Seen:
    """Opens a page, runs a script until it returns JSON text, and takes a picture.

    Raises:
        FileNotFoundError: no browser is installed.
    """
    seen = Seen()
    with _opened(seen, width, height) as tab:
        tab.ask("Page.navigate", url=page.resolve().as_uri())

        end = time.monotonic() + _PATIENCE_S
        text = ""
        while not text and time.monotonic() < end:
            time.sleep(_POLL_S)
            text = tab.ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get(
                "value", ""
            )

        seen.value = json.loads(text) if text else None
        if picture:
            picture.write_bytes(base64.b64decode(tab.ask("Page.captureScreenshot")["data"]))

    return seen


@dataclass
class _Tab:
    """One tab of a running browser; messages are JSON, each ended by a zero byte."""

    to: IO[bytes]
    back: IO[bytes]
    seen: Seen
    session: dict[str, str] = field(default_factory=dict)
    num_asked: int = 0

    def ask(self, method: str, **parameters: Any) -> Any:
        """Sends a command and returns its result; events that come before it are noted."""
        self.num_asked += 1
        self.to.write(
            json.dumps(
                {"id": self.num_asked, "method": method, "params": parameters, **self.session}
            ).encode()
            + b"\0"
        )
        self.to.flush()

        while True:
            message = self._heard()
            if message.get("id") == self.num_asked:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

            self.seen.note(message.get("method", ""), message.get("params", {}))

    def _heard(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self.back.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser exited unexpectedly")
            text += byte
        message: dict[str, Any] = json.loads(text)
        return message


@contextmanager
def _opened(seen: Seen, width: int, height: int) -> Iterator[_Tab]:
    browser = installed_browser()
    if browser is None:
        raise FileNotFoundError(f"no browser: none of {', '.join(_NAMES)} is installed")

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = ["sh", "-c", _ON_PIPES, browser, *_OPTIONS, f"--user-data-dir={folder}"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdin and process.stdout
            tab = _Tab(process.stdin, process.stdout, seen)
            target = tab.ask("Target.createTarget", url="about:blank")["targetId"]
            tab.session["sessionId"] = tab.ask(
                "Target.attachToTarget", targetId=target, flatten=True
            )["sessionId"]

            for domain in ("Page", "Runtime", "Network"):
                tab.ask(f"{domain}.enable")

            tab.ask(
                "Network.emulateNetworkConditions",
                offline=True,
                latency=0,
                downloadThroughput=0,
                uploadThroughput=0,
            )

            tab.ask(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=1,
                mobile=False,
            )

            yield tab

            del tab.session["sessionId"]
            tab.ask("Browser.close")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("size", type=int, nargs="*", metavar="WIDTH HEIGHT")
    asked = parser.parse_args()
    size = dict(zip(("width", "height"), asked.size, strict=False))
    print(look(asked.page, "document.readyState == 'complete' ? '1' : ''", asked.picture, **size))
