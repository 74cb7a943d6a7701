"""Measures tables of docs/results again: runs the command of each, and takes the table with the same columns from its output.

    python3 docs/results/take.py NAME [--from FILE]

FILE has the output of an earlier run. Then KVLANE_WRITE_RESULTS=1 cargo test -p kvlane --test results writes the documents.
"""

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def tables(text):
    """The Markdown tables of a text: columns and rows."""
    lines = [line.strip() for line in text.splitlines()] + [""]
    cells = lambda line: [cell.strip() for cell in line[1:-1].split("|")]  # noqa: E731
    for at, line in enumerate(lines):
        if line.startswith("|--") and at > 0 and lines[at - 1].startswith("|"):
            end = next(end for end in range(at, len(lines)) if not lines[end].startswith("|"))
            yield cells(lines[at - 1]), [cells(row) for row in lines[at + 1:end]]


def written(table):
    """As JSON with a line for each row, so that changes can be read."""
    head = json.dumps({key: value for key, value in table.items() if key != "rows"}, ensure_ascii=False, indent=2)
    rows = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in table["rows"])
    return f'{head[:-2]},\n  "rows": [\n{rows}\n  ]\n}}\n'


def main():
    options = argparse.ArgumentParser()
    options.add_argument("name")
    options.add_argument("--from", dest="file", help="a file with the output of the command")
    options = options.parse_args()
    path = HERE / f"{options.name}.json"
    table = json.loads(path.read_text())
    if options.file:
        output = Path(options.file).read_text()
    else:
        run = subprocess.run(table["command"], shell=True, cwd=HERE.parents[1], stdout=subprocess.PIPE, text=True, check=True)
        output = run.stdout
    rows = [rows for columns, rows in tables(output) if columns == table["columns"]]
    if not rows:
        sys.exit(
            f"{table['command']} printed no table with the columns {table['columns']}: "
            f"put its figures into {path.name} by hand, the day into \"measured\", and \"\" into \"code\""
        )
    path.write_text(written(table | {"measured": str(datetime.date.today()), "code": "", "rows": rows[-1]}))


main()
