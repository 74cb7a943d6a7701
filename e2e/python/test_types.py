"""The package and programs that use it pass pyright in strict mode, and wrong programs do not."""

import inspect
import json
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import kvlane

RIGHT = """\
import kvlane

result = kvlane.simulate(workload="chat", policy=["fleet_cost"], rate=(1, 5), engines=2)
frame = result.to_polars()
rows: list[dict[str, object]] = list(result.rows)
swept = kvlane.sweep({"engines": [1, 2]}, workload="chat", seeds=2)
kvlane.report({"a": kvlane.read_records("a.jsonl"), "b": "b.jsonl"}).save("c.html")
router = kvlane.Router({"name": "cache_aware"}, kv_events=True)
router.join("a")
decision: kvlane.Decision = router.arrive(b"abcd", session="s")
if decision.outcome == "placed":
    endpoint: str | None = decision.endpoint
router.settle(decision.request, "failed", now=1)
stored: int = router.stored("a", [1, b"12345678"], [1, 2]).stored
"""
WRONG = [
    ("kvlane.simulate(workload=1)", "reportArgumentType"),
    ("kvlane.simulate(colour=1)", "reportCallIssue"),
    ("kvlane.sweep({'engines': [1]}, seeds='two')", "reportArgumentType"),
    ("kvlane.Router().settle(1, 'fine')", "reportArgumentType"),
    ("kvlane.Router().arrive(7)", "reportArgumentType"),
    ("kvlane.Router().arrive([1]).where", "reportAttributeAccessIssue"),
]


def found(directory):
    """What pyright finds in a directory: file, line and rule."""
    (directory / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] > 0, done.stdout
    return [(Path(one["file"]).name, one["range"]["start"]["line"], one.get("rule", one["message"])) for one in report["generalDiagnostics"]]


class Types(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="kvlane-types-")
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def test_the_package_is_strictly_right(self):
        shutil.copytree(Path(kvlane.__file__).parent, self.directory / "kvlane")
        self.assertEqual(found(self.directory), [])

    def test_programs_are_checked(self):
        (self.directory / "right.py").write_text(RIGHT)
        (self.directory / "wrong.py").write_text("import kvlane\n" + "".join(f"{line}\n" for line, _ in WRONG))
        diagnostics = found(self.directory)
        self.assertEqual([one for one in diagnostics if one[0] == "right.py"], [])
        rules = {(line, rule) for _, line, rule in diagnostics}
        for line, (code, rule) in enumerate(WRONG, 1):
            self.assertIn((line, rule), rules, code)

    def test_the_stubs_have_what_the_module_has(self):
        stubs = (Path(kvlane.__file__).parent / "_core.pyi").read_text()
        for kind in (kvlane.Router, kvlane.Decision, kvlane.Endpoint, kvlane.Applied):
            for name in (name for name in vars(kind) if not name.startswith("_")):
                self.assertIn(f"def {name}(", stubs, f"{kind.__name__}.{name}")
        # Parameters and their defaults, which the stubs repeat.
        for name, method in inspect.getmembers(kvlane.Router, callable):
            if name.startswith("_"):
                continue
            declared = stubs.split("class Router:")[1].split(f"    def {name}(")[1].split(") ->")[0]
            for parameter in list(inspect.signature(method).parameters.values())[1:]:
                self.assertIn(f"{parameter.name}:", declared, name)
                if parameter.default is not inspect.Parameter.empty:
                    self.assertIn(f"= {parameter.default!r}".replace("'", '"'), declared, f"{name}({parameter.name})")


if __name__ == "__main__":
    unittest.main()
