// The dashboard. Once a second it reads /fleet, /history and /decisions from its own port, and shows them.
// Text reaches the page as text only. The key is only in this tab's session storage and in the Authorization header.

const EVERY_MS = 1000;
const EVERY_HIDDEN_MS = 10_000;
const PATIENCE_MS = 5000;
const DECISIONS_KEPT = 60;
const CHANGES_KEPT = 60;
const TREND_POINTS = 90;
const MAP_FROM = 13;
const PROBLEMS_SHOWN = 12;
const RATE_SAMPLES = 11;

const $ = id => document.getElementById(id);

// === Elements ===

function make(tag, traits = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(traits)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== undefined && child !== null && child !== false));
  return element;
}

function draw(tag, traits = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(traits)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Writes only on a change: an unchanged cell costs no layout, and a screen reader does not announce it. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setClass(element, name) {
  if (element.getAttribute("class") !== name) element.setAttribute("class", name);
}

// === Formatting ===

const whole = new Intl.NumberFormat("en");

function count(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 9.995e8) return (value / 1e9).toFixed(size < 9.995e9 ? 2 : 1) + "B";
  if (size >= 999_500) return (value / 1e6).toFixed(size < 9.995e6 ? 2 : 1) + "M";
  if (size >= 9995) return (value / 1e3).toFixed(size < 99_950 ? 1 : 0) + "k";
  if (size >= 100 || Number.isInteger(value)) return whole.format(Math.round(value));
  return value.toFixed(size < 9.95 ? 2 : 1);
}

function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size < 0.000_95) return (value * 1e6).toFixed(0) + " µs";
  if (size < 0.009_95) return (value * 1e3).toFixed(1) + " ms";
  if (size < 0.9995) return (value * 1e3).toFixed(0) + " ms";
  if (size < 9.995) return value.toFixed(2) + " s";
  if (size < 119.5) return value.toFixed(size < 59.5 ? 1 : 0) + " s";
  if (size < 7170) return (value / 60).toFixed(0) + " min";
  return (value / 3600).toFixed(1) + " h";
}

function share(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const percent = value * 100;
  return (percent > 0 && percent < 9.95 || percent > 99 && percent < 100 ? percent.toFixed(1) : percent.toFixed(0)) + " %";
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

function ago(span) {
  return span < 1 ? "now" : span < 60 ? `${Math.floor(span)} s ago` : span < 3600 ? `${Math.floor(span / 60)} min ago` : `${Math.floor(span / 3600)} h ago`;
}

function plural(n, one, many = one + "s") { return `${whole.format(n)} ${n === 1 ? one : many}`; }

/** A worker's name without the scheme. */
function short(name) { return name === null || name === undefined ? "a removed worker" : name.replace(/^https?:\/\//, ""); }

const STATES = {
  serving: "serving", draining: "draining", leaving: "leaving", joining: "not probed yet", failing: "does not answer", down: "down",
};
const SOURCES = {
  config: "the configuration", admin: "an operator", kubernetes: "Kubernetes", dns: "DNS", file: "the workers file",
};
const ROLES = {
  both: "prefill and decode", prefill: "prefill: computes prompts that other workers answer", decode: "decode: answers requests whose prompts others compute, and whole ones",
  encode: "encode only: no requests of its own",
};
const TRUST = {
  exact: ["exact", "Known from KV events; predictions are accurate"],
  degraded: ["degraded", "Known from KV events; recent predictions were wrong"],
  approximate: ["approximate", "Estimated from dispatched requests"],
  load_only: ["load only", "Cache content unknown; placed by load only"],
};
const BREAKERS = { closed: "closed", open: "open", half_open: "half-open" };
const FEEDS = { absent: "none", refused: "refused", syncing: "catching up", live: "live" };

// === State ===

const page = {
  key: sessionStorage.getItem("kvlane-key"),
  fleet: null,
  model: null,
  span: Number(localStorage.getItem("kvlane-span")) || 300,
  paused: false,
  history: null,
  decisions: [],
  decisionsAt: null,
  chosen: null,
  sort: null,
  find: "",
  sheet: null,
  before: new Map(),
  trends: new Map(),
  placed: new Map(),
  whatif: null,
  answeredAt: 0,
  costs: [],
};

// === Requests to the gateway ===

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function ask(path, method = "GET", body) {
  const headers = {};
  if (page.key) headers.authorization = `Bearer ${page.key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, {
    method, headers, body: body === undefined ? undefined : JSON.stringify(body),
    signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store", credentials: "omit", redirect: "error",
  });
  const told = await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(answer.status, told?.error?.message ?? `${method} ${path} answered ${answer.status}`);
  return told;
}

async function refresh() {
  const since = page.history ? `?since_s=${page.history.newest}` : "";
  const after = page.decisionsAt === null ? "" : `&since_s=${page.decisionsAt}`;
  const [fleet, history, decisions] = await Promise.all([
    ask("fleet"), ask(`history${since}`), ask(`decisions?limit=40&candidates=6${after}`),
  ]);
  if (page.fleet && fleet.now_s < page.fleet.now_s) {
    // The gateway has restarted: its clock starts at zero, and the kept data is obsolete.
    Object.assign(page, { history: null, decisions: [], decisionsAt: null, chosen: null });
    page.before.clear();
    page.trends.clear();
    page.placed.clear();
    page.fleet = fleet;
    noteChange("The gateway has restarted", "");
    return refresh();
  }
  // Without a shadow policy there is nothing to ask for.
  const whatif = fleet.pools.some(pool => pool.shadow_policy) ? await ask("whatif").catch(() => null) : null;
  const begun = performance.now();
  page.fleet = fleet;
  page.whatif = whatif;
  page.answeredAt = Date.now();
  keepHistory(history);
  keepDecisions(decisions);
  show();
  page.costs.push(performance.now() - begun);
  if (page.costs.length > 60) page.costs.shift();
}

let timer = 0;
let refreshing = false;

async function tick() {
  clearTimeout(timer);
  if (refreshing) return;
  refreshing = true;
  const begun = Date.now();
  try {
    await refresh();
    $("banner").hidden = true;
    if ($("app").hidden) open();
  } catch (error) {
    if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
      refreshing = false;
      return close(error);
    }
    trouble(error);
  }
  refreshing = false;
  showLive();
  if (page.paused) return;
  const every = document.hidden ? EVERY_HIDDEN_MS : EVERY_MS;
  timer = setTimeout(tick, Math.max(50, every - (Date.now() - begun)));
}

function trouble(error) {
  const silent = !(error instanceof Refused);
  const since = page.answeredAt ? ` The data shown is from ${clock(page.answeredAt)}.` : "";
  const what = silent && (error.name === "TimeoutError" || error instanceof TypeError)
    ? "The gateway does not answer."
    : `The data cannot be read: ${error.message}.`;
  if ($("app").hidden) {
    $("gate").hidden = false;
    setText($("gate-why"), what);
  } else {
    setText($("banner"), what + since);
    $("banner").hidden = false;
  }
}

function clock(ms) { return new Date(ms).toLocaleTimeString("en-GB"); }

/** The gateway's time in this machine's clock. */
function moment(at) { return page.answeredAt - (page.fleet.now_s - at) * 1000; }

// === The key ===

function open() {
  $("gate").hidden = true;
  $("app").hidden = false;
  $("leave").hidden = !page.key;
  show();
}

function close(error) {
  const tried = page.key !== null;
  page.key = null;
  page.fleet = null;
  page.history = null;
  page.decisions = [];
  page.decisionsAt = null;
  page.before.clear();
  sessionStorage.removeItem("kvlane-key");
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
  $("app").hidden = true;
  for (const emptied of ["tiles", "changes", "decision-list", "why", "index", "map", "problems", "start-command", "shadow-facts", "replica-own", "replica-problems"]) $(emptied).replaceChildren();
  $("endpoints").tBodies[0].replaceChildren();
  for (const table of ["replicas", "failures", "tenants"]) $(table).querySelector("tbody").replaceChildren();
  failuresShown = "";
  rows.clear();
  tiles.clear();
  $("gate").hidden = false;
  $("gate-why").className = error && tried ? "wrong" : "";
  setText($("gate-why"), error && (tried || error.status === 403) ? error.message : "This gateway needs an operator's key.");
  $("gate-key").value = "";
  $("gate-key").focus();
}

$("gate-form").addEventListener("submit", event => {
  event.preventDefault();
  page.key = $("gate-key").value.trim();
  $("gate-key").value = "";
  // The key is stored only once it is known to be valid.
  ask("fleet").then(() => sessionStorage.setItem("kvlane-key", page.key), () => {}).finally(tick);
});
$("leave").addEventListener("click", () => {
  clearTimeout(timer);
  close(null);
});

// === Kept data ===

function keepHistory(told) {
  const fresh = page.history ?? { newest: 0, ends: {}, pools: new Map() };
  const append = (kept, columns) => {
    for (const [name, values] of Object.entries(columns)) {
      if (!Array.isArray(values)) continue;
      const column = kept[name] ??= [];
      column.push(...values);
      if (column.length > told.rows_max) column.splice(0, column.length - told.rows_max);
    }
  };
  append(fresh.ends, told.ends);
  for (const pool of told.pools) {
    if (!fresh.pools.has(pool.model)) fresh.pools.set(pool.model, {});
    append(fresh.pools.get(pool.model), pool);
  }
  fresh.newest = fresh.ends.t_s?.at(-1) ?? 0;
  page.history = fresh;
}

function keepDecisions(told) {
  const seen = new Set(page.decisions.map(decision => decision.request));
  const fresh = [];
  for (const pool of told.pools) {
    for (const decision of pool.decisions) {
      if (!seen.has(decision.request)) fresh.push({ ...decision, model: pool.model, policy: pool.policy, cost_unit: pool.cost_unit });
    }
  }
  if (fresh.length === 0) return;
  page.decisions = [...fresh, ...page.decisions].sort((a, b) => b.at_s - a.at_s || b.request - a.request);
  page.decisionsAt = page.decisions[0].at_s;
  const chosen = page.decisions.find(decision => decision.request === page.chosen?.request);
  page.decisions.length = Math.min(page.decisions.length, DECISIONS_KEPT);
  // The open entry stays while it is open.
  if (chosen && !page.decisions.includes(chosen)) page.decisions.push(chosen);
}

/** Endpoints of the selected model, and workers that are in no pool yet. */
function endpoints() {
  const all = [];
  for (const worker of page.fleet.workers) {
    if (worker.endpoints.length === 0) all.push({ id: `${worker.id}/`, name: worker.url, worker, of: null });
    for (const of of worker.endpoints) {
      if (of.model === page.model) all.push({ id: `${worker.id}/${of.model}/${of.rank ?? ""}`, name: of.endpoint, worker, of });
    }
  }
  return all;
}

function pool() { return page.fleet.pools.find(pool => pool.model === page.model); }
function past() { return page.history?.pools.get(page.model) ?? {}; }
function last(values) { return values?.length ? values.at(-1) : null; }

// === Rendering ===

function show() {
  const models = page.fleet.pools.map(pool => pool.model);
  if (!models.includes(page.model)) page.model = models[0] ?? null;
  showModels(models);
  const all = endpoints();
  noteChanges();
  showSummary(all);
  showStart(all);
  showTiles(all);
  charts.forEach(chart => chart.show());
  showFleet(all);
  showFailures();
  showDecisions();
  showIndex(all);
  showTenants();
  showShadow();
  showReplicas();
  if (page.sheet) showSheet();
  $("add").hidden = !page.fleet.you.may_change;
  const who = page.fleet.you.name ? `${page.fleet.you.name}, ${page.fleet.you.role}` : page.fleet.you.may_change ? "no key needed" : page.fleet.you.role;
  setText($("about"), `kvlane ${page.fleet.version} · up ${seconds(page.fleet.now_s)} · ${who}`);
  const mean = page.costs.reduce((sum, cost) => sum + cost, 0) / Math.max(1, page.costs.length);
  setText($("cost"), page.costs.length ? `an update takes ${mean.toFixed(1)} ms in this browser` : "");
}

function showModels(models) {
  const select = $("model");
  if (select.options.length !== models.length || models.some((model, n) => select.options[n].value !== model)) {
    select.replaceChildren(...models.map(model => make("option", { value: model }, model)));
  }
  select.value = page.model ?? "";
  $("model-label").hidden = models.length < 2;
}

function showLive() {
  const live = $("live");
  const late = page.answeredAt && Date.now() - page.answeredAt > 3000;
  setClass(live, page.paused ? "live paused" : late ? "live late" : "live");
  setText(live.lastElementChild, page.paused ? "paused" : late ? ago((Date.now() - page.answeredAt) / 1000) : "live");
}

function tally(all) {
  const states = {};
  for (const { worker } of all) states[worker.state] = (states[worker.state] ?? 0) + 1;
  return states;
}

function showSummary(all) {
  const states = tally(all);
  const open = all.filter(({ of }) => of?.breaker?.state === "open").length;
  const parts = [];
  if (states.down) parts.push(`${plural(states.down, "endpoint")} down`);
  if (states.failing) parts.push(`${plural(states.failing, "endpoint does", "endpoints do")} not answer`);
  if (open) parts.push(`${plural(open, "breaker")} open`);
  const deaf = Object.keys(page.fleet.replicas?.problems ?? {}).length;
  if (deaf) parts.push(`${plural(deaf, "replica")} cannot be told anything`);
  const bad = parts.length > 0 || page.fleet.configuration.problem;
  const serving = states.serving ?? 0;
  if (page.fleet.configuration.problem) parts.push(`the configuration was rejected: ${page.fleet.configuration.problem}`);
  if (page.fleet.stopping) parts.push("the gateway is stopping");
  const rest = all.length === 0 ? "No endpoint" : serving === all.length ? `All ${plural(serving, "endpoint")} serving` : `${serving} of ${plural(all.length, "endpoint")} serving`;
  setText($("summary"), [rest, ...parts].join(" · "));
  setClass($("summary"), bad ? "trouble" : "");
  const mark = bad ? "● " : "";
  const title = `${mark}kvlane · ${serving}/${all.length} serving`;
  if (document.title !== title) document.title = title;
}

// === Figures at the top ===

const tiles = new Map();

function tile(name, figure, unit, more, values, title = "") {
  let shown = tiles.get(name);
  if (!shown) {
    const area = draw("path", { class: "area" });
    const line = draw("path", { class: "line" });
    const svg = draw("svg", { viewBox: "0 0 100 26", preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
    const number = make("span");
    const suffix = make("small");
    const note = make("div", { class: "more" });
    const root = make("div", { class: "tile", role: "group", "aria-label": name },
      make("div", { class: "name" }, name), make("div", { class: "figure" }, number, suffix), note, svg);
    shown = { root, number, suffix, note, area, line };
    tiles.set(name, shown);
    $("tiles").append(root);
  }
  if (shown.root.hidden) shown.root.hidden = false;
  setText(shown.number, figure);
  setText(shown.suffix, unit);
  setText(shown.note, more);
  if (shown.root.title !== title) shown.root.title = title;
  const points = buckets(values ?? [], 80).values;
  const top = Math.max(1e-9, ...points.filter(value => value !== null));
  const at = (value, n) => `${(100 * n / Math.max(1, points.length - 1)).toFixed(1)} ${(25 - 22 * (value ?? 0) / top).toFixed(1)}`;
  const line = points.length > 1 ? "M" + points.map(at).join("L") : "";
  shown.line.setAttribute("d", line);
  shown.area.setAttribute("d", line && `${line}L100 26L0 26Z`);
}

function showTiles(all) {
  const rows = past();
  const now = pool();
  const n = Math.min(page.span, rows.t_s?.length ?? 0);
  const recent = name => (rows[name] ?? []).slice(-n);
  const cache = fromCache.map(source => ({ ...source, values: source.of(rows) }));
  // The first source with a value is shown large, the others next to it.
  const told = ({ values }) => last(values) !== null && last(values) !== undefined;
  const cached = cache.find(source => told(source)) ?? cache[0];
  const others = cache.filter(other => other !== cached).map(other => told(other) ? `${other.name} ${share(last(other.values))}` : other.absent).filter(Boolean);
  const kv = all.map(({ of }) => of?.reported?.kv_usage_ratio).filter(value => value !== null && value !== undefined);
  const shed = Object.values(now?.shed ?? {}).reduce((sum, value) => sum + value, 0);
  tile("Requests", count(last(rows.requests)), "/s", `${count(last(rows.output_tokens))} output tokens/s`, recent("requests"));
  tile("TTFT", seconds(last(rows.ttft_p50_s)), "p50", `p90 ${seconds(last(rows.ttft_p90_s))} · p99 ${seconds(last(rows.ttft_p99_s))}`, recent("ttft_p50_s"));
  tile("Prompt tokens from cache", share(last(cached.values)), told(cached) ? cached.name : "", others.join(" · "), cached.values.slice(-n), cached.means);
  tile("In flight", count(last(rows.in_flight) ?? 0), "requests", `${count(last(rows.context_tokens))} tokens, ${count(last(rows.prefill_tokens))} prefill`, recent("context_tokens"));
  tile("KV cache", kv.length ? share(kv.reduce((sum, value) => sum + value, 0) / kv.length) : "–", "", kv.length ? `mean use, fullest ${share(Math.max(...kv))}` : "not reported", recent("kv_usage_ratio"));
  if (splits(all)) {
    const split = shareSplit(rows);
    tile("Split requests", share(last(split)), "", `transfer p50 ${seconds(last(rows.transfer_p50_s))} · p99 ${seconds(last(rows.transfer_p99_s))}`, split.slice(-n));
  } else if (tiles.has("Split requests")) tiles.get("Split requests").root.hidden = true;
  tile("Queue", count(now?.queued ?? 0), `of ${count(now?.queue_max ?? 0)}`, `${count(shed)} rejected since the start`, recent("queued"));
}

/** Whether requests are, or may be, split between two endpoints. */
function splits(all) {
  return (pool()?.totals.splits ?? 0) > 0 || all.some(({ worker }) => worker.role === "prefill" || worker.role === "decode");
}

/** The share of requests that are split. */
function shareSplit(columns) { return rolling(columns.splits, columns.requests, 10, 0); }

/** The share of prompt tokens from caches, by source. Engines' counters are read with their probes. */
const fromCache = [
  {
    name: "reported", of: columns => rolling(columns.cached_tokens, columns.input_tokens, 10), look: "c0 area",
    absent: "no usage in answers", means: "As answers report it: usage.prompt_tokens_details.cached_tokens. A stream has usage only if its client sets stream_options.include_usage",
  },
  {
    name: "engines' counters", of: columns => rolling(columns.engine_hit_tokens, columns.engine_queried_tokens, 30), look: "c1",
    means: "By the engines' own prefix cache counters in their /metrics, requests of others included",
  },
  {
    name: "predicted", of: columns => rolling(columns.predicted_cached_tokens, columns.prompt_tokens, 10), look: "c2 dash",
    means: "As kvlane predicted when it placed the requests: neither answers nor engines report it",
  },
];

/** Sums of one column over those of another, over several rows: the values of one second vary too much. */
function rolling(part, of, rows, least = 1) {
  const out = [];
  let [above, below] = [0, 0];
  for (let n = 0; n < (of?.length ?? 0); n += 1) {
    above += part[n] ?? 0;
    below += of[n] ?? 0;
    if (n >= rows) { above -= part[n - rows] ?? 0; below -= of[n - rows] ?? 0; }
    out.push(below > least ? Math.min(1, Math.max(0, above / below)) : null);
  }
  return out;
}

/** At most this many points: means of equal spans, no value for a span without data. */
function buckets(values, most) {
  if (values.length <= most) return { values, size: 1 };
  const size = Math.ceil(values.length / most);
  const out = [];
  for (let from = values.length % size; from < values.length; from += size) {
    const told = values.slice(from, from + size).filter(value => value !== null);
    out.push(told.length ? told.reduce((sum, value) => sum + value, 0) / told.length : null);
  }
  return { values: out, size };
}

// === Charts ===

const charts = [];
/** The row under the pointer, from the newest: the same in all charts. */
let pointed = null;

class Chart {
  /** `series` are `{name, of(columns), look}`; with `stack` they are stacked. */
  constructor({ title, unit, series, stack = false, top = null, columns = past, when = () => true }) {
    Object.assign(this, { title, unit, series, stack, fixedTop: top, columns, when, asTable: false, width: 400 });
    this.legend = make("div", { class: "legend" });
    this.values = series.map(({ name, look }) => {
      const value = make("b");
      this.legend.append(make("span", { class: look.split(" ")[0] }, make("i", { class: look.includes("dash") ? "dash" : "" }), name, value));
      return value;
    });
    this.rows = make("button", { class: "rows", "aria-pressed": "false", "aria-label": `${title}: as a table`, onclick: () => this.turn() }, "Table");
    this.svg = draw("svg", { tabindex: "0", role: "img" });
    this.told = make("div", { class: "told", tabindex: "0", hidden: true });
    this.root = make("section", { class: "chart", "aria-label": title }, make("div", { class: "top" }, make("h2", {}, title), this.rows, this.legend), this.svg, this.told);
    this.svg.addEventListener("pointermove", event => this.point(event));
    this.svg.addEventListener("pointerleave", () => pointAt(null));
    this.svg.addEventListener("blur", () => pointAt(null));
    this.svg.addEventListener("keydown", event => this.step(event));
    new ResizeObserver(entries => {
      this.width = Math.max(200, Math.round(entries[0].contentRect.width));
      if (page.fleet) this.show();
    }).observe(this.root);
    $("charts").append(this.root);
  }

  turn() {
    this.asTable = !this.asTable;
    this.rows.setAttribute("aria-pressed", this.asTable);
    setText(this.rows, this.asTable ? "Chart" : "Table");
    this.svg.toggleAttribute("hidden", this.asTable);
    this.told.hidden = !this.asTable;
    this.show();
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const x = (event.clientX - box.left - this.left) / (this.width - this.left);
    pointAt(Math.round((1 - Math.min(1, Math.max(0, x))) * page.span));
  }

  step(event) {
    const by = { ArrowLeft: 1, ArrowRight: -1, PageUp: 30, PageDown: -30, Home: page.span, End: -page.span }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    pointAt(Math.min(page.span, Math.max(0, (pointed ?? 0) + by)));
    say(`${pointed} seconds ago: ${this.series.map(({ name }, n) => `${name} ${this.values[n].textContent}`).join(", ")}`, true);
  }

  show() {
    const hidden = !this.when();
    if (this.root.hidden !== hidden) this.root.hidden = hidden;
    if (hidden) return;
    const columns = this.columns();
    const times = columns.t_s ?? [];
    const all = this.series.map(({ of }) => of(columns));
    const now = page.fleet.now_s;
    this.tell(times, all, now);
    if (this.asTable) return this.tabulate(times, all, now);
    const first = times.findIndex(t => t >= now - page.span);
    const lines = first < 0 ? all.map(() => []) : all.map(values => values.slice(first));
    const t = first < 0 ? [] : times.slice(first);
    const [width, height, left, bottom] = [this.width, 132, this.left = 44, 16];
    const thin = Math.max(1, Math.ceil(t.length / ((width - left) / 2)));
    const points = [];
    for (let from = t.length % thin; from < t.length; from += thin) {
      points.push({
        t: t[Math.min(t.length - 1, from + (thin >> 1))],
        values: lines.map(values => {
          let [sum, told] = [0, 0];
          for (let n = from; n < from + thin && n < values.length; n += 1) if (values[n] !== null) { sum += values[n]; told += 1; }
          return told ? sum / told : null;
        }),
      });
    }
    if (this.stack) for (const point of points) point.values.reduce((sum, value, n) => point.values[n] = sum + (value ?? 0), 0);
    // A series without data is not in the legend.
    this.series.forEach(({ seldom }, n) => {
      if (seldom) this.values[n].parentElement.hidden = !lines[n].some(value => value > 0);
    });
    const highest = Math.max(0, ...points.flatMap(point => point.values.map(value => value ?? 0)));
    const [top, step] = this.fixedTop ? [this.fixedTop, this.fixedTop / 2] : scale(highest, this.unit === seconds);
    const x = at => left + (width - left) * (1 - (now - at) / page.span);
    const y = value => 6 + (height - bottom - 6) * (1 - value / top);
    const parts = [];
    for (let value = 0; value <= top * 1.001; value += step) {
      const at = Math.round(y(value)) + .5;
      parts.push(draw("line", { class: "grid", x1: left, x2: width, y1: at, y2: at }));
      parts.push(draw("text", { x: left - 7, y: at + 3.5, "text-anchor": "end" }, value === 0 && this.unit === seconds ? "0" : this.unit(value).replace(".00", "")));
    }
    for (const [part, anchor] of [[0, "start"], [.5, "middle"], [1, "end"]]) {
      const back = page.span * (1 - part);
      parts.push(draw("text", { x: left + (width - left) * part, y: height - 2, "text-anchor": anchor }, back === 0 ? "now" : back >= 60 ? `−${back / 60} min` : `−${back} s`));
    }
    const order = this.stack ? [...this.series.keys()].reverse() : [...this.series.keys()].reverse();
    for (const n of order) {
      const { look } = this.series[n];
      const runs = [];
      let run = [];
      for (const point of points) {
        if (point.values[n] === null) { if (run.length) runs.push(run); run = []; } else run.push(point);
      }
      if (run.length) runs.push(run);
      const line = runs.map(run => "M" + run.map(point => `${x(point.t).toFixed(1)} ${y(point.values[n]).toFixed(1)}`).join("L") + (run.length === 1 ? "h1.5" : "")).join("");
      if (!line) continue;
      if (this.stack || look.includes("area")) {
        const area = this.stack
          ? runs.map(run => "M" + run.map(point => `${x(point.t).toFixed(1)} ${y(point.values[n]).toFixed(1)}`).join("L") + "L" + [...run].reverse().map(point => `${x(point.t).toFixed(1)} ${y(n ? point.values[n - 1] : 0).toFixed(1)}`).join("L") + "Z").join("")
          : runs.map(run => "M" + run.map(point => `${x(point.t).toFixed(1)} ${y(point.values[n]).toFixed(1)}`).join("L") + `L${x(run.at(-1).t).toFixed(1)} ${y(0)}L${x(run[0].t).toFixed(1)} ${y(0)}Z`).join("");
        parts.push(draw("path", { class: `fill ${this.stack ? "solid" : "soft"} ${look}`, d: area }));
      }
      if (!this.stack) parts.push(draw("path", { class: look, d: line }));
    }
    if (pointed !== null) parts.push(draw("line", { class: "cursor", x1: x(now - pointed), x2: x(now - pointed), y1: 4, y2: height - bottom }));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...parts);
  }

  /** The values at the pointer, or the newest. */
  tell(times, all, now) {
    let row = times.length - 1;
    if (pointed !== null) {
      row = times.findIndex(t => t >= now - pointed - .5);
      if (row < 0) row = times.length - 1;
    }
    const values = all.map(values => this.unit(values[row] ?? null));
    this.values.forEach((value, n) => setText(value, values[n]));
    const label = `${this.title}: ${this.series.map(({ name }, n) => `${name} ${values[n]}`).join(", ")}. Arrow keys go back in time.`;
    // Not each second, so that a screen reader can read it to the end.
    if (document.activeElement !== this.svg) this.svg.setAttribute("aria-label", label);
  }

  /** One row per thirtieth of the span. */
  tabulate(times, all, now) {
    const every = Math.max(1, Math.round(page.span / 30));
    const body = [];
    for (let row = times.length - 1; row >= 0 && times[row] >= now - page.span; row -= every) {
      body.push(make("tr", {}, make("td", {}, clock(moment(times[row]))), ...all.map(values => make("td", {}, this.unit(values[row] ?? null)))));
    }
    const head = make("tr", {}, make("th", { scope: "col" }, "Time"), ...this.series.map(({ name }) => make("th", { scope: "col" }, name)));
    const scrolled = this.told.scrollTop;
    this.told.replaceChildren(make("table", { class: "small" }, make("caption", { class: "unseen" }, this.title), make("thead", {}, head), make("tbody", {}, ...body)));
    this.told.scrollTop = scrolled;
  }
}

function pointAt(back) {
  if (pointed === back) return;
  pointed = back;
  if (page.fleet) charts.forEach(chart => chart.show());
}

/** A round top that holds `highest`, and the step of the lines below it. */
function scale(highest, ofTime) {
  const least = ofTime ? 0.01 : 1;
  const value = Math.max(highest * 1.05, least);
  const power = 10 ** Math.floor(Math.log10(value));
  const top = [1, 2, 4, 5, 10].map(n => n * power).find(top => top >= value * .999);
  return [top, top / 2];
}

const column = name => columns => columns[name] ?? [];

function openCharts() {
  charts.push(
    new Chart({ title: "TTFT", unit: seconds, series: [
      { name: "p50", of: column("ttft_p50_s"), look: "c0" },
      { name: "p90", of: column("ttft_p90_s"), look: "c1" },
      { name: "p99", of: column("ttft_p99_s"), look: "c2" },
    ] }),
    new Chart({ title: "Prompt tokens from cache", unit: share, top: 1, series: fromCache }),
    new Chart({ title: "Requests per second", unit: count, stack: true, columns: () => page.history?.ends ?? {}, series: [
      { name: "answered", of: column("answered"), look: "c1" },
      { name: "refused (4xx)", of: column("refused"), look: "c2", seldom: true },
      { name: "rejected (429)", of: column("shed"), look: "c-warn", seldom: true },
      { name: "failed (5xx)", of: column("failed"), look: "c-bad", seldom: true },
      { name: "client left", of: column("left"), look: "c-mute", seldom: true },
    ] }),
    new Chart({ title: "TPOT", unit: seconds, series: [
      { name: "p50", of: column("tpot_p50_s"), look: "c0" },
      { name: "p99", of: column("tpot_p99_s"), look: "c2" },
    ] }),
    new Chart({ title: "Queue", unit: count, series: [
      { name: "in flight", of: column("in_flight"), look: "c1 area" },
      { name: "queued", of: column("queued"), look: "c0" },
      { name: "rejected/s", of: column("shed"), look: "c-warn", seldom: true },
    ] }),
    new Chart({ title: "Tokens in flight", unit: count, series: [
      { name: "prompt and output", of: column("context_tokens"), look: "c1 area" },
      { name: "prefill", of: column("prefill_tokens"), look: "c0" },
    ] }),
    new Chart({ title: "KV transfer and first step", unit: seconds, when: () => splits(endpoints()), series: [
      { name: "p50", of: column("transfer_p50_s"), look: "c0" },
      { name: "p99", of: column("transfer_p99_s"), look: "c2" },
    ] }),
    new Chart({ title: "Split share of requests", unit: share, top: 1, when: () => splits(endpoints()), series: [
      { name: "split", of: shareSplit, look: "c1 area" },
    ] }),
  );
}

// === The fleet ===

const COLUMNS = [
  { name: "Endpoint", by: row => row.name },
  { name: "Load in tokens", by: row => row.of?.context_tokens ?? -1, wide: true },
  { name: "KV cache", by: row => row.of?.reported?.kv_usage_ratio ?? -1 },
  { name: "Cached", by: row => holds(row.of)?.tokens ?? -1 },
  { name: "Requests", by: row => row.of?.traffic?.requests ?? -1 },
  { name: "TTFT", by: row => row.of?.traffic?.ttft_p50_s ?? -1 },
  { name: "Errors", by: row => failed(row.of) },
  { name: "Rejected", by: row => row.of?.traffic?.rejected ?? -1 },
  { name: "Knowledge", by: row => ["load_only", "approximate", "degraded", "exact"].indexOf(row.of?.knowledge) },
  { name: "Feed lag", by: row => row.of?.feed?.lag_s ?? -1 },
  { name: "Last 90 s", by: null },
];

/** Requests that failed at an endpoint. */
function failed(of) { return Object.values(of?.traffic?.failed ?? {}).reduce((sum, n) => sum + n, 0); }

/** Requests per second at an endpoint over the last samples of this page; null while there is one sample. */
function rate(id, placed) {
  const samples = page.placed.get(id) ?? [];
  samples.push({ at: page.fleet.now_s, placed });
  if (samples.length > RATE_SAMPLES) samples.shift();
  page.placed.set(id, samples);
  const [first] = samples;
  const span = page.fleet.now_s - first.at;
  return span > 0 ? Math.max(0, placed - first.placed) / span : null;
}

/** The tokens that an endpoint holds: by its KV events while they are used, else by dispatches. */
function holds(of) {
  if (!of?.holds) return null;
  const told = of.feed?.state === "live";
  const room = of.reported?.kv_capacity_tokens ?? Infinity;
  const sent = of.holds.dispatches_tokens;
  // Evictions of dispatched tokens are not known: at most the size of the cache.
  return told ? { tokens: of.holds.events_tokens, told, most: false } : { tokens: Math.min(sent, room), told, most: sent > room };
}

const rows = new Map();
/** A line that is not visible is not drawn. */
const inView = new IntersectionObserver(entries => {
  const seen = new Map(entries.map(entry => [entry.target, entry.isIntersecting]));
  for (const row of rows.values()) if (seen.has(row.root)) row.inView = seen.get(row.root);
});

function openFleet() {
  const head = $("endpoints").tHead.rows[0];
  COLUMNS.forEach(({ name, by }, n) => {
    const cell = make("th", { scope: "col" }, by ? make("button", { type: "button", onclick: () => sortBy(n) }, name) : name);
    head.append(cell);
  });
}

function sortBy(n) {
  const falls = n !== 0;
  page.sort = page.sort?.n === n ? (page.sort.falls === falls ? { n, falls: !falls } : null) : { n, falls };
  [...$("endpoints").tHead.rows[0].cells].forEach((cell, at) => {
    if (page.sort?.n === at) cell.setAttribute("aria-sort", page.sort.falls ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
  sortedAt = 0;
  showFleet(endpoints());
}

function newRow(id) {
  const dot = make("span", { class: "dot", role: "img" });
  const name = make("button", { class: "link", type: "button", onclick: () => openSheet(id) });
  const note = make("span", { class: "note" });
  const role = make("span", { class: "tag second", hidden: true });
  const meter = (...parts) => {
    const value = make("span", { class: "value" });
    return { value, root: make("div", { class: "meter" }, make("span", { class: "track", "aria-hidden": "true" }, ...parts), value) };
  };
  const [prefill, context, used] = [make("i", { class: "first" }), make("i"), make("i")];
  const [load, kv] = [meter(prefill, context), meter(used)];
  const trust = make("span", { class: "trust" }, make("span", { class: "bars", "aria-hidden": "true" }, make("i"), make("i"), make("i")), make("span"));
  const [held, requests, ttft, errors, rejected, feed] = Array.from({ length: 6 }, () => make("span"));
  const line = draw("path");
  const trend = draw("svg", { class: "trend", viewBox: "0 0 96 20", "aria-hidden": "true" }, line);
  const cells = [make("div", { class: "who" }, dot, name, role, note), load.root, kv.root, held, requests, ttft, errors, rejected, trust, feed, trend];
  const root = make("tr", {}, ...cells.map((cell, n) => make("td", {
    "data-name": COLUMNS[n].name, class: [COLUMNS[n].wide && "wide", cell === trend && "trend-cell"].filter(Boolean).join(" ") || undefined,
  }, cell)));
  const square = make("b", { onclick: () => openSheet(id) });
  inView.observe(root);
  return { inView: true, id, root, dot, name, role, note, prefill, context, load: load.value, used, kv: kv.value, held, requests, ttft, errors, rejected, trust, feed, line, square };
}

function width(element, part) {
  const value = `${Math.round(1000 * Math.min(1, Math.max(0, part || 0))) / 10}%`;
  if (element.style.width !== value) element.style.width = value;
}

/** The problem of an endpoint, in a few words, and its severity. The whole text is in the list above the table. */
function ailment({ worker, of }) {
  switch (worker.state) {
    case "down": return ["bad", "down"];
    case "failing": return ["bad", `does not answer (${worker.failed_probes} of ${page.fleet.probes.failure_threshold} probes failed)`];
    case "joining": return ["off", "not probed yet"];
    case "leaving": return ["off", "is removed when its last request ends"];
    case "draining": return ["off", "draining"];
  }
  if (worker.role === "encode") return ["off", "it gets no requests"];
  if (of?.breaker?.state === "open") return ["warn", `its circuit breaker is open${of.breaker.opens_for_s > 0 ? ` for ${seconds(of.breaker.opens_for_s)}` : ""}`];
  if (of?.breaker?.state === "half_open") return ["warn", "its circuit breaker allows one request"];
  if (worker.parity.state === "mismatch") return ["warn", "counts tokens differently from the gateway"];
  if (of?.busy_for_s) return ["warn", `busy, it says, for ${seconds(of.busy_for_s)}`];
  if (of?.feed && (of.feed.state === "refused" || of.feed.problem)) return ["warn", "its KV event feed cannot be used"];
  return ["", ""];
}

/** The problems of all workers, with cause and remedy, and the names of those that have each of them. */
function problems(all) {
  const found = new Map();
  const note = (severity, what, text, name) => {
    const known = found.get(what + text) ?? { severity, what, text, names: new Set() };
    known.names.add(short(name));
    found.set(what + text, known);
  };
  for (const { worker, of } of all) {
    if (worker.problem) note("bad", "down", worker.problem, worker.url);
    if (worker.state !== "down" && worker.parity.state === "mismatch" && worker.parity.why) note("warn", "token counts", worker.parity.why, worker.url);
    if (worker.state !== "down" && of?.feed?.problem) note("warn", "KV event feed", of.feed.problem, of.endpoint);
  }
  return [...found.values()].sort((a, b) => (a.severity === "bad" ? 0 : 1) - (b.severity === "bad" ? 0 : 1));
}

let problemsShown = "";

function showProblems(all) {
  const found = problems(all);
  const shown = found.slice(0, PROBLEMS_SHOWN).map(({ severity, what, text, names }) => {
    const named = [...names];
    const more = named.length > 3 ? ` and ${plural(named.length - 3, "other")}` : "";
    return [severity, `${named.slice(0, 3).join(", ")}${more}`, what, text];
  });
  const left = found.length - shown.length;
  const mark = JSON.stringify([shown, left]);
  if (mark === problemsShown && $("problems").childElementCount === shown.length + (left > 0 ? 1 : 0)) return;
  problemsShown = mark;
  $("problems").hidden = shown.length === 0;
  $("problems").replaceChildren(
    ...shown.map(([severity, names, what, text]) => make("li", { class: severity }, make("b", {}, names), ` ${what}: `, text)),
    ...left > 0 ? [make("li", { class: "muted" }, `and ${plural(left, "more problem")}: GET /workers lists all`)] : []);
}

let sortedAt = 0;

function showFleet(all) {
  const body = $("endpoints").tBodies[0];
  const most = Math.max(1000, ...all.map(({ of }) => of?.context_tokens ?? 0));
  const wanted = page.find.toLowerCase();
  const here = new Set();
  for (const row of all) {
    here.add(row.id);
    let shown = rows.get(row.id);
    if (!shown) {
      shown = newRow(row.id);
      rows.set(row.id, shown);
      body.append(shown.root);
      $("map").append(shown.square);
      sortedAt = 0;
    }
    showRow(shown, row, most);
    const hidden = wanted !== "" && !`${row.name} ${row.worker.role} ${row.worker.state} ${row.of?.knowledge ?? ""} ${shown.note.textContent}`.toLowerCase().includes(wanted);
    if (shown.root.hidden !== hidden) shown.root.hidden = hidden;
  }
  for (const [id, shown] of rows) {
    if (here.has(id)) continue;
    inView.unobserve(shown.root);
    shown.root.remove();
    shown.square.remove();
    rows.delete(id);
    page.trends.delete(id);
    page.placed.delete(id);
  }
  showProblems(all);
  // Rows keep their place, because rows that move each second cannot be read.
  if (Date.now() - sortedAt > 5000) order(all, body);
  $("find-label").hidden = all.length < MAP_FROM;
  $("map").hidden = all.length < MAP_FROM;
  const states = tally(all);
  const words = Object.entries(states).filter(([state]) => state !== "serving").map(([state, n]) => `${n} ${STATES[state]}`);
  setText($("fleet-note"), [plural(all.length, "endpoint"), ...words, page.model ?? "", pool()?.policy ?? ""].filter(Boolean).join(" · "));
  $("fleet-empty").hidden = all.length > 0;
  $("fleet-scroll").hidden = all.length === 0;
  setText($("fleet-empty"), "There are no workers.");
}

function order(all, body) {
  sortedAt = Date.now();
  let sorted = all;
  if (page.sort) {
    const { by } = COLUMNS[page.sort.n];
    const sign = page.sort.falls ? -1 : 1;
    const key = new Map(all.map(row => [row, by(row)]));
    sorted = [...all].sort((a, b) => {
      const [x, y] = [key.get(a), key.get(b)];
      return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
    });
  }
  const wanted = sorted.map(row => rows.get(row.id).root);
  if (wanted.some((root, n) => body.rows[n] !== root)) {
    const focused = document.activeElement;
    body.append(...wanted);
    if (focused && body.contains(focused)) focused.focus({ preventScroll: true });
  }
}

function showRow(shown, { id, name, worker, of }, most) {
  const [severity, note] = ailment({ worker, of });
  setClass(shown.root, severity);
  setClass(shown.dot, `dot ${worker.state}`);
  shown.dot.setAttribute("aria-label", STATES[worker.state]);
  setText(shown.name, short(name));
  setText(shown.role, worker.role);
  shown.role.hidden = worker.role === "both";
  shown.role.title = ROLES[worker.role];
  setText(shown.note, note);
  if (shown.note.title !== note) shown.note.title = note;
  const [context, prefill] = [of?.context_tokens ?? 0, of?.prefill_tokens ?? 0];
  width(shown.prefill, prefill / most);
  width(shown.context, Math.max(0, context - prefill) / most);
  setText(shown.load, of ? `${count(context)} · ${count(of.requests ?? 0)} req` : "–");
  const used = of?.reported?.kv_usage_ratio;
  width(shown.used, used);
  setClass(shown.used, used > .9 ? "high" : "");
  setText(shown.kv, share(used));
  const held = holds(of);
  setText(shown.held, held ? `${held.most ? "≤ " : ""}${count(held.tokens)} tokens` : "–");
  shown.held.title = held ? (held.told ? "By its KV events" : "By dispatched requests") : "";
  showTraffic(shown, id, of?.traffic);
  // Of an engine that is down nothing is known.
  const known = worker.state === "down" ? undefined : of?.knowledge;
  const [trust, why] = TRUST[known] ?? ["–", ""];
  setClass(shown.trust, `trust ${known ?? ""}`);
  setText(shown.trust.lastElementChild, trust);
  shown.trust.title = why;
  const feed = of?.feed;
  setText(shown.feed, worker.state === "down" ? "–" : feed ? `${FEEDS[feed.state]}${feed.state === "live" && feed.lag_s !== null ? ` · ${seconds(Math.max(0, feed.lag_s))}` : ""}${feed.waiting ? ` · ${feed.waiting} waiting` : ""}` : "none");
  setClass(shown.feed, !feed || worker.state === "down" || feed.state === "live" ? "ok" : feed.state === "syncing" ? "is-warn" : "is-bad");
  const trend = page.trends.get(id) ?? [];
  trend.push(context);
  if (trend.length > TREND_POINTS) trend.shift();
  page.trends.set(id, trend);
  const from = TREND_POINTS - trend.length;
  if (shown.inView) shown.line.setAttribute("d", "M" + trend.map((value, n) => `${(96 * (from + n) / (TREND_POINTS - 1)).toFixed(1)} ${(19 - 18 * Math.min(1, value / most)).toFixed(1)}`).join("L"));
  setClass(shown.square, worker.state);
  const fill = `${Math.round(100 * (used ?? context / most))}%`;
  if (shown.square.style.getPropertyValue("--fill") !== fill) shown.square.style.setProperty("--fill", fill);
  if (shown.square.title !== name) shown.square.title = name;
}

/** Requests, TTFT, errors and rejections at an endpoint, since it joined. */
function showTraffic(shown, id, traffic) {
  if (!traffic) {
    for (const cell of [shown.requests, shown.ttft, shown.errors, shown.rejected]) setText(cell, "–");
    return;
  }
  const { requests, rejected } = traffic;
  const perSecond = rate(id, requests);
  setText(shown.requests, `${count(requests)}${perSecond ? ` · ${count(perSecond)}/s` : ""}`);
  shown.requests.title = "Placed there since it joined, retries included";
  setText(shown.ttft, seconds(traffic.ttft_p50_s));
  shown.ttft.title = traffic.ttft_p50_s === null ? "" : `p50 of its last streams, from the placement; p90 ${seconds(traffic.ttft_p90_s)}`;
  const kinds = Object.entries(traffic.failed);
  const errors = kinds.reduce((sum, [, n]) => sum + n, 0);
  setText(shown.errors, errors ? `${count(errors)} · ${share(errors / Math.max(errors, requests))}` : "0");
  setClass(shown.errors, errors > requests / 100 ? "is-bad" : "");
  shown.errors.title = kinds.map(([kind, n]) => `${kind.replaceAll("_", " ")} ${whole.format(n)}`).join(", ");
  setText(shown.rejected, rejected ? `${count(rejected)} · ${share(rejected / Math.max(rejected, requests))}` : "0");
  setClass(shown.rejected, rejected > requests / 100 ? "is-warn" : "");
  shown.rejected.title = "Answered 429 or 503 by its engine, which is busy";
}

$("find").addEventListener("input", event => {
  page.find = event.target.value.trim();
  showFleet(endpoints());
});

// === Decisions ===

function showDecisions() {
  const of = page.decisions.filter(decision => decision.model === page.model);
  const list = $("decision-list");
  const kept = pool()?.decisions_kept;
  setText($("decisions-note"), kept === 0 ? "routing.receipts is 0: none are kept" : "the last requests, and why each was placed where it was");
  const scrolled = list.scrollTop;
  // While the user has scrolled away from the newest entry, the list does not change.
  if (scrolled < 40 || list.childElementCount === 0) {
    list.replaceChildren(...of.map(decision => {
      const chosen = decision.request === page.chosen?.request;
      const held = decision.prompt_tokens ? (decision.prefill ?? decision).overlap_tokens / decision.prompt_tokens : 0;
      const bar = make("i");
      width(bar, held);
      return make("div", {
        class: "item", role: "option", id: `decision-${decision.request}`, "aria-selected": String(chosen),
        onclick: () => choose(decision.request),
      },
        make("span", { class: "to", title: decision.prefill ? "its prompt → its answer" : undefined }, decision.prefill ? `${short(decision.prefill.worker)} → ${short(decision.worker)}` : short(decision.worker)),
        make("span", { class: "when" }, ago(page.fleet.now_s - decision.at_s)),
        make("span", { class: "sub" }, `${decision.prefill ? "split, " : ""}${decision.reason_text}${decision.attempt ? ` · attempt ${decision.attempt + 1}` : ""}`),
        make("span", { class: "when" }, `${count(decision.prompt_tokens)} tokens`),
        make("span", { class: "held", title: `holds ${share(held)} of the prompt` }, bar));
    }));
    list.scrollTop = scrolled;
  }
  if (page.chosen) list.setAttribute("aria-activedescendant", `decision-${page.chosen.request}`);
  else list.removeAttribute("aria-activedescendant");
  const shown = page.chosen ?? of[0];
  if (shown) showWhy(shown);
  else $("why").replaceChildren(make("p", { class: "muted" }, "No request has been placed yet."));
}

async function choose(request) {
  const decision = page.decisions.find(decision => decision.request === request);
  if (!decision) return;
  page.chosen = page.chosen?.request === request ? null : decision;
  $("decision-list").scrollTop = Math.min($("decision-list").scrollTop, 39);
  showDecisions();
  if (!page.chosen || decision.candidates_left_out === 0) return;
  // The list has only the first candidates.
  const told = await ask(`decisions?request=${request}`).catch(() => null);
  const whole = told?.pools.flatMap(pool => pool.decisions)[0];
  if (whole) Object.assign(decision, whole);
  if (page.chosen === decision) showWhy(decision);
}

$("decision-list").addEventListener("keydown", event => {
  const of = page.decisions.filter(decision => decision.model === page.model);
  const at = of.findIndex(decision => decision.request === page.chosen?.request);
  const to = { ArrowDown: at + 1, ArrowUp: Math.max(0, at - 1), Home: 0, End: of.length - 1 }[event.key];
  if (event.key === "Escape") { page.chosen = null; showDecisions(); return; }
  if (to === undefined || !of[to]) return;
  event.preventDefault();
  if (to !== at) choose(of[to].request);
  $(`decision-${of[to].request}`)?.scrollIntoView({ block: "nearest" });
});

/** The selected ones first, then by cost, then by tokens held. */
function ranked(decision) {
  const cost = row => row.cost ?? Infinity;
  const first = row => row.worker === decision.worker ? 2 : row.worker === decision.prefill?.worker ? 1 : 0;
  return [...decision.candidates].sort((a, b) =>
    first(b) - first(a) || cost(a) - cost(b) || b.overlap_tokens - a.overlap_tokens || a.context_tokens - b.context_tokens);
}

const COST_UNITS = { seconds: "", tokens: " tokens", requests: " requests", score: "" };

/** A cost with its unit; a score has none. */
function cost(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "seconds") return seconds(value);
  return (Math.abs(value) >= 1000 ? count(value) : String(Number(value.toPrecision(3)))) + (COST_UNITS[unit] ?? "");
}

let whyShown = "";

function showWhy(decision) {
  const mark = `${decision.request} ${decision.candidates.length} ${page.chosen?.request === decision.request}`;
  if (whyShown === mark && $("why").childElementCount) return;
  whyShown = mark;
  const order = ranked(decision);
  const [picked, second] = order;
  const unit = decision.cost_unit;
  const said = make("p", { class: "said" }, "Placed on ", make("b", {}, short(decision.worker)), `: ${decision.reason_text}. `,
    `Predicted to be cached there: ${whole.format(decision.overlap_tokens)} of ${whole.format(decision.prompt_tokens)} prompt tokens`);
  said.append(decision.prompt_tokens ? ` (${share(decision.overlap_tokens / decision.prompt_tokens)}). ` : ". ");
  if (decision.prefill) {
    said.append("Its prompt is computed on ", make("b", {}, short(decision.prefill.worker)),
      `, predicted to have ${whole.format(decision.prefill.overlap_tokens)} of its tokens cached. `);
    const [best, other] = decision.pairs;
    if (best) said.append(`The split costs ${cost(best.cost, unit)}${other ? `, the next best ${cost(other.cost, unit)}` : ""}.`);
  } else if (second) {
    said.append("Next best: ", make("b", {}, short(second.worker)), `, with ${whole.format(second.overlap_tokens)} cached`);
    said.append(picked.cost !== null && second.cost !== null
      ? ` and a cost of ${cost(second.cost, unit)} against ${cost(picked.cost, unit)} for the pick${second.cost > 0 && picked.cost < second.cost ? `, ${share(1 - picked.cost / second.cost)} less` : ""}.`
      : ` and ${plural(second.requests, "request")} in flight against ${whole.format(picked.requests)} for the pick.`);
  } else said.append("There was no other candidate.");
  if (!decision.prefill && decision.pairs?.length) said.append(` Split, it would cost ${cost(decision.pairs[0].cost, unit)}.`);
  const traits = [
    `request ${decision.request}`, clock(moment(decision.at_s)), `policy ${decision.policy}`,
    decision.session && `conversation ${decision.session}`, decision.tenant && `tenant ${decision.tenant}`,
    decision.priority !== 0 && `priority ${decision.priority}`, decision.attempt > 0 && `attempt ${decision.attempt + 1}`,
    `about ${whole.format(decision.expected_output_tokens)} output tokens expected`, page.chosen?.request === decision.request && "pinned: select it again to unpin",
  ].filter(Boolean);
  const costs = order.map(row => row.cost).filter(value => value !== null && value !== undefined);
  const dearest = Math.max(...costs, 1e-12);
  const timed = order.some(row => row.predicted_ttft_s !== undefined);
  const bar = (part, value) => {
    const filled = make("i");
    width(filled, part);
    return make("div", { class: "meter" }, make("span", { class: "track", "aria-hidden": "true" }, filled), make("span", { class: "value" }, value));
  };
  const head = ["Candidate", "Cached", "In flight", "Prefill", timed && "TTFT", costs.length && `Cost${unit === "score" ? " (score)" : ""}`].filter(Boolean);
  const body = order.map((row, n) => make("tr", { class: row.worker === decision.worker ? "picked" : "" },
    make("td", {}, short(row.worker), row.worker === decision.worker ? make("span", { class: "tag" }, "picked")
      : row.worker === decision.prefill?.worker ? make("span", { class: "tag" }, "prefill") : n === 1 && make("span", { class: "tag second" }, "runner-up")),
    make("td", {}, bar(decision.prompt_tokens ? row.overlap_tokens / decision.prompt_tokens : 0, count(row.overlap_tokens)), ),
    make("td", {}, `${count(row.context_tokens)} `, make("span", { class: "unit" }, `· ${row.requests} req`)),
    make("td", {}, count(row.prefill_tokens + Math.max(0, decision.prompt_tokens - row.overlap_tokens))),
    timed && make("td", {}, seconds(row.predicted_ttft_s)),
    costs.length > 0 && make("td", {}, row.cost === null ? "–" : bar(row.cost / dearest, cost(row.cost, unit)))));
  const left = decision.candidates_left_out;
  $("why").replaceChildren(said, make("div", { class: "traits" }, ...traits.map(trait => make("span", {}, trait))),
    make("table", {}, make("caption", { class: "unseen" }, "Candidates as the policy saw them"), make("thead", {}, make("tr", {}, ...head.map(name => make("th", { scope: "col" }, name)))), make("tbody", {}, ...body)),
    left > 0 && make("p", { class: "muted" }, `and ${plural(left, "more candidate")}`) || "", pairTable(decision) ?? "");
}

const TERMS = { prompt_s: "Prompt", transfer_s: "Transfer", second_step_s: "Step", copy_s: "Copy", room_s: "Room", interrupted_s: "Stalls", decode_s: "Answer" };

/** The ways to split a request, by price, and the terms of each in seconds. */
function pairTable(decision) {
  const pairs = decision.pairs ?? [];
  if (pairs.length === 0) return null;
  const terms = Object.entries(TERMS).filter(([term]) => pairs.some(pair => pair.terms[term] > 0));
  const body = pairs.map(pair => {
    const picked = pair.worker === decision.worker && pair.prefill === decision.prefill?.worker;
    return make("tr", { class: picked ? "picked" : "" },
      make("td", {}, `${short(pair.prefill)} → ${short(pair.worker)}`), ...terms.map(([term]) => make("td", {}, seconds(pair.terms[term]))), make("td", {}, cost(pair.cost, decision.cost_unit)));
  });
  const head = ["Split", ...terms.map(([, name]) => name), "Cost"].map(name => make("th", { scope: "col" }, name));
  return make("table", {}, make("caption", { class: "unseen" }, "Ways to split the request, by price"), make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
}

// === The index ===

function showIndex(all) {
  const of = pool();
  if (!of) return $("index").replaceChildren();
  const feeds = all.map(row => row.of?.feed).filter(Boolean);
  const live = feeds.filter(feed => feed.state === "live");
  const lags = live.map(feed => feed.lag_s).filter(lag => lag !== null);
  const waiting = feeds.reduce((sum, feed) => sum + feed.waiting, 0);
  const lost = feeds.reduce((sum, feed) => sum + feed.lost, 0);
  const room = (used, most) => {
    const filled = make("i");
    width(filled, used / most);
    return make("div", { class: "track", "aria-hidden": "true" }, filled);
  };
  const { events, dispatches } = of.index;
  const facts = [
    ["KV events", events ? [`${count(events.blocks)} blocks, ${bytes(events.bytes)} of ${bytes(events.bytes_max)}`, room(events.bytes, events.bytes_max)] : ["not taken"]],
    ["Dispatches", [`${count(dispatches.blocks)} blocks, ${bytes(dispatches.bytes)} of ${bytes(dispatches.bytes_max)}`, room(dispatches.bytes, dispatches.bytes_max)]],
    ["Event feeds", [feeds.length ? `${live.length} of ${feeds.length} live${waiting ? `, ${whole.format(waiting)} messages waiting` : ""}` : "none"]],
    ["Largest lag", [lags.length ? seconds(Math.max(0, ...lags)) : "–"]],
    ["Messages lost", [feeds.length ? whole.format(lost) : "–"]],
    ["Block", [`${whole.format(of.block_tokens)} tokens`]],
    ["Tokens are", [of.tokens?.source === "estimate" || !of.tokens ? "estimated" : `counted (${of.tokens.source})`]],
    ["Rejected (429)", [Object.entries(of.shed).filter(([, n]) => n > 0).map(([why, n]) => `${why.replaceAll("_", " ")} ${whole.format(n)}`).join(", ") || "none"]],
  ];
  const list = $("index");
  if (list.childElementCount !== facts.length * 2) list.replaceChildren(...facts.flatMap(([name]) => [make("dt", {}, name), make("dd")]));
  facts.forEach(([, value], n) => {
    const cell = list.children[2 * n + 1];
    if (cell.firstChild?.textContent !== value[0] || value.length > 1) cell.replaceChildren(...value);
  });
}

// === Failures ===

let failuresShown = "";

/** The last requests that failed, of all models. */
function showFailures() {
  const failures = page.fleet.failures;
  setText($("failures-note"), failures.length ? "requests that got a 5xx, or whose answer broke off" : "none since the start");
  $("failures-scroll").hidden = failures.length === 0;
  const mark = `${failures.length} ${failures[0]?.at_s} ${failures[0]?.request_id}`;
  if (mark === failuresShown) return;
  failuresShown = mark;
  $("failures").querySelector("tbody").replaceChildren(...failures.map(failure => make("tr", {},
    make("td", { title: failure.model || undefined }, clock(moment(failure.at_s))),
    make("td", {}, failure.endpoint ? short(failure.endpoint) : "–"),
    make("td", {}, failure.status < 500 ? `${failure.status}, broke off` : String(failure.status)),
    make("td", { class: "reason" }, failure.reason || "–"),
    make("td", { class: "id" }, failure.request_id))));
}

// === Tenants ===

function showTenants() {
  const told = pool()?.tenants;
  const named = told?.top.some(({ tenant }) => tenant !== null);
  $("tenants").hidden = !named;
  if (!named) return;
  const lines = [...told.top.map(of => ({ ...of, shown: of.name ?? of.tenant ?? "no tenant" })), { ...told.others, shown: "all others" }]
    .filter(of => of.prompt_tokens + of.expected_output_tokens > 0);
  const work = of => of.prefill_tokens + of.expected_output_tokens;
  const all = lines.reduce((sum, of) => sum + work(of), 0);
  const requests = lines.reduce((sum, of) => sum + of.requests, 0);
  setText($("tenants-note"), `of the last ${plural(requests, "request")}, ${seconds(told.span_s)}`);
  const body = $("tenants").querySelector("tbody");
  while (body.rows.length > lines.length) body.deleteRow(-1);
  while (body.rows.length < lines.length) body.append(make("tr", {}, make("td"), make("td", { class: "n" }), make("td", { class: "n" }), make("td", { class: "n" })));
  lines.forEach((of, n) => {
    const cells = [of.shown, count(of.requests), count(of.prompt_tokens + of.expected_output_tokens), share(work(of) / all)];
    cells.forEach((text, cell) => setText(body.rows[n].cells[cell], text));
    body.rows[n].cells[0].title = of.name ? `tenant ${of.tenant}` : of.tenant ? "Only names in the configuration are known; this is the tenant's key, as in decisions" : "";
  });
}

// === The shadow policy ===

/** What the shadow policy's choices would have saved; nothing where both are within two standard errors. */
function verdict({ policy, shadow_policy: shadow, decisions, mean_gain_s: gain, mean_gain_error_s: error }) {
  if (decisions === 0) return "No decision has been compared yet.";
  if (Math.abs(gain) <= 2 * error || gain === 0) return `No clear difference between ${shadow} and ${policy} so far.`;
  return gain > 0
    ? `${shadow} would have saved ${seconds(gain)} of fleet time per request.`
    : `${shadow} would have cost ${seconds(-gain)} more fleet time per request.`;
}

function showShadow() {
  const told = page.whatif?.pools.find(of => of.model === page.model);
  $("shadow").hidden = !told;
  if (!told) return;
  setText($("shadow-verdict"), verdict(told));
  const entries = [
    ["Policies", `${told.policy}, shadow ${told.shadow_policy}`],
    ["Decisions", whole.format(told.decisions)],
    ["Same endpoint", share(told.agreement)],
    ["Gain per request", `${seconds(told.mean_gain_s)} ± ${seconds(told.mean_gain_error_s)}`],
    ["Gain in all", seconds(told.gain_s)],
  ];
  const list = $("shadow-facts");
  if (!list.childElementCount) list.replaceChildren(...entries.flatMap(([name]) => [make("dt", {}, name), make("dd")]));
  entries.forEach(([, text], n) => setText(list.children[2 * n + 1], text));
}

// === The first request ===

/** Text as one word of a shell. */
function quoted(text) { return `'${text.replaceAll("'", `'\\''`)}'`; }

/** Where clients connect, as this browser may reach it. */
function clientsUrl({ address, tls }) {
  const colon = address.lastIndexOf(":");
  const [host, port] = [address.slice(0, colon), address.slice(colon + 1)];
  return `http${tls ? "s" : ""}://${host === "0.0.0.0" || host === "[::]" ? location.hostname : host}:${port}`;
}

/** What to do where nothing can be seen yet; null once there have been requests. */
function firstStep(all) {
  if (all.length === 0) {
    const key = page.key ? ` -H "Authorization: Bearer $KVLANE_ADMIN_KEY"` : "";
    return {
      title: "No workers yet",
      text: "List the workers with --worker-urls or in the configuration, or add one while kvlane runs: here, or with",
      command: `curl -X POST ${location.origin}/workers${key} -d ${quoted(JSON.stringify({ url: "http://10.0.0.9:8000" }))}`,
    };
  }
  if (!all.some(({ worker }) => worker.state !== "down" && worker.state !== "joining")) {
    return {
      title: "No worker is ready yet", command: "",
      text: all.some(({ worker }) => worker.problem) ? "Requests get a 503 until one is. What is wrong, and what to do, is below." : "The first probes are not answered yet.",
    };
  }
  if (!page.fleet.clients || all.some(({ of }) => of?.traffic?.requests) || page.decisions.length || page.fleet.failures.length) return null;
  const key = page.fleet.clients.need_a_key ? ` \\\n  -H "Authorization: Bearer $KVLANE_API_KEY"` : "";
  const body = { model: page.model, messages: [{ role: "user", content: "Hello" }] };
  return {
    title: "No requests yet",
    text: "Point an OpenAI client at this address, or send the first request with",
    command: `curl ${clientsUrl(page.fleet.clients)}/v1/chat/completions \\\n  -H "Content-Type: application/json"${key} \\\n  -d ${quoted(JSON.stringify(body))}`,
  };
}

function showStart(all) {
  const step = firstStep(all);
  $("start").hidden = !step;
  if (!step) return;
  setText($("start-title"), step.title);
  setText($("start-text"), step.text);
  $("start-paste").hidden = step.command === "";
  setText($("start-command"), step.command);
}

$("start-copy").addEventListener("click", async () => {
  const command = $("start-command");
  try {
    await navigator.clipboard.writeText(command.textContent);
    say("Copied");
  } catch {
    // Without https or loopback there is no clipboard.
    getSelection().selectAllChildren(command);
  }
});

// === Changes ===

function noteChange(text, severity) {
  const list = $("changes");
  list.prepend(make("li", {}, make("time", {}, clock(page.answeredAt || Date.now())), make("span", { class: severity }, text)));
  while (list.childElementCount > CHANGES_KEPT) list.lastElementChild.remove();
}

/** Differences from the last response, for all models. */
function noteChanges() {
  const first = page.before.size === 0;
  const here = new Map();
  for (const worker of page.fleet.workers) {
    here.set(worker.id, { name: short(worker.url), state: worker.state, problem: worker.problem });
    for (const of of worker.endpoints) {
      here.set(`${worker.id}/${of.model}/${of.rank ?? ""}`, {
        name: short(of.endpoint), trust: of.knowledge, breaker: of.breaker?.state, feed: of.feed?.state,
      });
    }
  }
  if (!first) {
    for (const [id, now] of here) {
      const before = page.before.get(id);
      if (!before) {
        if (now.state) noteChange(`${now.name} was added`, "");
        continue;
      }
      if (now.state !== before.state) {
        const words = {
          down: [`${now.name} is down${now.problem ? `: ${now.problem}` : ""}`, "is-bad"], failing: [`${now.name} does not answer`, "is-bad"],
          draining: [`${now.name} is draining`, ""], leaving: [`${now.name} is being removed`, ""], joining: [`${now.name} was added`, ""], serving: [`${now.name} is serving`, "is-good"],
        };
        noteChange(...words[now.state]);
      }
      if (now.breaker !== before.breaker && now.breaker && before.breaker) noteChange(`${now.name}: breaker ${BREAKERS[now.breaker]}`, now.breaker === "open" ? "is-bad" : "");
      if (now.trust !== before.trust && now.trust && before.trust) noteChange(`${now.name}: cache knowledge ${TRUST[before.trust][0]} → ${TRUST[now.trust][0]}`, now.trust === "exact" ? "is-good" : "is-warn");
    }
    for (const [id, before] of page.before) if (!here.has(id) && before.state) noteChange(`${before.name} was removed`, "");
  } else if ($("changes").childElementCount === 0) noteChange("Opened", "");
  page.before = here;
}

// === Replicas ===

const SNAPSHOTS = {
  none: "none", awaited: "waits for an older replica", arriving: "arrives", arrived: "arrived",
};

/** The first half of an id is enough to tell a few replicas apart; the whole one is in the title. */
function shortId(id) { return id.slice(0, 8); }

function showReplicas() {
  const told = page.fleet.replicas;
  $("replicas").hidden = !told;
  if (!told) return;
  const counting = told.peers.filter(peer => peer.counts).length;
  setText($("replicas-note"), `${counting} of ${plural(told.peers.length, "other")} heard`);
  const body = $("replicas").querySelector("tbody");
  while (body.rows.length > told.peers.length) body.deleteRow(-1);
  while (body.rows.length < told.peers.length) body.append(make("tr", {}, make("td"), make("td"), make("td", { class: "n" }), make("td")));
  told.peers.forEach((peer, n) => {
    const row = body.rows[n];
    const heard = peer.counts ? `for ${seconds(peer.heard_for_s)}` : `last ${ago(peer.age_s)}`;
    row.cells[0].title = peer.replica;
    [shortId(peer.replica), peer.address ?? "through the broker", whole.format(peer.requests), heard].forEach((text, cell) => setText(row.cells[cell], text));
    setClass(row.cells[3], peer.counts ? "" : "is-warn");
  });
  const problems = Object.entries(told.problems).map(([of, why]) => `${of} is told nothing: ${why}`);
  const list = $("replica-problems");
  while (list.childElementCount > problems.length) list.lastElementChild.remove();
  while (list.childElementCount < problems.length) list.append(make("li"));
  problems.forEach((text, n) => setText(list.children[n], text));
  const { state, from, marks } = told.snapshot;
  const own = [
    ["This one", shortId(told.replica)],
    ["Snapshot", SNAPSHOTS[state] + (state === "arrived" ? ` from ${shortId(from)}, ${count(marks)} marks` : "")],
  ];
  const facts = $("replica-own");
  if (!facts.childElementCount) facts.replaceChildren(...own.flatMap(([name]) => [make("dt", {}, name), make("dd")]));
  own.forEach(([, text], n) => setText(facts.children[2 * n + 1], text));
}

// === One endpoint ===

function openSheet(id) {
  page.sheet = id;
  showSheet();
  if (!$("sheet").open) $("sheet").showModal();
}

function facts(entries) {
  return make("dl", { class: "facts" }, ...entries.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

function showSheet() {
  const row = endpoints().find(row => row.id === page.sheet);
  if (!row) {
    page.sheet = null;
    $("sheet").close();
    return;
  }
  const { worker, of } = row;
  const [, few] = ailment(row);
  const note = worker.problem ? `${few}: ${worker.problem}` : of?.feed?.problem ?? few;
  setText($("sheet-title"), short(row.name));
  const scrolled = $("sheet").scrollTop;
  const parts = [];
  if (note) parts.push(make("p", { class: "problem" }, note[0].toUpperCase() + note.slice(1)));
  if (of?.requests !== undefined) {
    const reported = of.reported;
    const held = holds(of);
    parts.push(make("h3", {}, "Load"), facts([
      ["State", STATES[worker.state]],
      ["Requests in flight", `${whole.format(of.requests)}, ${whole.format(of.prefilling)} before their first token`],
      ["Tokens in flight", whole.format(of.context_tokens)],
      ["Prefill tokens in flight", `${whole.format(of.prefill_tokens)}`],
      ["It reports", reported ? `${whole.format(reported.running)} running, ${whole.format(reported.waiting)} waiting, ${seconds(reported.age_s)} ago` : "nothing"],
      ["Prefill (learned)", `${count(of.rates.prefill_tokens_per_second)} tokens/s ± ${share(of.rates.prefill_error)}`],
      ["Decode step (learned)", `${seconds(of.rates.decode_step_s)} ± ${share(of.rates.decode_error)}`],
    ]), make("h3", {}, "Requests since it joined"), facts([
      ["Placed there", whole.format(of.traffic.requests)],
      ["TTFT", of.traffic.ttft_p50_s === null ? "–" : `p50 ${seconds(of.traffic.ttft_p50_s)}, p90 ${seconds(of.traffic.ttft_p90_s)}`],
      ["Errors", Object.entries(of.traffic.failed).map(([kind, n]) => `${kind.replaceAll("_", " ")} ${whole.format(n)}`).join(", ") || "none"],
      ["Rejected (429, 503)", whole.format(of.traffic.rejected)],
    ]), make("h3", {}, "Cache"), facts([
      ["KV cache use", reported ? share(reported.kv_usage_ratio) : "–"],
      ["KV capacity", reported?.kv_capacity_tokens ? `${whole.format(reported.kv_capacity_tokens)} tokens` : "–"],
      ["Cached", held ? `${held.most ? "at most " : ""}${whole.format(held.tokens)} tokens, ${held.told ? "by its KV events" : "by dispatched requests"}` : "–"],
      ["Cache knowledge", worker.state === "down" ? "–" : `${TRUST[of.knowledge][0]}: ${TRUST[of.knowledge][1].toLowerCase()}`],
      ["Predictions", of.answers ? `${whole.format(of.answers)} answers compared, ${whole.format(of.answers_mispredicted)} mispredicted` : "no answer compared yet"],
      ["Accuracy", `${share(of.precision)} of predicted tokens were cached, ${share(of.recall)} of cached tokens were predicted`],
      ["Token counts", `${worker.parity.state}${worker.parity.why ? `: ${worker.parity.why}` : ""}`],
    ]), make("h3", {}, "Event feed"), facts(of.feed ? [
      ["State", FEEDS[of.feed.state] + (of.feed.problem ? `: ${of.feed.problem}` : "")],
      ["Lag", seconds(of.feed.lag_s)], ["Last event", of.feed.last_event_age_s === null ? "–" : ago(of.feed.last_event_age_s)],
      ["Queued", `${whole.format(of.feed.waiting)} messages`], ["Lost", `${whole.format(of.feed.lost)} messages`],
    ] : [["State", "no feed"]]), make("h3", {}, "Breaker"), facts([
      ["State", BREAKERS[of.breaker.state] + (of.breaker.opens_for_s > 0 ? `, for ${seconds(of.breaker.opens_for_s)} more` : "")],
      ["Failures in a row", whole.format(of.breaker.failures)],
      ["Reports busy", of.busy_for_s ? `for ${seconds(of.busy_for_s)} more` : "no"],
      ["Failed probes", whole.format(worker.failed_probes)],
    ]));
  }
  parts.push(make("h3", {}, "Worker"), facts([["Named by", SOURCES[worker.source]], ["Role", ROLES[worker.role]]]));
  $("sheet-body").replaceChildren(...parts);
  $("sheet").scrollTop = scrolled;
  showActions(worker);
}

function showActions(worker) {
  const actions = $("sheet-actions");
  const mark = `${worker.id} ${worker.state === "draining"} ${worker.state === "leaving"} ${page.fleet.you.may_change}`;
  if (actions.dataset.mark === mark) return;
  actions.dataset.mark = mark;
  if (!page.fleet.you.may_change) return actions.replaceChildren(make("p", { class: "muted" }, "Changes need a key with the role admin."));
  const several = worker.endpoints.length > 1 ? ` All ${worker.endpoints.length} of its endpoints.` : "";
  const name = short(worker.url);
  const buttons = [];
  if (worker.state !== "leaving") {
    buttons.push(worker.state === "draining"
      ? make("button", { onclick: () => act(`Resume ${name}?`, `Requests are placed there again.${several}`, "Resume", `workers/${worker.id}`, "PUT", { draining: false }, `${name} accepts requests again`) }, "Resume")
      : make("button", { onclick: () => act(`Drain ${name}?`, `It takes no new requests; those in flight are completed.${several}`, "Drain", `workers/${worker.id}`, "PUT", { draining: true }, `${name} is draining`) }, "Drain"));
    buttons.push(make("button", { onclick: () => act(`Remove ${name}?`, `It drains, and is removed when its last request ends.${several}${worker.configured ? " It is named in the configuration: after a restart it is back." : ""}`, "Remove", `workers/${worker.id}`, "DELETE", undefined, `${name} leaves`, true) }, "Remove"));
  }
  actions.replaceChildren(...buttons);
}

$("sheet").addEventListener("close", () => {
  page.sheet = null;
  $("sheet-actions").dataset.mark = "";
});
// A click outside of it.
$("sheet").addEventListener("click", event => { if (event.target === $("sheet")) $("sheet").close(); });

// === Changes of the fleet ===

function confirmed(title, text, yes, danger = false) {
  const dialog = $("confirm");
  setText($("confirm-title"), title);
  setText($("confirm-text"), text);
  setText($("confirm-yes"), yes);
  $("confirm-yes").className = danger ? "danger" : "primary";
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise(done => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}

async function act(title, text, yes, path, method, body, done, danger) {
  if (!await confirmed(title, text, yes, danger)) return;
  try {
    await ask(path, method, body);
    say(done);
  } catch (error) {
    say(`The change failed: ${error.message}`);
  }
  tick();
}

$("add").addEventListener("click", () => {
  $("new-form").reset();
  setText($("new-problem"), "");
  $("new").showModal();
});
$("new-cancel").addEventListener("click", () => $("new").close());
$("new-form").addEventListener("submit", async event => {
  event.preventDefault();
  const [url, model, key] = ["new-url", "new-model", "new-key"].map(id => $(id).value.trim());
  if (!await confirmed(`Add ${short(url)}?`, "Requests are placed on it after its first successful probe. It is not added to the configuration file: a restart removes it.", "Add")) return;
  try {
    await ask("workers", "POST", { url, ...model && { model }, ...key && { api_key: key } });
    $("new").close();
    say(`${short(url)} was added`);
  } catch (error) {
    setText($("new-problem"), error.message);
  }
  tick();
});

let saying = 0;

/** Shows a short notice; with `quietly` only to screen readers. */
function say(text, quietly = false) {
  const said = $("said");
  setClass(said, quietly ? "unseen" : "");
  setText(said, text);
  clearTimeout(saying);
  saying = setTimeout(() => setText(said, ""), 4000);
}

// === Head ===

$("pause").addEventListener("click", () => {
  page.paused = !page.paused;
  $("pause").setAttribute("aria-pressed", page.paused);
  setText($("pause"), page.paused ? "Go on" : "Pause");
  showLive();
  if (!page.paused) tick();
});
$("model").addEventListener("change", event => {
  page.model = event.target.value;
  page.chosen = null;
  rows.forEach(row => { row.root.remove(); row.square.remove(); });
  rows.clear();
  whyShown = "";
  show();
});
$("span").addEventListener("change", event => {
  page.span = Number(event.target.value);
  localStorage.setItem("kvlane-span", page.span);
  show();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && !page.paused && page.fleet) tick(); });

const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };
const dark = matchMedia("(prefers-color-scheme: dark)");

function dress() {
  const theme = localStorage.getItem("kvlane-theme") ?? "auto";
  document.documentElement.dataset.theme = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
  setText($("theme"), `Theme: ${(THEMES[theme] ?? "Auto").toLowerCase()}`);
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[theme] ?? "Auto"}`);
}
dark.addEventListener("change", dress);
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const theme = localStorage.getItem("kvlane-theme") ?? "auto";
  localStorage.setItem("kvlane-theme", names[(names.indexOf(theme) + 1) % names.length]);
  dress();
});

// === Start ===

dress();
$("span").value = String(page.span);
if ($("span").selectedIndex < 0) { page.span = 300; $("span").value = "300"; }
openFleet();
openCharts();
setInterval(showLive, 1000);
tick();
