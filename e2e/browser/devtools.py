"""Chromium through its DevTools protocol, with the standard library alone: a page is opened, looked at, clicked, pictured.

    with Browser() as browser:
        page = browser.open("http://127.0.0.1:29000/dashboard")
        page.until("document.title.startsWith('kvlane')")
"""

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
# For what must come; nothing is measured with it.
PATIENCE_S = 30


class Browser:
    """A headless Chromium with a profile of its own, which goes with it."""

    def __init__(self, *flags):
        if not CHROMIUM:
            raise SystemExit("Chromium is missing: apt-get install chromium, or name it in CHROMIUM")
        self.pages = []
        self.profile = tempfile.mkdtemp(prefix="kvlane-browser-")
        command = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", "--disable-dev-shm-usage", "--remote-debugging-port=0",
            f"--user-data-dir={self.profile}", *flags, "about:blank",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        told = Path(self.profile, "DevToolsActivePort")
        give_up = time.monotonic() + PATIENCE_S
        while not (told.exists() and "\n" in told.read_text()):
            if time.monotonic() > give_up or self.process.poll() is not None:
                raise RuntimeError("Chromium does not start")
            time.sleep(0.02)
        self.port = int(told.read_text().split("\n")[0])

    def open(self, url, width=1440, height=900, dark=False):
        """A page of its own size and colours, at `url`."""
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            target = json.load(answer)["webSocketDebuggerUrl"]
        page = Page(target)
        self.pages.append(page)
        for domain in ("Page", "Runtime", "Network", "Log", "Performance"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
        ])
        page.go(url)
        return page

    def close(self):
        for page in self.pages:
            page.socket.socket.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Page:
    """One tab. What it asks for, says and complains of is kept in `requests`, `answers` and `complaints`."""

    def __init__(self, target):
        self.socket = WebSocket(target)
        self.number = 0
        self.requests = []
        self.answers = []
        self.complaints = []
        self.failed = []

    def call(self, method, **parameters):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            told = json.loads(self.socket.receive())
            if told.get("id") == self.number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']['message']}")
                return told["result"]
            self.note(told)

    def note(self, event):
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"])
            case "Network.responseReceived":
                self.answers.append(parameters["response"])
            case "Network.loadingFailed":
                self.failed.append(parameters)
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.complaints.append(" ".join(str(part.get("value", part.get("description"))) for part in parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.complaints.append(parameters["entry"]["text"])

    def go(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, script):
        """What `script` comes to, promises awaited."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            details = told["exceptionDetails"]
            raise AssertionError(f"{script}: {details.get('exception', {}).get('description', details['text'])}")
        return told["result"].get("value")

    def until(self, script, patience_s=PATIENCE_S):
        """Waits until `script` is true; the seconds that took."""
        begun = time.monotonic()
        while True:
            try:
                if self.run(script):
                    return time.monotonic() - begun
            except RuntimeError:
                pass  # Between two pages.
            if time.monotonic() - begun > patience_s:
                raise AssertionError(f"it never came to hold: {script}")
            time.sleep(0.02)

    def click(self, selector):
        """A click with the mouse where the element is."""
        at = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1)

    def press(self, key):
        """One key, by its name in the DOM."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)
            text = {}

    def type(self, text):
        self.call("Input.insertText", text=text)

    def metrics(self):
        """Chromium's own counters of this page, in seconds and counts."""
        return {row["name"]: row["value"] for row in self.call("Performance.getMetrics")["metrics"]}

    def picture(self, path, whole=False):
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(told["data"]))


class WebSocket:
    """As much of RFC 6455 as a client of DevTools needs."""

    def __init__(self, url):
        host, path = url.removeprefix("ws://").split("/", 1)
        name, port = host.rsplit(":", 1)
        self.socket = socket.create_connection((name, int(port)), PATIENCE_S)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.unread = b""
        while b"\r\n\r\n" not in self.unread:
            self.unread += self.more()
        head, self.unread = self.unread.split(b"\r\n\r\n", 1)
        if b" 101 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(head.decode(errors="replace"))

    def more(self):
        piece = self.socket.recv(1 << 16)
        if not piece:
            raise RuntimeError("Chromium has closed the connection")
        return piece

    def take(self, count):
        while len(self.unread) < count:
            self.unread += self.more()
        taken, self.unread = self.unread[:count], self.unread[count:]
        return taken

    def send(self, text):
        data, mask = text.encode(), os.urandom(4)
        length = len(data)
        if length < 126:
            head = struct.pack("!BB", 0x81, 0x80 | length)
        elif length < 1 << 16:
            head = struct.pack("!BBH", 0x81, 0x80 | 126, length)
        else:
            head = struct.pack("!BBQ", 0x81, 0x80 | 127, length)
        self.socket.sendall(head + mask + bytes(byte ^ mask[n % 4] for n, byte in enumerate(data)))

    def receive(self):
        text = b""
        while True:
            first, second = self.take(2)
            length = second & 0x7F
            if length == 126:
                (length,) = struct.unpack("!H", self.take(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", self.take(8))
            data = self.take(length)
            if first & 0x0F in (0, 1, 2):
                text += data
                if first & 0x80:
                    return text.decode()
            elif first & 0x0F == 8:
                raise RuntimeError("Chromium has closed the page")
