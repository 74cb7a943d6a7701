#!/usr/bin/env python3
"""Whether every link of the built site leads somewhere, and every page of docs/ is in it.

    docs/site/check.py target/site
"""

import html.parser
import pathlib
import sys
import urllib.parse

SITE = pathlib.Path(sys.argv[1]).resolve()
DOCS = pathlib.Path(__file__).resolve().parent.parent
# Read in the repository, not on the site.
NOT_PAGES = {"SUMMARY.md"}


class Page(html.parser.HTMLParser):
    """The links of a page, and the places in it that links may name."""

    def __init__(self, text):
        super().__init__()
        self.links, self.places = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.places.add(attributes.get("id"))
        for name in ("href", "src"):
            if attributes.get(name):
                self.links.add(attributes[name])


def main():
    pages = {path: Page(path.read_text()) for path in SITE.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        if path.name in ("print.html", "404.html", "toc.html"):
            continue
        for link in sorted(page.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target = target / "index.html"
            if not target.exists():
                wrong.append(f"{path.relative_to(SITE)}: {link} leads nowhere")
            elif parts.fragment and target in pages and parts.fragment not in pages[target].places:
                wrong.append(f"{path.relative_to(SITE)}: {link}: the page has no such place")
    for source in sorted(DOCS.rglob("*.md")):
        name = source.relative_to(DOCS)
        built = SITE / name.with_suffix(".html")
        if name.name == "README.md":
            built = built.with_name("index.html")
        if str(name) not in NOT_PAGES and built not in pages:
            wrong.append(f"docs/{name} is not in docs/SUMMARY.md")
    print("\n".join(wrong) or f"{len(pages)} pages, every link leads somewhere")
    sys.exit(bool(wrong))


main()
