"""A report in headless Chromium: what it asks for, what it saves, with the mouse, by keyboard, on paper, and its size.

    apt-get install chromium && cargo build --release -p kvlane && python3 e2e/browser/report/test_report.py -v

PICTURES=docs/images also writes report-light.png and report-dark.png there. RECORDS=100000 makes the large one smaller.
"""

import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree as xml
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import records
from devtools import Browser
from engines import KVLANE

PICTURES = os.environ.get("PICTURES")
RECORDS = int(os.environ.get("RECORDS", "1000000"))
SVG = "{http://www.w3.org/2000/svg}"


def setUpModule():
    global DIR, BROWSER, URL
    DIR = Path(tempfile.mkdtemp(prefix="kvlane-report-"))
    records.write(DIR / "turn.jsonl", 10_000, 8, "turn")
    records.write(DIR / "prefix.jsonl", 10_000, 8, "prefix")
    report("in turn=" + str(DIR / "turn.jsonl"), "by prefix=" + str(DIR / "prefix.jsonl"), "--plots", str(DIR / "plots"))
    URL = (DIR / "report.html").as_uri()
    BROWSER = Browser()


def tearDownModule():
    BROWSER.close()
    shutil.rmtree(DIR)


def report(*arguments, page="report.html"):
    subprocess.run([KVLANE, "report", *arguments, "--html", str(DIR / page)], check=True, stdout=subprocess.DEVNULL)


class Opens(unittest.TestCase):
    def test_it_asks_nobody_for_anything_and_complains_of_nothing(self):
        for width, dark in [(1440, False), (1440, True), (390, False), (390, True)]:
            page = BROWSER.open(URL, width=width, height=900, dark=dark)
            asked = [request["url"] for request in page.requests if not request["url"].startswith(("data:", "blob:"))]
            self.assertEqual(set(asked), {URL})
            self.assertEqual(page.complaints, [])
            wide = page.run("document.documentElement.scrollWidth")
            self.assertLessEqual(wide, width, "nothing but tables and heat maps is scrolled sideways")

    def test_a_request_it_made_would_be_refused(self):
        page = BROWSER.open(URL)
        told = page.run("fetch('http://127.0.0.1:9/').then(() => 'sent', error => error.name)")
        self.assertEqual(told, "TypeError")
        self.assertTrue(any("Content Security Policy" in text for text in page.complaints), page.complaints)

    def test_it_is_light_or_dark_as_asked_and_by_its_button(self):
        lightness = "(([r, g, b]) => r + g + b)(getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number))"
        for dark in (False, True):
            page = BROWSER.open(URL, dark=dark)
            self.assertEqual(page.run(lightness) < 200, dark)
            page.click(".top button")
            self.assertEqual(page.run(lightness) < 200, not dark)

    def test_pictures(self):
        for name, dark in (("light", False), ("dark", True)):
            page = BROWSER.open(URL, width=1280, height=1460, dark=dark)
            if PICTURES:
                page.picture(Path(PICTURES) / f"report-{name}.png")
            self.assertGreater(page.run("document.querySelectorAll('.line').length"), 10)


class Read(unittest.TestCase):
    def test_every_chart_is_told_in_words_and_has_its_figures(self):
        page = BROWSER.open(URL)
        charts = page.run("""[...document.querySelectorAll('figure')].map(figure => [
            figure.querySelector('figcaption').textContent, figure.querySelector('svg').getAttribute('aria-label'),
            figure.querySelectorAll('details tbody tr').length])""")
        self.assertGreater(len(charts), 10)
        for title, label, rows in charts:
            self.assertTrue(label.startswith(title) and len(label) > len(title) + 10, label)
            self.assertGreater(rows, 0, title)
        self.assertEqual(page.run("document.querySelectorAll('th:not([scope]), button:empty, html:not([lang])').length"), 0)
        self.assertEqual(page.run("new Set([...document.querySelectorAll('.save button')].map(b => b.ariaLabel)).size"), 2 * len(charts))

    def test_arrow_keys_go_from_point_to_point_and_are_read_out(self):
        page = BROWSER.open(URL)
        said = "document.querySelector('[aria-live]').textContent"
        for chart in ("#s6 ~ figure svg", "#s2 ~ .charts svg"):
            page.run(f"document.querySelector('{chart}').focus()")
            page.press("ArrowRight")
            first = page.run(said)
            self.assertIn("\n", first)
            page.press("ArrowRight")
            self.assertNotEqual(page.run(said), first)
            self.assertFalse(page.run("document.querySelector('.tip').hidden"))
            page.press("Escape")
            self.assertTrue(page.run("document.querySelector('.tip').hidden"))

    def test_the_pointer_is_told_what_is_under_it(self):
        page = BROWSER.open(URL)
        at = page.run("""(() => { const svg = document.querySelector('#s6 ~ figure svg');
            svg.scrollIntoView({block: 'center', behavior: 'instant'}); const b = svg.getBoundingClientRect();
            return [b.x + b.width / 2, b.y + b.height / 3]; })()""")
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
        page.until("/http:.*\\n.*Requests: [0-9.]+/s.test(document.querySelector('.tip').textContent)")

    def test_tables_sort_by_a_column(self):
        page = BROWSER.open(URL)
        column = "[...document.querySelectorAll('#s1 ~ .wide')][0].querySelectorAll('tbody tr')"
        cells = f"[...{column}].map(row => parseFloat(row.cells[1].textContent.replace(/,/g, '')))"
        for _ in range(2):
            page.run("document.querySelectorAll('#s1 ~ .wide')[0].querySelectorAll('th button')[1].click()")
            order = page.run("document.querySelectorAll('#s1 ~ .wide')[0].querySelectorAll('th')[1].ariaSort")
            values = page.run(cells)
            self.assertEqual(values, sorted(values, reverse=order == "descending"))

    def test_all_of_it_is_there_without_scripts(self):
        page = BROWSER.open("about:blank")
        page.call("Emulation.setScriptExecutionDisabled", value=True)
        page.call("Page.navigate", url=URL)
        time.sleep(1)
        page.call("Emulation.setScriptExecutionDisabled", value=False)
        self.assertGreater(page.run("document.querySelectorAll('figure title').length"), 100)
        self.assertEqual(page.run("document.querySelectorAll('.save').length"), 0)

    def test_on_paper_it_is_light_and_has_no_buttons(self):
        page = BROWSER.open(URL, dark=True)
        self.assertGreater(len(page.call("Page.printToPDF", printBackground=True)["data"]), 50_000)
        page.call("Emulation.setEmulatedMedia", media="print")
        shown = "[...document.querySelectorAll('.top, .save, details')].filter(e => getComputedStyle(e).display !== 'none').length"
        self.assertEqual(page.run(shown), 0)


class Saves(unittest.TestCase):
    def saved(self, page, name, ending):
        into = Path(tempfile.mkdtemp(dir=DIR))
        page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(into))
        page.click(f"figure[data-file='{name}'] .save button:nth-child({1 if ending == '.svg' else 2})")
        give_up = time.monotonic() + 30
        while time.monotonic() < give_up:
            found = [path for path in into.iterdir() if path.suffix == ending]
            if found:
                return found[0]
            time.sleep(0.05)
        self.fail(f"{name}{ending} was not saved: {page.complaints}")

    def test_every_chart_as_svg_and_png(self):
        page = BROWSER.open(URL, dark=True)
        names = page.run("[...document.querySelectorAll('figure')].map(figure => figure.dataset.file)")
        # Pages scroll at once then, and a click meets what it aims at.
        page.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-reduced-motion", "value": "reduce"}, {"name": "prefers-color-scheme", "value": "dark"},
        ])
        for name in names:
            svg = self.saved(page, name, ".svg")
            self.assertEqual(svg.stem, name)
            drawn = xml.parse(svg).getroot()
            self.assertEqual(drawn.tag, SVG + "svg")
            self.assertEqual(drawn.find(SVG + "text").get("class"), "head")
            written = xml.parse(DIR / "plots" / f"{name}.svg").getroot()
            marks = lambda root: sum(1 for node in root.iter() if node.tag in (SVG + "path", SVG + "rect", SVG + "circle"))
            self.assertEqual(marks(drawn), marks(written), name)
            png = self.saved(page, name, ".png")
            data = png.read_bytes()
            self.assertEqual(data[:8], b"\x89PNG\r\n\x1a\n")
            width, height = struct.unpack(">II", data[16:24])
            self.assertEqual(width, 2 * int(float(drawn.get("width"))), name)
            self.assertGreater(len(data), 5000, "it is not blank")
        self.assertEqual(page.complaints, [])


class Size(unittest.TestCase):
    def test_ten_thousand_requests(self):
        size = (DIR / "report.html").stat().st_size
        print(f"  two runs of 10,000 requests: {size / 1e6:.2f} MB")
        self.assertLess(size, 1_000_000)

    def test_a_million_requests_open_as_fast(self):
        records.write(DIR / "large.jsonl", RECORDS, 200, "turn")
        begun = time.monotonic()
        report(str(DIR / "large.jsonl"), page="large.html")
        took = time.monotonic() - begun
        size = (DIR / "large.html").stat().st_size
        begun = time.monotonic()
        page = BROWSER.open((DIR / "large.html").as_uri())
        page.until("!!document.querySelector('.save')")
        opened = time.monotonic() - begun
        print(f"  {RECORDS} requests: written in {took:.1f} s, {size / 1e6:.2f} MB, open in {opened:.2f} s")
        self.assertLess(size, 2_000_000)
        self.assertEqual(page.complaints, [])


if __name__ == "__main__":
    unittest.main()
