"""The examples of docs/python.md and of the package's README run as they are written, one after the other."""

import doctest
import os
import re
import tempfile
import unittest

import matplotlib

from installed import ROOT

matplotlib.use("Agg")


class Examples(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(directory.name)

    def run_all(self, page):
        """Runs the page's code; `pycon` blocks must print what they say."""
        names, ran = {}, 0
        text = (ROOT / page).read_text()
        for kind, code in re.findall(r"^```(python|pycon)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            ran += 1
            if kind == "python":
                exec(compile(code, page, "exec"), names)
                continue
            test = doctest.DocTestParser().get_doctest(code, names, page, page, 0)
            failures = []
            doctest.DocTestRunner().run(test, out=failures.append, clear_globs=False)
            self.assertEqual("".join(failures), "")
            names.update(test.globs)
        return ran

    def test_the_page_about_python(self):
        self.assertGreater(self.run_all("docs/python.md"), 6)
        for written in ("ttft.svg", "report.html", "figures.json", "fleet_cost.jsonl", "comparison.html"):
            self.assertGreater(os.path.getsize(written), 100, written)

    def test_the_readme_of_the_package(self):
        self.assertEqual(self.run_all("crates/kvlane-py/README.md"), 1)


if __name__ == "__main__":
    unittest.main()
