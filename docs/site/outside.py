#!/usr/bin/env python3
"""A preprocessor of mdBook: links to files outside of docs/ lead to the repository, where those files are, and links to a README.md
to the index.html that mdBook makes of it."""

import json
import posixpath
import re
import sys

REPOSITORY = "https://github.com/kvlane/kvlane/blob/main/"
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")


def lead(path, text):
    """The text of a page with such links."""
    folder = posixpath.join("docs", posixpath.dirname(path))

    def replaced(link):
        target = link[2]
        if "://" in target or target.startswith(("mailto:", "/")):
            return link[0]
        at = posixpath.normpath(posixpath.join(folder, target))
        if at.startswith("docs/"):
            target = re.sub(r"README\.md$", "index.md", target)
            return f"{link[1]}{target}{link[3] or ''}{link[4]}"
        return f"{link[1]}{REPOSITORY}{at}{link[3] or ''}{link[4]}"

    return LINK.sub(replaced, text)


def pages(items):
    for item in items:
        chapter = item.get("Chapter") if isinstance(item, dict) else None
        if chapter:
            yield chapter
            yield from pages(chapter["sub_items"])


def main():
    if len(sys.argv) > 1:
        # mdBook asks whether a renderer is supported: all are.
        return
    _, book = json.load(sys.stdin)
    for chapter in pages(book.get("items") or book.get("sections")):
        if chapter["path"]:
            chapter["content"] = lead(chapter["path"], chapter["content"])
    json.dump(book, sys.stdout)


main()
