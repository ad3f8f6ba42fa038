"use strict";
const doc = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
// Every text of the document becomes a text node: nothing in it is ever read as markup.
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "path", "text", "line", "circle", "title", "polyline"].includes(tag);
  const e = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) k === "click" ? e.addEventListener("click", v) : e.setAttribute(k, v);
  e.append(...children.filter((c) => c !== null && c !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return e;
}
const ms = (s) => (s === null || s === undefined ? "" : s >= 1 ? s.toFixed(2) + " s" : s >= 1e-3 ? (s * 1e3).toPrecision(3) + " ms" : (s * 1e6).toPrecision(3) + " µs");
const bytes = (n) => (n >= 1 << 20 ? (n / (1 << 20)).toFixed(1) + " MiB" : n >= 1024 ? (n / 1024).toFixed(1) + " KiB" : n + " B");
const few = (names, n = 3) => names.slice(0, n).join(", ") + (names.length > n ? ` +${names.length - n}` : "");
function table(titles, rows, numeric = []) {
  const cell = (tag) => (c, k) => make(tag, numeric.includes(k) ? { class: "n" } : {}, c);
  return make("div", { class: "scroll" }, make("table", {}, make("tr", {}, ...titles.map(cell("th"))), ...rows.map((r) => make("tr", {}, ...r.map(cell("td"))))));
}

function summary() {
  at("title").textContent = `${doc.model}, ${doc.dtype} ${doc.mode}, by ${doc.backend}`;
  const e = doc.environment;
  at("about").textContent = `${e.device ? e.device + "; " : ""}${e.cpu}, ${e.threads} threads; torch ${e.versions.torch}, Fusewright ${e.versions.fusewright}; ${e.date}` + (e.load_1min > 1 ? `; the machine was busy (load ${e.load_1min})` : "");
  const card = (big, small) => at("cards").append(make("div", { class: "card" }, make("b", {}, big), make("span", {}, small)));
  const s = doc.seconds;
  card(ms(s.ours), "a call");
  for (const who of Object.keys(s)) if (who !== "ours") card((s[who] / s.ours).toFixed(2) + "x", `over ${who} (${ms(s[who])})`);
  card(ms(doc.first_call.seconds), "first call, nothing cached");
  const fates = doc.graphs.flatMap((g) => g.fates).filter((f) => f.where !== "view");
  const n = (where) => fates.filter((f) => f.where === where).reduce((a, f) => a + f.n, 0);
  const all = Math.max(1, fates.reduce((a, f) => a + f.n, 0));
  card(`${Math.round((100 * n("lowered")) / all)}%`, `of ${all} ops lowered, ${n("carried")} carried, ${n("eager")} in eager`);
  const breaks = Object.entries(doc.breaks);
  card(doc.graphs.length, `graph${doc.graphs.length === 1 ? "" : "s"}, ${breaks.reduce((a, [, k]) => a + k, 0)} graph breaks`);
  for (const [why, k] of breaks) at("remarks").append(make("p", {}, `break (${k}x): ${why.split("Hint:")[0]}`));
  for (const bug of new Set(doc.graphs.flatMap((g) => g.bugs))) at("remarks").append(make("p", { class: "bad" }, `bug of the backend: ${bug}`));
  if (doc.without_inductor) at("remarks").append(make("p", {}, `Inductor's kernels are not shown: ${doc.without_inductor}`));
}

function bars() {
  for (const chart of doc.bars) {
    if (doc.bars.length > 1) at("barchart").append(make("h3", {}, chart.phase));
    const most = Math.max(1e-12, ...chart.groups.flatMap((g) => Object.values(g.seconds)));
    const sum = (who) => chart.groups.reduce((a, g) => a + (g.seconds[who] || 0), 0);
    at("barchart").append(make("p", { class: "hint" }, "sums: " + chart.who.map((w) => `${w} ${ms(sum(w))}`).join(", ")));
    const shown = chart.groups.filter((g) => Math.max(...Object.values(g.seconds)) > most / 1000).slice(0, 40);
    for (const g of shown) at("barchart").append(row(g, chart, most));
    if (chart.groups.length > shown.length) at("barchart").append(make("p", { class: "hint" }, `${chart.groups.length - shown.length} more, each far smaller`));
  }
}
function row(g, chart, most) {
  const name = make("div", { class: "name" }, g.lines.length ? few(g.lines) : "views, and what names no line", make("code", {}, g.lines.map((l) => chart.code[l]).filter(Boolean)[0] || ""));
  const each = make("div", {}, ...chart.who.map((who) => {
    const s = g.seconds[who] || 0;
    return make("div", { class: "bar" }, make("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none" }, make("rect", { class: `f-${who}`, width: Math.max(s ? 0.3 : 0, (100 * s) / most), height: 10 })), make("span", {}, `${who} ${ms(s)}`));
  }));
  const r = make("div", { class: "row", tabindex: 0, role: "button" }, name, each);
  let open = null;
  const toggle = () => { if (open) { open.remove(); open = null; } else r.append((open = parts(g, chart))); };
  r.addEventListener("click", (e) => { if (!(e.target instanceof HTMLButtonElement)) toggle(); });
  r.addEventListener("keydown", (e) => { if (e.key === "Enter" && e.target === r) toggle(); });
  return r;
}
function parts(g, chart) {
  const rows = g.ours.map((p) => [make("span", {}, p.name, " ", ...p.places.slice(0, 3).map(([graph, k]) => make("button", { click: () => choose(graph, k, true) }, `#${k}`))), "ours", p.runs, ms(p.seconds)]);
  for (const who of chart.who) for (const [name, s] of (g.parts[who] || []).slice(0, 12)) rows.push([name, who, "", ms(s)]);
  const code = g.lines.filter((l) => chart.code[l]).slice(0, 12).map((l) => make("div", {}, `${l}  `, make("code", {}, chart.code[l])));
  return make("div", { class: "parts" }, ...code, table(["kernel", "whose", "runs", "time"], rows, [2, 3]));
}

const W = 168, H = 34, DX = 186, DY = 58;
let view = null, shown = 0, boxes = new Map();
function flow() {
  const pick = make("select", { "aria-label": "graph" }, ...doc.graphs.map((g, k) => make("option", { value: k }, `graph ${k}, ${g.phase}`)));
  pick.addEventListener("change", () => draw(Number(pick.value)));
  const key = ["lowered", "carried", "eager"].flatMap((w) => [make("svg", { class: "key", viewBox: "0 0 1 1" }, make("rect", { width: 1, height: 1, class: w === "eager" ? "f-eagerbox" : `f-${w}` })), w]);
  at("tools").append(...(doc.graphs.length > 1 ? [pick] : []), make("button", { click: () => zoom(0.7) }, "+"), make("button", { click: () => zoom(1.4) }, "−"), make("button", { click: () => fit() }, "all"), make("button", { click: () => start() }, "top"), ...key);
  const svg = at("graph");
  let from = null;
  svg.addEventListener("wheel", (e) => { e.preventDefault(); zoom(e.deltaY > 0 ? 1.15 : 0.87, e); }, { passive: false });
  svg.addEventListener("pointerdown", (e) => { from = { x: e.clientX, y: e.clientY, v: [...view] }; });
  svg.addEventListener("pointermove", (e) => {
    if (!from || !e.buttons) return;
    const k = scale();
    view = [from.v[0] - (e.clientX - from.x) * k, from.v[1] - (e.clientY - from.y) * k, from.v[2], from.v[3]];
    look();
  });
  svg.addEventListener("pointerup", () => { from = null; });
  draw(0);
}
function draw(k) {
  shown = k;
  boxes = new Map();
  const g = doc.graphs[k], svg = at("graph");
  svg.replaceChildren();
  if (!g || !g.nodes) return;
  const x = (n) => n.column * DX, y = (n) => n.row * DY, by = new Map(g.nodes.map((n) => [n.at, n]));
  const slowest = Math.max(1e-12, ...g.nodes.map((n) => n.seconds || 0));
  for (const n of g.nodes) for (const i of n.inputs) {
    const a = by.get(i), mid = (y(a) + H + y(n)) / 2;
    svg.append(make("path", { d: `M${x(a) + W / 2},${y(a) + H} C${x(a) + W / 2},${mid} ${x(n) + W / 2},${mid} ${x(n) + W / 2},${y(n)}` }));
  }
  for (const n of g.nodes) {
    const cut = (t, l) => (t.length > l ? t.slice(0, l - 1) + "…" : t);
    const box = make("g", { class: "node", tabindex: 0, transform: `translate(${x(n)},${y(n)})`, click: () => choose(k, n.at) },
      make("rect", { width: W, height: H, rx: 4, class: n.where }), make("rect", { y: H - 3, width: (W * (n.seconds || 0)) / slowest, height: 3, class: "f-ours", stroke: "none" }),
      make("text", { x: 6, y: 13, "font-size": 10.5, "font-weight": 600 }, cut(n.label, 27)), make("text", { x: 6, y: 26, "font-size": 9.5, class: "dim" }, cut(n.module || n.shape, 24) + (n.seconds ? " " + ms(n.seconds) : "")),
      make("title", {}, `${n.label}\n${n.ops.join(", ")}\n${n.sources.join(", ")}\n${n.module}\n${n.shape}`));
    box.addEventListener("keydown", (e) => { if (e.key === "Enter") choose(k, n.at); });
    boxes.set(n.at, box);
    svg.append(box);
  }
  start();
}
const extent = () => { const n = doc.graphs[shown].nodes; const xs = n.map((m) => m.column * DX); return [Math.min(...xs) - 20, -20, Math.max(...xs) - Math.min(...xs) + W + 40, Math.max(...n.map((m) => m.row)) * DY + H + 40]; };
const scale = () => Math.max(view[2] / at("graph").clientWidth, view[3] / at("graph").clientHeight);
function look() { at("graph").setAttribute("viewBox", view.map((v) => v.toFixed(1)).join(" ")); }
const CLOSEST = 0.6; // units of the drawing a pixel: a graph of few boxes is not blown up
function fit() {
  const e = extent(), w = Math.max(e[2], at("graph").clientWidth * CLOSEST);
  view = [e[0] - (w - e[2]) / 2, e[1], w, Math.max(e[3], at("graph").clientHeight * CLOSEST)];
  look();
}
function start() {
  if (!doc.graphs[shown].nodes || !doc.graphs[shown].nodes.length) return;
  const e = extent(), w = Math.max(Math.min(e[2], at("graph").clientWidth * 1.1), at("graph").clientWidth * CLOSEST), h = (w * at("graph").clientHeight) / at("graph").clientWidth, first = doc.graphs[shown].nodes.find((n) => n.row === 0);
  view = [first.column * DX + W / 2 - w / 2, -20, w, h];
  look();
}
function zoom(f, e) {
  const box = at("graph").getBoundingClientRect(), px = e ? (e.clientX - box.left) / box.width : 0.5, py = e ? (e.clientY - box.top) / box.height : 0.5;
  view = [view[0] + view[2] * (1 - f) * px, view[1] + view[3] * (1 - f) * py, view[2] * f, view[3] * f];
  look();
}
function choose(graph, k, move) {
  if (graph !== shown) draw(graph);
  const n = doc.graphs[graph].nodes.find((m) => m.at === k), kernel = n && doc.kernels[n.kernel];
  for (const [i, box] of boxes) box.classList.toggle("picked", i === k);
  if (!n) return at("chosen").replaceChildren(make("p", {}, `Instruction ${k} only makes a view.`));
  if (move) { view = [n.column * DX + W / 2 - view[2] / 2, n.row * DY - view[3] / 2, view[2], view[3]]; look(); }
  const facts = [["instruction", `#${k} of graph ${graph}: ${n.label}`], ["ops", few(n.ops, 12)], ["lines", few(n.sources, 12)], ["module", n.module], ["result", n.shape], ["runs", n.where], ["time", ms(n.seconds)]];
  at("chosen").replaceChildren(table(["", ""], facts.filter(([, v]) => v)), ...(kernel ? [make("h3", {}, "Kernel"), make("pre", {}, kernel.ir)] : []), ...(kernel && kernel.source ? [make("h3", {}, "As emitted"), make("pre", {}, kernel.source)] : []));
  if (move) at("detail").scrollIntoView({ behavior: "instant", block: "nearest" });
}

function fates() {
  doc.graphs.forEach((g, k) => {
    const lowered = g.fates.filter((f) => f.where !== "view");
    at("fatetable").append(make("h3", {}, `graph ${k}, ${g.phase}: ${g.regions} region${g.regions === 1 ? "" : "s"}, captured ${g.capture}` + (g.replay ? `; ${g.replay}` : "")),
      table(["op", "n", "estimate", "where", "how, or why not", "lines"], lowered.map((f) => [f.op, f.n, (100 * f.share).toFixed(1) + "%", f.where, f.why, few(f.sources, 2)]), [1, 2]),
      make("p", { class: "hint" }, "rules: " + (Object.entries(g.rules).map(([r, n]) => `${r} ${n}`).join(", ") || "none")));
  });
}

function flame() {
  const c = doc.first_call, rows = 1 + Math.max(0, ...c.spans.map((s) => s.depth)), width = 1000, h = 26;
  const svg = make("svg", { class: "chart", viewBox: `0 0 ${width} ${rows * h + 18}`, role: "img", "aria-label": "first call by stage" });
  for (const s of c.spans) {
    const x = (width * s.start) / c.seconds, w = Math.max(0.5, (width * s.seconds) / c.seconds);
    const fill = s.depth === 0 ? "f-eager" : s.name.startsWith("Dynamo") || s.name.startsWith("guards") ? "f-inductor" : "f-ours";
    svg.append(make("g", {}, make("rect", { x, y: s.depth * h, width: w, height: h - 2, class: fill, "fill-opacity": 0.35 + 0.12 * s.depth }), w > 60 ? make("text", { x: x + 4, y: s.depth * h + 16, "font-size": 12 }, `${s.name} ${ms(s.seconds)}`.slice(0, Math.floor(w / 6.6))) : null, make("title", {}, `${s.name}: ${ms(s.seconds)}`)));
  }
  at("flame").append(svg);
  const total = new Map();
  for (const s of c.spans) if (s.depth > 0) total.set(s.name, (total.get(s.name) || 0) + s.seconds);
  at("flame").append(make("p", { class: "hint" }, [...total].map(([n, s]) => `${n} ${ms(s)}`).join(" · ")));
}

function lines(series, { label, log = false, format, points = [] }) {
  const width = 1000, height = 220, left = 70, all = series.flatMap((s) => s.values).filter((v) => v !== null && (!log || v > 0));
  let low = log ? Math.floor(Math.log10(Math.min(...all))) : 0, high = log ? Math.ceil(Math.log10(Math.max(...all))) : Math.max(1, ...all) * 1.05;
  if (high <= low) high = low + 1;
  const n = Math.max(1, ...series.map((s) => s.values.length - 1));
  const x = (k) => left + ((width - left - 5) * k) / n, y = (v) => height - 8 - ((height - 20) * ((log ? Math.log10(Math.max(v, 10 ** low)) : v) - low)) / (high - low);
  const svg = make("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const marks = log ? Array.from({ length: high - low + 1 }, (_, k) => 10 ** (low + k)) : [0, 0.25, 0.5, 0.75, 1].map((k) => k * high);
  for (const v of marks) svg.append(make("line", { x1: left, x2: width, y1: y(v), y2: y(v), class: "axis" }), make("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end", "font-size": 12, class: "dim" }, format(v)));
  for (const s of series) svg.append(make("polyline", { class: s.style, points: s.values.map((v, k) => (v === null ? "" : `${x(k).toFixed(1)},${y(v).toFixed(1)}`)).join(" ") }));
  for (const p of points) svg.append(make("circle", { cx: x(p.k), cy: y(p.v), r: p.bad ? 4.5 : 2.2, class: p.bad ? "f-bad" : "f-ours" }, make("title", {}, p.title)));
  return svg;
}
function memory() {
  doc.graphs.forEach((g, k) => {
    const m = g.memory;
    if (!m || !m.fresh.length) return;
    at("memchart").append(make("h3", {}, `graph ${k}, ${g.phase}: ${bytes(m.peak)} at the peak: an arena of ${bytes(m.arena)}, the rest as tensors of their own; beside ${bytes(m.weights)} of weights and ${bytes(m.inputs)} of other inputs`),
      lines([{ values: m.fresh.map((v, i) => v + m.used[i]), style: "s-ours" }, { values: m.fresh.map((v) => v + m.arena), style: "s-eager" }], { label: "memory over the plan", format: bytes }),
      make("p", { class: "hint" }, "Blue: what lives behind each instruction. Gray: with the arena as it is held."),
      table(["alive at the peak", "made by", "bytes"], m.largest.map((l) => [l.label, `#${l.at}`, bytes(l.bytes)]), [2]));
  });
}
function layers() {
  doc.graphs.forEach((g, k) => {
    if (g.not_judged) at("layerchart").append(make("p", {}, `graph ${k}, ${g.phase}: ${g.not_judged}`));
    if (!g.layers || !g.layers.length) return;
    const points = g.layers.map((l, i) => ({ k: i, v: l.ours || 1e-12, bad: !l.passed, title: `${l.op} ${l.source}\n${l.module}\nours ${l.ours.toExponential(2)}, eager ${l.eager.toExponential(2)}` }));
    const worst = [...g.layers].sort((a, b) => b.ours / Math.max(b.eager, 1e-12) - a.ours / Math.max(a.eager, 1e-12)).slice(0, 8), failed = g.layers.filter((l) => !l.passed).length;
    at("layerchart").append(make("h3", {}, `graph ${k}: ${g.layers.length} values, ${failed ? failed + " beyond the rule" : "all within the rule"}`),
      lines([{ values: g.layers.map((l) => l.eager || null), style: "s-eager" }, { values: g.layers.map((l) => l.ours || null), style: "s-ours" }], { label: "error by layer", log: true, format: (v) => v.toExponential(0), points }),
      make("p", { class: "hint" }, "Blue: ours. Gray: eager. Red: beyond the rule. Below: the values farthest from eager's own error."),
      table(["op", "line", "module", "ours", "eager"], worst.map((l) => [l.op, l.source, l.module, l.ours.toExponential(2), l.eager.toExponential(2)]), [3, 4]));
  });
}
function rest() {
  doc.graphs.forEach((g, k) => at("plantext").append(make("details", {}, make("summary", {}, `graph ${k}, ${g.phase}: ${g.plan.split("\n").length} lines`), make("pre", {}, g.plan))));
  const e = doc.environment, rows = [...Object.entries(e.versions), ["cpu", e.cpu], ["architecture", e.arch], ["cores", e.cores], ["threads", e.threads], ["load when this was made", e.load_1min], ["features", e.features.join(" ")], ["options", JSON.stringify(doc.options)], ["size", doc.size], ["made", e.date]];
  at("envtable").append(table(["", ""], rows));
}
for (const part of [summary, bars, flow, fates, flame, memory, layers, rest]) part();
document.documentElement.dataset.ready = "yes";
