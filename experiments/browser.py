"""Opens a page in a real headless Chromium (QtWebEngine), runs a script in it, and prints what came of it as JSON.

    python -m experiments.browser PAGE.html 'JavaScript' [PICTURE.png [WIDTH HEIGHT]]

The script's value is JSON text; while it is empty, the page is not ready and the script is run again. Network access is
refused, and each attempt is told. Needs the extra `browser`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_POLL_MS, _PATIENCE_MS, _PAINT_MS = 200, 60_000, 500


def main(page: str, script: str, picture: str = "", width: str = "1280", height: str = "1600") -> None:
    """Opens the page and prints {"is_loaded", "errors", "requests", "value"}."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")  # root in a container has no sandbox
    from PySide6.QtCore import QTimer, QUrl
    from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineSettings, QWebEngineUrlRequestInterceptor
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    seen: dict[str, Any] = {"is_loaded": False, "errors": [], "requests": [], "value": None}

    class Offline(QWebEngineUrlRequestInterceptor):  # type: ignore[misc, unused-ignore]  # Any where it is not installed
        def interceptRequest(self, info: Any) -> None:
            if info.requestUrl().scheme() not in ("file", "data", "blob"):
                seen["requests"].append(info.requestUrl().toString())
                info.block(True)

    class Page(QWebEnginePage):  # type: ignore[misc, unused-ignore]
        def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:
            if level == QWebEnginePage.JavaScriptConsoleMessageLevel.ErrorMessageLevel:
                seen["errors"].append(f"{message} (line {line})")

    application = QApplication(sys.argv[:1])
    view, offline = QWebEngineView(), Offline()
    opened = Page(view)
    opened.setUrlRequestInterceptor(offline)
    view.setPage(opened)
    view.settings().setAttribute(QWebEngineSettings.WebAttribute.ShowScrollBars, False)
    view.resize(int(width), int(height))
    view.show()

    def ask(waited_ms: int = 0) -> None:
        opened.runJavaScript(script, lambda value: finish(value, waited_ms))

    def finish(value: Any, waited_ms: int) -> None:
        if not value and waited_ms < _PATIENCE_MS:
            QTimer.singleShot(_POLL_MS, lambda: ask(waited_ms + _POLL_MS))
            return
        seen["value"] = json.loads(value) if value else None
        QTimer.singleShot(_PAINT_MS, close)

    def close() -> None:
        if picture:
            view.grab().save(picture)
        application.quit()

    def loaded(is_loaded: bool) -> None:
        seen["is_loaded"] = is_loaded
        ask()

    opened.loadFinished.connect(loaded)
    opened.load(QUrl.fromLocalFile(str(Path(page).resolve())))
    application.exec()
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()
    os._exit(0)  # Qt's own end of the process can wait for a page that is still alive


if __name__ == "__main__":
    main(*sys.argv[1:])
