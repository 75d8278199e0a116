// Each chart is a function from a group's state to what Plotly draws, the same numbers as a table, and the order in
// which arrow keys go through its clients. Nothing here touches the page.
"use strict";

const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star"];
const DASHES = ["solid", "dash", "dashdot", "dot", "longdash", "longdashdot", "5px 2px 1px 2px 1px 2px", "2px 6px"];

const MOST_CELLS = 8000; // of the picture of the partition

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const known = (values) => values.filter(isNumber);
const grouped = new Intl.NumberFormat("en"); // made once: toLocaleString makes one for every number
const plural = (count, noun) => `${grouped.format(count)} ${noun}${count === 1 ? "" : "s"}`;
const minus = (text) => text.replace("-", "−");

/** By whole characters: half an emoji is none. */
function shortened(text, most = 9) {
  const characters = [...text];
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : text;
}

/** A colour on a scale of places and colours, as #rrggbb. */
function between(scale, place) {
  const next = Math.max(scale.findIndex(([end]) => end >= place), 1);
  const [[start, from], [end, to]] = [scale[next - 1], scale[next]];
  const share = (Math.min(Math.max(place, start), end) - start) / (end - start);
  const part = (colour, at) => Number.parseInt(colour.slice(at, at + 2), 16);
  return `#${[1, 3, 5].map((at) => Math.round(part(from, at) + share * (part(to, at) - part(from, at))).toString(16).padStart(2, "0")).join("")}`;
}

/** Plotly reads a few tags and %{templates} in its texts; an id is a text of the user's. */
const escaped = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll("{", "&#123;");

function compact(value, digits = 3) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  return minus(size !== 0 && (size < 0.001 || size >= 1e5) ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits))));
}

class Colours {
  constructor(isDark, palette) {
    const style = getComputedStyle(document.documentElement);
    const named = (name) => style.getPropertyValue(`--${name}`).trim();
    this.isDark = isDark;
    [this.ink, this.soft, this.grid, this.paper, this.line] = ["ink", "soft", "grid", "paper", "line"].map(named);
    [this.good, this.bad, this.accent] = ["good", "bad", "accent"].map(named);
    this.methods = palette.map((pair) => pair[isDark ? 1 : 0]);
    this.heat = isDark
      ? [[0, "#1d3a52"], [0.5, "#2f87c4"], [1, "#c9e8fb"]]
      : [[0, "#c3dff2"], [0.5, "#3a93cd"], [1, "#08304f"]];
  }
  faint(method, alpha = 0.16) {
    return this.methods[method] + Math.round(alpha * 255).toString(16).padStart(2, "0");
  }
}

/** What is chosen in one group, and what follows from it. */
class State {
  constructor(entry) {
    this.id = entry.id;
    this.client = null; // number among the clients of the seed shown
    this.focus = 0; // method that the pictures of one method show
    this.part = "weighted";
    this.along = "x"; // what the curves over rounds are drawn along
    this.single = false; // each seed by itself
    this.order = null;
    this.seedNumber = 0;
    this.visible = null;
    this.take(entry);
  }
  take(entry) {
    const chosen = this.clientId;
    this.data = entry.tables;
    this.palette = entry.palette;
    this.seedNumber = Math.min(this.seedNumber, Math.max(this.data.seeds.length - 1, 0));
    this.client = chosen === null ? null : this.find(chosen);
    this.visible ??= this.firstVisible();
    this.order ??= this.seed && this.seed.clients.length > 60 ? "class" : "size";
  }
  /** All methods while they can be told apart; of many, the first, the shared model and training alone. */
  firstVisible() {
    const { methods, alone, shared } = this.data;
    const kept = new Set([0, alone, shared]);
    return methods.map((_, number) => methods.length <= 3 || kept.has(number));
  }
  get seed() { return this.data?.seeds[this.seedNumber] ?? null; }
  get clientId() { return this.client === null || !this.seed ? null : this.seed.clients[this.client]; }
  find(id) {
    const place = this.seed ? this.seed.clients.indexOf(id) : -1;
    return place < 0 ? null : place;
  }
  of(method) { return this.seed?.methods[method] ?? null; }
  value(method, column, client) { return this.of(method)?.[column]?.[client] ?? null; }
  inside() {
    const { inside } = this.data;
    return inside.find((one) => one.method === this.focus) ?? inside[0];
  }
  /** Whether it is known what a method's clients have alone: the run itself has measured it, or another one has. */
  hasAlone(method) {
    const { alone } = this.data;
    return Boolean(this.of(method)?.alone) || (alone !== null && alone !== method && this.of(alone) !== null);
  }
  alone(method, client) {
    if (!this.hasAlone(method)) return null;
    return this.of(method)?.alone ? this.value(method, "alone", client) : this.value(this.data.alone, "personal", client);
  }
  /** What a client gains by joining: over training alone if that is known, else over the shared model. */
  gain(method, client) {
    const mine = this.value(method, "personal", client);
    const other = this.hasAlone(method) ? this.alone(method, client) : this.value(method, "global", client);
    return isNumber(mine) && isNumber(other) ? (this.data.higher ? mine - other : other - mine) : null;
  }
  /** Whether a client has rows enough to test on for its gain to count; all have where none has. */
  isCounted(client) {
    const { test } = this.seed;
    return test[client] >= this.data.fewest || !test.some((rows) => rows >= this.data.fewest);
  }
  get gainOver() { return this.hasAlone(this.focus) ? "training alone" : "the global model"; }
  shown(value) {
    if (!isNumber(value)) return "–";
    return this.data.unit === "%" ? `${value.toFixed(1)} %` : compact(value, 4);
  }
  gap(value) {
    if (!isNumber(value)) return "–";
    const size = this.data.unit === "%" ? `${Math.abs(value).toFixed(1)} points` : compact(Math.abs(value));
    return `${value < 0 ? "−" : value > 0 ? "+" : ""}${size}`;
  }
  get axis() { return this.data.metric + (this.data.unit ? `, ${this.data.unit}` : ""); }
  get clientAxis() { return this.data.clientMetric + (this.data.unit ? `, ${this.data.unit}` : ""); }
  classesOf(client) {
    const { classes } = this.seed;
    if (!classes) return [];
    return classes.client.flatMap((one, i) => (one === client ? [[classes.names[classes.class[i]], classes.rows[i]]] : []));
  }
  /** Cells of the answers of one client, or of all where none is chosen; null where the page has none. */
  answersOf(method, client) {
    const answers = this.of(method)?.answers;
    if (!answers) return null;
    const cells = answers.client.flatMap((one, i) => (client === null || one === client ? [{ held: answers.class[i], answer: answers.answer[i], rows: answers.rows[i], confidence: answers.confidence[i] }] : []));
    return { names: answers.names, cells };
  }
  get whose() { return this.client === null ? "all clients" : escaped(shortened(this.clientId, 24)); }
  pathOf(method, client) {
    const path = this.data.paths.find((one) => one.method === method && one.seed === this.seed?.seed);
    if (!path) return null;
    const at = path.client.flatMap((one, i) => (one === client ? [i] : []));
    const pick = (column) => at.map((i) => path[column][i]);
    return { every: path.every, round: pick("round"), steps: pick("steps"), wanted: pick("wanted"), variance: pick("variance"), weight: pick("weight") };
  }
  /** The client's story with one method: pairs of a name and a value, those that are known. */
  facts(method, client) {
    const facts = [["personal model", this.shown(this.value(method, "personal", client))]];
    const add = (name, value, text) => isNumber(value) && facts.push([name, text(value)]);
    add("global model", this.value(method, "global", client), (v) => this.shown(v));
    add("alone", this.alone(method, client), (v) => this.shown(v));
    add("gain", this.gain(method, client), (v) => (this.isCounted(client) ? this.gap(v) : "too few test rows"));
    if (this.data.predicts[method]) add("predicted gain", this.value(method, "predicted", client), (v) => `variance ÷ ${compact(v)}`);
    // With a variance v times as small, its own rows are one part in v of what its model rests on.
    if (this.data.predicts[method]) add("rests on", this.value(method, "predicted", client), (v) => `${Math.round(100 / v)} % own rows, ${100 - Math.round(100 / v)} % the others`);
    add("local steps", this.value(method, "steps", client), (v) => String(v));
    add("variance σₘ²", this.value(method, "variance", client), (v) => compact(v));
    add("weight", this.value(method, "weight", client), (v) => `${compact(100 * v)} %`);
    add("rounds taken part", this.value(method, "rounds", client), (v) => String(v));
    return facts;
  }
  size(client) {
    const { train, test, cluster } = this.seed;
    const classes = this.classesOf(client).map(([name, rows]) => `${name} (${rows})`);
    const shown = classes.length > 6 ? [...classes.slice(0, 6), `${classes.length - 6} more`] : classes;
    const group = cluster && cluster[client] !== null ? `; cluster ${cluster[client]}` : "";
    return { rows: `${plural(train[client], "training row")}, ${test[client]} to test${group}`, classes: shown.length ? `classes ${shown.join(", ")}` : "" };
  }
  story(method, client) {
    const { rows, classes } = this.size(client);
    const facts = this.facts(method, client).map(([name, value]) => `${name} ${value}`);
    const lines = [`<b>${escaped(this.seed.clients[client])}</b> · ${escaped(this.data.methods[method])}`, rows];
    if (classes) lines.push(escaped(classes));
    for (let i = 0; i < facts.length; i += 3) lines.push(facts.slice(i, i + 3).join(" · "));
    return lines.join("<br>");
  }
}

/** How wide a text is on the page, in pixels. */
const pen = document.createElement("canvas").getContext("2d");
function widthOf(text, size) {
  pen.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text.replace(/<br>.*|<[^>]*>/g, "")).width;
}

/** Room for ticks, titles and a legend from the start: Plotly draws everything anew where its margins have to grow. */
function marginsFor({ yaxis, showlegend, margin }) {
  const widest = Math.max(...(yaxis.categoryarray ?? yaxis.ticktext ?? []).map((name) => widthOf(name, yaxis.tickfont.size)), 0);
  return { l: Math.max(66, widest + 42), r: 15, t: showlegend ? 48 : 14, b: 54, ...margin };
}

function layout(c, more) {
  const axis = { gridcolor: c.grid, linecolor: c.line, zerolinecolor: c.line, tickcolor: c.line, automargin: true, ticklabeloverflow: "allow", title: { standoff: 10, font: { size: 12.5, color: c.soft } }, tickfont: { size: 12, color: c.soft } };
  const { xaxis = {}, yaxis = {}, margin = {}, ...rest } = more;
  const titled = (chosen) => ({ ...axis, ...chosen, title: { ...axis.title, text: chosen.title ?? "" } });
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: c.ink },
    showlegend: false, legend: legendAbove, hovermode: "closest", dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false,
    hoverlabel: { bgcolor: c.isDark ? "#2a2f36" : "#22262b", bordercolor: "rgba(0,0,0,0)", font: { color: "#f5f2ea", size: 12.5, family: getComputedStyle(document.body).fontFamily }, align: "left", namelength: -1 },
    xaxis: titled({ showgrid: false, ...xaxis }), yaxis: titled(yaxis), ...rest,
    margin: marginsFor({ yaxis: { ...axis, ...yaxis }, showlegend: rest.showlegend, margin }),
  };
}

/** In place of axes, where there is nothing to draw. */
function without(c, text) {
  return layout(c, { xaxis: { visible: false }, yaxis: { visible: false }, annotations: [{ xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false, text, font: { color: c.soft } }] });
}

const ring = (c, symbol, more = {}) => ({ size: 15, symbol: `${symbol}-open`, color: c.ink, line: { width: 2.5, color: c.ink }, ...more });
const symbolOf = (method) => SYMBOLS[method % SYMBOLS.length];
const isWide = (values) => Math.min(...values) > 0 && Math.max(...values) > 10 * Math.min(...values);
const legendAbove = { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 }, itemclick: false, itemdoubleclick: false };

/** A range with air around the values: shares and scores are read by their differences. */
function around(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const air = (high - low || Math.abs(high) || 1) * 0.12;
  return [Math.max(low - air, 0), high + air];
}

/** Of factors on a logarithmic axis, with air; and marks at round numbers, of which a narrow one has no powers of ten. */
function factorRange(values) {
  const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [1, 10];
  const air = Math.max(high / low, 1.02) ** 0.05;
  return [low / air, high * air];
}
function factorTicks([low, high]) {
  if (high / low > 30) return { exponentformat: "none", dtick: 1 };
  if (high / low > 3) return { tickvals: (high / low > 10 ? [1, 2, 5] : [1, 1.5, 2, 3, 5, 7]).flatMap((m) => [0.1, 1, 10, 100, 1e3, 1e4].map((p) => m * p)).filter((v) => v >= low && v <= high) };
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough);
  const first = Math.ceil(low / step);
  return { tickvals: Array.from({ length: Math.max(Math.floor(high / step) - first + 1, 0) }, (_, i) => Number(((first + i) * step).toPrecision(6))) };
}

const roundAxis = (one) => ({ title: "round", range: [0, 1.02 * Math.max(...one.rounds, 1)] });

/** Names at the ends of lines, moved apart where they would touch. */
function endLabels(ends, height, range) {
  const gap = ((range[1] - range[0]) * 16) / height;
  const sorted = ends.slice().sort((a, b) => a.y - b.y);
  sorted.forEach((end, i) => { end.at = i ? Math.max(end.y, sorted[i - 1].at + gap) : end.y; });
  const over = sorted.length ? sorted.at(-1).at - range[1] : 0;
  if (over > 0) {
    sorted.at(-1).at = range[1];
    for (let i = sorted.length - 2; i >= 0; i--) sorted[i].at = Math.min(sorted[i].at, sorted[i + 1].at - gap);
  }
  return sorted.map(({ text, colour, at, bold }) => ({ xref: "paper", x: 1, xanchor: "left", xshift: 6, y: at, yanchor: "middle", showarrow: false, text: bold ? `<b>${text}</b>` : text, font: { color: colour, size: 12 } }));
}

const CHARTS = {
  rounds(s, c, size) {
    const { data, client } = s;
    const along = { x: "round", gradients: "gradients evaluated by a run", bytes: "bytes sent and received by a server", seconds: "seconds of a run" }[s.along];
    const curves = data.rounds[s.part].map((curve) => {
      const x = curve && { x: curve.x, gradients: curve.gradients, bytes: curve.bytes, seconds: curve.seconds }[s.along];
      return x?.every(isNumber) ? { ...curve, x } : null;
    });
    const traces = [];
    const rows = [];
    const ends = [];
    curves.forEach((curve, method) => {
      if (!curve) return;
      const name = data.methods[method];
      const points = { hoverinfo: "skip", mode: "lines", line: { width: 0 }, x: curve.x, legendgroup: name, showlegend: false };
      if (s.single) curve.single.forEach((y) => traces.push({ x: curve.x, y, meta: "single", mode: "lines", line: { color: c.methods[method], width: 0.9, dash: DASHES[method % DASHES.length] }, opacity: 0.55, hoverinfo: "skip", showlegend: false }));
      else if (curve.error) {
        traces.push({ ...points, y: curve.y.map((y, i) => y - curve.error[i]), meta: "low" });
        traces.push({ ...points, y: curve.y.map((y, i) => y + curve.error[i]), fill: "tonexty", fillcolor: c.faint(method), meta: "high" });
      }
      const spread = (i) => (curve.error ? ` ± ${s.data.unit === "%" ? curve.error[i].toFixed(1) : compact(curve.error[i], 2)}` : "");
      traces.push({
        x: curve.x, y: curve.y, name: escaped(name), meta: "line", legendgroup: name, mode: curve.x.length > 1 ? "lines" : "markers", marker: { symbol: symbolOf(method), size: 9, color: c.methods[method] },
        line: { color: c.methods[method], width: method === 0 ? 3.2 : 1.9, dash: DASHES[method % DASHES.length] }, hoverinfo: "text+x", hovertext: curve.y.map((y, i) => `${escaped(name)} ${s.shown(y)}${spread(i)}`),
      });
      ends.push({ text: escaped(name), colour: c.methods[method], y: curve.y.at(-1), bold: method === 0 });
      curve.x.forEach((x, i) => rows.push([name, x, curve.y[i], curve.error ? curve.error[i] : null, ...(s.single ? curve.single.map((one) => one[i]) : [])]));
    });
    const values = known(traces.flatMap((t) => t.y)); // bands included
    const last = Math.max(...traces.filter((t) => t.meta === "line").flatMap((t) => t.x), 1);
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (client !== null && s.part !== "global") {
      // Of one client only the end is known: a ring there, on a line across.
      const own = s.value(s.focus, "personal", client);
      if (isNumber(own)) {
        traces.push({ x: [0, last], y: [own, own], mode: "lines", meta: "level", line: { color: c.ink, width: 1, dash: "dot" }, hoverinfo: "skip", showlegend: false });
        traces.push({ x: [last], y: [own], mode: "markers", meta: "selected", name: escaped(s.clientId), showlegend: false, customdata: [client], marker: ring(c, symbolOf(s.focus), { size: 13 }), hoverinfo: "text", hovertext: [s.story(s.focus, client)], cliponaxis: false });
        [low, high] = [Math.min(low, own), Math.max(high, own)];
      }
    }
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    const range = [low - room, high + room];
    const labelled = size.width > 560;
    return {
      traces,
      layout: layout(c, {
        hovermode: "x unified", hoverlabel: { bgcolor: c.isDark ? "#2a2f36" : "#ffffff", bordercolor: c.line, font: { color: c.ink, size: 12.5, family: getComputedStyle(document.body).fontFamily } },
        xaxis: { title: along, range: [0, last * 1.015], unifiedhovertitle: { text: `${along} %{x}` } }, yaxis: { title: s.axis, range },
        annotations: labelled ? endLabels(ends, size.height - 60, range) : [], showlegend: !labelled, legend: { ...legendAbove, y: -0.22, yanchor: "top" },
        margin: labelled ? { r: 22 + 7.4 * Math.max(...ends.map((e) => Math.min(e.text.length, 22)), 0) } : { t: 14, b: 60 },
      }),
      table: { head: ["method", along, `${data.parts[s.part]}: ${s.axis}`, "standard error over seeds", ...(s.single ? Array.from({ length: Math.max(...rows.map((row) => row.length), 4) - 4 }, (_, i) => `seed ${data.allSeeds[i] ?? i}`) : [])], rows },
    };
  },

  clients(s, c) {
    const { seed, client, data } = s;
    const order = seed.clients.map((_, i) => i);
    const sizes = known(seed.train);
    const wide = isWide(sizes);
    // Clients with few test rows have one of few accuracies: a client's marks stand side by side, not on each other.
    const shown = data.methods.flatMap((_, method) => (s.of(method) && s.visible[method] ? [method] : []));
    const aside = (method) => shown.indexOf(method) - (shown.length - 1) / 2;
    const [least, most] = [Math.min(...sizes), Math.max(...sizes)];
    const step = Math.min(0.03, 0.08 / shown.length) * (wide ? 1 : most - least || most);
    const spot = (i, method) => (wide ? seed.train[i] * (1 + step * aside(method)) : seed.train[i] + step * aside(method));
    const traces = shown.flatMap((method) => {
      const name = data.methods[method];
      const own = s.of(method);
      const at = order.filter((i) => isNumber(own.personal[i]) && isNumber(seed.train[i]));
      return [{
        x: at.map((i) => spot(i, method)), y: at.map((i) => own.personal[i]), customdata: at, name: escaped(name), meta: "points", mode: "markers", type: "scatter",
        marker: { symbol: symbolOf(method), size: order.length > 300 ? 6 : 9, color: c.methods[method], opacity: client === null ? 0.72 : 0.22, line: { width: 0.6, color: c.paper } },
        hoverinfo: "text", hovertext: at.map((i) => s.story(method, i)),
      }];
    });
    if (client !== null) {
      const there = data.methods.flatMap((_, m) => (isNumber(s.value(m, "personal", client)) && s.visible[m] ? [m] : []));
      traces.push({
        x: there.map((m) => spot(client, m)), y: there.map((m) => s.value(m, "personal", client)), customdata: there.map(() => client), meta: "selected", name: escaped(s.clientId), mode: "markers+lines", line: { color: c.soft, width: 1 },
        marker: { size: 14, symbol: there.map(symbolOf), color: there.map((m) => c.methods[m]), line: { width: 2, color: c.ink } }, hoverinfo: "text", hovertext: there.map((m) => s.story(m, client)),
      });
    }
    const rows = order.map((i) => [seed.clients[i], seed.train[i], seed.test[i], ...data.methods.map((_, m) => s.value(m, "personal", i))]);
    return {
      traces,
      layout: layout(c, { xaxis: { title: `training rows${wide ? " (logarithmic)" : ""}`, type: wide ? "log" : "linear", ...(wide ? { dtick: "D2", tickformat: ",d" } : {}) }, yaxis: { title: `${s.clientAxis}, personal model` } }),
      table: { head: ["client", "training rows", "test rows", ...data.methods], rows },
      order,
    };
  },

  /** Clients in the order of their own accuracy, method by method. */
  spread(s, c, size) {
    const { data, seed, client } = s;
    const traces = [];
    const rows = [];
    data.methods.forEach((name, method) => {
      const own = s.of(method);
      if (!own || !s.visible[method]) return;
      const at = seed.clients.map((_, i) => i).filter((i) => isNumber(own.personal[i])).sort((a, b) => (own.personal[a] - own.personal[b]) * (data.higher ? 1 : -1) || a - b);
      const x = at.map((_, rank) => (100 * (rank + 1)) / at.length);
      traces.push({ x, y: at.map((i) => own.personal[i]), customdata: at, name: escaped(name), meta: "line", mode: "lines", line: { shape: "hv", color: c.methods[method], width: method === 0 ? 3.2 : 1.9, dash: DASHES[method % DASHES.length] }, hoverinfo: "text", hovertext: at.map((i) => s.story(method, i)) });
      at.forEach((i, rank) => rows.push([name, seed.clients[i], x[rank], own.personal[i]]));
      if (client !== null && at.includes(client)) traces.push({ x: [x[at.indexOf(client)]], y: [own.personal[client]], customdata: [client], meta: "selected", name: escaped(s.clientId), mode: "markers", marker: ring(c, symbolOf(method), { size: 12 }), hoverinfo: "text", hovertext: [s.story(method, client)], showlegend: false });
    });
    return {
      traces,
      layout: layout(c, { xaxis: { title: "clients, % from the worst", range: [0, 101] }, yaxis: { title: size.width > 560 ? `${s.clientAxis}, personal model` : s.clientAxis }, showlegend: true }),
      table: { head: ["method", "client", "% of clients up to here", s.clientAxis], rows },
    };
  },

  tails(s, c) {
    const { data, client } = s;
    const there = data.methods.map((_, m) => m).filter((m) => data.scores[m].weighted).reverse();
    const names = there.map((m) => escaped(data.methods[m]));
    const kinds = [["worst10", "diamond", c.bad], ["weighted", "circle", c.ink], ["top10", "triangle-up", c.good]];
    const lines = there.filter((m) => data.scores[m].worst10 && data.scores[m].top10);
    const traces = [{
      x: lines.flatMap((m) => [data.scores[m].worst10[0], data.scores[m].top10[0], null]), y: lines.flatMap((m) => [names[there.indexOf(m)], names[there.indexOf(m)], null]), mode: "lines", line: { color: c.line, width: 5 }, hoverinfo: "skip", showlegend: false,
    }];
    for (const [part, symbol, colour] of kinds) {
      const has = there.filter((m) => data.scores[m][part]);
      traces.push({
        x: has.map((m) => data.scores[m][part][0]), y: has.map((m) => names[there.indexOf(m)]), name: data.parts[part], meta: part, mode: "markers", marker: { symbol, size: 11, color: colour },
        error_x: { array: has.map((m) => data.scores[m][part][1] ?? 0), color: colour, thickness: 1.4, width: 4 }, hoverinfo: "text",
        hovertext: has.map((m) => `${escaped(data.methods[m])}, ${data.parts[part]}: ${s.shown(data.scores[m][part][0])}${isNumber(data.scores[m][part][1]) ? ` ± ${compact(data.scores[m][part][1], 2)}` : ""}`),
      });
    }
    if (client !== null) {
      const has = there.filter((m) => isNumber(s.value(m, "personal", client)));
      traces.push({
        x: has.map((m) => s.value(m, "personal", client)), y: has.map((m) => names[there.indexOf(m)]), name: escaped(s.clientId), meta: "selected", mode: "markers", customdata: has.map(() => client), marker: ring(c, "circle"), hoverinfo: "text", hovertext: has.map((m) => s.story(m, client)),
      });
    }
    return {
      traces,
      layout: layout(c, { xaxis: { title: s.axis, showgrid: true }, yaxis: { tickfont: { size: 13, color: c.ink }, type: "category", categoryorder: "array", categoryarray: names, showgrid: false }, showlegend: true }),
      table: { head: ["method", ...kinds.flatMap(([part]) => [data.parts[part], "s.e."])], rows: there.slice().reverse().map((m) => [data.methods[m], ...kinds.flatMap(([part]) => data.scores[m][part] ?? [null, null])]) },
    };
  },

  gains(s, c) {
    const { seed, client, focus } = s;
    const gains = seed.clients.map((_, i) => s.gain(focus, i));
    const order = gains.flatMap((g, i) => (isNumber(g) ? [i] : [])).sort((a, b) => gains[b] - gains[a] || a - b);
    const y = order.map((i) => gains[i]);
    const room = (Math.max(...y, 0) - Math.min(...y, 0) || 1) * 0.012; // what gains nothing is a stroke, not nothing
    const traces = [{
      type: "bar", x: order.map((_, rank) => rank + 1), y, customdata: order, meta: "points", width: order.length > 120 ? 1 : 0.82,
      marker: { color: order.map((i) => (!s.isCounted(i) ? c.line : gains[i] > 0 ? c.good : gains[i] < 0 ? c.bad : c.soft)), opacity: order.map((i) => (client === null || i === client ? 0.9 : 0.28)), line: { width: 0 } },
      hoverinfo: "text", hovertext: order.map((i) => s.story(focus, i)),
    }];
    const zeros = order.flatMap((i, rank) => (gains[i] === 0 ? [rank] : []));
    traces.push({ x: zeros.map((rank) => rank + 1), y: zeros.map(() => 0), customdata: zeros.map((rank) => order[rank]), mode: "markers", marker: { symbol: "line-ns-open", size: 9, color: c.soft, opacity: client === null ? 1 : 0.4 }, hoverinfo: "text", hovertext: zeros.map((rank) => s.story(focus, order[rank])), meta: "zeros" });
    const annotations = [];
    const up = order.filter((i) => gains[i] > 0 && s.isCounted(i)).length;
    const down = order.filter((i) => gains[i] < 0 && s.isCounted(i)).length;
    if (up) annotations.push({ x: y.filter((v) => v > 0).length + 0.9, y: y[0], yanchor: "top", xanchor: "left", showarrow: false, text: `<b>${plural(up, "client")}</b> ${up === 1 ? "gains" : "gain"}`, font: { color: c.good, size: 13 } });
    if (down) annotations.push({ x: y.length - y.filter((v) => v < 0).length + 0.1, y: y.at(-1), yanchor: "top", xanchor: "right", showarrow: false, text: `<b>${plural(down, "client")}</b> ${down === 1 ? "loses" : "lose"}`, font: { color: c.bad, size: 13 } });
    if (client !== null && isNumber(gains[client])) {
      const rank = order.indexOf(client);
      traces.push({ x: [rank + 1], y: [gains[client] + (gains[client] < 0 ? -room : room)], customdata: [client], mode: "markers", meta: "selected", name: escaped(s.clientId), marker: { symbol: gains[client] < 0 ? "triangle-up" : "triangle-down", size: 12, color: c.ink }, hoverinfo: "text", hovertext: [s.story(focus, client)] });
    }
    return {
      traces,
      layout: layout(c, { bargap: 0, xaxis: { title: "clients, from those who gain most", range: [0.3, Math.max(order.length, 1) + 0.7], tickformat: ",d", ...(order.length < 12 ? { dtick: 1 } : {}) }, yaxis: { title: `gain over ${s.gainOver}${s.data.unit ? ", points" : ""}`, zeroline: true, zerolinecolor: c.soft }, annotations }),
      table: { head: ["client", `gain over ${s.gainOver} (${s.data.methods[focus]})`, "training rows", "test rows", "counted"], rows: order.map((i) => [seed.clients[i], gains[i], seed.train[i], seed.test[i], s.isCounted(i) ? "yes" : "no"]) },
      order,
    };
  },

  predicted(s, c, size) {
    const { seed, client } = s;
    const foretells = (m) => Boolean(s.of(m)?.predicted) && s.hasAlone(m) && s.data.predicts[m];
    const method = foretells(s.focus) ? s.focus : s.data.methods.findIndex((_, m) => foretells(m));
    const own = method < 0 ? { predicted: [] } : s.of(method);
    const at = seed.clients.map((_, i) => i).filter((i) => own.predicted[i] > 0 && isNumber(s.gain(method, i)));
    const order = at.slice().sort((a, b) => own.predicted[a] - own.predicted[b] || a - b);
    const unit = s.data.unit ? ", points" : "";
    const traces = [{
      x: at.map((i) => own.predicted[i]), y: at.map((i) => s.gain(method, i)), customdata: at, name: "a client", meta: "points", mode: "markers",
      marker: { symbol: symbolOf(Math.max(method, 0)), size: at.length > 300 ? 5 : 8, color: c.methods[Math.max(method, 0)], opacity: client === null ? 0.65 : 0.25, line: { width: 0.6, color: c.paper } }, hoverinfo: "text", hovertext: at.map((i) => s.story(method, i)),
    }];
    const { bins } = own;
    if (bins) {
      const few = Math.min(...bins.count);
      const many = Math.max(...bins.count);
      traces.push({
        x: bins.x, y: bins.y, name: `mean of ${few === many ? few : `${few} to ${many}`} clients ± s.e.`, meta: "bins", mode: "lines+markers", line: { color: c.ink, width: 1.6 }, marker: { symbol: "circle", size: 9, color: c.ink },
        error_y: { array: bins.error.map((e) => e ?? 0), color: c.ink, thickness: 1.6, width: 5 }, hoverinfo: "text",
        hovertext: bins.x.map((x, i) => `${plural(bins.count[i], "client")} around ${compact(x)}: mean gain ${s.gap(bins.y[i])}${isNumber(bins.error[i]) ? ` ± ${compact(bins.error[i], 2)}` : ""}`),
      });
    }
    if (client !== null && at.includes(client)) traces.push({ x: [own.predicted[client]], y: [s.gain(method, client)], customdata: [client], name: escaped(s.clientId), showlegend: false, meta: "selected", mode: "markers", marker: ring(c, symbolOf(method)), hoverinfo: "text", hovertext: [s.story(method, client)] });
    const why = client === null ? "" : isNumber(own.predicted[client]) ? "it has no rows to test on" : "its variance is not known";
    const missing = client !== null && !at.includes(client) ? [{ xref: "paper", yref: "paper", x: 0.99, y: 0.98, xanchor: "right", yanchor: "top", showarrow: false, text: `<b>${escaped(s.clientId)}</b> is not here: ${why}`, font: { color: c.soft, size: 12 } }] : [];
    const range = factorRange(at.map((i) => own.predicted[i]));
    const zero = { type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, line: { color: c.soft, width: 1.5 } };
    return {
      traces,
      layout: layout(c, { annotations: missing, shapes: [zero], xaxis: { title: size.width > 560 ? `predicted by ${escaped(s.data.methods[Math.max(method, 0)])}: variance shrinks by this factor (logarithmic)` : "predicted: variance shrinks by a factor of", type: "log", range: range.map(Math.log10), ...factorTicks(range) }, yaxis: { title: size.width > 560 ? `realised: gain over training alone${unit}` : `realised gain${unit}`, zeroline: false }, showlegend: Boolean(bins) }),
      table: { head: ["client", "predicted gain (variance factor)", "gain over training alone"], rows: at.map((i) => [seed.clients[i], own.predicted[i], s.gain(method, i)]) },
      order,
    };
  },

  variances(s, c) {
    const one = s.inside();
    const curve = (values, name, dash, colour) => ({ x: one.rounds, y: values, name, meta: name, mode: "lines", line: { color: colour, width: 2.4, dash }, connectgaps: true, hoverinfo: "text", hovertext: values.map((v, i) => `round ${one.rounds[i]}: ${name} ${compact(v)}`) });
    const traces = [curve(one.inter, "σ₀² between clients", "solid", c.methods[one.method]), curve(one.intra, "σₘ² within, mean", "dot", c.ink)];
    const rows = one.rounds.map((x, i) => [x, one.inter[i], one.intra[i]]);
    withPath(s, c, one, traces, "variance", (v) => `variance ${compact(v)}`);
    const positive = traces.flatMap((t) => known(t.y)).some((v) => v > 0);
    return {
      traces,
      layout: layout(c, { xaxis: roundAxis(one), yaxis: { title: "variance (logarithmic)", type: positive ? "log" : "linear", exponentformat: "power", ...(positive && isWide(traces.flatMap((t) => known(t.y)).filter((v) => v > 0)) ? { dtick: 1 } : {}) }, showlegend: true, margin: { l: 76 } }),
      table: { head: ["round", "variance between clients", "variance within, mean"], rows },
    };
  },

  weights(s, c) {
    const one = s.inside();
    const traces = bandTraces(one.weight, c, one.method, 100, "weight");
    const rows = one.weight ? one.weight.x.map((x, i) => [x, ...["low", "middle", "high"].map((edge) => 100 * one.weight[edge][i])]) : [];
    withPath(s, c, one, traces, "weight", (v) => `weight ${compact(v)} %`, 100);
    const shapes = isNumber(one.equal) ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 100 * one.equal, y1: 100 * one.equal, line: { color: c.soft, width: 1, dash: "dot" } }] : [];
    return {
      traces,
      layout: layout(c, { xaxis: roundAxis(one), yaxis: { title: "share in the average, %", range: around([...traces.flatMap((t) => known(t.y)), ...known([one.equal]).map((v) => 100 * v)]) }, shapes, annotations: shapes.length ? [{ xref: "paper", x: 1, xanchor: "right", y: 100 * one.equal, yanchor: "bottom", yshift: 14, showarrow: false, text: "equal shares", font: { size: 11.5, color: c.soft } }] : [] }),
      table: { head: ["round", "weight, %: first decile", "median", "ninth decile"], rows },
    };
  },

  steps(s, c) {
    const one = s.inside();
    const traces = bandTraces(one.steps, c, one.method, 1, "steps");
    withPath(s, c, one, traces, "steps", (v) => `${v} steps`);
    const rows = one.steps ? one.steps.x.map((x, i) => [x, one.steps.low[i], one.steps.middle[i], one.steps.high[i]]) : [];
    return {
      traces,
      hidden: !one.steps, // clients take as many steps as they are told
      layout: layout(c, { xaxis: roundAxis(one), yaxis: { title: "local steps taken", rangemode: "tozero" }, ...cap(one, c) }),
      table: { head: ["round", "steps: first decile", "median", "ninth decile"], rows },
    };
  },

  histogram(s, c) {
    const one = s.inside();
    const last = (one.counts ?? []).findLastIndex((n) => n > 0);
    const counts = (one.counts ?? []).slice(0, last + 1);
    const total = counts.reduce((sum, n) => sum + n, 0) || 1;
    const names = one.bins.slice(0, last + 1).map((low, i) => (i + 1 < one.bins.length ? (one.bins[i + 1] - low > 1 ? `${low}–${one.bins[i + 1] - 1}` : `${low}`) : `${low} +`));
    const traces = [{ type: "bar", x: names, y: counts.map((n) => (100 * n) / total), meta: "bars", marker: { color: c.methods[one.method], opacity: 0.85 }, hoverinfo: "text", hovertext: counts.map((n, i) => `${names[i]} steps: ${plural(n, "client-round")}, ${compact((100 * n) / total)} %`) }];
    if (s.client !== null) {
      const path = s.pathOf(one.method, s.client);
      const wanted = known(path?.wanted ?? []);
      const bins = wanted.map((v) => one.bins.findLastIndex((low) => low <= Math.max(v, 1)));
      const own = new Set(bins);
      traces[0].marker.opacity = names.map((_, i) => (own.has(i) || !wanted.length ? 0.95 : 0.3));
      const counted = names.map((_, i) => bins.filter((b) => b === i).length);
      const at = names.flatMap((_, i) => (counted[i] ? [i] : []));
      traces.push({ x: at.map((i) => names[i]), y: at.map((i) => traces[0].y[i]), text: at.map((i) => `${counted[i]}×`), textposition: "top center", mode: "markers+text", meta: "selected", marker: ring(c, "circle", { size: 10 }), textfont: { color: c.ink }, customdata: at.map(() => s.client), hoverinfo: "text", hovertext: at.map((i) => `<b>${escaped(s.clientId)}</b> wants ${names[i]} steps in ${plural(counted[i], "round")}${path.every > 1 ? " of those shown" : ""}`), cliponaxis: false });
    }
    return {
      traces,
      hidden: !one.steps,
      layout: !counts.length ? without(c, "nobody wants a number of steps yet") : layout(c, { bargap: 0.12, xaxis: { title: "steps wanted, before ℓ_max", type: "category", tickfont: { size: 11, color: c.soft } }, yaxis: { title: "client-rounds, %" } }),
      table: { head: ["steps wanted", "client-rounds", "%"], rows: counts.map((n, i) => [names[i], n, (100 * n) / total]) },
    };
  },

  confusion(s, c, size) {
    const seen = s.answersOf(s.focus, s.client);
    const names = seen?.names ?? [];
    const counts = new Map();
    seen?.cells.forEach(({ held, answer, rows }) => counts.set(held * names.length + answer, (counts.get(held * names.length + answer) ?? 0) + rows));
    const found = [...counts].map(([cell, rows]) => ({ held: Math.floor(cell / names.length), answer: cell % names.length, rows })).sort((a, b) => a.held - b.held || a.answer - b.answer);
    const there = [...new Set(found.flatMap(({ held, answer }) => [held, answer]))].sort((a, b) => a - b);
    const place = new Map(there.map((name, i) => [name, i]));
    const totals = new Map();
    found.forEach(({ held, rows }) => totals.set(held, (totals.get(held) ?? 0) + rows));
    const most = Math.max(...found.map(({ rows }) => rows), 1);
    const widest = Math.max(Math.min(34, (size.height - 90) / Math.max(there.length, 1)), 8);
    const disc = (isRight) => {
      const shown = found.filter(({ held, answer }) => (held === answer) === isRight);
      return {
        x: shown.map(({ answer }) => place.get(answer)), y: shown.map(({ held }) => place.get(held)), meta: isRight ? "right" : "wrong", name: isRight ? "right" : "wrong", mode: "markers",
        marker: { symbol: isRight ? "circle" : "square", size: shown.map(({ rows }) => Math.max(widest * Math.sqrt(rows / most), 4)), sizemode: "diameter", color: isRight ? c.methods[s.focus] : c.bad, opacity: 0.85, line: { width: 0 } },
        hoverinfo: "text", hovertext: shown.map(({ held, answer, rows }) => `class ${escaped(names[held])}, answer ${escaped(names[answer])}: ${plural(rows, "row")}, ${Math.round((100 * rows) / totals.get(held))} % of the class`),
      };
    };
    const ticks = (title) => ({ title, tickvals: there.map((_, i) => i), ticktext: there.map((name) => escaped(shortened(names[name], 10))), range: [-0.7, there.length - 0.3], zeroline: false });
    const missing = found.length ? "" : "this page has no answers of this client with this method and seed";
    return {
      traces: missing ? [] : [disc(true), disc(false)],
      layout: missing ? without(c, missing) : layout(c, { xaxis: { ...ticks("answer"), showgrid: true }, yaxis: { ...ticks(`class, ${s.whose}`), autorange: false, range: [there.length - 0.3, -0.7] }, showlegend: true }),
      table: { head: ["client", "class", "answer", "rows"], rows: found.map(({ held, answer, rows }) => [s.clientId ?? "all", names[held], names[answer], rows]) },
    };
  },

  sureness(s, c) {
    const seen = s.answersOf(s.focus, s.client);
    const tenths = new Map();
    seen?.cells.forEach(({ held, answer, rows, confidence }) => {
      const key = Math.min(Math.floor(10 * confidence), 9);
      const bin = tenths.get(key) ?? { rows: 0, right: 0, sum: 0 };
      tenths.set(key, { rows: bin.rows + rows, right: bin.right + (held === answer ? rows : 0), sum: bin.sum + rows * confidence });
    });
    const found = [...tenths].sort((a, b) => a[0] - b[0]).map(([, { rows, right, sum }]) => ({ rows, sure: (100 * sum) / rows, right: (100 * right) / rows }));
    const most = Math.max(...found.map(({ rows }) => rows), 1);
    const missing = found.length ? "" : "this page has no answers of this client with this method and seed";
    const traces = [
      { x: [0, 100], y: [0, 100], meta: "diagonal", name: "as often right as sure", mode: "lines", line: { color: c.soft, width: 1.2, dash: "dot" }, hoverinfo: "skip" },
      { x: found.map(({ sure }) => sure), y: found.map(({ right }) => right), meta: "bins", name: "a tenth of confidence", mode: "markers", marker: { symbol: symbolOf(s.focus), color: c.methods[s.focus], size: found.map(({ rows }) => Math.max(18 * Math.sqrt(rows / most), 6)) }, hoverinfo: "text", hovertext: found.map(({ rows, sure, right }) => `${plural(rows, "row")}: ${sure.toFixed(0)} % sure, ${right.toFixed(0)} % right`) },
    ];
    return {
      traces: missing ? [] : traces,
      layout: missing ? without(c, missing) : layout(c, { xaxis: { title: "probability of the answer by the model, %", range: [0, 103] }, yaxis: { title: `right, %, ${s.whose}`, range: [-4, 106], dtick: 20 }, showlegend: true }),
      table: { head: ["client", "rows", "sure, %", "right, %"], rows: found.map(({ rows, sure, right }) => [s.clientId ?? "all", rows, Number(sure.toFixed(2)), Number(right.toFixed(2))]) },
    };
  },

  trajectory(s, c) {
    const one = s.inside();
    const path = s.data.paths.find((p) => p.method === one.method && p.seed === s.seed?.seed);
    // Without a choice, a client that took part most often.
    const counts = new Map();
    path?.client.forEach((i) => counts.set(i, (counts.get(i) ?? 0) + 1));
    const busiest = [...counts].sort((a, b) => b[1] - a[1] || a[0] - b[0])[0]?.[0] ?? null;
    const client = s.client ?? busiest;
    const own = client === null ? null : s.pathOf(one.method, client);
    const id = client === null ? "" : s.seed.clients[client];
    const traces = [];
    if (own) {
      traces.push({ x: own.round, y: own.steps, name: "taken", meta: s.client === null ? "taken" : "selected", customdata: own.round.map(() => client), mode: "lines+markers", marker: { symbol: symbolOf(one.method), size: 7, color: c.methods[one.method] }, line: { color: c.methods[one.method], width: 2 }, hoverinfo: "text", hovertext: own.round.map((r, i) => `<b>${escaped(id)}</b>, round ${r}: ${own.steps[i]} steps taken${isNumber(own.wanted[i]) ? `, ${compact(own.wanted[i])} wanted` : ""}`) });
      const has = own.wanted.flatMap((v, i) => (isNumber(v) ? [i] : []));
      traces.push({ x: has.map((i) => own.round[i]), y: has.map((i) => own.wanted[i]), name: "wanted", meta: "wanted", mode: "lines+markers", marker: { symbol: "circle-open", size: 7, color: c.soft }, line: { color: c.soft, width: 1.2, dash: "dot" }, hoverinfo: "skip" });
    }
    const missing = own && own.round.length ? "" : "this page has no rounds of this client with this method and seed";
    return {
      hidden: !one.steps,
      traces: missing ? [] : traces,
      layout: missing ? without(c, missing) : layout(c, { xaxis: roundAxis(one), yaxis: { title: `steps of ${escaped(shortened(id, 24))}`, rangemode: "tozero" }, showlegend: true, ...cap(one, c) }),
      table: { head: ["client", "round", "steps taken", "steps wanted", "variance", "weight"], rows: own ? own.round.map((r, i) => [id, r, own.steps[i], own.wanted[i], own.variance[i], own.weight[i]]) : [] },
    };
  },

  clusters(s, c) {
    const { seed, client, focus } = s;
    const groups = [...new Set(seed.cluster)].filter((g) => g !== null).sort((a, b) => a - b);
    const own = s.of(focus);
    const at = seed.clients.map((_, i) => i).filter((i) => seed.cluster[i] !== null && isNumber(own?.personal[i]));
    const spot = (i) => groups.indexOf(seed.cluster[i]) + (((i * 0.618034) % 1) - 0.5) * 0.5; // spread evenly, the same every time
    const mean = (g, read) => { const v = known(at.filter((i) => seed.cluster[i] === g).map(read)); return v.length ? v.reduce((a, b) => a + b) / v.length : null; };
    const means = groups.map((g) => mean(g, (i) => own.personal[i]));
    const order = at.slice().sort((a, b) => spot(a) - spot(b));
    const traces = [
      { x: groups.flatMap((_, g) => [g - 0.34, g + 0.34, null]), y: means.flatMap((m) => [m, m, null]), mode: "lines", meta: "means", line: { color: c.ink, width: 3 }, hoverinfo: "skip" },
      { x: at.map(spot), y: at.map((i) => own.personal[i]), customdata: at, meta: "points", mode: "markers", marker: { symbol: symbolOf(focus), size: at.length > 300 ? 6 : 9, color: c.methods[focus], opacity: client === null ? 0.7 : 0.22, line: { width: 0.6, color: c.paper } }, hoverinfo: "text", hovertext: at.map((i) => s.story(focus, i)) },
    ];
    if (client !== null && at.includes(client)) traces.push({ x: [spot(client)], y: [own.personal[client]], customdata: [client], meta: "selected", mode: "markers", marker: ring(c, symbolOf(focus)), hoverinfo: "text", hovertext: [s.story(focus, client)] });
    const count = (g) => seed.cluster.filter((one) => one === g).length;
    return {
      traces,
      layout: layout(c, { xaxis: { title: "cluster", tickvals: groups.map((_, g) => g), ticktext: groups.map((g) => `${g}<br>${plural(count(g), "client")}`), range: [-0.6, groups.length - 0.4] }, yaxis: { title: `${s.clientAxis}, ${escaped(s.data.methods[focus])}` }, margin: { b: 72 } }),
      table: { head: ["cluster", "clients", `personal model, mean (${s.data.methods[focus]})`, "global model, mean", `gain over ${s.gainOver}, mean`], rows: groups.map((g, k) => [g, count(g), means[k], mean(g, (i) => s.value(focus, "global", i)), mean(g, (i) => s.gain(focus, i))]) },
      order,
    };
  },

  partition(s, c, size) {
    const { seed, client } = s;
    const { classes } = seed;
    const order = seed.clients.map((_, i) => i); // largest first
    if (!classes) {
      return { traces: [{ type: "bar", x: order, y: seed.train, customdata: order, meta: "points", marker: { color: c.methods[0], opacity: order.map((i) => (client === null || i === client ? 0.9 : 0.3)) }, hoverinfo: "text", hovertext: order.map((i) => s.story(s.focus, i)) }], layout: layout(c, { xaxis: { title: "clients, largest first", showticklabels: false }, yaxis: { title: "training rows" } }), table: { head: ["client", "training rows"], rows: order.map((i) => [seed.clients[i], seed.train[i]]) }, order };
    }
    const counts = classes.names.map(() => new Array(order.length).fill(null));
    classes.client.forEach((one, i) => { counts[classes.class[i]][one] = classes.rows[i]; });
    if (s.order === "class") {
      const main = order.map((i) => counts.reduce((best, row, k) => ((row[i] ?? 0) > (counts[best][i] ?? 0) ? k : best), 0));
      order.sort((a, b) => main[a] - main[b] || a - b);
    }
    const most = Math.max(...classes.rows, 2);
    const least = Math.min(...classes.rows, most);
    const ticks = [...new Set([least, 1, 10, 100, 1000, 10000, 100000, most].filter((v) => v >= least && v <= most && (v === least || v === most || (v > 1.8 * least && v < most / 1.8))))].sort((a, b) => a - b);
    const few = size.width / order.length >= 18; // room for ids
    const longest = few ? Math.max(...order.map((i) => widthOf(shortened(seed.clients[i]), 10))) : 0;
    const turned = longest > (size.width - 90) / order.length; // ids that do not fit beside each other are turned
    const shade = (rows) => between(c.heat, most === least ? 1 : Math.log(rows / least) / Math.log(most / least));
    // A cell is a short bar that begins at its class; of very many clients, every so-many-th is drawn.
    const every = Math.ceil(classes.rows.length / MOST_CELLS);
    const cells = order.flatMap((i, rank) => (rank % every && i !== client ? [] : counts.flatMap((row, k) => (row[i] ? [[i, rank, k, row[i]]] : []))));
    const traces = [{
      type: "bar", x: cells.map(([, rank]) => rank), base: cells.map(([, , k]) => k - 0.46), y: cells.map(() => 0.92), width: every * (order.length <= 120 ? 0.94 : 1), customdata: cells.map(([i]) => i), meta: "points", hoverinfo: "text",
      hovertext: cells.map(([i, , k, rows]) => `<b>${escaped(seed.clients[i])}</b> · class ${escaped(classes.names[k])}<br>${rows} of ${plural(seed.train[i], "training row")}`),
      marker: { line: { width: 0 }, color: cells.map(([, , , rows]) => shade(rows)) }, showlegend: false,
    }];
    ticks.forEach((rows, i) => traces.push({ x: [null], y: [null], mode: "markers", meta: "scale", name: grouped.format(rows) + (i === ticks.length - 1 ? " rows of one class" : ""), marker: { symbol: "square", size: 12, color: shade(rows) }, hoverinfo: "skip" }));
    const shapes = [];
    const annotations = [];
    if (client !== null) {
      const rank = order.indexOf(client);
      const pad = Math.max(0, order.length / 400 - 0.5);
      shapes.push({ type: "rect", name: "selected", x0: rank - 0.5 - pad, x1: rank + 0.5 + pad, y0: -0.5, y1: classes.names.length - 0.5, line: { color: c.accent, width: 2.5 } });
      annotations.push({ x: rank, y: -0.5, yanchor: "bottom", showarrow: false, text: `<b>${escaped(s.clientId)}</b>`, font: { color: c.accent, size: 12 }, xanchor: rank < order.length * 0.08 ? "left" : rank > order.length * 0.92 ? "right" : "center" });
    }
    const step = Math.ceil(classes.names.length / 24);
    return {
      traces,
      layout: layout(c, {
        barmode: "overlay", bargap: 0, showlegend: true,
        xaxis: { zeroline: false, range: [-0.6, order.length - 0.4], title: (every > 1 ? `every ${every}th of the ` : "") + (s.order === "class" ? "clients by their main class, largest first" : "clients, largest first"), ...(few ? { tickvals: order.map((_, r) => r), ticktext: order.map((i) => escaped(shortened(seed.clients[i]))), tickfont: { size: 10, color: c.soft } } : { tickformat: ",d" }) },
        yaxis: { title: "class", range: [classes.names.length - 0.4, -0.6], tickvals: classes.names.map((_, k) => k).filter((k) => k % step === 0), ticktext: classes.names.filter((_, k) => k % step === 0).map(escaped), showgrid: false, zeroline: false }, shapes, annotations, margin: turned ? { b: longest + 60 } : {},
      }),
      table: { head: ["client", "training rows", ...classes.names.map((name) => `class ${name}`)], rows: order.map((i) => [seed.clients[i], seed.train[i], ...counts.map((row) => row[i] ?? 0)]) },
      order,
    };
  },
};

/** The middle of a round's clients, and the tenths at either end as a band. */
function bandTraces(band, c, method, scale, noun) {
  if (!band) return [];
  const [low, middle, high] = [band.low, band.middle, band.high].map((values) => values.map((v) => scale * v));
  const edge = { x: band.x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  return [
    { ...edge, y: low, meta: "low" },
    { ...edge, y: high, fill: "tonexty", fillcolor: c.faint(method, 0.2), meta: "high" },
    { x: band.x, y: middle, name: "median", meta: "middle", mode: "lines", line: { color: c.methods[method], width: 2.4 }, hoverinfo: "text", hovertext: band.x.map((x, i) => `round ${x}: median ${noun} ${compact(middle[i])}, 80 % of clients ${compact(low[i])} to ${compact(high[i])}`) },
  ];
}

/** The chosen client's own course, over that of all. */
function withPath(s, c, one, traces, column, text, scale = 1) {
  if (s.client === null) return;
  const own = s.pathOf(one.method, s.client);
  const at = own ? own[column].flatMap((v, i) => (isNumber(v) ? [i] : [])) : [];
  traces.push({ x: at.map((i) => own.round[i]), y: at.map((i) => scale * own[column][i]), customdata: at.map(() => s.client), name: escaped(s.clientId), meta: "selected", mode: "lines+markers", line: { color: c.ink, width: 1.4 }, marker: { size: 7, symbol: "circle-open", color: c.ink, line: { width: 2 } }, hoverinfo: "text", hovertext: at.map((i) => `<b>${escaped(s.clientId)}</b>, round ${own.round[i]}: ${text(scale * own[column][i])}`) });
}

function cap(one, c) {
  if (!isNumber(one.most)) return {};
  return {
    shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: one.most, y1: one.most, line: { color: c.soft, width: 1, dash: "dot" } }],
    annotations: [{ xref: "paper", x: 1, xanchor: "right", y: one.most, yanchor: "bottom", showarrow: false, text: "ℓ_max", font: { size: 11.5, color: c.soft } }],
  };
}
