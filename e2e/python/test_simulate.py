"""Simulations, records and reports from Python are those of the commands, to the byte."""

import inspect
import itertools
import json
import os
import re
import signal
import tempfile
import threading
import unittest
from pathlib import Path

import kvlane
import matplotlib

from installed import PROGRAM, ROOT, printed

matplotlib.use("Agg")

SMALL = {"workload": "chat", "preset": "llama-3.1-8b@h100", "engines": 2, "rate": [(1, 10)]}
SMALL_FLAGS = ["--workload", "chat", "--preset", "llama-3.1-8b@h100", "--engines", 2, "--rate", "1x10"]


class WithDirectory(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)


class SameBytes(WithDirectory):
    def check(self, settings, *flags):
        self.assertEqual(kvlane.simulate(**settings).json + "\n", printed(PROGRAM, "simulate", *flags, "--json"))

    def test_the_defaults(self):
        self.check(SMALL, *SMALL_FLAGS)

    def test_policies_seeds_knowledge_and_objectives(self):
        more = {"policy": ["least_load", "fleet_cost"], "seeds": 2, "cache_knowledge": "exact", "slo_ttft_s": 0.5, "slo_tpot_ms": 9.5}
        flags = ["--policy", "least_load,fleet_cost", "--seeds", 2, "--cache-knowledge", "exact"]
        self.check(SMALL | more, *SMALL_FLAGS, *flags, "--slo-ttft-s", 0.5, "--slo-tpot-ms", 9.5)

    def test_the_three_kinds_of_load(self):
        fleet = {"workload": "chat", "preset": "llama-3.1-8b@h100", "policy": "least_load"}
        flags = ["--workload", "chat", "--preset", "llama-3.1-8b@h100", "--policy", "least_load"]
        self.check(fleet | {"load": [0.5, 2]}, *flags, "--load", "0.5,2")
        self.check(fleet | {"concurrency": 3}, *flags, "--concurrency", 3)
        start = {"concurrency": 3, "warm_up": 2, "stagger_s": 0, "length_spread": 0.5}
        self.check(fleet | start, *flags, "--concurrency", 3, "--warm-up", 2, "--stagger-s", 0, "--length-spread", 0.5)
        self.check(fleet | {"rate": (2, 5)}, *flags, "--rate", "2x5")

    def test_a_trace_that_comes_with_kvlane(self):
        slice_ = ROOT / "crates/kvlane/assets/mooncake-conversation-slice.jsonl.gz"
        self.check({"trace": slice_, "policy": "fleet_cost"}, "--trace", slice_, "--policy", "fleet_cost")

    def test_a_scenario_as_a_mapping_and_as_a_file_beside_its_timing(self):
        scenario = {
            "scenario": "ours",
            "fleet": {"engines": 2, "preset": "llama-3.1-8b@h100"},
            "workload": {"generate": {"kind": "chat"}, "closed_loop": {"concurrency": [2], "conversations": {"total": 4}}},
            "policies": ["round_robin", {"arm": "mild", "policy": {"name": "cache_aware", "cache_threshold": 0.2}}],
        }
        path = self.directory / "ours.yaml"
        path.write_text(json.dumps(scenario))
        self.check({"scenario": scenario}, "--scenario", path)
        self.check({"scenario": path, "seeds": 2}, "--scenario", path, "--seeds", 2)

    def test_any_number_of_threads(self):
        figures = {kvlane.simulate(**SMALL, seeds=3, jobs=jobs).json for jobs in (1, 2, 5, None)}
        self.assertEqual(len(figures), 1)
        self.assertNotEqual(figures, {kvlane.simulate(**SMALL, seeds=3, first_seed=2).json})

    def test_the_report_of_records(self):
        result = kvlane.simulate(**SMALL, policy=["round_robin", "fleet_cost"], records=True)
        self.assertEqual(list(result.records), ["round_robin", "fleet_cost"])
        files = []
        for name, records in result.records.items():
            files.append(self.directory / f"{name}.jsonl")
            records.save(files[-1])
            self.assertEqual(kvlane.read_records(files[-1]).columns(), records.columns())
        page = self.directory / "page.html"
        said = printed(PROGRAM, "report", *files, "--html", page, "--title", "both")
        report = kvlane.report(result.records, title="both")
        # A page that Python makes has no command.
        expected = re.sub(r"<dt>Command</dt>.*\n", "", page.read_text())
        self.assertEqual(report.to_html(), expected)
        self.assertEqual(kvlane.report(files, title="both").to_html(), expected)
        self.assertEqual(report.verdict, said.splitlines()[-1])
        self.assertTrue(all(svg.startswith("<svg") for svg in report.plots().values()))

    def test_the_records_of_the_command(self):
        printed(PROGRAM, "simulate", *SMALL_FLAGS, "--policy", "least_load", "--records", self.directory)
        records = kvlane.simulate(**SMALL, policy="least_load", records=True).records["least_load"]
        records.save(self.directory / "ours.jsonl")
        self.assertEqual((self.directory / "ours.jsonl").read_bytes(), (self.directory / "least_load.jsonl").read_bytes())


class Results(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.result = kvlane.simulate(**SMALL | {"rate": [(1, 10), (2, 10)]}, policy=["round_robin", "fleet_cost"], records=True)

    def test_frames_of_both_libraries_have_the_rows_of_the_figures(self):
        pandas, polars = self.result.to_pandas(), self.result.to_polars()
        self.assertEqual(list(pandas.columns), polars.columns)
        self.assertEqual(list(pandas["policy"]), ["round_robin"] * 2 + ["fleet_cost"] * 2)
        self.assertEqual(polars["rate"].to_list(), [1.0, 2.0, 1.0, 2.0])
        for row, figures in zip(pandas.to_dict("records"), self.result.rows, strict=True):
            self.assertEqual(row["ttft_p90_s"], figures["simulated"]["ttft_p90_s"])
            self.assertLessEqual(row["ttft_mean_s_low"], row["ttft_mean_s"])
            self.assertLessEqual(row["ttft_mean_s"], row["ttft_mean_s_high"])

    def test_records_are_frames(self):
        records = self.result.records["fleet_cost-rate-2"]
        frame = records.to_polars()
        self.assertEqual(len(frame), len(records))
        self.assertEqual(frame["ttft_s"].to_list(), (frame["first_token_s"] - frame["scheduled_s"]).to_list())
        self.assertEqual(list(records.to_pandas().columns), frame.columns)
        self.assertTrue(frame["ok"].all())

    def test_a_notebook_shows_the_report_in_a_frame_of_its_own(self):
        shown = self.result._repr_html_()
        self.assertTrue(shown.startswith("<iframe srcdoc=") and shown.endswith("</iframe>"))
        self.assertNotIn("<script", shown)

    def test_a_plot_has_a_line_for_each_policy_or_a_bar(self):
        axes = self.result.plot("ttft_mean_s")
        self.assertEqual([line.get_label() for line in axes.get_lines()], ["round_robin", "fleet_cost"])
        self.assertEqual((axes.get_xlabel(), axes.get_ylabel()), ("rate", "ttft_mean_s"))
        self.assertEqual(len(kvlane.simulate(**SMALL).plot().patches), 3)
        with self.assertRaisesRegex(ValueError, "no figure nonsense: there are .*ttft_p90_s"):
            self.result.plot("nonsense")

    def test_a_sweep_has_every_combination(self):
        sweep = kvlane.sweep({"engines": [1, 2], "cache_knowledge": ["approximate", "exact"]}, **SMALL_SWEEP)
        frame = sweep.to_pandas()
        self.assertEqual(len(sweep), 4)
        varied = list(zip(frame["engines"], frame["cache_knowledge"], frame["policy"], strict=True))
        self.assertEqual(varied, list(itertools.product([1, 2], ["approximate", "exact"], ["least_load", "fleet_cost"])))
        self.assertEqual(sweep.cells[3][1].json, kvlane.simulate(**SMALL_SWEEP, engines=2, cache_knowledge="exact").json)

    def test_the_keywords_of_a_sweep_are_those_of_simulate(self):
        self.assertEqual(set(kvlane.Settings.__annotations__), set(inspect.signature(kvlane.simulate).parameters))


SMALL_SWEEP = {"workload": "chat", "preset": "llama-3.1-8b@h100", "rate": [(1, 5)], "policy": ["least_load", "fleet_cost"]}


class Errors(WithDirectory):
    def check(self, kind, words, call, *arguments, **keywords):
        with self.assertRaises(kind) as caught:
            call(*arguments, **keywords)
        for word in [words] if isinstance(words, str) else words:
            self.assertIn(word, str(caught.exception))

    def test_settings_that_are_wrong_are_named(self):
        wrong = [
            ({}, "nothing to simulate: a trace or a workload is required"),
            ({"workload": "chatter"}, "workload chatter: unknown kind: did you mean `chat`"),
            ({"workload": "chat", "policy": "best"}, "policy: unknown policy 'best': did you mean"),
            ({"workload": "chat", "trace": "x"}, "trace and workload exclude each other"),
            ({"workload": "chat", "load": 1, "concurrency": 2}, "load, rate and concurrency exclude each other"),
            ({"workload": "chat", "load": float("nan")}, "load"),
            ({"workload": "chat", "stagger_s": 1}, "stagger_s needs concurrency"),
            ({"workload": "chat", "concurrency": 2, "length_spread": 1}, "length_spread at least 0 and below 1"),
            ({"workload": "chat", "engines": 0}, "engines must be between 1 and 65535"),
            ({"workload": "chat", "preset": "llama@abacus"}, "names an unknown model or GPU"),
            ({"workload": "chat", "seeds": 0}, "seeds 0: must be at least 1"),
            ({"workload": "chat", "jobs": 0}, "jobs 0: must be at least 1"),
            ({"workload": "chat", "cache_knowledge": "total"}, "must be approximate or exact"),
            ({"scenario": "seed-001", "engines": 3, "load": 1}, "scenario has engines, load in itself"),
            ({"scenario": {"scenario": "x"}}, "missing field `fleet`"),
        ]
        for settings, words in wrong:
            with self.subTest(settings=settings):
                self.check(ValueError, words, kvlane.simulate, **settings)
        self.check(TypeError, "workload: cannot take this value", kvlane.simulate, workload=3)
        self.check(TypeError, "engines: cannot take this value", kvlane.simulate, workload="chat", engines="four")

    def test_files_that_are_not_there_or_wrong_are_named(self):
        absent = self.directory / "absent"
        for call, settings in [
            (kvlane.simulate, {"trace": absent}), (kvlane.simulate, {"scenario": absent}),
            (kvlane.read_records, {"path": absent}), (kvlane.report, {"runs": [absent]}),
        ]:
            self.check(FileNotFoundError, str(absent), call, **settings)
        wrong = self.directory / "wrong.jsonl"
        wrong.write_text("{}\n")
        self.check(ValueError, [str(wrong), "line 1"], kvlane.read_records, wrong)
        wrong.write_text("")
        self.check(ValueError, [str(wrong), "contains no records"], kvlane.read_records, wrong)
        self.check(ValueError, "0 runs", kvlane.report, [])

    def test_a_sweep_says_what_it_cannot_vary(self):
        self.check(ValueError, "vary colour: simulate() has no such setting", kvlane.sweep, {"colour": [1]}, workload="chat")
        self.check(ValueError, "engines is given and varied", kvlane.sweep, {"engines": [1]}, workload="chat", engines=2)
        self.check(ValueError, "at least one value", kvlane.sweep, {"engines": []}, workload="chat")

    def test_other_threads_run_and_an_interrupt_ends_a_simulation(self):
        running, ran = threading.Event(), []

        def interrupt():
            running.wait()
            ran.append(True)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with self.assertRaises(KeyboardInterrupt):
            running.set()
            kvlane.simulate(workload="chat", rate=(20, 100), seeds=8)
        thread.join()
        self.assertEqual(ran, [True])
        self.assertEqual(kvlane.simulate(**SMALL).json, kvlane.simulate(**SMALL).json)


if __name__ == "__main__":
    unittest.main()
