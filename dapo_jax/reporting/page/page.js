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
const dashOf = (number) => ["solid", "dashed", "dotted"][Math.floor(number / COLOURS.length) % 3];
const shorten = (text, most) => (text.length > most ? `${text.slice(0, most / 2)}…${text.slice(1 - most / 2)}` : text);

function show(value, form = "number") {
  if (value === null || value === undefined) return "–";
  if (form === "share") return (100 * value).toFixed(1) + "\u00a0%";
  if (form === "points") return (100 * value).toFixed(1);
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size !== 0 && size < 0.0001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

function table(heads, rows, numeric = false) {
  const kind = (place) => (numeric && place ? "number" : "");
  const head = make("tr", {}, ...heads.map((text, i) => make("th", { scope: "col", className: kind(i) }, text)));
  const body = rows.map((row) => make("tr", {}, ...row.map((text, i) => make("td", { className: kind(i) }, text))));
  return make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": heads.join(", ") },
    make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

// --- headline numbers and warnings -------------------------------------------------------------

const written = (value) => (value === null ? "not there" : JSON.stringify(value));

function interval([mean, low, high], form) {
  return low === null || low === undefined ? "" : `${show(low, form)} to ${show(high, form)}`;
}

function drawNumbers(one) {
  const cards = one.headlines.map(({ name, form, value, over }) => make("div", {}, make("dt", {}, name),
    make("dd", {}, show(value[0], form), make("small", {}, interval(value, form) ? `${interval(value, form)}, 95 % ${over}` : "no interval"))));
  byId("headlines").append(make("dl", { className: "numbers" }, ...cards));
}

// A row for each experiment: number, interval, difference to the first experiment with its interval.
function drawComparison() {
  const names = [...new Set(data.experiments.flatMap((one) => one.headlines.map(({ name }) => name)))];
  const cellOf = (one, name) => {
    const found = one.headlines.find((line) => line.name === name);
    if (!found) return "–";
    const [difference, form] = [one.differences[name], found.form === "share" ? "points" : found.form];
    const small = [make("small", { title: `95 % ${found.over}` }, interval(found.value, found.form))];
    if (difference) {
      const [by, range] = [difference.value[0], interval(difference.value, form)];
      small.push(make("small", { className: "difference", title: range ? `95 % ${difference.over}` : "" },
        `${by > 0 ? "+" : ""}${show(by, form)}${form === "points" ? " points" : ""} `, range ? make("span", {}, `(${range})`) : null));
    }
    return make("span", {}, show(found.value[0], found.form), ...small);
  };
  const rows = data.experiments.map((one, i) => [make("span", {}, swatch(i), one.name), ...names.map((name) => cellOf(one, name))]);
  byId("headlines").append(make("h2", {}, "Comparison"), table(["run", ...names], rows, true),
    make("p", { className: "note" }, "Below a number stands its 95 % interval: over seeds, or of a single run over its problems or last steps. "
      + `Then comes the difference to ${data.experiments[0].name} with its 95 % interval: by problem where both were asked the same problems, else by Welch's t. `
      + "One run against several seeds has none."));
  const apart = make("details", { open: data.apart.length <= 20 }, make("summary", {}, `Settings that differ: ${data.apart.length}`),
    table(["setting", ...data.experiments.map((one) => one.name)], data.apart.map(([name, ...values]) => [name, ...values.map(written)])));
  byId("headlines").append(apart);
}

function drawHeadlines() {
  if (several) drawComparison();
  else drawNumbers(data.experiments[0]);
  const warnings = data.experiments.flatMap((one) => one.runs.flatMap((run) => run.warnings.map((text) => [run.name, text])));
  byId("warnings").hidden = !warnings.length;
  for (const [name, text] of warnings) {
    byId("warnings").querySelector("ul").append(make("li", {}, runs.length > 1 ? `${name}: ${text}` : text));
  }
}

function swatch(number) {
  const made = make("span", { className: "swatch", "aria-hidden": "true" });
  made.style.borderTop = `4px ${dashOf(number)} ${colourOf(number)}`;
  return made;
}

// --- where time and tokens went ----------------------------------------------------------------

function drawSpent() {
  const drawings = [];
  for (const [part, unit] of [["seconds", "seconds"], ["tokens", "tokens"]]) {
    const kinds = [...new Set(data.experiments.flatMap((one) => Object.keys(one.spent[part])))];
    if (!kinds.length) continue;
    const shareOf = (one, kind) => show(one.spent[part][kind] / Object.values(one.spent[part]).reduce((a, b) => a + b, 0), "share");
    const cell = (one, kind) => (kind in one.spent[part] ? `${show(one.spent[part][kind])} (${shareOf(one, kind)})` : "–");
    const bars = kinds.map((kind, i) => ({ type: "bar", orientation: "h", name: kind, marker: { color: colourOf(i) },
      y: data.experiments.map((_, at) => at), x: data.experiments.map((one) => one.spent[part][kind] ?? 0),
      hovertemplate: "%{x:,.0f} " + unit }));
    const look = { ...layout(""), barmode: "stack", hovermode: "closest", dragmode: false };
    look.xaxis.title = { text: unit };
    const most = window.innerWidth < 700 ? 14 : 28;
    look.yaxis = { ...look.yaxis, autorange: "reversed", showticklabels: several, showgrid: false, zeroline: false,
      tickvals: data.experiments.map((_, at) => at), ticktext: data.experiments.map((one) => plain(shorten(one.name, most))) };
    const plot = make("div", { className: "plot", role: "img", "aria-label": `${unit} by what they went into; the table below has the numbers` });
    plot.style.height = `${220 + 28 * data.experiments.length}px`;
    const shown = several ? [["run", ...kinds], data.experiments.map((one) => [one.name, ...kinds.map((kind) => cell(one, kind))])]
      : [["went into", unit], kinds.map((kind) => [kind, cell(data.experiments[0], kind)])];
    const note = part === "seconds" ? "Over all runs of an experiment. What a lag hides behind an update is counted as well."
      : "Sampled tokens over all runs: trained on, or paid for and lost.";
    byId("spent").querySelector(".grid").append(make("article", { className: "card" }, make("h3", {}, part === "seconds" ? "Time" : "Tokens"),
      plot, make("p", {}, note), table(...shown, true)));
    drawings.push([plot, bars, look]);
  }
  for (const one of drawings) Plotly.newPlot(...one, OPTIONS); // once each has the width that the other leaves it
  byId("spent").hidden = !drawings.length;
}

// --- rollouts ----------------------------------------------------------------------------------

function colourOfToken(by, value) {
  if (value === null || value === undefined) return "";
  if (by === "logprobs") return `rgba(var(--heat), ${Math.min(0.75, -value / 6)})`;
  const share = Math.log(Math.max(value, 1e-6)) / 0.5;
  return `rgba(var(--${share > 0 ? "heat" : "less"}), ${Math.min(0.75, Math.abs(share))})`;
}

function tokensOf(response, text = response.text, first = 0, last = Infinity) {
  const by = byId("colour").value;
  const box = make("pre", { tabIndex: 0, role: "region", "aria-label": "response", dir: "auto" });
  if (!response.pieces) return (box.append(text ?? ""), box);
  response.pieces.slice(first, last).forEach((piece, place) => {
    const i = first + place;
    const clip = CLIPS[response.clipped?.[i] ?? 0];
    const said = [`log-probability ${show(response.logprobs?.[i])}`,
      response.ratios ? `ratio ${show(response.ratios[i])}` : "", clip].filter(Boolean).join(", ");
    const token = make("span", { title: said, className: clip ? "clip" : "" }, piece || "◦");
    if (by && response[by]) token.style.background = colourOfToken(by, response[by][i]);
    box.append(token, clip ? make("span", { hidden: true }, ` (${clip})`) : "");
  });
  return box;
}

// A box for each turn. Only the policy's words have tokens; a reward is for the step that a turn made.
function turnsOf(response) {
  let drawn = 0;
  const rewards = response.rewards?.some(Boolean) ? [...response.rewards] : [];
  return response.turns.map(([speaker, tokens, text]) => {
    const own = speaker === "policy";
    const reward = own && rewards.length ? `, reward ${show(rewards.shift())}` : "";
    const shown = own ? tokensOf(response, text, drawn, drawn + tokens) : make("pre", { tabIndex: 0, role: "region", "aria-label": "observation", dir: "auto" }, text);
    drawn += own ? tokens : 0;
    return make("div", { className: own ? "turn" : "turn observed" },
      make("p", { className: "note" }, make("b", {}, own ? "policy" : "environment"), `, ${tokens} tokens${reward}`), shown);
  });
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
      + (response.failure ? `; the verdict failed: ${response.failure}` : "")),
    ...(response.turns?.length ? turnsOf(response) : [tokensOf(response)]));
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
