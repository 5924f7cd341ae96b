"use strict";
// Draws the curves; stands in front of page.js in the same script.
function smoothed(values, width) {
  if (width < 2) return values;
  return values.map((_, i) => {
    if (values[i] === null) return null; // a gap stays one
    const part = values.slice(Math.max(0, i - width + 1), i + 1).filter((v) => v !== null);
    return part.length ? part.reduce((a, b) => a + b) / part.length : null;
  });
}

function layout(title) {
  const style = getComputedStyle(document.documentElement);
  const [ink, line, card] = ["--ink", "--line", "--card"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, zerolinecolor: line, automargin: true };
  return {
    margin: { l: 48, r: 10, t: 8, b: 36 }, paper_bgcolor: card, plot_bgcolor: card,
    font: { color: ink, size: 12, family: "system-ui, sans-serif" }, xaxis: { ...axis }, yaxis: { ...axis, title: { text: title }, exponentformat: "e", minexponent: 5, hoverformat: ".4~g" },
    legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, font: { size: 11 }, traceorder: "normal" },
    hovermode: data.experiments.length > 8 ? "closest" : "x unified", hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink }, namelength: 40 },
    dragmode: window.innerWidth < 700 ? false : "zoom",
  };
}

const DASHES = { solid: "solid", dashed: "dash", dotted: "dot" }; // of CSS, of the plotting library
const OPTIONS = { displayModeBar: false, responsive: true };
const shownExperiments = () => [...data.experiments.entries()].filter(([i]) => {
  const box = byId(`experiment-${i}`);
  return !box || box.checked;
});

// A closed line around each stretch without a gap.
function bandOf(x, low, high) {
  const outline = { x: [], y: [] };
  for (let i = 0; i < x.length; i += 1) {
    const start = i;
    while (i < x.length && low[i] !== null) i += 1;
    const there = [...Array(i - start).keys()].map((step) => start + step);
    const back = there.toReversed();
    if (there.length) {
      outline.x.push(...there.map((at) => x[at]), ...back.map((at) => x[at]), null);
      outline.y.push(...there.map((at) => high[at]), ...back.map((at) => low[at]), null);
    }
  }
  return outline;
}

function traces(curve) {
  const [axis, width] = [byId("axis").value, Number(byId("smooth").value)];
  const found = [];
  for (const [number, one] of shownExperiments()) {
    for (const [place, [metric, words]] of Object.entries(curve.metrics).entries()) {
      const line = one.curves.lines[metric];
      if (!line) continue;
      const x = line.at.map((i) => one.curves.x[axis][i]);
      const colour = colourOf(several ? number : place);
      const name = several ? one.name : words;
      if (line.low) {
        found.push({ ...bandOf(x, smoothed(line.low, width), smoothed(line.high, width)), mode: "lines", line: { width: 0 },
          fill: "toself", fillcolor: colour + "30", hoverinfo: "skip", showlegend: false });
      }
      const y = smoothed(line.mean, width);
      const there = line.mean.filter((value) => value !== null);
      const isDot = (i) => y[i] !== null && (there.length < 40 || (y[i - 1] ?? null) === null && (y[i + 1] ?? null) === null);
      const sizes = y.map((_, i) => (isDot(i) ? 5 : 0));
      found.push({ x, y, name: plain(shorten(name, 40)), mode: sizes.some(Boolean) ? "lines+markers" : "lines", line: { color: colour, width: 2, dash: DASHES[dashOf(several ? number : 0)] },
        marker: { size: sizes, opacity: 1, line: { width: 0 } },
        summary: `${name} from ${show(there[0])} to ${show(there.at(-1))}` });
    }
  }
  return found;
}

// Values that hardly differ get an axis of some height, on which rounding looks flat.
function hold(curve, lines) {
  const values = lines.flatMap((one) => one.y).filter((value) => value !== null);
  const [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
  const span = Math.max(curve.span, 0.01 * Math.max(Math.abs(low), Math.abs(high)));
  if (!values.length || high - low >= span) return {};
  let from = (low + high - span) / 2;
  if (low >= 0 && from < 0) from = 0;
  const note = high > low && high - low < span / 10
    ? `All values lie within ${show(high - low)} of each other. The axis spans ${show(span)}, so that rounding looks flat.` : "";
  return { range: [from - 0.05 * span, from + 1.05 * span], note };
}

function drawCurve(curve, plot) {
  const lines = traces(curve);
  const look = layout(curve.unit);
  const held = hold(curve, lines);
  look.xaxis.title = { text: byId("axis").selectedOptions[0].text };
  if (held.range) look.yaxis.range = held.range;
  plot.nextSibling.textContent = held.note ?? "";
  look.showlegend = !several && Object.keys(curve.metrics).length > 1; // the check boxes are the legend of experiments
  plot.setAttribute("aria-label", `${curve.title}, ${curve.unit}: ` + lines.filter((l) => l.summary).map((l) => l.summary).join("; "));
  return Plotly.react(plot, lines, look, OPTIONS);
}

function numbersOf(curve) {
  const rows = [];
  for (const [, one] of shownExperiments()) {
    for (const [metric, words] of Object.entries(curve.metrics).filter(([name]) => one.curves.lines[name])) {
      const line = one.curves.lines[metric];
      const every = Math.max(1, Math.ceil(line.at.length / 10));
      line.at.forEach((at, i) => {
        if (i % every === 0 || i === line.at.length - 1) {
          const range = line.low && line.low[i] !== null ? `${show(line.low[i])} to ${show(line.high[i])}` : "";
          rows.push([several ? `${one.name}: ${words}` : words, String(one.curves.x.step[at]), show(line.mean[i]), range]);
        }
      });
    }
  }
  return make("div", {}, make("p", {}, `In metrics.jsonl: ${Object.keys(curve.metrics).join(", ")}.`), table(["metric", "step", "mean", "range"], rows, true));
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
  const there = data.curves.filter((curve) => data.experiments.some((one) => Object.keys(curve.metrics).some((m) => m in one.curves.lines)));
  for (const curve of there) {
    const metrics = Object.entries(curve.metrics).filter(([name]) => data.experiments.some((one) => name in one.curves.lines));
    const plots = (several ? metrics.map((metric) => [metric]) : [metrics]).map((shown) => {
      const plot = make("div", { className: "plot", role: "img", "aria-label": curve.title });
      plot.curve = { ...curve, metrics: Object.fromEntries(shown) };
      return plot;
    });
    const drawings = plots.flatMap((plot) => [several && metrics.length > 1 ? make("h4", {}, ...Object.values(plot.curve.metrics)) : null, plot, make("p", { className: "held" })]);
    const numbers = make("details", {}, make("summary", { "aria-label": `${curve.title} in numbers` }, "In numbers"));
    numbers.addEventListener("toggle", () => numbers.open && numbers.replaceChildren(numbers.firstChild, numbersOf(curve)));
    byId("charts").append(make("article", { className: "card" }, make("h3", {}, curve.title), ...drawings,
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
  byId("bands").textContent = [there.length ? "" : "No metric is measured yet.", bands ? "Lines are means over seeds; bands reach from the lowest seed to the highest." : "", ...thin].join(" ");
}

