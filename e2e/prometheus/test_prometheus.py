"""A real Prometheus scrapes a run: what deploy/ says is checked against what it has found, and what a collector of traces
is sent is read by OpenTelemetry's own messages."""

import http.server
import json
import re
import subprocess
import sys
import threading
import time
import unittest
import urllib.parse
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from google.protobuf.json_format import MessageToDict
from grafana_foundation_sdk.models import dashboard as grafana
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from engines import KVLANE, WORK, Engine, Gateway, Process, begin, free_port, request, start, until

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
CHAT = "/v1/chat/completions"
CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
# Panels that have nothing to show while nothing goes wrong: their PromQL must be right, and may find nothing.
QUIET = {"Limits reached, reloads rejected, spans lost", "Queue", "KV cache use"}


class Mock(Engine):
    """`kvlane mock-engine`, which publishes KV events."""

    def __init__(self, number):
        self.port = free_port()
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"}
        super().__init__(
            f"prometheus-mock-{number}",
            [KVLANE, "mock-engine", "--port", str(self.port), "--model", "mock", "--speed", "20",
             "--kv-events-config", json.dumps(events)],
        )


class Collector:
    """Takes spans as an OpenTelemetry collector does, and keeps them."""

    def __init__(self):
        self.spans, collector = [], self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                taken = ExportTraceServiceRequest()
                taken.ParseFromString(body)
                for of_resource in taken.resource_spans:
                    resource = {each.key: each.value.string_value for each in of_resource.resource.attributes}
                    for scope in of_resource.scope_spans:
                        collector.spans += [(resource, span) for span in scope.spans]
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def trace(self, trace_id):
        return [(resource, span) for resource, span in self.spans if span.trace_id.hex() == trace_id]


class Prometheus(Process):
    """The real one, with the configuration of deploy/prometheus but for address and pace."""

    def __init__(self, admin_port):
        self.port, directory = free_port(), WORK / "prometheus-data"
        config = (DEPLOY / "prometheus" / "prometheus.yaml").read_text()
        config = config.replace("127.0.0.1:29000", f"127.0.0.1:{admin_port}").replace("15s", "1s")
        config = config.replace("- alerts.yaml", f"- {DEPLOY / 'prometheus' / 'alerts.yaml'}")
        file = WORK / "prometheus.yaml"
        file.write_text(config)
        subprocess.run(["rm", "-rf", directory], check=True)
        super().__init__("prometheus", [
            "prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ])

    def ask(self, path, **query):
        answer = request(self.port, f"/api/v1/{path}?{urllib.parse.urlencode(query)}").json()
        if answer["status"] != "success":
            raise AssertionError(f"{query}: {answer}")
        return answer["data"]

    def value(self, promql):
        result = self.ask("query", query=promql)["result"]
        return result and float(result[0]["value"][1])

    def is_ready(self):
        self.check_alive()
        try:
            return request(self.port, "/-/ready").status == 200
        except OSError:
            return False


class RealCollector(Process):
    """OpenTelemetry's, which writes all that it is told to its log. `OTELCOL=1 setup.sh` builds it."""

    PROGRAM = WORK / "otelcol" / "otelcol"

    def __init__(self):
        self.port, config = free_port(), WORK / "otelcol-run.yaml"
        config.write_text(json.dumps({
            "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"127.0.0.1:{self.port}"}}}},
            "exporters": {"debug": {"verbosity": "detailed"}},
            "service": {
                "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["debug"]}},
                "telemetry": {"metrics": {"level": "none"}},
            },
        }))
        super().__init__("otelcol", [str(self.PROGRAM), f"--config={config}"])

    def is_ready(self):
        self.check_alive()
        try:
            # It answers, whatever it thinks of a GET.
            return request(self.port, "/v1/traces").status == 405
        except OSError:
            return False


def chat(text, stream, tokens=20):
    return {
        "model": "mock", "stream": stream, "max_tokens": tokens, "messages": [{"role": "user", "content": text}],
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }


def rows():
    """docs/metrics.md: kind and labels by name."""
    found = {}
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if row := re.match(r"\| `(kvlane_\w+)` \| (\w+) \| [^|]*\| ([^|]*)\|", line):
            found[row[1]] = (row[2], set(re.findall(r"`(\w+)`", row[3])))
    return found


class Deployed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.collector = Collector()
        cls.mocks = [Mock(number) for number in range(3)]
        for mock in cls.mocks:
            cls.addClassCleanup(mock.stop)
        start(cls.mocks)
        own, other = (f"127.0.0.1:{free_port()}" for _ in range(2))
        cls.sibling = Gateway(cls.mocks, "round_robin", "--replicas-listen", other, "--replicas-peer", own)
        cls.addClassCleanup(cls.sibling.stop)
        cls.gateway = Gateway(
            cls.mocks, "fleet_cost", "--replicas-listen", own, "--replicas-peer", other, "--otlp-traces-endpoint", cls.collector.url, "--set", "tracing.interval=100ms",
            "--health-check-interval-secs", "1", "--cb-failure-threshold", "1",
            "--log-format", "json", "--log-level", "info,kvlane::access=debug",
        )
        cls.addClassCleanup(cls.gateway.stop)
        cls.prometheus = Prometheus(cls.gateway.admin_port)
        cls.addClassCleanup(cls.prometheus.stop)
        until("Prometheus is ready", cls.prometheus.is_ready)
        until("it has scraped", lambda: cls.prometheus.value('up{job="kvlane"}') == 1.0)
        cls.run_traffic()

    @classmethod
    def run_traffic(cls):
        """Conversations, streamed and whole, some that go wrong, and a worker that is killed."""
        port = cls.gateway.port
        for turn in range(8):
            # Rates want samples on either side.
            time.sleep(0.6)
            for number in range(6):
                text = f"conversation {number}, " + "and so on, " * 60 * (turn + 1)
                headers = {"traceparent": CALLER} if (turn, number) == (3, 3) else {}
                answer = request(port, CHAT, chat(text, number % 2 == 0), headers=headers)
                assert answer.status == 200, answer.body
                assert "engine;dur=" in answer.headers["server-timing"], answer.headers
            assert request(port, CHAT, b"{").status == 400
            assert request(port, CHAT, chat("a", False) | {"model": "nobody"}).status == 404
        # Some are answered when a worker dies, whose span fails: the next one may already find the worker gone, because the
        # gateway looks for it when its connections close.
        long = [begin(port, CHAT, chat(f"long {number} " * 50, True, tokens=2000)) for number in range(9)]
        at = [answer.headers["x-router-backend"] for _, answer in long]
        victim = next(mock for mock in cls.mocks if mock.url in at)
        victim.kill()
        for connection, answer in long:
            answer.read()
            connection.close()
        for number in range(12):
            request(port, CHAT, chat(f"afterwards {number} " * 50, False))
        until("the worker is down", lambda: victim.url not in cls.gateway.healthy())
        time.sleep(3)

    def test_promtool_finds_nothing_wrong(self):
        prometheus = DEPLOY / "prometheus"
        for arguments in [
            ["check", "config", str(prometheus / "prometheus.yaml")],
            ["check", "rules", str(prometheus / "alerts.yaml")],
            ["test", "rules", str(ROOT / "e2e" / "prometheus" / "alerts.test.yaml")],
        ]:
            done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, f"{arguments}: {done.stdout}{done.stderr}")

    def test_every_alert_is_loaded_and_tested(self):
        alerts = {
            rule["name"]: rule for group in self.prometheus.ask("rules")["groups"] for rule in group["rules"]
        }
        tested = (ROOT / "e2e" / "prometheus" / "alerts.test.yaml").read_text()
        self.assertGreater(len(alerts), 15)
        for name, rule in alerts.items():
            self.assertEqual((rule["health"], rule.get("lastError")), ("ok", None), name)
            self.assertIn(f'alertname="{name}"', tested)
            self.assertTrue(rule["annotations"]["summary"] and rule["annotations"]["action"], name)

    def test_a_worker_that_is_killed_sets_its_alert_off(self):
        def pending():
            alerts = self.prometheus.ask("alerts")["alerts"]
            return {alert["labels"]["alertname"] for alert in alerts} >= {"KvlaneWorkerDown"}

        until("the alert is pending", pending)

    def test_every_metric_is_as_its_row_says(self):
        known = rows()
        self.assertGreater(len(known), 50)
        series = self.prometheus.ask("series", **{"match[]": '{__name__=~"kvlane_.*"}'})
        # A label that is empty is none to Prometheus, so what counts is those of all series of a name.
        seen = {}
        for one in series:
            name = one.pop("__name__")
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            row = known.get(name) or known.get(base)
            self.assertIsNotNone(row, f"docs/metrics.md does not have {name}")
            labels = set(one) - {"job", "instance", "le"}
            self.assertLessEqual(labels, row[1], f"labels of {name}")
            seen.setdefault(name if name in known else base, set()).update(labels)
        kinds = self.prometheus.ask("metadata")
        for name, labels in seen.items():
            self.assertEqual(labels, known[name][1], f"labels of {name}")
            # Of a counter OpenMetrics tells the type under its name without `_total`.
            told = kinds.get(name) or kinds.get(name.removesuffix("_total"))
            self.assertEqual(told and told[0]["type"], known[name][0], name)
        self.assertGreater(len(seen), 40, sorted(set(known) - set(seen)))

    def test_every_query_for_autoscalers_has_an_answer(self):
        document = (ROOT / "docs" / "autoscaling.md").read_text()
        queries = re.findall(r"```promql\n(.+?)\n```", document, re.DOTALL)
        queries += re.findall(r"^ +query: (.+)$", document, re.MULTILINE)
        self.assertGreater(len(queries), 6)
        known = set(rows())
        for promql in queries:
            for name in re.findall(r"kvlane_\w+", promql):
                self.assertIn(name, known, promql)
            found = self.prometheus.ask("query", query=promql)["result"]
            self.assertEqual(len(found), 1, f"{promql}: {found}")
            self.assertGreaterEqual(float(found[0]["value"][1]), 0.0, promql)

    def test_every_panel_of_the_dashboard_shows_something(self):
        written = json.loads((DEPLOY / "grafana" / "kvlane.json").read_text())
        panels = [panel for panel in written["panels"] if panel["type"] != "row"]
        self.assertGreater(len(panels), 25)
        known = set(rows())
        empty = []
        for panel in panels:
            self.assertEqual(panel["datasource"]["uid"], "${datasource}", panel["title"])
            found = 0
            for target in panel["targets"]:
                promql = target["expr"].replace("$__rate_interval", "1m")
                promql = re.sub(r"\$(job|model|worker)", ".*", promql)
                self.assertNotIn("$", promql)
                for name in re.findall(r"kvlane_\w+", promql):
                    base = re.sub(r"_(bucket|sum|count)$", "", name)
                    self.assertTrue({name, base} & known, f"{panel['title']}: there is no {name}")
                result = self.prometheus.ask("query", query=promql)["result"]
                found += sum(value["value"][1] != "NaN" for value in result)
            if not found and panel["title"] not in QUIET:
                empty.append(panel["title"])
        self.assertEqual(empty, [], "panels without data")

    def test_the_dashboard_is_one_that_grafana_knows(self):
        written = json.loads((DEPLOY / "grafana" / "kvlane.json").read_text())
        read = grafana.Dashboard.from_json(written)
        self.assertEqual((read.title, read.uid), ("kvlane", "kvlane"))
        self.assertEqual(len(read.panels), len(written["panels"]))
        ids = [panel["id"] for panel in written["panels"]]
        self.assertEqual(len(set(ids)), len(ids))
        taken = set()
        for panel in written["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            self.assertFalse(cells & taken, f"{panel['title']} lies on another")
            self.assertLessEqual(at["x"] + at["w"], 24)
            taken |= cells
        for variable in [each for each in written["templating"]["list"] if each["type"] == "query"]:
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()
            self.assertTrue(self.prometheus.ask(f"label/{label}/values", **{"match[]": metric}), variable["name"])

    def test_stages_in_prometheus_are_those_of_the_headers(self):
        """Every request that got a pool is counted once in each stage it went through."""
        placed = self.prometheus.value('kvlane_stage_seconds_count{stage="place"}')
        engine = self.prometheus.value('kvlane_stage_seconds_count{stage="engine"}')
        answered = self.prometheus.value('sum(kvlane_requests_total{code="200"})')
        self.assertGreaterEqual(placed, engine)
        self.assertEqual(engine, answered)

    def test_spans_are_what_opentelemetry_reads(self):
        trace_id = CALLER[3:35]
        spans = until("the trace is told", lambda: self.collector.trace(trace_id))
        resource, _ = spans[0]
        self.assertEqual(resource["service.name"], "kvlane")
        by_name = {span.name: span for _, span in spans}
        root, attempt = by_name["POST " + CHAT], by_name["chat mock"]
        self.assertEqual(root.parent_span_id.hex(), CALLER[36:52])
        self.assertEqual((root.kind, attempt.kind), (2, 3))
        self.assertEqual(attempt.parent_span_id, root.span_id)
        told = {each["key"]: next(iter(each["value"].values())) for each in MessageToDict(attempt)["attributes"]}
        self.assertEqual(told["gen_ai.operation.name"], "chat")
        self.assertGreater(int(told["gen_ai.usage.input_tokens"]), 0)
        self.assertEqual(int(told["gen_ai.usage.output_tokens"]), 20)
        for _, span in spans:
            self.assertLessEqual(root.start_time_unix_nano, span.start_time_unix_nano)
            self.assertLessEqual(span.end_time_unix_nano, root.end_time_unix_nano)
        self.assertLess(abs(root.start_time_unix_nano / 1e9 - time.time()), 600)
        failed = [span for _, span in self.collector.spans if span.status.code == 2]
        self.assertTrue(failed, "the killed worker failed a request")

    def test_logs_are_objects_and_requests_have_their_ids_in_them(self):
        lines = [json.loads(line) for line in self.gateway.log.read_text().splitlines()]
        for line in lines:
            self.assertLessEqual({"timestamp", "level", "target", "message"}, set(line), line)
        requests = [line for line in lines if line["target"] == "kvlane::access"]
        self.assertGreater(len(requests), 60)
        for line in requests:
            self.assertRegex(line["request_id"], r"^kvl-[0-9a-f]{26}$")
            self.assertRegex(line["trace_id"], r"^[0-9a-f]{32}$")
        traced = [line for line in requests if line["trace_id"] == CALLER[3:35]]
        self.assertEqual([(line["model"], line["status"], line["client_left"]) for line in traced], [("mock", 200, False)])
        self.assertNotIn("and so on", self.gateway.log.read_text(), "nothing of prompts")

    def test_spans_are_counted(self):
        sent = until("they are counted", lambda: self.prometheus.value('kvlane_trace_spans_total{outcome="sent"}'))
        self.assertGreater(sent, 400)
        self.assertLessEqual(sent, len(self.collector.spans))


@unittest.skipUnless(RealCollector.PROGRAM.exists(), "no collector: OTELCOL=1 e2e/prometheus/setup.sh builds one")
class Collected(unittest.TestCase):
    def test_a_real_collector_takes_every_span(self):
        collector = RealCollector()
        self.addCleanup(collector.stop)
        until("the collector is ready", collector.is_ready)
        mock = Mock(9)
        self.addCleanup(mock.stop)
        start([mock])
        endpoint = f"http://127.0.0.1:{collector.port}"
        gateway = Gateway([mock], "fleet_cost", "--otlp-traces-endpoint", endpoint, "--set", "tracing.interval=10ms")
        self.addCleanup(gateway.stop)
        headers = {"traceparent": CALLER, "tracestate": "vendor=1"}
        self.assertEqual(request(gateway.port, CHAT, chat("hello", True), headers=headers).status, 200)
        self.assertEqual(request(gateway.port, CHAT, b"{", headers=headers).status, 400)
        log = until("both are told", lambda: (text := collector.log.read_text()).count("POST " + CHAT) >= 2 and text)
        for told in [
            f"Trace ID       : {CALLER[3:35]}", f"Parent ID      : {CALLER[36:52]}", "TraceState     : vendor=1",
            "Name           : chat mock", "Kind           : Client", "Kind           : Server", "Kind           : Internal",
            "service.name: Str(kvlane)", "gen_ai.operation.name: Str(chat)", "gen_ai.usage.output_tokens: Int(20)",
            "http.response.status_code: Int(400)",
        ]:
            self.assertIn(told, log)

        def outcomes():
            text = request(gateway.admin_port, "/metrics").body.decode()
            return dict(re.findall(r'kvlane_trace_spans_total\{outcome="(\w+)"\} (\d+)', text))

        sent = until("they are counted", lambda: outcomes().get("sent"))
        self.assertEqual(set(outcomes()), {"sent"})
        self.assertEqual(int(sent), log.count("Span #"))


if __name__ == "__main__":
    unittest.main()
