"use strict";
// Draws the report from the JSON in the page. Texts become text nodes, never markup.
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
let rollouts = []; // parsed after the first chart
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f"];
const DASHES = [["solid", "solid"], ["dashed", "dash"], ["dotted", "dot"]]; // names in CSS and in plotly
const CLIPS = ["", "cut by the lower clip", "cut by the upper clip", "cut by the dual clip"];
const OPTIONS = { displayModeBar: false, responsive: true };
const canDraw = typeof Plotly !== "undefined"; // its file may be missing
const isGraded = !data.reward_leads; // right and wrong mean something
const several = data.experiments.length > 1; // each plot then compares one metric

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // plotly reads tags in labels
const colourOf = (number) => COLOURS[number % COLOURS.length];
const dashOf = (number) => DASHES[Math.floor(number / COLOURS.length) % 3];
const shorten = (text, most) => (text.length > most ? `${text.slice(0, most / 2)}…${text.slice(1 - most / 2)}` : text);
const box = (label, ...children) => make("pre", { tabIndex: 0, role: "region", "aria-label": label, dir: "auto" }, ...children);

function show(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size !== 0 && size < 0.0001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

function layout(title) {
  const style = getComputedStyle(document.documentElement);
  const [ink, line, card] = ["--ink", "--line", "--card"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, zerolinecolor: line, automargin: true };
  return {
    margin: { l: 48, r: 10, t: 8, b: 36 }, paper_bgcolor: card, plot_bgcolor: card,
    font: { color: ink, size: 12, family: "system-ui, sans-serif" },
    xaxis: { ...axis }, yaxis: { ...axis, title: { text: title }, exponentformat: "e", minexponent: 5, hoverformat: ".4~g" },
    legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, font: { size: 11 }, traceorder: "normal" },
    hovermode: data.experiments.length > 8 ? "closest" : "x unified",
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink }, namelength: 40 },
    dragmode: window.innerWidth < 700 ? false : "zoom",
  };
}

function smoothed(values, width) {
  return values.map((value, i) => {
    if (value === null) return null;
    const part = values.slice(Math.max(0, i - width + 1), i + 1).filter((v) => v !== null);
    return part.reduce((a, b) => a + b) / part.length;
  });
}

// A closed line around each stretch without a gap.
function bandOf(x, low, high) {
  const band = { x: [], y: [] };
  for (let end = 0; end < x.length; end += 1) {
    const start = end;
    while (end < x.length && low[end] !== null) end += 1;
    if (end === start) continue;
    band.x.push(...x.slice(start, end), ...x.slice(start, end).reverse(), null);
    band.y.push(...high.slice(start, end), ...low.slice(start, end).reverse(), null);
  }
  return band;
}

// Lines of the shown experiments: i numbers the experiment, place the metric. A line joins rare evaluations; elsewhere are gaps.
const linesOf = (curve) => [...data.experiments.entries()].filter(([i]) => byId(`experiment-${i}`)?.checked ?? true)
  .flatMap(([i, { name, curves }]) => Object.entries(curve.metrics).map(([metric, words], place) => ({ i, name, place, words, metric, line: curves.lines[metric], x: curves.x })))
  .filter(({ line }) => line);

function traces(curve) {
  const width = Number(byId("smooth").value);
  return linesOf(curve).flatMap(({ i, name, place, words, metric, line, x: axes }) => {
    const measured = [...line.mean.keys()].filter((at) => line.mean[at] !== null || !metric.startsWith("heldout_"));
    const at = (values) => measured.map((place) => values[place]);
    const x = at(axes[byId("axis").value]);
    const y = smoothed(at(line.mean), width);
    const colour = colourOf(several ? i : place);
    const label = several ? name : words;
    const known = line.mean.filter((value) => value !== null);
    const isDot = (i) => y[i] !== null && (known.length < 40 || ((y[i - 1] ?? null) === null && (y[i + 1] ?? null) === null));
    const sizes = y.map((_, i) => (isDot(i) ? 5 : 0));
    const band = line.low ? [{ ...bandOf(x, smoothed(at(line.low), width), smoothed(at(line.high), width)), mode: "lines", line: { width: 0 },
      fill: "toself", fillcolor: colour + "30", hoverinfo: "skip", showlegend: false }] : [];
    return [...band, { x, y, name: plain(shorten(label, 40)), mode: sizes.some(Boolean) ? "lines+markers" : "lines",
      line: { color: colour, width: 2, dash: dashOf(several ? i : 0)[1] }, marker: { size: sizes, opacity: 1, line: { width: 0 } },
      summary: `${label} from ${show(known[0])} to ${show(known.at(-1))}` }];
  });
}

// The axis has at least the height `span`, so that rounding errors look flat.
function flatRange(curve, lines) {
  const values = lines.flatMap(({ y }) => y).filter((value) => value !== null);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const span = Math.max(curve.span, 0.01 * Math.max(Math.abs(low), Math.abs(high)));
  if (!values.length || high - low >= span) return [undefined, ""];
  const from = Math.max(low >= 0 ? 0 : -Infinity, (low + high - span) / 2);
  const note = high > low && high - low < span / 10
    ? `All values lie within ${show(high - low)} of each other. The axis spans ${show(span)}, so that rounding looks flat.` : "";
  return [[from - 0.05 * span, from + 1.05 * span], note];
}

function drawCurve(plot) {
  const { curve } = plot;
  const lines = traces(curve);
  const look = layout(curve.unit);
  const [range, note] = flatRange(curve, lines);
  look.xaxis.title = { text: byId("axis").selectedOptions[0].text };
  if (range) look.yaxis.range = range;
  plot.nextSibling.textContent = note;
  look.showlegend = !several && Object.keys(curve.metrics).length > 1; // the check boxes are the legend of experiments
  plot.setAttribute("aria-label", `${curve.title}, ${curve.unit}: ` + lines.map(({ summary }) => summary).filter(Boolean).join("; "));
  return Plotly.react(plot, lines, look, OPTIONS);
}

function drawCurves() {
  const plots = [...document.querySelectorAll("#charts .plot")];
  const redraw = () => plots.filter((plot) => plot.data).forEach(drawCurve);
  const near = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => {
    near.unobserve(target);
    drawCurve(target).then(() => { document.documentElement.dataset.firstPicture ??= Math.round(performance.now()); });
  }), { rootMargin: "400px" });
  for (const plot of plots) {
    const curve = data.curves[Number(plot.dataset.curve)];
    plot.curve = { ...curve, metrics: Object.fromEntries(plot.dataset.metrics.split(" ").map((name) => [name, curve.metrics[name]])) };
    near.observe(plot);
  }
  for (const id of ["axis", "smooth", "shown"]) byId(id)?.addEventListener("change", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

function colourOfToken(by, value) {
  if (value === null || value === undefined) return "";
  if (by === "token_logprobs") return `rgba(var(--heat), ${Math.min(0.75, -value / 6)})`;
  const share = Math.log(Math.max(value, 1e-6)) / 0.5;
  return `rgba(var(--${share > 0 ? "heat" : "less"}), ${Math.min(0.75, Math.abs(share))})`;
}

function tokensOf(response, text = response.response, first = 0, last = Infinity) {
  const by = byId("colour").value;
  if (!response.token_texts) return box("response", text ?? "");
  return box("response", ...response.token_texts.slice(first, last).flatMap((piece, place) => {
    const i = first + place;
    const clip = CLIPS[response.token_clipped?.[i] ?? 0];
    const facts = [`log-probability ${show(response.token_logprobs?.[i])}`, response.token_ratios ? `ratio ${show(response.token_ratios[i])}` : "", clip];
    const token = make("span", { title: facts.filter(Boolean).join(", "), className: clip ? "clip" : "" }, piece || "◦");
    if (by && response[by]) token.style.background = colourOfToken(by, response[by][i]);
    return [token, clip ? make("span", { hidden: true }, ` (${clip})`) : ""];
  }));
}

// A box per turn. Only the policy's turns have tokens and rewards.
function turnsOf(response) {
  let sampled = 0;
  const rewards = response.environment_rewards?.some(Boolean) ? [...response.environment_rewards] : [];
  return response.turns.map(([speaker, tokens, text]) => {
    const isPolicy = speaker === "policy";
    const reward = isPolicy && rewards.length ? `, reward ${show(rewards.shift())}` : "";
    const shown = isPolicy ? tokensOf(response, text, sampled, sampled + tokens) : box("observation", text);
    sampled += isPolicy ? tokens : 0;
    return make("div", { className: isPolicy ? "turn" : "turn observed" },
      make("p", { className: "note" }, make("b", {}, isPolicy ? "policy" : "environment"), `, ${tokens} tokens${reward}`), shown);
  });
}

function drawResponse(response, number) {
  const advantage = response.advantage === null ? "not trained on" : `advantage ${show(response.advantage)}`;
  const facts = [`reward ${show(response.reward)}`, response.advantage === undefined ? "" : advantage,
    `${response.tokens} tokens`, response.truncated ? "cut off by the budget" : "", response.surplus ? "surplus" : ""];
  const parts = Object.entries(response.reward_parts ?? {}).map(([name, value]) => `${name} ${show(value)}`).join(", ");
  const failure = response.failure ? `; the verdict failed: ${response.failure}` : "";
  const verdict = make("span", { className: response.correct ? "right" : "wrong" }, response.correct ? "✓ right" : "✗ wrong");
  const details = make("details", { open: number === 0 }, make("summary", {}, `${number + 1}. `, ...(isGraded ? [verdict, " · "] : []), `${facts.filter(Boolean).join(" · ")}`));
  details.addEventListener("toggle", () => details.open && details.replaceChildren(details.firstChild,
    make("p", { className: "note", dir: "auto" }, `extracted ${JSON.stringify(response.extracted ?? null)}; reward parts: ${parts || "none"}${failure}`),
    ...(response.turns?.length ? turnsOf(response) : [tokensOf(response)])));
  return details;
}

function legendOf(group) {
  const by = byId("colour").value;
  const meaning = { token_logprobs: "The darker a token, the less likely it was to the sampler; full at 1 in 90.",
    token_ratios: "Orange: more likely to the policy of the last update than to the old one; blue: less. The gradient of underlined tokens was cut by the clip." };
  const [name, setting] = by === "token_ratios" ? ["ratios", "token_ratios"] : ["tokens", "token_groups"];
  if (!by) return "";
  return group.responses.some((response) => response[by]) ? `${meaning[by]} ◦ is a token without text, such as the end.`
    : `No ${name} are stored for this group: see config.log.${setting}.`;
}

function drawGroup() {
  const place = Number(byId("group").value);
  const group = rollouts[place];
  byId("previous").disabled = place === 0;
  byId("next").disabled = place === rollouts.length - 1;
  byId("responses").replaceChildren(make("h3", {}, `Prompt ${group.prompt_id}, step ${group.step}${isGraded ? `, ${group.outcome}` : ""}`), box("prompt", group.prompt),
    make("p", { dir: "auto" }, `Answer: ${group.answer}`), ...group.responses.map(drawResponse));
  byId("legend").textContent = legendOf(group);
}

function drawRollouts() {
  rollouts = JSON.parse(byId("rollouts-data").textContent);
  if (!rollouts.length) return;
  const runs = data.experiments.flatMap((experiment) => experiment.runs);
  byId("group").append(...rollouts.map((group, i) => {
    const correct = group.responses.filter((response) => response.correct).length;
    const reward = group.responses.reduce((sum, response) => sum + response.reward, 0) / group.responses.length;
    const score = isGraded ? `${correct} of ${group.responses.length} right` : `mean reward ${show(reward)}`;
    const name = runs.length > 1 ? `${runs[group.run]}, ` : "";
    return make("option", { value: i }, `${name}step ${group.step}: ${score}`);
  }));
  for (const [id, by] of [["previous", -1], ["next", 1]]) {
    byId(id).addEventListener("click", () => { byId("group").selectedIndex += by; drawGroup(); });
  }
  for (const id of ["group", "colour"]) byId(id).addEventListener("change", drawGroup);
  byId("open").addEventListener("click", () => byId("responses").querySelectorAll("details").forEach((details) => { details.open = true; }));
  byId("group").value = Math.max(0, rollouts.findLastIndex((group) => group.responses[0].token_texts));
  drawGroup();
}

document.querySelectorAll(".swatch").forEach(({ style, dataset }) => {
  style.borderTop = `4px ${dashOf(dataset.number)[0]} ${colourOf(dataset.number)}`;
});
if (canDraw) drawCurves();
else byId("bands").textContent = "The charts need the package plotly: pip install 'dapo_jax[report]', then dapo-jax report.";
setTimeout(() => {
  drawRollouts();
  byId("js-plotly-tester")?.setAttribute("aria-hidden", "true"); // plotly measures texts in it
});
