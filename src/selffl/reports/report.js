// The page: which client, method and seed are chosen, and everything that follows the choice.
"use strict";

const MOST_DRAWING_MS = 50; // before the page may answer again
const root = document.documentElement;
const payload = JSON.parse(document.getElementById("report-data")?.textContent ?? '{"groups": []}');
const darkSystem = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme === "auto" || !root.dataset.theme ? darkSystem.matches : root.dataset.theme === "dark");

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const SHAPES = {
  circle: '<circle cx="7.5" cy="7.5" r="4.6"/>', square: '<path d="M3.4 3.4h8.2v8.2H3.4z"/>', diamond: '<path d="M7.5 1.8 13.2 7.5 7.5 13.2 1.8 7.5z"/>',
  "triangle-up": '<path d="M7.5 2.2 13 12H2z"/>', "triangle-down": '<path d="M7.5 12.8 13 3H2z"/>', cross: '<path d="M5.6 2h3.8v3.6H13v3.8H9.4V13H5.6V9.4H2V5.6h3.6z"/>',
  x: '<path d="m3.2 5.4 2.2-2.2 2.1 2.1 2.1-2.1 2.2 2.2-2.1 2.1 2.1 2.1-2.2 2.2-2.1-2.1-2.1 2.1-2.2-2.2 2.1-2.1z"/>', star: '<path d="m7.5 1.5 1.7 3.9 4.3.4-3.2 2.9.9 4.2-3.7-2.2-3.7 2.2.9-4.2L1.5 5.8l4.3-.4z"/>',
};

/** Numbers as they are; texts in quotes where they need them, and never as a formula of a spreadsheet. */
function asCsv(lines) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return lines.map((line) => line.map(cell).join(",")).join("\n") + "\n";
}

/** A button in each heading of a table: its lines by that column, and back again. */
function sortable(table) {
  const body = table.tBodies[0];
  const key = (row, column) => {
    const text = row.cells[column]?.textContent.trim() ?? "";
    const number = Number.parseFloat(text.replaceAll(",", "").replace("−", "-").replace("< ", ""));
    return Number.isNaN(number) ? text : number;
  };
  for (const heading of table.tHead?.rows[0]?.cells ?? []) {
    if (heading.querySelector("button")) continue;
    const press = element("button", { type: "button", class: "sort" }, ...heading.childNodes);
    heading.append(press);
    press.addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") === "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : typeof a === typeof b ? a.localeCompare(b) : typeof a === "number" ? 1 : -1);
      const lines = [...body.rows].sort((a, b) => compare(key(a, heading.cellIndex), key(b, heading.cellIndex)) * (up ? 1 : -1));
      body.append(...lines);
    });
  }
}

class GroupView {
  constructor(entry) {
    this.root = document.querySelector(`[data-group="${CSS.escape(entry.id)}"]`);
    this.state = new State(entry);
    this.panel = this.root.querySelector(".panel");
    this.orders = {};
    this.drawn = new Map();
    this.restore();
    this.follow();
    this.listen();
    this.fill();
  }
  all(selector) { return [...this.root.querySelectorAll(selector)]; }
  get charts() { return this.all("[data-chart]"); }

  /** A reader's choice outlives a reload of a live page. */
  restore() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(`selffl-${this.state.id}`));
      if (!kept) return;
      Object.assign(this.state, { focus: Math.min(kept.focus, this.state.data.methods.length - 1), seedNumber: Math.min(kept.seedNumber, Math.max(this.state.data.seeds.length - 1, 0)), part: kept.part });
      if (kept.client !== null) this.state.client = this.state.find(kept.client);
    } catch { /* storage may be closed to a page from disk */ }
  }
  keep() {
    const { focus, seedNumber, part, clientId } = this.state;
    try { sessionStorage.setItem(`selffl-${this.state.id}`, JSON.stringify({ focus, seedNumber, part, client: clientId })); } catch { /* likewise */ }
  }

  listen() {
    const { state } = this;
    const on = (selector, event, act) => this.all(selector).forEach((one) => one.addEventListener(event, () => act(one)));
    on("[data-part]", "click", (one) => { state.part = one.dataset.part; this.draw(["rounds"]); this.fill(); });
    on("[data-show]", "change", (one) => { state.visible[one.dataset.show] = one.checked; this.draw(["clients", "spread"]); });
    on("[data-focus]", "change", (one) => { state.focus = Number(one.value); this.draw(); this.fill(); });
    on("[data-order]", "change", (one) => { state.order = one.value; this.draw(["partition"]); });
    on("[data-seed]", "change", (one) => {
      const id = state.clientId;
      state.seedNumber = Number(one.value);
      state.client = id === null ? null : state.find(id);
      this.draw();
      this.fill();
    });
    on("[data-client]", "change", (one) => this.choose(one.value.trim() === "" ? null : state.find(one.value.trim()), one.value.trim()));
    on("[data-step]", "click", (one) => this.step(Number(one.dataset.step), "clients"));
    on("[data-along]", "change", (one) => { state.along = one.value; this.draw(["rounds"]); this.fill(); });
    on("[data-single]", "change", (one) => { state.single = one.checked; this.draw(["rounds"]); this.fill(); });
    on("[data-export]", "click", (one) => this.save(one.dataset.of, one.dataset.export));
    on("[data-numbers]", "toggle", (one) => one.open && this.tabulate(one.dataset.numbers));
    for (const chart of this.charts) {
      chart.addEventListener("keydown", (event) => {
        const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (by) this.step(by, chart.dataset.chart);
        else if (event.key === "Escape") this.choose(null);
        else return;
        event.preventDefault();
      });
    }
  }

  step(by, chart) {
    const order = this.orders[chart] ?? this.orders.clients ?? [];
    if (!order.length) return;
    const at = order.indexOf(this.state.client);
    this.choose(order[at < 0 ? (by > 0 ? 0 : order.length - 1) : (at + by + order.length) % order.length]);
  }

  choose(client, asked = "") {
    this.state.client = client;
    this.draw();
    this.fill();
    this.link();
    const said = this.root.querySelector("[data-said]");
    if (!said) return;
    if (client === null) said.textContent = asked ? `There is no client ${asked}.` : "No client is chosen.";
    else said.textContent = `Client ${this.state.clientId}: ${this.state.facts(this.state.focus, client).map(([name, value]) => `${name} ${value}`).join(", ")}.`;
    if (client === null && asked) this.root.querySelector("[data-card]").replaceChildren(element("p", { class: "hint" }, `There is no client “${asked}”.`));
  }

  /** The address of the chosen client, to send to somebody. */
  link() {
    const { id, clientId } = this.state;
    const hash = clientId === null ? "" : `#${id}-client=${encodeURIComponent(clientId)}`;
    if (hash || location.hash.startsWith(`#${id}-client=`)) history.replaceState(null, "", hash || location.pathname + location.search);
  }
  /** Choose the client that the address names. */
  follow() {
    const start = `#${this.state.id}-client=`;
    if (!location.hash.startsWith(start)) return;
    const client = this.state.find(decodeURIComponent(location.hash.slice(start.length)));
    if (client !== null) this.state.client = client;
  }

  /** A picture as it stands, on the page's own ground, or its numbers. */
  async save(name, kind) {
    const plot = this.root.querySelector(`[data-chart="${name}"] .plot`);
    const table = this.drawn.get(name) ?? CHARTS[name](this.state, this.colours(), { width: 800, height: 400 }).table;
    const address = kind === "csv"
      ? URL.createObjectURL(new Blob([asCsv([table.head, ...table.rows])], { type: "text/csv" }))
      : await Plotly.toImage({ data: plot.data, layout: { ...plot.layout, paper_bgcolor: this.colours().paper } }, { format: kind, width: plot.clientWidth, height: plot.clientHeight, scale: kind === "png" ? 2 : 1 });
    const link = element("a", { href: address, download: `${this.state.id}-${name}.${kind}` });
    link.click();
    if (kind === "csv") setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  /** Everything that is no chart. */
  fill() {
    const { state } = this;
    this.keep();
    this.all("[data-part]").forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.part === state.part)));
    this.all("[data-show]").forEach((one) => { one.checked = state.visible[one.dataset.show]; });
    this.all("[data-focus]").forEach((one) => { one.value = String(state.focus); });
    this.all("[data-seed]").forEach((one) => { one.value = String(state.seedNumber); });
    this.all("[data-order]").forEach((one) => { one.value = state.order; });
    this.all("[data-client]").forEach((one) => { one.value = state.clientId ?? ""; });
    const list = this.root.querySelector("datalist");
    if (list && list.dataset.of !== `${state.seed?.seed}:${state.seed?.clients.length}`) {
      list.replaceChildren(...(state.seed?.clients ?? []).map((id) => element("option", { value: id })));
      list.dataset.of = `${state.seed?.seed}:${state.seed?.clients.length}`;
    }
    this.fillLosers();
    this.all("table:not(.plain)").forEach(sortable);
    this.paintSwatches();
    if (this.panel) this.fillCard();
    this.all("[data-numbers][open]").forEach((one) => this.tabulate(one.dataset.numbers));
  }

  /** Who loses most with the method and seed that are chosen, and why. */
  fillLosers() {
    const box = this.root.querySelector("[data-losers]");
    if (!box) return;
    const { state } = this;
    const { focus, data } = state;
    const losers = state.of(focus)?.losing?.most;
    const name = data.methods[focus];
    const seed = data.seeds.length > 1 ? ` (seed ${state.seed.seed})` : "";
    const { lose, of } = state.of(focus)?.losing ?? {};
    const said = !losers ? `${focus === data.alone ? `${name} is training alone` : `What clients of ${name} have alone is not known`}.`
      : !lose ? `With ${name} nobody loses by joining${seed}.`
      : `With ${name}${seed}, ${grouped.format(lose)} of ${plural(of, "client")} ${lose === 1 ? "loses" : "lose"} by joining${lose > losers.length ? `; ${losers.length} are named` : ""}, those with a significant loss first.`;
    this.root.querySelector("[data-losing]").textContent = said;
    box.hidden = !losers?.length;
    const line = (one) => {
      const place = state.find(one.client);
      const who = place === null ? one.client : element("button", { type: "button", class: "link" }, one.client);
      if (place !== null) who.addEventListener("click", () => this.choose(place === state.client ? null : place));
      return element("tr", {}, element("th", { scope: "row" }, who), element("td", { class: "number bad" }, state.gap(one.gain)), element("td", {}, one.why), element("td", { class: "number wide" }, String(one.train)), element("td", { class: "number wide" }, String(one.test)));
    };
    const names = [["client", ""], ["gain", "number"], ["why, as far as it was measured", ""], ["training rows", "number wide"], ["test rows", "number wide"]];
    box.replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...names.map(([text, kind]) => element("th", { scope: "col", ...(kind ? { class: kind } : {}) }, text)))), element("tbody", {}, ...(losers ?? []).map(line))));
  }

  paintSwatches() {
    const { methods } = this.colours();
    this.all(".swatch").forEach((one) => { one.innerHTML = `<svg width="15" height="15" fill="${methods[one.dataset.method]}" aria-hidden="true">${SHAPES[symbolOf(Number(one.dataset.method))]}</svg>`; });
  }

  fillCard() {
    const { state } = this;
    const card = this.root.querySelector("[data-card]");
    this.panel.classList.toggle("following", state.client !== null);
    if (state.client === null) {
      card.replaceChildren(element("p", { class: "hint" }, "Click a client in any picture, type its id, or walk through them with the arrows: it is then marked in every picture."));
      return;
    }
    const { client, focus, data } = state;
    const { rows, classes } = state.size(client);
    const close = element("button", { type: "button" }, "clear");
    close.addEventListener("click", () => { this.choose(null); this.root.querySelector("[data-client]").focus(); });
    const gain = state.gain(focus, client);
    const parts = [
      element("div", { class: "who" }, element("p", { class: "name" }, state.clientId), close),
      element("p", {}, rows + (classes ? `; ${classes}` : "")),
      element("p", { class: "big" }, state.shown(state.value(focus, "personal", client)), element("small", {}, isNumber(gain) ? (state.isCounted(client) ? `${state.gap(gain)} over ${state.gainOver}` : `of ${plural(state.seed.test[client], "test row")}: too few to tell a gain`) : data.methods[focus])),
    ];
    const values = data.methods.map((_, m) => state.value(m, "personal", client));
    const top = data.unit === "%" ? 100 : Math.max(...known(values), 1e-12);
    const { methods } = this.colours();
    if (known(values).length > 1) {
      parts.push(element("ul", { class: "bars", "aria-label": "Personal models of this client, by method" }, ...values.flatMap((value, m) => {
        if (!isNumber(value)) return [];
        const fill = element("span", { class: "fill", style: `width:${Math.max((100 * value) / top, 0)}%;background:${methods[m]}` });
        return [element("li", m === focus ? { class: "chosen" } : {}, element("span", { class: "swatch", "data-method": m, "aria-hidden": "true" }), element("span", { class: "name" }, data.methods[m]), element("span", { class: "track" }, fill), element("span", { class: "value" }, state.shown(value)))];
      })));
    }
    parts.push(element("dl", { "data-facts": "" }, ...state.facts(focus, client).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
    card.replaceChildren(...parts);
    this.paintSwatches();
  }

  colours() { return new Colours(isDark() && !this.printing, this.state.palette); }

  draw(names = null) {
    for (const chart of this.charts) {
      if (names && !names.includes(chart.dataset.chart)) continue;
      this.drawOne(chart);
    }
    return this;
  }

  drawOne(chart) {
    const name = chart.dataset.chart;
    const plot = chart.firstElementChild;
    const size = { width: this.printing ? 660 : chart.clientWidth, height: chart.clientHeight };
    const made = CHARTS[name](this.state, this.colours(), size);
    chart.closest("figure").hidden = Boolean(made.hidden);
    if (made.hidden) return;
    this.orders[name] = made.order;
    this.drawn.set(name, made.table);
    const fixed = this.printing ? { width: chart.closest(".pair") && !chart.closest(".facts") ? 320 : 660, height: Math.min(size.height, 330), autosize: false } : { autosize: true };
    Plotly.react(plot, made.traces, { ...made.layout, ...fixed }, { displayModeBar: false, responsive: false, doubleClick: "reset" });
    if (!plot.dataset.listens) {
      plot.dataset.listens = "yes";
      plot.on("plotly_click", (event) => {
        const client = event.points.map((point) => point.customdata).find(Number.isInteger);
        if (client !== undefined) this.choose(client === this.state.client ? null : client);
      });
    }
  }

  /** The numbers of a chart as a table, made when somebody opens it. */
  tabulate(name) {
    const { head, rows } = this.drawn.get(name) ?? { head: [], rows: [] };
    const most = 1000;
    const cell = (value, i) => element(i ? "td" : "th", i ? (isNumber(value) ? { class: "number" } : {}) : { scope: "row" }, value === null || value === undefined ? "–" : isNumber(value) ? minus(String(Number(value.toPrecision(6)))) : String(value));
    const table = element("table", {},
      element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, ...rows.slice(0, most).map((row) => element("tr", {}, ...row.map(cell)))));
    const box = this.root.querySelector(`[data-numbers="${name}"] .scroll`);
    sortable(table);
    const kept = box.querySelector("input")?.value ?? "";
    const filter = element("input", { type: "search", class: "filter", placeholder: "only lines with…", "aria-label": "Only lines with this text" });
    const narrow = () => { for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase()); };
    filter.addEventListener("input", narrow);
    filter.value = kept;
    narrow();
    box.replaceChildren(...(rows.length > 12 ? [filter] : []), table, ...(rows.length > most ? [element("p", {}, `The first ${most} of ${rows.length} lines; all are in the run's files.`)] : []));
  }

  /** New numbers of a live run; what was chosen stays chosen. */
  update(entry) {
    this.state.take(entry);
    for (const [name, text] of Object.entries(entry.text ?? {})) this.all(`[data-text="${name}"]`).forEach((one) => { one.textContent = text; });
    for (const [name, html] of Object.entries(entry.html ?? {})) this.all(`[data-html="${name}"]`).forEach((one) => { one.innerHTML = html; });
    this.draw();
    this.fill();
  }
}

const views = payload.groups.map((entry) => new GroupView(entry));
const redraw = () => views.forEach((view) => { view.draw(); view.fill(); });

// Pictures that are in view at once, the others as soon as the page has been shown, a few at a time so that it answers
// meanwhile. A message is handled at once; a timer that sets a timer waits.
const inView = (chart) => chart.getBoundingClientRect().top < innerHeight;
const waiting = views.flatMap((view) => view.charts.map((chart) => [view, chart, inView(chart)])).sort((a, b) => b[2] - a[2]);
const turn = new MessageChannel();
function drawSome() {
  const start = performance.now();
  while (waiting.length && performance.now() - start < MOST_DRAWING_MS) {
    const [view, chart, isSeen] = waiting[0];
    if (!isSeen && !root.dataset.shown) {
      root.dataset.shown = "yes";
      performance.mark("shown"); // what is in view is drawn
      break;
    }
    waiting.shift();
    view.drawOne(chart);
  }
  if (waiting.length) turn.port2.postMessage(null);
  else root.dataset.ready = "yes";
}
turn.port1.onmessage = drawSome;
drawSome();

addEventListener("hashchange", () => views.forEach((view) => { view.follow(); view.draw(); view.fill(); }));

let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); views.forEach((view) => view.charts.forEach((chart) => Plotly.Plots.resize(chart.firstElementChild))); } });
const forPrint = (printing) => { views.forEach((view) => { view.printing = printing; }); redraw(); };
addEventListener("beforeprint", () => forPrint(true));
addEventListener("afterprint", () => forPrint(false));

const themes = { auto: ["as the system", "◐"], light: ["light", "○"], dark: ["dark", "●"] };
const button = document.getElementById("theme");
function setTheme(name) {
  root.dataset.theme = name;
  button.textContent = themes[name][1];
  button.setAttribute("aria-label", `Colours: ${themes[name][0]}`);
  button.title = `Colours: ${themes[name][0]}`;
  try { localStorage.setItem("selffl-theme", name); } catch { /* from disk there may be none */ }
}
setTheme(root.dataset.theme in themes ? root.dataset.theme : "auto");
button.addEventListener("click", () => {
  const names = ["auto", ...(darkSystem.matches ? ["light", "dark"] : ["dark", "light"])]; // the first click is seen
  setTheme(names[(names.indexOf(root.dataset.theme) + 1) % names.length]);
  redraw();
});
darkSystem.addEventListener("change", redraw);

document.addEventListener("click", async (event) => {
  const copy = event.target.closest("[data-copy]");
  if (!copy) return;
  const code = copy.parentElement.querySelector("code");
  try { await navigator.clipboard.writeText(code.textContent); copy.textContent = "Copied"; } catch { getSelection().selectAllChildren(code); copy.textContent = "Selected"; }
});

// The link of the section in view.
const links = new Map([...document.querySelectorAll(".bar nav a")].map((link) => [link.hash.slice(1), link]));
const seen = new IntersectionObserver((entries) => {
  for (const crossing of entries) {
    if (!crossing.isIntersecting) continue;
    links.forEach((link) => link.removeAttribute("aria-current"));
    links.get(crossing.target.id)?.setAttribute("aria-current", "true");
  }
}, { rootMargin: "-20% 0px -70% 0px" });
links.forEach((_, id) => { const target = document.getElementById(id); if (target) seen.observe(target); });

// A live page asks for news; while there are none, the answer is empty.
if ("live" in root.dataset) {
  const sign = document.getElementById("live");
  let tag = payload.tag;
  const ask = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch("data.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
        if (answer.status === 200) {
          const news = await answer.json();
          tag = answer.headers.get("ETag");
          if (news.shape !== payload.shape) { location.reload(); return; }
          news.groups.forEach((entry, i) => views[i].update(entry));
          sign.textContent = `live, ${news.state}`;
        }
        if (answer.status < 400) sign.classList.remove("lost"); else throw new Error(answer.statusText);
      } catch {
        sign.classList.add("lost");
        sign.textContent = "the server does not answer";
        tag = "";
      }
    }
    setTimeout(ask, payload.every);
  };
  if (payload.state) sign.textContent = `live, ${payload.state}`;
  setTimeout(ask, payload.every);
}
