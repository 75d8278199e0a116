// Twenty clients between one shared answer and each its own, as the spread between clients moves.
// The equations are those of selffl.posterior; tests/test_docs_shrinkage.py holds the two against each other.
(function () {
  "use strict";

  // Made-up clinics: patients, and the mean number of days until they were well.
  const CLIENTS = [
    [4, 11.3], [5, 6.1], [6, 9.8], [7, 8.9], [9, 12.6], [10, 9.4], [12, 7.2], [14, 10.9], [18, 8.1], [22, 11.7],
    [26, 9.1], [32, 10.2], [40, 7.8], [55, 9.6], [70, 11.1], [95, 8.6], [130, 10.4], [180, 9.3], [260, 8.2], [400, 10.0],
  ].map(([rows, estimate]) => ({ rows, estimate }));
  const ROW_VARIANCE = 16; // of one patient: four days either way

  function posterior(estimate, intra, inter, form) {
    const weight = intra.map((v) => 1 / (inter + v));
    const global = estimate.reduce((sum, z, m) => sum + weight[m] * z, 0) / weight.reduce((a, b) => a + b, 0);
    const clients = estimate.map((own, m) => {
      let precision = 0, total = 0; // of the others: nothing is subtracted, so nothing cancels
      weight.forEach((w, k) => {
        if (k !== m) { precision += w; total += w * estimate[k]; }
      });
      const start = total / precision;
      const prior = 1 / precision + (form === "exact" ? inter : 0);
      const trust = prior / (prior + intra[m]);
      return { mean: start + trust * (own - start), variance: trust * intra[m], trust, gain: 1 / trust };
    });
    return { global, clients };
  }

  // DerSimonian and Laird's estimate of the spread between clients.
  function interVariance(estimate, intra) {
    const weight = intra.map((v) => 1 / v);
    const sum = weight.reduce((a, b) => a + b, 0);
    const mean = estimate.reduce((total, z, m) => total + weight[m] * z, 0) / sum;
    const q = estimate.reduce((total, z, m) => total + weight[m] * (z - mean) ** 2, 0);
    const c = sum - weight.reduce((total, w) => total + w * w, 0) / sum;
    return Math.max(0, (q - (estimate.length - 1)) / c);
  }

  if (typeof module !== "undefined") {
    module.exports = { CLIENTS, ROW_VARIANCE, posterior, interVariance };
    return;
  }

  const LOW = -3, HIGH = 2; // powers of ten of the slider's ends
  const SVG = "http://www.w3.org/2000/svg";
  const estimates = CLIENTS.map((client) => client.estimate);
  const variances = CLIENTS.map((client) => ROW_VARIANCE / client.rows);
  const estimated = interVariance(estimates, variances);

  function draw(host) {
    host.innerHTML = `
      <div class="shrinkage-controls">
        <label for="shrinkage-spread">Spread between clinics, σ₀²:
          <output for="shrinkage-spread" id="shrinkage-value"></output></label>
        <input id="shrinkage-spread" type="range" min="${LOW}" max="${HIGH}" step="any" aria-describedby="shrinkage-ends">
        <div class="shrinkage-ends" id="shrinkage-ends"><span>all the same</span><span>nothing in common</span></div>
        <fieldset><legend>Posterior</legend>
          <label><input type="radio" name="shrinkage-form" value="exact" checked> exact form</label>
          <label><input type="radio" name="shrinkage-form" value="paper"> the paper's form</label>
          <button type="button" id="shrinkage-estimated">Spread as estimated from these clinics</button>
        </fieldset>
      </div>
      <div class="shrinkage-picture"></div>
      <p class="shrinkage-summary" role="status"></p>
      <details><summary>The same as a table</summary><div class="shrinkage-scroll" tabindex="0" role="region"
        aria-label="Clinics as a table"><table><thead><tr><th scope="col">patients</th><th scope="col">alone</th>
        <th scope="col">with the others</th><th scope="col">trust in itself</th><th scope="col">gain</th></tr></thead>
        <tbody></tbody></table></div></details>`;
    const slider = host.querySelector("#shrinkage-spread");
    const value = host.querySelector("#shrinkage-value");
    const picture = host.querySelector(".shrinkage-picture");
    const summary = host.querySelector(".shrinkage-summary");
    const body = host.querySelector("tbody");
    let timer = 0;

    function render() {
      const inter = 10 ** Number(slider.value);
      const form = host.querySelector("input[name=shrinkage-form]:checked").value;
      const found = posterior(estimates, variances, inter, form);
      const text = inter >= 10 ? inter.toFixed(0) : inter.toPrecision(2);
      value.textContent = text;
      slider.setAttribute("aria-valuetext", `sigma zero squared ${text}`);
      paint(found);
      body.innerHTML = CLIENTS.map((client, m) => {
        const { mean, trust, gain } = found.clients[m];
        const cells = [client.estimate.toFixed(1), mean.toFixed(2), `${(100 * trust).toFixed(0)} %`, `${gain.toFixed(2)}×`];
        return `<tr><th scope="row">${client.rows}</th>${cells.map((cell) => `<td>${cell}</td>`).join("")}</tr>`;
      }).join("");
      const first = found.clients[0], last = found.clients[CLIENTS.length - 1];
      const sentence = `At σ₀² = ${text} the clinic with ${CLIENTS[0].rows} patients takes ${(100 * first.trust).toFixed(0)} % of ` +
        `its answer from its own patients and gains ${first.gain.toFixed(1)}×; the one with ` +
        `${CLIENTS[CLIENTS.length - 1].rows} takes ${(100 * last.trust).toFixed(0)} % and gains ${last.gain.toFixed(1)}×. ` +
        `The shared answer is ${found.global.toFixed(2)} days.`;
      clearTimeout(timer); // a reader is told where the slider stops, not every place on its way
      timer = setTimeout(() => { summary.textContent = sentence; }, summary.textContent ? 250 : 0);
    }

    function paint({ global, clients }) {
      const width = Math.max(picture.clientWidth, 260), row = 19, left = 62, right = 14, top = 34;
      const height = top + row * CLIENTS.length + 30;
      const low = Math.min(...estimates) - 0.5, high = Math.max(...estimates) + 0.5;
      const x = (days) => left + ((days - low) / (high - low)) * (width - left - right);
      const parts = [];
      const add = (name, attributes, text) => parts.push([name, attributes, text]);
      for (let tick = Math.ceil(low); tick <= high; tick++) {
        add("line", { class: "grid", x1: x(tick), x2: x(tick), y1: top - 6, y2: height - 24 });
        add("text", { x: x(tick), y: height - 8, "text-anchor": "middle" }, String(tick));
      }
      add("text", { x: 2, y: 14 }, "patients");
      add("text", { x: width - right, y: 14, "text-anchor": "end" }, "○ alone   ● with the others   ┆ shared");
      add("line", { class: "shared", x1: x(global), x2: x(global), y1: top - 6, y2: height - 24 });
      CLIENTS.forEach((client, m) => {
        const y = top + row * (m + 0.5), from = x(client.estimate), to = x(clients[m].mean);
        const radius = 2.5 + 6 * Math.sqrt(client.rows / 400); // its area grows with the rows
        add("text", { x: left - 16, y: y + 4, "text-anchor": "end" }, String(client.rows));
        add("line", { class: "way", x1: from, x2: to, y1: y, y2: y });
        add("circle", { class: "own", cx: from, cy: y, r: radius });
        add("circle", { class: "personal", cx: to, cy: y, r: radius });
      });
      const svg = document.createElementNS(SVG, "svg");
      svg.setAttribute("width", width);
      svg.setAttribute("height", height);
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", "Each clinic's own estimate and its estimate with the others' help, in days");
      for (const [name, attributes, text] of parts) {
        const node = document.createElementNS(SVG, name);
        for (const key in attributes) node.setAttribute(key, attributes[key]);
        if (text) node.textContent = text;
        svg.appendChild(node);
      }
      picture.replaceChildren(svg);
    }

    host.querySelector("#shrinkage-estimated").addEventListener("click", () => {
      slider.value = Math.log10(Math.max(estimated, 10 ** LOW));
      render();
    });
    slider.value = Math.log10(Math.max(estimated, 10 ** LOW));
    host.addEventListener("input", render);
    new ResizeObserver(render).observe(picture);
    render();
  }

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll("[data-shrinkage]").forEach(draw));
})();
