"use strict";
// Unpacks the data, draws charts when they come into view, and filters the rollouts. All text of a run is put into the
// page with textContent, never as HTML. The page of rlhf watch has no data in it: it asks for them, and for what is new.
const $ = (id) => document.getElementById(id);
const COLORS = matchMedia("(prefers-color-scheme: dark)").matches
  ? ["#56b4e9", "#ff9e5e", "#3ddca4", "#e08fc6", "#f0e442", "#8fc1ff", "#c7c7c7", "#c79bf2"]
  : ["#0072b2", "#d55e00", "#009e73", "#a6498f", "#8a6d00", "#3f7fb5", "#5b5b5b", "#7a3e9d"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const ROWS_SHOWN = 50;
const shownSettings = new Set();
const POLL_MS = 500, RETRY_MS = 5000, MOST_ROLLOUTS = 50000;
const live = !$("metrics-data").textContent;
let data, rollouts, settingsSeen = 0, matches = [], firstRow = 0, openGroup = null, texts;

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

async function unpack(id) {
  const packed = atob($(id).textContent), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
  $(id).remove();
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const color = (setting) => COLORS[setting % COLORS.length];
const dot = (setting) => { const made = element("span", { className: "dot" }); made.style.background = color(setting); return made; };
const nameOf = (setting) => element("span", { className: "name" }, dot(setting), data.settings[setting].name);
const settingOf = (run) => data.settings.findIndex((setting) => setting.runs.includes(run));
const nameOfRun = (run) => element("span", { className: "name" }, dot(settingOf(run)), data.runs[run].name);
const isBand = (setting) => setting.runs.length > 1;
const known = (values) => (values || []).filter((v) => v !== null);
const short = (value) => typeof value !== "number" ? (value ?? "-") : String(+value.toPrecision(4));
const duration = (s) => s < 5400 ? `${(s / 60).toFixed(1)} min` : `${(s / 3600).toFixed(1)} h`;
const written = (value) => value === undefined ? "-" : typeof value === "string" ? value : JSON.stringify(value);

function table(target, head, rows) {
  const cell = (value) => value instanceof Node ? element("td", {}, value)
    : element("td", { className: typeof value === "number" ? "number" : "", textContent: short(value) });
  target.replaceChildren(element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((h) => element("th", { scope: "col" }, h)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell))))));
}

// --- summary, diagnosis, config ---

function showSummary() {
  const evaluations = [...new Set(data.settings.flatMap((each) => Object.keys(each.series)))].filter((n) => /^eval\/.*\/(avg|pass|maj)@\d+$/.test(n));
  // Of several seeds at the last step that all of them have reached.
  const change = (setting, metric) => {
    const values = setting.series[metric] || [], has = (v, i) => v !== null && (!isBand(setting) || setting.steps[i] <= setting.shared);
    const last = values.findLastIndex(has);
    if (last < 0) return "-";
    const bounds = setting.bands[metric] || ["low", "high"].map((end) => setting.series[`${metric}/${end}`]), [low, high] = bounds.map((bound) => bound?.[last]);
    return `${short(values[values.findIndex(has)])} → ${short(values[last])}` + (low === undefined || low === null ? "" : ` (${short(low)} to ${short(high)})`);
  };
  const stepsOf = (setting) => {
    const of = setting.runs.map((run) => data.runs[run]), lasts = of.map((run) => run.last), planned = of[0].config["run.steps"];
    const unfinished = of.filter((run) => !run.finished).length, reached = [...new Set([Math.min(...lasts), Math.max(...lasts)])].join(" to ");
    return reached + (planned === undefined ? "" : ` of ${planned}`) + (unfinished ? `, ${of.length > 1 ? `${unfinished} ` : ""}not finished` : "") +
      (isBand(setting) && reached !== `${setting.shared}` ? `; values at step ${setting.shared}` : "");
  };
  const rows = data.settings.map((setting, i) => {
    const run = data.runs[setting.runs[0]], seconds = known(setting.seconds);
    return [nameOf(i), setting.seeds.join(", "), `${run.program ?? "another version"}: ${run.config["model.path"]}`, stepsOf(setting), seconds.length > 1 ? duration(seconds.at(-1)) : "-",
      change(setting, "reward/mean"), ...evaluations.map((metric) => change(setting, metric))];
  });
  table($("summary-table"), ["run", "seed", "program and model", "steps", "time", "reward, first → last", ...evaluations.map((e) => `${e.slice(5)}, first → last`)], rows);
  const thinned = Math.max(...data.settings.map((setting) => setting.every)), bands = data.settings.some(isBand);
  $("summary-note").textContent = `${live ? "Read" : "Written"} ${data.written}. ` +
    (bands ? "Runs whose configs differ only in the seed are one line: the mean of the runs that have a value at a step. Its band, and the interval in " +
      "this table, is the 95% bootstrap interval over seeds; for two or three seeds it goes from the lowest to the highest value. " : "") +
    (data.settings.some((each) => !isBand(each) && evaluations.some((e) => each.series[`${e}/low`])) ?
      `Intervals of ${bands ? "an evaluation of one run" : "evaluations"} hold 95% of bootstrap samples over problems. ` : "") +
    (thinned > 1 ? `Curves have every ${thinned}th step.` : "");
}

function showFindings() {
  const found = data.runs.flatMap((run, i) => run.findings.map((finding) => ({ ...finding, run: i })));
  $("findings").replaceChildren(...found.map((f) => element("div", { className: "finding" },
    element("p", {}, nameOfRun(f.run), element("strong", { textContent: ` ${f.title}, ` }),
      f.first === f.last ? `step ${f.first}` : `steps ${f.first} to ${f.last}`),
    element("p", { textContent: f.seen }), element("p", { textContent: f.advice }))));
  const outside = data.runs.flatMap((run, i) => run.outside.map((each) => [nameOfRun(i), each.metric, each.value, each.healthy]));
  if (outside.length) {
    const list = element("div");
    table(list, ["run", "metric", "mean of the last steps", "healthy"], outside);
    $("findings").append(element("div", { className: "finding" }, element("p", {}, element("strong", { textContent: "Outside the healthy range. " }),
      "There may be a good reason; docs/metrics.md explains each metric."), list));
  }
  if (!found.length) $("findings").append(element("p", { className: outside.length ? "soft" : "good",
    textContent: `No rule found a problem${outside.length ? "" : ", and every metric with a healthy range ends in its range"}.` }));
}

function showConfig() {
  const head = () => ["key", ...data.settings.map((_, i) => nameOf(i))];
  const valuesOf = (runs, key) => [...new Set(runs.map((run) => written(data.runs[run].config[key])))].join(", ");
  const row = (key) => [key, ...data.settings.map(({ runs }) => element("span", { textContent: valuesOf(runs, key) }))];
  $("differences").hidden = data.settings.length < 2;
  table($("differences-table"), head(), data.differing.map(row));
  $("changed-title").textContent = `What was changed${data.settings.length > 1 ? " in all runs" : ""}`;
  $("changed-keys").replaceChildren(...data.changed.map((key) => element("div", {}, element("span", { className: "soft", textContent: `${key}: ` }), valuesOf([0], key))));
  $("changed-note").textContent = (data.runs.every((run) => run.program) ? "The keys whose values differ from the defaults. " :
    "The keys whose values differ from the defaults; for a run of another version of rlhf, all keys that are not null. ") + `Config, at the end, has all ${data.keys.length}.`;
  const list = () => table($("config-table"), head(), data.keys.filter((k) => k.includes($("key").value)).map(row));
  $("key").oninput = list;
  list();
}

// --- charts ---

function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return mean / total;
  });
}

function xOf(setting) {
  return $("axis").value === "step" ? setting.steps : setting.seconds.map((t) => t === null ? null : t / 3600);
}

// The bounds of a line of several seeds: one without a line, and one that is filled up to it.
function bandOf(setting, i, metric, weight) {
  const x = xOf(setting), ends = setting.bands[metric].map((bound) => smoothed(bound, weight)), places = x.map((_, k) => k).filter((k) => x[k] !== null && ends[0][k] !== null);
  const style = { x: places.map((k) => x[k]), mode: "lines", line: { width: 0, color: color(i) }, hoverinfo: "skip", showlegend: false, legendgroup: i };
  return ends.map((bound, end) => ({ ...style, y: places.map((k) => bound[k]), ...(end ? { fill: "tonexty", fillcolor: `${color(i)}33` } : {}) }));
}

function traces(panel, section) {
  const weight = section === "Evaluation" ? 0 : +$("smoothing").value, made = [];
  data.settings.forEach((setting, i) => {
    if (!shownSettings.has(i)) return;
    const first = i === Math.min(...shownSettings), style = { line: { color: color(i), width: 1.8 }, connectgaps: true, legendgroup: i };
    panel.metrics.forEach((metric, m) => {
      const values = setting.series[metric];
      if (!values) return;
      if (isBand(setting)) made.push(...bandOf(setting, i, metric, weight));
      const few = known(values).length < 30, name = panel.metrics.length > 1 ? `${data.settings.length > 1 ? `${setting.name} ` : ""}${metric.split("/").slice(1).join("/")}` : setting.name;
      const trace = { ...style, metric, x: xOf(setting), y: smoothed(values, weight), name,
        mode: few ? "lines+markers" : "lines", marker: { size: 5 }, showlegend: first && panel.metrics.length > 1,
        line: { ...style.line, dash: DASHES[m % DASHES.length] } };
      const low = setting.series[`${metric}/low`], high = setting.series[`${metric}/high`];
      if (low && high) trace.error_y = { type: "data", symmetric: false, thickness: 1, width: 3,
        array: high.map((h, k) => h === null ? 0 : h - values[k]), arrayminus: low.map((l, k) => l === null ? 0 : values[k] - l) };
      made.push(trace);
    });
  });
  return made;
}

// If a curve leaves its healthy range: a yellow band from the bound to the farthest value.
function bands(panel, drawn, fill) {
  return Object.entries(panel.healthy || {}).flatMap(([metric, { low, high }]) => {
    const values = drawn.filter((t) => t.metric === metric).flatMap((t) => known(t.y));
    const least = Math.min(...values), most = Math.max(...values), band = { type: "rect", xref: "paper", x0: 0, x1: 1, layer: "below",
      fillcolor: fill, line: { width: 0 } };
    return [...(low !== null && least < low ? [{ ...band, y0: least - (low - least) / 20, y1: low }] : []),
      ...(high !== null && most > high ? [{ ...band, y0: high, y1: most + (most - high) / 20 }] : [])];
  });
}

function layout(panel, drawn) {
  const style = getComputedStyle(document.documentElement), get = (name) => style.getPropertyValue(name).trim();
  const positive = drawn.flatMap((t) => known(t.y)).filter((v) => v > 0);
  const axis = { gridcolor: get("--line"), zerolinecolor: get("--line"), automargin: true, exponentformat: "e" };
  return { margin: { l: 48, r: 10, t: 8, b: 24 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: get("--soft"), size: 11 }, hovermode: "x unified", uirevision: true, hoverlabel: { bgcolor: get("--card"), font: { color: get("--ink") } },
    xaxis: { ...axis }, legend: { orientation: "h", y: -0.18, font: { size: 10 } },
    shapes: bands(panel, drawn, get("--warn-band")),
    yaxis: { ...axis, type: panel.log && positive.length && Math.max(...positive) > 50 * Math.min(...positive) ? "log" : "linear" } };
}

const SETTINGS = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

function draw(plot) {
  const drawn = traces(plot.panel, plot.section);
  Plotly.react(plot, drawn, layout(plot.panel, drawn), SETTINGS);
}

const plots = new Map(); // section and title -> the plot

const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
  entry.target.visible = entry.isIntersecting;
  if (entry.isIntersecting && entry.target.stale !== false) { entry.target.stale = false; entry.target.draw(); }
}), { rootMargin: "200px" });

// The plot of a panel in a card at the end of the grid, or the one that is already there.
function plotOf(grid, section, title) {
  const key = `${section}/${title}`;
  if (!plots.has(key)) {
    const plot = element("div", { className: "plot" });
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", title);
    grid.append(element("div", { className: "card" }, element("h3", {}, title, element("small")), plot));
    seen.observe(plot);
    plots.set(key, plot);
  }
  return plots.get(key);
}

function showCharts() {
  const healthy = (panel) => {
    const same = new Set(panel.metrics.map((metric) => panel.healthy[metric]?.words)).size === 1;
    return [...new Set(Object.entries(panel.healthy).map(([metric, range]) =>
      `healthy${same ? "" : ` ${metric.split("/").slice(1).join("/")}`}: ${range.words}`))].join(", ");
  };
  data.sections.forEach(({ title, panels }) => {
    const id = title.toLowerCase().replace(/\W+/g, "-");
    if (!$(id)) $("charts").append(element("section", { id }, element("h2", { textContent: title }), element("div", { className: "grid" })));
    const grid = $(id).querySelector(".grid"), describe = (plot, unit) => { plot.parentElement.querySelector("small").textContent = unit; };
    if (title === "Speed") {
      const plot = Object.assign(plotOf(grid, title, "Where the time went"), { draw() { drawTime(this); } });
      plot.parentElement.classList.add("wide-card");
      describe(plot, "s");
    }
    panels.forEach((panel) => describe(Object.assign(plotOf(grid, title, panel.title), { panel, section: title, draw() { draw(this); } }),
      [panel.metrics.length === 1 && panel.metrics[0] !== panel.title ? panel.metrics[0] : "", panel.unit, healthy(panel)].filter(Boolean).join(", ")));
  });
  $("contents").replaceChildren(...[...document.querySelectorAll("main section:not([hidden])")].map((section) =>
    element("a", { href: `#${section.id}`, textContent: section.querySelector("h2").textContent })));
}

function drawTime(plot) {
  const phases = [...new Set(data.runs.flatMap((run) => Object.keys(run.phases)))], runs = data.runs.filter((_, i) => shownSettings.has(settingOf(i))).reverse();
  const drawn = phases.map((phase, i) => ({ type: "bar", orientation: "h", name: phase, x: runs.map((run) => run.phases[phase] || 0),
    y: runs.map((run) => run.name), marker: { color: color(i) } }));
  const form = layout({}, []);
  form.yaxis.type = "category";
  Plotly.react(plot, drawn, { ...form, barmode: "stack", hovermode: "closest", legend: { orientation: "h", y: -0.15, traceorder: "normal" } }, SETTINGS);
}

function redraw() {
  document.querySelectorAll(".plot").forEach((plot) => { plot.stale = !plot.visible; if (plot.visible) plot.draw(); });
}

// --- rollouts ---

// Adds rollouts as `page_rollouts` gives them. Each distinct text is kept once.
function addRollouts({ columns, texts: theirs, text_columns: named }) {
  rollouts ??= { columns: {}, texts: [], numbers: new Map(), groups: 0 };
  texts = rollouts.texts;
  const numbers = theirs.map((text) => {
    if (!rollouts.numbers.has(text)) rollouts.numbers.set(text, texts.push(text) - 1);
    return rollouts.numbers.get(text);
  });
  const before = rollouts.groups, renumber = {
    blocks: (blocks) => blocks && blocks.map(([kind, text]) => [kind, numbers[text]]),
    group: (group) => { rollouts.groups = Math.max(rollouts.groups, before + group + 1); return before + group; },
  };
  for (const name of named) renumber[name] = (text) => numbers[text];
  for (const [name, column] of Object.entries(columns)) {
    rollouts.columns[name] = (rollouts.columns[name] || []).concat(renumber[name] ? column.map(renumber[name]) : column);
  }
}

// Offers the runs, statuses and ends that there are; what was chosen stays.
function showOptions() {
  const form = $("filters"), { columns } = rollouts;
  const options = (name, values, label) => {
    const chosen = form[name].value;
    form[name].replaceChildren(element("option", { value: "", textContent: "all" }), ...values.map((value) => element("option", { value, textContent: label(value) })));
    form[name].value = chosen;
  };
  options("run", data.runs.map((_, i) => i), (i) => data.runs[i].name);
  for (const name of ["status", "finish_reason"]) options(name, [...new Set(columns[name])], (i) => texts[i]);
}

function connectFilters() {
  const form = $("filters");
  let waiting;
  form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(filter, 80); });
  form.addEventListener("reset", () => setTimeout(filter));
  form.addEventListener("submit", (event) => { event.preventDefault(); filter(); });
}

function filter() { firstRow = 0; match(); }

function match() {
  const form = $("filters"), c = rollouts.columns, number = (name) => form[name].value === "" ? null : +form[name].value;
  const needle = form.text.value.toLowerCase(), hit = needle ? texts.map((text) => text.toLowerCase().includes(needle)) : null;
  const tests = [];
  const range = (column, low, high) => {
    if (low !== null) tests.push((i) => c[column][i] !== null && c[column][i] >= low);
    if (high !== null) tests.push((i) => c[column][i] !== null && c[column][i] <= high);
  };
  for (const name of ["run", "status", "finish_reason"]) { const value = number(name); if (value !== null) tests.push((i) => c[name][i] === value); }
  range("step", number("step_min"), number("step_max"));
  range("reward", number("reward_min"), number("reward_max"));
  if (hit) tests.push((i) => hit[c.conversation[i]] || hit[c.text[i]] || (c.blocks[i] || []).some(([, block]) => hit[block]));
  matches = [];
  const total = (c.step || []).length;
  for (let i = 0; i < total; i++) if (tests.every((test) => test(i))) matches.push(i);
  const order = form.order.value, key = order.replace("-", ""), sign = order.startsWith("-") ? -1 : 1;
  if (order) matches.sort((a, b) => sign * ((c[key][a] ?? 0) - (c[key][b] ?? 0)));
  showRows();
}

// Green or red if the reward read an answer or found none; otherwise no color.
function verdict(i) {
  const c = rollouts.columns, extracted = texts[c.extracted[i]];
  return extracted === "" && !c.no_answer[i] ? "" : extracted !== "" && c.reward[i] > 0 ? "good" : "bad";
}

function showRows() {
  const c = rollouts.columns, total = (c.step || []).length, last = Math.min(firstRow + ROWS_SHOWN, matches.length);
  $("count").textContent = `${matches.length.toLocaleString("en")} of ${total.toLocaleString("en")} rollouts` +
    (matches.length ? `, ${(firstRow + 1).toLocaleString("en")} to ${last.toLocaleString("en")}` : "");
  $("previous").disabled = firstRow === 0;
  $("next").disabled = last >= matches.length;
  const answers = (c.extracted || []).some((_, i) => verdict(i)), golds = (c.answer || []).some((i) => texts[i] !== "");
  const several = data.runs.length > 1, head = [...(several ? ["run"] : []), "step", "prompt", "response", ...(answers ? ["extracted"] : []), ...(golds ? ["gold"] : []), "reward", "advantage", "tokens", "status", "end"];
  const cut = (i) => texts[i].slice(0, 300).replace(/\s+/g, " ");
  const rows = matches.slice(firstRow, last).map((i) => {
    const open = element("button", { type: "button", className: "link", textContent: cut(c.prompt[i]) || "(no prompt)" });
    open.addEventListener("click", () => showGroup(c.group[i]));
    const number = (value) => element("td", { className: "number", textContent: short(value) });
    return element("tr", {}, several ? element("td", {}, nameOfRun(c.run[i])) : null, number(c.step[i]), element("td", { className: "text" }, open),
      element("td", { className: "text", textContent: cut(c.text[i]) }),
      answers ? element("td", { className: verdict(i), textContent: cut(c.extracted[i]) || (verdict(i) ? "none" : "") }) : null,
      golds ? element("td", { textContent: cut(c.answer[i]) }) : null,
      number(c.reward[i]), number(c.advantage[i]), number(c.response_tokens[i]), element("td", { textContent: texts[c.status[i]] }),
      element("td", { textContent: texts[c.finish_reason[i]] }));
  });
  $("rows").replaceChildren(element("thead", {}, element("tr", {}, ...head.map((h) => element("th", { scope: "col", textContent: h })))), element("tbody", {}, ...rows));
}

function turnPage(by) { firstRow = Math.max(0, firstRow + by * ROWS_SHOWN); showRows(); }

// --- one group ---

function response(i, shade) {
  const c = rollouts.columns, kept = c.tokens[i], values = kept && kept[shade];
  if (!values && c.blocks[i] === null) return element("pre", { textContent: texts[c.text[i]] });
  if (!values) return element("div", {}, ...c.blocks[i].map(([kind, block]) =>
    element("pre", { className: ["text", "thought", "call"].includes(kind) ? kind : "said", textContent: texts[block], title: kind })));
  const largest = Math.max(...values.map(Math.abs), 1e-9);
  return element("pre", {}, ...kept.tokens.map((token, t) => {
    if (values[t] === null) return element("span", { className: "said", textContent: token, title: "not sampled" });
    const span = element("span", { className: "token", textContent: token, title: `${shade.replace("_", " ")}: ${short(values[t])}` });
    span.style.background = `color-mix(in srgb, ${values[t] < 0 ? "var(--bad)" : "var(--good)"} ${Math.round(60 * Math.abs(values[t]) / largest)}%, transparent)`;
    return span;
  }));
}

function showGroup(group) {
  const c = rollouts.columns, shade = $("shade").value, rows = [];
  for (let i = c.group.indexOf(group); c.group[i] === group; i++) rows.push(i);
  if (!rows.length) return;
  openGroup = group;
  const first = rows[0], gold = texts[c.answer[first]];
  $("group-title").replaceChildren(nameOfRun(c.run[first]), ` step ${c.step[first]}, ${texts[c.prompt_id[first]]}`);
  $("prompt").replaceChildren(element("pre", { className: "card", textContent: texts[c.conversation[first]] }),
    gold === "" ? "" : element("p", {}, "gold answer ", element("strong", { textContent: gold })));
  $("samples").replaceChildren(...rows.map((i) => element("article", { className: "card" },
    element("h3", {}, `sample ${c.sample[i]}`, element("small", { textContent: `reward ${short(c.reward[i])}, advantage ${short(c.advantage[i])}` })),
    response(i, shade),
    verdict(i) ? element("p", { className: verdict(i), textContent: texts[c.extracted[i]] === "" ? "no answer was extracted" : `extracted ${texts[c.extracted[i]]}` }) : null,
    element("p", { className: "soft", textContent: [...Object.entries(JSON.parse(texts[c.parts[i]])).map(([name, value]) => `${name} ${short(value)}`),
      texts[c.status[i]], `end: ${texts[c.finish_reason[i]]}`, `${c.response_tokens[i]} tokens`, `weights of step ${short(c.version[i])}`].join(", ") }))));
  $("shade-label").hidden = !rows.some((i) => c.tokens[i]);
  if (!$("group").open) $("group").showModal();
}

// --- start ---

function showLegend() {
  $("legend").replaceChildren(...data.settings.map((_, i) => {
    const box = element("input", { type: "checkbox", checked: shownSettings.has(i) });
    box.addEventListener("change", () => { box.checked ? shownSettings.add(i) : shownSettings.delete(i); redraw(); });
    return element("label", {}, box, nameOf(i));
  }));
}

function connect() {
  $("axis").addEventListener("change", redraw);
  $("smoothing").addEventListener("input", redraw);
  $("previous").addEventListener("click", () => turnPage(-1));
  $("next").addEventListener("click", () => turnPage(1));
  $("shade").addEventListener("change", () => showGroup(openGroup));
  $("earlier").addEventListener("click", () => showGroup(openGroup - 1));
  $("later").addEventListener("click", () => showGroup(openGroup + 1));
  $("close").addEventListener("click", () => $("group").close());
  connectFilters();
}

// Shows everything of `data`, the first time or after it has changed.
function showData() {
  document.querySelector("main").hidden = false;
  for (; settingsSeen < data.settings.length; settingsSeen++) shownSettings.add(settingsSeen);
  showLegend();
  showSummary();
  showFindings();
  showConfig();
  showCharts();
  redraw();
}

// --- rlhf watch ---

function showStatus(runs, failure = "") {
  const ago = (s) => s < 90 ? `${Math.round(s)} s` : duration(s);
  $("live").replaceChildren(...runs.map((run) => element("p", {},
    element("strong", { className: `state ${run.state.replace(" ", "-")}`, textContent: run.state }), runs.length > 1 ? ` ${run.name}: ` : " ",
    [run.step || run.steps ? `step ${run.step}${run.steps ? ` of ${run.steps}` : ""}` : "", run.since_step_s === null ? "" : `the last one ${ago(run.since_step_s)} ago`,
      run.step_s === null ? "" : `${short(run.step_s)} s per step`, run.remaining_s === null ? "" : `${ago(run.remaining_s)} left`].filter(Boolean).join(", "),
    run.text ? element("span", { className: "soft", textContent: ` ${run.text}` }) : null,
    run.waits ? element("span", { className: "bad", textContent: ` ${run.waits}` }) : null)),
    failure ? element("p", { className: "bad", textContent: failure }) : "");
}

async function follow() {
  let version = "", generation = "", steps = [], late = false, runs = [];
  for (;;) {
    let pause = POLL_MS;
    try {
      const status = await ask("status"), began = Date.now();
      runs = status.runs;
      showStatus(runs);
      if (`${status.generation}` !== generation || (rollouts?.columns.step || []).length > MOST_ROLLOUTS) {
        [generation, version, rollouts, steps] = [`${status.generation}`, "", undefined, []];
        $("group").close();
      }
      const changed = `${status.version}` !== version;
      if (changed && status.version.some(Boolean)) {
        data = await ask("metrics");
        showData();
      }
      if ((changed || late) && data) { // the rollouts of a step come just after its metrics
        const more = await ask(`rollouts?after=${steps}`);
        if (!rollouts) $("share").textContent = more.first.map((step, i) => step > 1 ? `${data.runs[i].name}: rollouts from step ${step} on. ` : "").join("") +
          (more.first.some((step) => step > 1) ? "rlhf report has those of the whole run." : "");
        addRollouts(more);
        steps = more.last;
        showOptions();
        if (!firstRow) match(); // else someone reads older ones
      }
      late = changed;
      version = `${status.version}`;
      document.body.dataset.ready = version;
      pause = Math.max(POLL_MS, 3 * (Date.now() - began));
    } catch (error) {
      showStatus(runs, `rlhf watch does not answer (${error.message}). The page shows what it had read.`);
      pause = RETRY_MS;
    }
    await new Promise((done) => setTimeout(done, pause));
  }
}

async function start() {
  connect();
  if (live) {
    document.querySelector("h1").textContent = "rlhf watch";
    document.querySelector("main").hidden = true; // until there is a run
    $("config").before($("changed")); // the curves come first
    $("filters").order.value = "-step";
    const script = element("script", { src: "plotly.js" });
    document.head.append(script);
    await new Promise((done, failed) => Object.assign(script, { onload: done, onerror: failed }));
    await follow();
    return;
  }
  data = JSON.parse(await unpack("metrics-data"));
  document.head.append(element("script", { textContent: await unpack("plotly-code") }));
  showData();
  const packed = JSON.parse(await unpack("rollouts-data"));
  addRollouts(packed);
  $("share").textContent = packed.every.map((every, i) => every === 1 ? "" :
    `Of ${data.runs[i].name} this page has the rollouts of one step in ${every}. `).join("");
  showOptions();
  filter();
  document.body.dataset.ready = "true";
}

start();
