"use strict";
// Draws the charts and the sample responses of the page from the numbers in #data. Texts are set as text, never as HTML:
// what a model wrote cannot act here.

const data = JSON.parse(document.getElementById("data").textContent);
const state = { x: "steps", smooth: true, hidden: new Set(), charts: [] };
const COLORS = 7, FEW = 20, HEIGHT = 190, MARGIN = { left: 48, right: 10, top: 10, bottom: 22 };
const DASHES = ["", "6 4", "1.5 4"]; // of a chart's lines
const AXES = { steps: "step", hours: "hours", tokens: "million tokens" };
const PHASES = ["c0", "c4", "c2", "c5", "c3", "c1", "c6"];
const tip = document.getElementById("tip");

// ---- small things

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function written(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(3);
}

// Round numbers from low to high, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
  return found;
}

// As the labels of one axis: all with the decimals that their distance asks for.
function ticked(values) {
  const step = values.length > 1 ? Math.abs(values[1] - values[0]) : Math.abs(values[0]) || 1;
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), largest = Math.max(...values.map(Math.abs));
  if (decimals > 4 || largest >= 1e7) return values.map((value) => (value === 0 ? "0" : value.toExponential(1)));
  return values.map((value) => value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }));
}

function decades(low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const stride = Math.max(1, Math.ceil((last - first + 1) / 5)), found = [];
  for (let n = first; n <= last; n += stride) found.push(10 ** n);
  return found;
}

// Mean over a centred window of a tenth of the run, cut off at both ends.
function smoothed(values) {
  const half = Math.floor(values.length / 20);
  return values.map((_, i) => {
    const window = values.slice(Math.max(0, i - half), i + half + 1);
    return window.reduce((sum, value) => sum + value, 0) / window.length;
  });
}

const visible = () => data.groups.map((group, index) => ({ ...group, index })).filter((group) => !state.hidden.has(group.index));

// ---- tooltip

function showTip(event, head, rows) {
  tip.replaceChildren(element("div", { class: "head" }, head));
  for (const row of rows) {
    const swatch = element("span", { class: "swatch", style: `--tone: var(--${row.tone})` });
    tip.append(element("div", { class: "row" }, ...(row.tone ? [swatch] : []), element("span", { class: "what" }, row.what), element("b", {}, row.value)));
  }
  place(event);
}

function place(event) {
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 16 : event.clientX + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4))}px`;
}

const hideTip = () => { tip.hidden = true; };

// ---- charts of lines

class LineChart {
  constructor(parent, spec) {
    this.use(spec);
    this.plot = element("div", { class: "plot" });
    this.key = element("div", { class: "key" });
    this.title = element("h3", {}, spec.title);
    const caption = element("figcaption", {}, this.title);
    this.figure = element("figure", { class: "chart", id: `chart_${spec.id}` }, caption, ...(spec.note ? [element("p", { class: "note" }, spec.note)] : []), this.plot, this.key);
    parent.append(this.figure);
    this.plot.addEventListener("pointermove", (event) => this.hover(event));
    this.plot.addEventListener("pointerleave", () => { hideTip(); state.charts.forEach((chart) => chart.cursor(null)); });
    state.charts.push(this);
  }

  use(spec) {
    this.spec = spec;
    this.lines = spec.lines.map((metric, i) => ({ metric, label: metric, dash: DASHES[i] }));
  }

  // What is drawn: one series per group and line, of the points that there are.
  series() {
    const found = [];
    for (const group of visible()) {
      for (const line of this.lines) {
        const metric = group.metrics[line.metric];
        if (!metric) continue;
        const points = [];
        group.x[state.x].forEach((x, i) => {
          const mean = metric.mean[i];
          if (x === null || mean === null || (this.spec.log && mean <= 0)) return;
          points.push({ x, mean, error: metric.error ? metric.error[i] ?? 0 : 0, step: group.x.steps[i] });
        });
        if (points.length) found.push(this.prepared({ group, line, points, tone: `c${group.index % COLORS}` }));
      }
    }
    return found;
  }

  prepared(series) {
    const many = series.points.length >= FEW && state.smooth;
    const means = series.points.map((point) => point.mean), errors = series.points.map((point) => point.error);
    return { ...series, many, shown: many ? smoothed(means) : means, band: many ? smoothed(errors) : errors };
  }

  draw() {
    const series = (this.drawn = this.series());
    const width = Math.max(this.plot.clientWidth, 120);
    const svg = (this.svg = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img" }));
    svg.setAttribute("aria-label", `${this.spec.title}: ${series.map((s) => `${s.group.name} ${s.line.label} ends at ${written(s.shown.at(-1))}`).join("; ")}`);
    this.plot.replaceChildren(svg);
    this.scales(series, width);
    this.axes(width);
    for (const each of series) this.curve(each);
    this.marks = shape("g");
    svg.append(this.marks);
    const lines = this.lines.filter((line) => series.some((each) => each.line === line));
    this.key.replaceChildren(...(lines.length > 1 ? lines.map((line) => this.keyOf(line)) : []));
  }

  keyOf(line) {
    const drawn = shape("svg", { width: 26, height: 8 });
    drawn.append(shape("line", { x1: 0, x2: 26, y1: 4, y2: 4, stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": line.dash }));
    return element("span", {}, drawn, line.label);
  }

  scales(series, width) {
    const xs = series.flatMap((each) => each.points.map((point) => point.x));
    const ys = series.flatMap((each) => each.shown.flatMap((value, i) => [value - each.band[i], value + each.band[i]]));
    const raw = series.filter((each) => each.many && each.group.seeds === 1).flatMap((each) => each.points.map((point) => point.mean));
    let values = [...ys, ...raw].filter((value) => !this.spec.log || value > 0);
    if (!values.length) values = [this.spec.log ? 1 : 0, 1];
    let low = Math.min(...values), high = Math.max(...values);
    if (this.spec.log) [low, high] = [Math.log10(low), Math.log10(high)];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    low = this.spec.floor === null || this.spec.log ? low - room : Math.min(this.spec.floor, low);
    high += room;
    const left = Math.min(...xs, Infinity), right = Math.max(...xs, -Infinity);
    [this.left, this.right] = left < right ? [left, right] : [left - 1, left + 1];
    if (!xs.length) [this.left, this.right] = [0, 1];
    [this.low, this.high] = [low, high];
    this.inner = { x0: MARGIN.left, x1: width - MARGIN.right, y0: HEIGHT - MARGIN.bottom, y1: MARGIN.top };
  }

  px(x) { return this.inner.x0 + ((x - this.left) / (this.right - this.left)) * (this.inner.x1 - this.inner.x0); }

  py(y) {
    const value = this.spec.log ? Math.log10(y) : y;
    return this.inner.y0 - ((value - this.low) / (this.high - this.low)) * (this.inner.y0 - this.inner.y1);
  }

  axes(width) {
    const { x0, x1, y0 } = this.inner;
    const vertical = this.spec.log ? decades(10 ** this.low, 10 ** this.high) : ticks(this.low, this.high, 4);
    const texts = this.spec.log ? vertical.map((value) => value.toExponential(0)) : ticked(vertical);
    vertical.forEach((value, i) => {
      const y = this.py(value), kind = value === 0 && this.low < 0 && !this.spec.log ? "zero" : "grid";
      this.svg.append(shape("line", { class: kind, x1: x0, x2: x1, y1: y, y2: y }));
      this.label(texts[i], x0 - 6, y + 4, "end");
    });
    const horizontal = ticks(this.left, this.right, Math.max(2, Math.min(6, width / 90)));
    ticked(horizontal).forEach((text, i) => this.label(text, this.px(horizontal[i]), y0 + 16, "middle"));
  }

  label(text, x, y, anchor) {
    const made = shape("text", { x, y, "text-anchor": anchor });
    made.textContent = text;
    this.svg.append(made);
  }

  curve({ group, line, points, shown, band, many, tone }) {
    const path = (values) => values.map((value, i) => `${i ? "L" : "M"}${this.px(points[i].x).toFixed(1)},${this.py(value).toFixed(1)}`).join("");
    const style = `--tone: var(--${tone})`;
    if (band.some((value) => value > 0)) {
      const low = shown.map((value, i) => (this.spec.log ? Math.max(value - band[i], 10 ** this.low) : value - band[i]));
      const upper = path(shown.map((value, i) => value + band[i]));
      const lower = points.map((_, i) => points.length - 1 - i).map((i) => `L${this.px(points[i].x).toFixed(1)},${this.py(low[i]).toFixed(1)}`).join("");
      this.svg.append(shape("path", { class: "band", style, d: `${upper}${lower}Z` }));
    }
    if (many && group.seeds === 1) this.svg.append(shape("path", { class: "raw", style, d: path(points.map((point) => point.mean)) }));
    this.svg.append(shape("path", { class: "mean", style, d: path(shown), "stroke-dasharray": line.dash }));
    if (points.length < FEW) {
      points.forEach((point, i) => this.svg.append(shape("circle", { class: "dot", style, cx: this.px(point.x), cy: this.py(shown[i]), r: 2.6 })));
    }
  }

  nearest(points, x) {
    return points.reduce((best, point, i) => (Math.abs(point.x - x) < Math.abs(points[best].x - x) ? i : best), 0);
  }

  hover(event) {
    const box = this.svg.getBoundingClientRect();
    const at = (event.clientX - box.left - this.inner.x0) / (this.inner.x1 - this.inner.x0);
    const x = this.left + Math.max(0, Math.min(1, at)) * (this.right - this.left);
    state.charts.forEach((chart) => chart.cursor(x));
    if (!this.drawn.length) return;
    const many = this.lines.length > 1;
    const rows = this.drawn.map(({ group, line, points, tone }) => {
      const point = points[this.nearest(points, x)];
      const error = point.error ? ` ± ${written(point.error)}` : "";
      return { tone, what: group.name + (many ? `, ${line.label}` : ""), value: written(point.mean) + error };
    });
    const points = this.drawn[0].points, found = points[this.nearest(points, x)];
    const beside = state.x === "steps" ? "" : `, ${written(found.x)} ${AXES[state.x]}`;
    showTip(event, `step ${written(found.step)}${beside}`, rows);
  }

  // A line at x in every chart, so that one eye follows all of them.
  cursor(x) {
    if (!this.marks) return;
    this.marks.replaceChildren();
    if (x === null || x < this.left || x > this.right || !this.drawn.length) return;
    const { y0, y1 } = this.inner;
    this.marks.append(shape("line", { class: "cursor", x1: this.px(x), x2: this.px(x), y1: y0, y2: y1 }));
    for (const { points, shown, tone } of this.drawn) {
      const i = this.nearest(points, x);
      this.marks.append(shape("circle", { class: "mark", style: `--tone: var(--${tone})`, cx: this.px(points[i].x), cy: this.py(shown[i]), r: 4 }));
    }
  }
}

// ---- charts of stacked seconds

class StackChart {
  constructor(parent, group, index) {
    this.group = group;
    this.plot = element("div", { class: "plot" });
    const unit = element("span", { class: "unit" }, "seconds by phase");
    this.figure = element("figure", { class: "chart stack", id: `stack_${index}` }, element("figcaption", {}, element("h3", {}, group.name), unit), this.plot, this.legend());
    parent.append(this.figure);
    state.charts.push(this);
  }

  // The longest phases have colours of their own, the same in all groups; the others have one together.
  get parts() {
    const names = data.phases, own = names.length > PHASES.length ? names.slice(0, PHASES.length - 1) : names;
    const parts = own.map((name) => ({ label: name.replace("seconds/", ""), names: [name] }));
    return own.length < names.length ? [...parts, { label: "the rest", names: names.slice(own.length) }] : parts;
  }

  legend() {
    const all = this.bars().reduce((sum, bar) => sum + bar.total * bar.count, 0);
    const made = element("div", { class: "key" });
    this.parts.forEach((part, i) => {
      const seconds = this.bars().reduce((sum, bar) => sum + bar.heights[i] * bar.count, 0);
      const swatch = element("span", { class: "swatch", style: `--tone: var(--${PHASES[i]})` });
      if (seconds) made.append(element("span", {}, swatch, `${part.label} ${Math.round((100 * seconds) / all)}%`));
    });
    return made;
  }

  // Means over up to 40 runs of steps; step 0, the evaluation before the first, is left out.
  bars() {
    const { x, metrics } = this.group, step = metrics["seconds/step"]?.mean ?? [];
    const places = x.steps.map((_, i) => i).filter((i) => step[i] != null && x.steps[i] > 0);
    const width = Math.ceil(places.length / 40) || 1, found = [];
    for (let start = 0; start < places.length; start += width) {
      const bin = places.slice(start, start + width);
      const mean = (name) => bin.reduce((sum, i) => sum + (metrics[name]?.mean[i] ?? 0), 0) / bin.length;
      const heights = this.parts.map((part) => part.names.reduce((sum, name) => sum + mean(name), 0));
      const total = heights.reduce((sum, height) => sum + height, 0);
      found.push({ first: x.steps[bin[0]], last: x.steps[bin.at(-1)], heights, total, count: bin.length });
    }
    return found;
  }

  draw() {
    const bars = this.bars(), width = Math.max(this.plot.clientWidth, 120), top = Math.max(...bars.map((bar) => bar.total), 1e-9) * 1.05;
    const x0 = MARGIN.left, x1 = width - MARGIN.right, y0 = HEIGHT - MARGIN.bottom, y1 = MARGIN.top;
    const svg = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": `Seconds of a step by phase, ${this.group.name}` });
    this.plot.replaceChildren(svg);
    const py = (seconds) => y0 - (seconds / top) * (y0 - y1), each = (x1 - x0) / Math.max(bars.length, 1);
    const label = (text, x, y, anchor) => { const made = shape("text", { x, y, "text-anchor": anchor }); made.textContent = text; svg.append(made); };
    const values = ticks(0, top, 4);
    ticked(values).forEach((text, i) => {
      svg.append(shape("line", { class: "grid", x1: x0, x2: x1, y1: py(values[i]), y2: py(values[i]) }));
      label(text, x0 - 6, py(values[i]) + 4, "end");
    });
    bars.forEach((bar, place) => {
      const part = shape("g");
      let low = 0;
      bar.heights.forEach((height, i) => {
        part.append(shape("rect", { class: "bar", style: `--tone: var(--${PHASES[i]})`, x: x0 + place * each, width: Math.max(each - 1, 1), y: py(low + height), height: Math.max(py(low) - py(low + height), 0) }));
        low += height;
      });
      part.addEventListener("pointermove", (event) => this.hover(event, bar));
      part.addEventListener("pointerleave", hideTip);
      svg.append(part);
      if (place % Math.ceil(bars.length / 5) === 0) label(written(bar.first), x0 + (place + 0.5) * each, y0 + 16, "middle");
    });
  }

  hover(event, bar) {
    const rows = this.parts.map((part, i) => ({ tone: PHASES[i], what: part.label, value: `${written(bar.heights[i])} s` })).filter((_, i) => bar.heights[i]);
    const steps = bar.first === bar.last ? `step ${written(bar.first)}` : `steps ${written(bar.first)} to ${written(bar.last)}`;
    showTip(event, `${steps}: ${written(bar.total)} s`, rows.reverse());
  }

  cursor() {}
}

// ---- sample responses

// How a number per token is shown: `scale` maps it to -1 .. 1, above zero warm, below cold.
const KINDS = {
  rollout_logprobs: { label: "log-prob, engine", unit: "nats", scale: (v) => -v / 4, ends: ["0: certain", "−4 and less"] },
  old_logprobs: { label: "log-prob, trainer before the step", unit: "nats", scale: (v) => -v / 4, ends: ["0: certain", "−4 and less"] },
  ref_logprobs: { label: "log-prob, reference", unit: "nats", scale: (v) => -v / 4, ends: ["0: certain", "−4 and less"] },
  teacher_logprobs: { label: "log-prob, teacher", unit: "nats", scale: (v) => -v / 4, ends: ["0: certain", "−4 and less"] },
  refined_logprobs: { label: "log-prob of the refined token", unit: "nats", scale: (v) => -v / 4, ends: ["0: certain", "−4 and less"] },
  cross_entropy: { label: "cross entropy", unit: "nats", scale: (v) => v / 4, ends: ["0: certain", "4 and more"] },
  moved: { label: "policy against reference", unit: "nats", scale: (v) => v / 2, ends: ["−2: less likely", "+2: more likely"] },
  mismatch: { label: "trainer minus engine", unit: "nats", scale: (v) => v / 0.1, ends: ["−0.1", "+0.1"] },
};
const signed = (kind) => ["moved", "mismatch", "advantages"].includes(kind) || !(kind in KINDS);

// The recorded numbers, and differences between them.
function numbers(sample) {
  const found = { ...sample.values };
  const minus = (a, b) => a.map((value, i) => (value === null || b[i] === null ? null : value - b[i]));
  const own = found.old_logprobs ?? found.rollout_logprobs;
  if (own) found.cross_entropy ??= own.map((value) => (value === null ? null : -value));
  if (own && found.ref_logprobs) found.moved = minus(own, found.ref_logprobs);
  if (found.old_logprobs && found.rollout_logprobs) found.mismatch = minus(found.old_logprobs, found.rollout_logprobs);
  return found;
}

function scaleOf(kind, samples) {
  if (KINDS[kind]) return KINDS[kind];
  const largest = Math.max(1e-9, ...samples.flatMap((sample) => (numbers(sample)[kind] ?? []).map((v) => Math.abs(v ?? 0))));
  return { label: kind.replaceAll("_", " "), unit: "", scale: (v) => v / largest, ends: [`−${written(largest)}`, `+${written(largest)}`] };
}

function colour(kind, value, scale) {
  if (value === null || value === undefined) return "transparent";
  const at = Math.max(-1, Math.min(1, scale.scale(value)));
  return `rgba(var(--${at < 0 ? "cold" : "hot"}), ${(0.75 * Math.abs(at)).toFixed(3)})`;
}

class Samples {
  constructor(root) {
    this.root = root;
    if (!data.samples.length) {
      root.querySelector(".picker").append(element("p", { class: "empty" }, "These runs recorded none (tracking.sampled_steps)."));
      return;
    }
    this.run = this.select("run", data.samples.map((run, i) => [i, run.run]), data.samples.length > 1);
    this.step = element("input", { type: "range", min: 0, id: "sample_step" });
    this.stepLabel = element("output");
    this.step.addEventListener("input", () => this.draw());
    root.querySelector(".picker").append(element("label", {}, "step ", this.step, this.stepLabel));
    this.kind = this.select("colour", [], true);
    this.run.addEventListener("change", () => this.chooseRun());
    this.chooseRun();
  }

  select(name, options, shown) {
    const made = element("select", { id: `sample_${name}` });
    made.append(...options.map(([value, text]) => element("option", { value }, text)));
    made.addEventListener("change", () => this.draw());
    if (shown) this.root.querySelector(".picker").append(element("label", {}, `${name} `, made));
    return made;
  }

  chooseRun() {
    this.steps = data.samples[this.run.value].steps;
    this.step.max = this.steps.length - 1;
    this.step.value = this.steps.length - 1;
    const kinds = [...new Set(this.steps.flatMap((line) => line.samples.flatMap((sample) => Object.keys(numbers(sample)))))];
    const before = this.kind.value, pairs = this.steps.some((line) => line.samples.some((sample) => sample.kind === "refined"));
    if (pairs) kinds.sort((a, b) => (b === "cross_entropy") - (a === "cross_entropy"));  // the one that both sides have
    this.kind.replaceChildren(...kinds.map((kind) => element("option", { value: kind }, scaleOf(kind, []).label)));
    if (kinds.includes(before)) this.kind.value = before;
    this.draw();
  }

  draw() {
    const line = this.steps[this.step.value], kind = this.kind.value, scale = scaleOf(kind, line.samples);
    this.stepLabel.textContent = line.step;
    const ramp = [-1, -0.5, 0, 0.5, 1].filter((at) => signed(kind) || at >= 0);
    const colours = ramp.map((at) => `rgba(var(--${at < 0 ? "cold" : "hot"}), ${0.75 * Math.abs(at)})`).join(", ");
    const bar = element("span", { class: "ramp", style: `background: linear-gradient(to right, ${colours})` });
    this.root.querySelector(".scale").replaceChildren(element("b", {}, scale.label), element("span", {}, scale.ends[0]), bar, element("span", {}, scale.ends[1]), element("span", {}, "(point at a token for its numbers)"));
    this.root.querySelector(".list").replaceChildren(...line.samples.map((sample) => this.card(sample, kind, scale)));
  }

  card(sample, kind, scale) {
    const right = sample.reward !== null && sample.reward >= 1, wrong = sample.reward !== null && sample.reward <= 0;
    const shaped = sample.shaping ? ` + ${written(sample.shaping)} shaping` : "";
    const facts = element("div", { class: "facts" }, element("span", { class: `badge ${right ? "good" : wrong ? "bad" : ""}` }, `reward ${written(sample.reward)}${shaped}`));
    const say = (text) => facts.append(element("span", {}, text));
    if (sample.kind !== "sampled") say(sample.kind);
    if (sample.problem !== null) say(`problem ${sample.problem}`);
    say(`${sample.tokens.length + sample.omitted} tokens${sample.finished ? "" : ", cut off at the limit"}`);
    if (sample.answer) say(`reference ${sample.answer.slice(0, 80)}`);
    if (sample.reason) say(`verifier: ${sample.reason.slice(0, 200)}`);
    const response = element("div", { class: "text response" }), all = numbers(sample), turns = sample.turns ?? [];
    const pieces = sample.segments ?? [], segments = [response];
    let part = response, spoken = null, within = 0;
    sample.tokens.forEach((token, i) => {
      const place = sample.omitted && i >= sample.head ? i + sample.omitted : i;  // in the whole response
      const turn = turns.findIndex(([first, end]) => first <= place && place < end);
      const of = pieces.find(([first, end]) => first <= place && place < end)?.[2] ?? 0;
      if (turns.length && (turn !== spoken || of !== within)) {
        part = this.part(turn, turns, of);
        this.segment(segments, Math.abs(of), Math.abs(within)).append(part);
        [spoken, within] = [turn, of];
      }
      if (sample.omitted && i === sample.head) part.append(element("span", { class: "omitted" }, `\n[... ${sample.omitted} tokens ...]\n`));
      const span = element("span", { style: `background: ${colour(kind, turns.length && turn < 0 ? null : all[kind]?.[i], scale)}` }, token);
      span.addEventListener("pointermove", (event) => this.hover(event, token, i, all));
      span.addEventListener("pointerleave", hideTip);
      part.append(span);
    });
    const images = (sample.images ?? []).map((src) => element("img", { src, alt: "an image of the prompt" }));
    return element("article", { class: "sample" }, facts, ...images, element("div", { class: "text prompt" }, sample.prompt), response);
  }

  // One part of a conversation, which can be folded: a turn of the policy, or what the environment said.
  part(turn, turns, segment) {
    const reward = turns[turn]?.[2] ? `, reward ${written(turns[turn][2])}` : "";
    const name = turn < 0 ? (segment < 0 ? "prompt" : "environment") : `turn ${turn + 1}${reward}`;
    return element("details", { class: turn < 0 ? "said" : "turn", open: "" }, element("summary", {}, name));
  }

  // Where a segment's parts go. An episode is a tree: a segment is in the one that had the turn before its first one.
  segment(places, number, before) {
    if (!places[number]) {
      places[number] = element("details", { class: "segment", open: "" }, element("summary", {}, `segment ${number + 1}`));
      places[before].append(places[number]);
    }
    return places[number];
  }

  hover(event, token, i, all) {
    const rows = Object.entries(all).filter(([, values]) => values[i] !== null && values[i] !== undefined).map(([kind, values]) => {
      const chance = kind.endsWith("logprobs") ? ` (p = ${Math.exp(values[i]).toPrecision(2)})` : "";
      return { what: scaleOf(kind, []).label, value: written(values[i]) + chance };
    });
    showTip(event, "", rows);
    tip.firstChild.replaceWith(element("div", { class: "token" }, JSON.stringify(token)));
    place(event);
  }
}

// ---- the page

function drawAll() { state.charts.forEach((chart) => chart.draw()); }

function legend() {
  const root = document.getElementById("legend");
  data.groups.forEach((group, index) => {
    const seeds = group.seeds > 1 ? ` (${group.seeds} seeds, ± standard error)` : "";
    const button = element("button", { type: "button", "aria-pressed": "true", class: `group${index % COLORS}` }, element("span", { class: "swatch" }), group.name + seeds);
    button.addEventListener("click", () => {
      if (!state.hidden.delete(index)) state.hidden.add(index);
      button.setAttribute("aria-pressed", String(!state.hidden.has(index)));
      drawAll();
    });
    root.append(button);
  });
}

function axisChoice() {
  const root = document.getElementById("axis");
  for (const name of Object.keys(AXES)) {
    const sensible = name === "steps" || data.groups.every((group) => group.x[name].some((x) => x > 0));
    if (!sensible) continue;
    const button = element("button", { type: "button", "aria-pressed": String(name === state.x) }, name);
    button.addEventListener("click", () => {
      state.x = name;
      for (const other of root.children) other.setAttribute("aria-pressed", String(other === button));
      drawAll();
    });
    root.append(button);
  }
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const set = (name) => document.documentElement.setAttribute("data-theme", name);
  set(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => set(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => set(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}

function explorer() {
  const select = document.getElementById("metric"), names = [...new Set(data.groups.flatMap((group) => Object.keys(group.metrics)))].sort();
  select.append(...names.map((name) => element("option", { value: name }, name)));
  const root = document.querySelector("#explorer .charts");
  const spec = (name) => ({ id: "any", title: name, note: "", log: false, floor: null, lines: [name] });
  const drawn = new Set(data.charts.flatMap((chart) => chart.lines));
  const moves = (name) => data.groups.some((group) => new Set((group.metrics[name] || { mean: [] }).mean.filter((value) => value !== null)).size > 2);
  const first = names.find((name) => moves(name) && !drawn.has(name)) || names.find(moves) || names[0];
  select.value = first;
  const chart = new LineChart(root, spec(first));
  select.addEventListener("change", () => {
    chart.use(spec(select.value));
    chart.title.textContent = select.value;
    chart.draw();
  });
}

theme();
legend();
axisChoice();
data.charts.forEach((spec) => new LineChart(document.getElementById("charts"), spec));
const timed = data.groups.map((group, index) => [group, index]).filter(([group]) => group.metrics["seconds/step"]);
timed.forEach(([group, index]) => new StackChart(document.querySelector("#times .charts"), group, index));
document.getElementById("times").hidden = !timed.length;
explorer();
new Samples(document.getElementById("samples"));
document.getElementById("smooth").addEventListener("change", (event) => { state.smooth = event.target.checked; drawAll(); });
drawAll();
let known = innerWidth;
addEventListener("resize", () => { if (innerWidth !== known) { known = innerWidth; drawAll(); } });
addEventListener("scroll", hideTip, { passive: true });
