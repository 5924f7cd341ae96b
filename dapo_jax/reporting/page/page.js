"use strict";
// Draws the report from the JSON beside it. Text becomes text nodes, never markup.
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
let rollouts = []; // read after the first picture
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f"];
const CLIPS = ["", "cut by the lower clip", "cut by the upper clip", "cut by the dual clip"];
const runs = data.experiments.flatMap((one) => one.runs);
const several = data.experiments.length > 1; // a plot then shows one metric of all

function make(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((one) => one !== null && one !== undefined));
  return made;
}

// Escapes tags, which the plotting library reads in labels.
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const colourOf = (number) => COLOURS[number % COLOURS.length];

function show(value, form = "number") {
  if (value === null || value === undefined) return "–";
  if (form === "share") return (100 * value).toFixed(1) + "\u00a0%";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size !== 0 && size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

function table(heads, rows, numeric = false) {
  const kind = (place) => (numeric && place ? "number" : "");
  const head = make("tr", {}, ...heads.map((text, i) => make("th", { scope: "col", className: kind(i) }, text)));
  const body = rows.map((row) => make("tr", {}, ...row.map((text, i) => make("td", { className: kind(i) }, text))));
  return make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": heads.join(", ") },
    make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

// --- headline numbers and warnings -------------------------------------------------------------

function drawHeadlines() {
  for (const [number, one] of data.experiments.entries()) {
    const cards = one.headlines.map(({ name, form, value: [mean, low, high], over }) => {
      const interval = low === null || low === undefined ? "no interval"
        : `${show(low, form)} to ${show(high, form)}, 95 % ${over}`;
      return make("div", {}, make("dt", {}, name), make("dd", {}, show(mean, form), make("small", {}, interval)));
    });
    const title = several ? make("h3", {}, swatch(number), one.name) : null;
    byId("headlines").append(make("div", {}, title, make("dl", { className: "numbers" }, ...cards)));
  }
  const warnings = data.experiments.flatMap((one) => one.runs.flatMap((run) => run.warnings.map((text) => [run.name, text])));
  byId("warnings").hidden = !warnings.length;
  for (const [name, text] of warnings) {
    byId("warnings").querySelector("ul").append(make("li", {}, runs.length > 1 ? `${name}: ${text}` : text));
  }
}

function swatch(number) {
  const made = make("span", { className: "swatch", "aria-hidden": "true" });
  made.style.background = colourOf(number);
  return made;
}

// --- curves ------------------------------------------------------------------------------------

function smoothed(values, width) {
  if (width < 2) return values;
  return values.map((_, i) => {
    const part = values.slice(Math.max(0, i - width + 1), i + 1).filter((v) => v !== null);
    return part.length ? part.reduce((a, b) => a + b) / part.length : null;
  });
}

function layout(title) {
  const style = getComputedStyle(document.documentElement);
  const [ink, line] = [style.getPropertyValue("--ink").trim(), style.getPropertyValue("--line").trim()];
  const axis = { gridcolor: line, zerolinecolor: line, automargin: true };
  return {
    margin: { l: 48, r: 10, t: 8, b: 36 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: 12, family: "system-ui, sans-serif" }, xaxis: { ...axis }, yaxis: { ...axis, title: { text: title } },
    legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, font: { size: 11 } }, hovermode: "x unified",
    dragmode: window.innerWidth < 700 ? false : "zoom",
  };
}

const OPTIONS = { displayModeBar: false, responsive: true };
const shownExperiments = () => [...data.experiments.entries()].filter(([i]) => {
  const box = byId(`experiment-${i}`);
  return !box || box.checked;
});

function traces(curve) {
  const [axis, width] = [byId("axis").value, Number(byId("smooth").value)];
  const found = [];
  for (const [number, one] of shownExperiments()) {
    for (const [place, metric] of curve.metrics.entries()) {
      const line = one.curves.lines[metric];
      if (!line) continue;
      const x = line.at.map((i) => one.curves.x[axis][i]);
      const colour = colourOf(several ? number : place);
      const name = several ? one.name : metric;
      if (line.low) {
        const band = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
        found.push({ ...band, y: smoothed(line.low, width) });
        found.push({ ...band, y: smoothed(line.high, width), fill: "tonexty", fillcolor: colour + "30" });
      }
      found.push({ x, y: smoothed(line.mean, width), name: plain(name), mode: x.length < 40 ? "lines+markers" : "lines",
        line: { color: colour, width: 2 }, marker: { size: 4 },
        connectgaps: true, summary: `${name} from ${show(line.mean[0])} to ${show(line.mean.at(-1))}` });
    }
  }
  return found;
}

function drawCurve(curve, plot) {
  const lines = traces(curve);
  const look = layout(curve.unit);
  look.xaxis.title = { text: byId("axis").selectedOptions[0].text };
  look.showlegend = !several && curve.metrics.length > 1; // the check boxes are the legend of experiments
  plot.setAttribute("aria-label", `${curve.title}, ${curve.unit}: ` + lines.filter((l) => l.summary).map((l) => l.summary).join("; "));
  return Plotly.react(plot, lines, look, OPTIONS);
}

function numbersOf(curve) {
  const rows = [];
  for (const [, one] of shownExperiments()) {
    for (const metric of curve.metrics.filter((name) => one.curves.lines[name])) {
      const line = one.curves.lines[metric];
      const every = Math.max(1, Math.ceil(line.at.length / 10));
      line.at.forEach((at, i) => {
        if (i % every === 0 || i === line.at.length - 1) {
          const range = line.low && line.low[i] !== null ? `${show(line.low[i])} to ${show(line.high[i])}` : "";
          rows.push([`${one.name}: ${metric}`, String(one.curves.x.step[at]), show(line.mean[i]), range]);
        }
      });
    }
  }
  return table(["metric", "step", "mean", "range"], rows, true);
}

function drawCurves() {
  const redraw = () => drawn.forEach((plot) => drawCurve(plot.curve, plot));
  const drawn = new Set();
  const draw = (plot) => {
    watcher.unobserve(plot);
    drawn.add(plot);
    drawCurve(plot.curve, plot).then(() => {
      document.documentElement.dataset.firstPicture ??= Math.round(performance.now());
    });
  };
  const watcher = new IntersectionObserver((entries) => {
    entries.filter((one) => one.isIntersecting && !drawn.has(one.target)).forEach((one) => draw(one.target));
  }, { rootMargin: "400px" });
  const there = data.curves.filter((curve) => data.experiments.some((one) => curve.metrics.some((m) => m in one.curves.lines)));
  for (const curve of there) {
    const metrics = curve.metrics.filter((name) => data.experiments.some((one) => name in one.curves.lines));
    const plots = (several ? metrics.map((name) => [name]) : [metrics]).map((names) => {
      const plot = make("div", { className: "plot", role: "img", "aria-label": curve.title });
      plot.curve = { ...curve, metrics: names, unit: several && metrics.length > 1 ? names[0] : curve.unit };
      return plot;
    });
    const numbers = make("details", {}, make("summary", { "aria-label": `${curve.title} in numbers` }, "In numbers"));
    numbers.addEventListener("toggle", () => numbers.open && numbers.replaceChildren(numbers.firstChild, numbersOf(curve)));
    byId("charts").append(make("article", { className: "card" }, make("h3", {}, curve.title), ...plots,
      make("p", {}, make("b", {}, "Healthy: "), curve.healthy),
      make("p", { className: "ill" }, make("b", {}, "Ill: "), curve.ill), numbers));
    for (const plot of plots) {
      if (drawn.size) watcher.observe(plot); // draws it when it comes near
      else draw(plot);
    }
  }
  byId("axis").addEventListener("change", redraw);
  byId("smooth").addEventListener("change", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  byId("shown").hidden = !several;
  for (const [number, one] of several ? data.experiments.entries() : []) {
    const box = make("input", { type: "checkbox", checked: true, id: `experiment-${number}`, onchange: redraw });
    byId("shown").append(make("label", {}, box, swatch(number), one.name));
  }
  const bands = data.experiments.some((one) => one.runs.length > 1);
  const thin = data.experiments.filter((one) => one.curves.points < one.curves.steps)
    .map((one) => `${one.name}: ${one.curves.points} of ${one.curves.steps} rows are drawn.`);
  byId("bands").textContent = [bands ? "Lines are means over seeds, bands their range." : "", ...thin].join(" ");
}

// --- where time and tokens went ----------------------------------------------------------------

function drawSpent() {
  for (const [part, unit] of [["seconds", "seconds"], ["tokens", "tokens"]]) {
    const kinds = [...new Set(data.experiments.flatMap((one) => Object.keys(one.spent[part])))];
    const rows = data.experiments.flatMap((one) => {
      const sum = Object.values(one.spent[part]).reduce((a, b) => a + b, 0);
      return kinds.filter((kind) => kind in one.spent[part]).map((kind) => [
        one.name, kind, show(one.spent[part][kind]), show(one.spent[part][kind] / sum, "share")]);
    });
    if (!rows.length) continue;
    const bars = kinds.map((kind, i) => ({ type: "bar", orientation: "h", name: kind, marker: { color: colourOf(i) },
      y: data.experiments.map((one) => plain(one.name)), x: data.experiments.map((one) => one.spent[part][kind] ?? 0),
      hovertemplate: "%{x:,.0f} " + unit }));
    const look = { ...layout(""), barmode: "stack", hovermode: "closest", dragmode: false };
    look.xaxis.title = { text: unit };
    if (!several) look.yaxis.showticklabels = false;
    const plot = make("div", { className: "plot", role: "img", "aria-label": `${unit} by what they went into; the table below has the numbers` });
    const heads = ["of", "went into", unit, "share"];
    const shown = several ? [heads, rows] : [heads.slice(1), rows.map((row) => row.slice(1))];
    const note = part === "seconds" ? "Over all runs of an experiment. What a lag hides behind an update is counted as well."
      : "Sampled tokens over all runs: trained on, or paid for and lost.";
    byId("spent").querySelector(".grid").append(make("article", { className: "card" }, make("h3", {}, part === "seconds" ? "Time" : "Tokens"),
      plot, make("p", {}, note), table(...shown)));
    Plotly.newPlot(plot, bars, look, OPTIONS);
  }
}

// --- rollouts ----------------------------------------------------------------------------------

function colourOfToken(by, value) {
  if (value === null || value === undefined) return "";
  if (by === "logprobs") return `rgba(var(--heat), ${Math.min(0.75, -value / 6)})`;
  const share = Math.log(Math.max(value, 1e-6)) / 0.5;
  return `rgba(var(--${share > 0 ? "heat" : "less"}), ${Math.min(0.75, Math.abs(share))})`;
}

function tokensOf(response) {
  const by = byId("colour").value;
  const box = make("pre", { tabIndex: 0, role: "region", "aria-label": "response", dir: "auto" });
  if (!response.pieces) return (box.append(response.text ?? ""), box);
  response.pieces.forEach((piece, i) => {
    const clip = CLIPS[response.clipped?.[i] ?? 0];
    const said = [`log-probability ${show(response.logprobs?.[i])}`,
      response.ratios ? `ratio ${show(response.ratios[i])}` : "", clip].filter(Boolean).join(", ");
    const token = make("span", { title: said, className: clip ? "clip" : "" }, piece || "◦");
    if (by && response[by]) token.style.background = colourOfToken(by, response[by][i]);
    box.append(token, clip ? make("span", { hidden: true }, ` (${clip})`) : "");
  });
  return box;
}

function drawResponse(response, number) {
  const trained = response.advantage === null ? "not trained on" : `advantage ${show(response.advantage)}`;
  const facts = [`reward ${show(response.reward)}`, response.advantage === undefined ? "" : trained,
    `${response.tokens} tokens`, response.truncated ? "cut off by the budget" : "", response.surplus ? "surplus" : ""];
  const parts = Object.entries(response.parts ?? {}).map(([name, value]) => `${name} ${show(value)}`).join(", ");
  const details = make("details", { open: number === 0 },
    make("summary", {}, `${number + 1}. `, make("span", { className: response.correct ? "right" : "wrong" },
      response.correct ? "✓ right" : "✗ wrong"), ` · ${facts.filter(Boolean).join(" · ")}`));
  const fill = () => details.open && details.replaceChildren(details.firstChild,
    make("p", { className: "note", dir: "auto" }, `read as ${JSON.stringify(response.extracted ?? null)}; reward parts: ${parts || "none"}`
      + (response.failure ? `; the verdict failed: ${response.failure}` : "")), tokensOf(response));
  details.addEventListener("toggle", fill);
  return details;
}

function drawGroup() {
  const place = Number(byId("group").value);
  const group = rollouts[place];
  byId("previous").disabled = place === 0;
  byId("next").disabled = place === rollouts.length - 1;
  byId("responses").replaceChildren(
    make("h3", {}, `Prompt ${group.id}, step ${group.step}, ${group.outcome}`),
    make("pre", { tabIndex: 0, role: "region", "aria-label": "prompt", dir: "auto" }, group.prompt),
    make("p", { dir: "auto" }, `Answer: ${group.answer}`), ...group.responses.map(drawResponse));
  const has = (name) => group.responses.some((response) => response[name]);
  const by = byId("colour").value;
  const missing = `Of this group no ${by === "ratios" ? "ratios are" : "tokens are"} stored: see config.log.token_${by === "ratios" ? "ratios" : "groups"}.`;
  const meaning = { logprobs: "The darker a token, the less likely it was to the sampler; full at 1 in 90.",
    ratios: "Orange: more likely to the policy that the last update saw than to the old one; blue: less. Underlined tokens had their gradient cut by the clip." };
  byId("legend").textContent = !by ? "" : has(by) ? `${meaning[by]} ◦ is a token without text, such as the end.` : missing;
}

function drawRollouts() {
  rollouts = JSON.parse(byId("rollouts-data").textContent);
  byId("sample").textContent = rollouts.length ? data.sample : "No rollouts are stored (config.log.rollouts).";
  if (!rollouts.length) return void document.querySelector("#rollouts .controls").remove();
  rollouts.forEach((group, i) => {
    const right = group.responses.filter((response) => response.correct).length;
    const name = runs.length > 1 ? `${runs[group.run].name}, ` : "";
    byId("group").append(make("option", { value: i }, `${name}step ${group.step}: ${right} of ${group.responses.length} right`));
  });
  const move = (by) => { byId("group").selectedIndex += by; drawGroup(); };
  byId("previous").addEventListener("click", () => move(-1));
  byId("next").addEventListener("click", () => move(1));
  byId("group").addEventListener("change", drawGroup);
  byId("colour").addEventListener("change", drawGroup);
  byId("open").addEventListener("click", () => byId("responses").querySelectorAll("details").forEach((one) => { one.open = true; }));
  byId("group").value = Math.max(0, rollouts.findLastIndex((group) => group.responses[0].pieces));
  drawGroup();
}

// --- settings ----------------------------------------------------------------------------------

function drawSettings() {
  const box = byId("settings");
  const written = (value) => (value === null ? "not there" : JSON.stringify(value));
  if (data.apart.length) {
    box.append(make("h3", {}, "What sets the experiments apart"),
      table(["setting", ...data.experiments.map((one) => one.name)], data.apart.map(([name, ...values]) => [name, ...values.map(written)])));
  }
  const changes = (title, heads, lines) => make("details", {}, make("summary", {}, `${title}: ${lines.length || "nothing"}`),
    lines.length ? table(heads, lines.map(([name, ...values]) => [name, ...values.map(written)])) : null);
  for (const one of data.experiments) {
    const preset = changes(`Differs from the preset ${one.preset}`, ["setting", "here", one.preset], one.fromPreset);
    preset.open = true;
    box.append(make("h3", {}, one.name), preset,
      changes("Differs from the defaults", ["setting", "here", "default"], one.fromDefaults),
      changes("All settings", ["setting", "value"], one.settings));
  }
}

drawHeadlines();
drawCurves();
setTimeout(() => {
  for (const draw of [drawRollouts, drawSettings, drawSpent]) draw();
  // The plotting library measures texts in it: screen readers pass over it.
  byId("js-plotly-tester")?.setAttribute("aria-hidden", "true");
});
