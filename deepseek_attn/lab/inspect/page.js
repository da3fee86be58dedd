"use strict";
const found = JSON.parse(document.getElementById("data").textContent);
const get = (id) => document.getElementById(id);
const recent = Number(get("maps").dataset.recent);
const MEAN = -1; // number of the mean of the heads
const reads = new Map(found.queries.map((query) => [query.position, query]));
const { query: firstQuery, layer: firstLayer } = get("maps").dataset; // the place that the page opens on
const chosen = { query: Number(firstQuery), layer: Number(firstLayer), head: MEAN };

// Regions of attention: their names, values of a record's shares, and colours.
const regions = found.window
  ? [["sink", (s) => s.sink, "--sink"], ["window", (s) => s.window, "--token"], ["entries", (s) => s.entries, "--entry"]]
  : [
      [`last ${recent} tokens`, (s) => s.recent, "--token"],
      ["earlier tokens", (s) => s.entries - s.recent, "--entry"],
    ];

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const percent = (value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;
const shown = (value) => (value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential(1) : value.toPrecision(3));
const textOf = (position) => (found.text ? found.text[position] : `${found.token_ids[position]} `);
const spanOf = (first, end) => Array.from({ length: end - first }, (_, i) => textOf(first + i)).join("").replaceAll("\n", "↵");
const headName = () => (chosen.head === MEAN ? "mean of heads" : `head ${chosen.head}`);
const layerRead = () => found.queries[chosen.query].layers[chosen.layer];
const headRead = () => (chosen.head === MEAN ? layerRead().mean : layerRead().heads[chosen.head]);
const clamp = (value, last) => Math.max(0, Math.min(last, value));

// The tokens of an entry: its own, and with overlap those before them that it was made of as well.
function entrySpan(number) {
  const { ratio, overlap } = found.layers[chosen.layer];
  const first = number * ratio;
  return { first, end: first + ratio, from: overlap ? Math.max(0, first - ratio) : first };
}
const oneToken = () => !found.window; // entries of V3.2 are tokens

// the text

const tokens = found.token_ids.map((id, position) => {
  const piece = textOf(position);
  const element = make("span", piece === "" ? "·" : piece.replaceAll("\n", "↵\n"), "t");
  element.dataset.position = position;
  element.id = `t${position}`;
  element.title = `token ${position}, id ${id}`;
  element.setAttribute("role", "option");
  element.setAttribute("aria-selected", "false");
  if (reads.has(position)) element.classList.add("can");
  else element.setAttribute("aria-disabled", "true");
  return element;
});
get("text").append(...tokens);
get("text").classList.toggle("some", reads.size < tokens.length);
let marked = [];

function mark() {
  for (const element of marked) {
    element.classList.remove("on", "chosen");
    element.removeAttribute("style");
    element.setAttribute("aria-selected", "false");
  }
  const at = found.queries[chosen.query].position;
  const read = headRead();
  const largest = Math.max(...read.token_weights, ...read.entry_weights, 1e-30);
  const paint = (position, name, weight) => {
    const element = tokens[position];
    const before = Number(element.style.getPropertyValue(name) || 0);
    element.style.setProperty(name, Math.max(before, 0.12 + (0.88 * weight) / largest));
    element.classList.add("on");
    marked.push(element);
  };
  marked = [tokens[at]];
  read.tokens.forEach((position, i) => paint(position, "--t", read.token_weights[i]));
  read.entries.forEach((number, i) => {
    if (oneToken()) return paint(number, "--t", read.entry_weights[i]);
    const { end, from } = entrySpan(number);
    for (let position = from; position < end; position++) paint(position, "--e", read.entry_weights[i]);
  });
  tokens[at].classList.add("chosen");
  tokens[at].setAttribute("aria-selected", "true");
  get("text").setAttribute("aria-activedescendant", tokens[at].id);
}

// Points at the tokens of a row of a table, until the next call.
let pointed = [];
function point(span, scroll) {
  pointed.forEach((element) => element.classList.remove("point"));
  pointed = span ? tokens.slice(span.from, span.end) : [];
  pointed.forEach((element) => element.classList.add("point"));
  if (scroll && pointed.length) scrollTo(pointed[0]);
}

// Scrolls the text's own box, not the page.
function scrollTo(element) {
  const box = get("text");
  const top = element.getBoundingClientRect().top - box.getBoundingClientRect().top + box.scrollTop;
  if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 40) box.scrollTop = top - box.clientHeight / 2;
}

// the reads of the chosen token

function rowOf(span, label, text) {
  const row = make("tr");
  row.tabIndex = 0;
  row.append(make("td", label, "name"), make("td", text, "name text-of"));
  row.addEventListener("mouseenter", () => point(span, false));
  row.addEventListener("mouseleave", () => point(null));
  row.addEventListener("focus", () => point(span, true));
  row.addEventListener("click", () => point(span, true));
  return row;
}

function weightCell(value, largest, hue) {
  const cell = make("td", shown(value), "weight");
  cell.style.setProperty("--w", value / largest);
  cell.style.setProperty("--hue", `var(${hue})`);
  return cell;
}

function entryRow(number) {
  if (oneToken()) return rowOf({ from: number, end: number + 1 }, `token ${number}`, spanOf(number, number + 1));
  const span = entrySpan(number);
  return rowOf(span, `entry ${number}: ${span.from}–${span.end - 1}`, spanOf(span.from, span.end));
}

function listReads() {
  const read = headRead();
  const rows = [
    ...read.tokens.map((position, i) => ({ position, weight: read.token_weights[i] })),
    ...read.entries.map((entry, i) => ({ entry, weight: read.entry_weights[i] })),
  ].sort((a, b) => b.weight - a.weight);
  const largest = rows.length ? rows[0].weight : 1;
  get("reads").replaceChildren(
    ...rows.map(({ position, entry, weight }) => {
      const isToken = position !== undefined;
      const row = isToken
        ? rowOf({ from: position, end: position + 1 }, `token ${position}`, spanOf(position, position + 1))
        : entryRow(entry);
      row.append(weightCell(weight, largest, isToken || oneToken() ? "--token" : "--entry"));
      return row;
    }),
  );
  const sum = rows.reduce((total, row) => total + row.weight, 0);
  const parts = regions.map(([name, value]) => `${name} ${percent(value(read.shares))}`).join(", ");
  get("listed").textContent = `${parts}. The largest weights, ${percent(sum)} of the attention:`;
  get("shares").replaceChildren(
    ...regions.map(([name, value, hue]) => {
      const share = value(read.shares);
      const part = make("span", share > 0.12 ? name : "");
      part.style.flex = `${Math.max(share, 0)} 1 0`;
      part.style.setProperty("--hue", `var(${hue})`);
      return part;
    }),
  );
}

function listScores() {
  const { index } = layerRead();
  get("index").hidden = !index;
  if (!index) return;
  const { index_topk: topk } = found.layers[chosen.layer];
  const what = oneToken() ? "tokens" : "entries";
  get("indexed").textContent =
    `${topk} of ${index.visible} ${what} were selected, for all heads: the scores down to ${shown(index.lowest_selected)}. ` +
    `Of the ${topk} that dense attention weighs most, ${percent(index.recall)} were selected (recall). ` +
    `The selected ones hold ${percent(index.kept)} of dense attention to ${what}. The best by either:`;
  const largest = Math.max(...index.dense_weights, 1e-30);
  get("scored").replaceChildren(
    ...index.entries.map((number, i) => {
      const row = entryRow(number);
      row.append(
        make("td", shown(index.scores[i])),
        weightCell(index.dense_weights[i], largest, "--entry"),
        make("td", index.selected[i] ? "yes" : "no"),
      );
      return row;
    }),
  );
}

// heat maps: a row per layer; the mean of the heads, then each head

const numHeads = found.layers[0].heads.length;
const maps = regions.map(([name, value, hue]) => {
  const figure = make("figure");
  const table = make("table", undefined, "map");
  table.setAttribute("role", "grid");
  table.setAttribute("aria-label", `attention on ${name}, by layer and head`);
  table.tabIndex = 0;
  table.style.setProperty("--hue", `var(${hue})`);
  const cells = found.layers.map((layer, l) => {
    const row = table.insertRow();
    row.append(make("th", `${layer.layer} ${layer.kind}`));
    return Array.from({ length: numHeads + 1 }, (_, i) => {
      const cell = row.insertCell();
      cell.id = `${name.replaceAll(" ", "-")}-${l}-${i}`;
      cell.dataset.layer = l;
      cell.dataset.head = i - 1;
      cell.setAttribute("role", "gridcell");
      if (name === "entries" && !layer.ratio) cell.className = "none";
      return cell;
    });
  });
  const labels = make("tr");
  labels.append(make("th"), make("th", "mean"), ...Array.from({ length: numHeads }, (_, head) => make("th", numHeads > 16 && head % 8 ? "" : head)));
  table.append(labels);
  const caption = make("figcaption");
  const scale = make("div", undefined, "scale");
  scale.style.setProperty("--hue", `var(${hue})`);
  scale.append(make("span", "0 %"), make("i"), make("span", "100 % of the attention"));
  figure.append(caption, table, scale);
  get("maps").append(figure);
  table.addEventListener("click", (event) => {
    const cell = event.target.closest("td");
    if (cell) choose({ layer: Number(cell.dataset.layer), head: Number(cell.dataset.head) });
  });
  table.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    choose({ layer: chosen.layer + step[0], head: chosen.head + step[1] });
  });
  return { name, value, table, cells, caption };
});

function colour() {
  const one = document.querySelector("[name=over]:checked").value === "one";
  for (const { name, value, table, cells, caption } of maps) {
    caption.textContent = `${name}: ${one ? "the chosen token" : "mean of all tokens"}`;
    cells.forEach((row, l) => {
      const heads = (one ? found.queries[chosen.query].layers[l].heads.map((head) => head.shares) : found.layers[l].heads).map(value);
      [mean(heads), ...heads].forEach((share, i) => {
        const isChosen = l === chosen.layer && i - 1 === chosen.head;
        row[i].style.setProperty("--w", clamp(share, 1));
        row[i].title = `layer ${found.layers[l].layer}, ${i ? `head ${i - 1}` : "mean of heads"}: ${percent(share)}`;
        row[i].setAttribute("aria-label", row[i].title);
        row[i].classList.toggle("chosen", isChosen);
        if (isChosen) table.setAttribute("aria-activedescendant", row[i].id);
      });
    });
  }
}

// choices

function choose(change, scroll = true) {
  Object.assign(chosen, change);
  chosen.query = clamp(chosen.query, found.queries.length - 1);
  chosen.layer = clamp(chosen.layer, found.layers.length - 1);
  chosen.head = clamp(chosen.head + 1, numHeads) - 1;
  const { position } = found.queries[chosen.query];
  const layer = found.layers[chosen.layer];
  get("layer").value = chosen.layer;
  get("head").value = chosen.head;
  get("chosen").textContent = `Token ${position} “${spanOf(position, position + 1).trim()}”, layer ${layer.layer} ${layer.kind}, ${headName()}`;
  point(null);
  mark();
  listReads();
  listScores();
  colour();
  if (scroll) scrollTo(tokens[position]);
  history.replaceState(null, "", `#t=${position}&l=${layer.layer}&h=${chosen.head}`);
}

const queryAt = (position) => found.queries.findIndex((query) => query.position === position);
get("text").addEventListener("click", (event) => {
  const query = queryAt(Number(event.target.dataset.position));
  if (query >= 0) choose({ query }, false);
});
get("text").addEventListener("keydown", (event) => {
  const change = {
    ArrowLeft: { query: chosen.query - 1 },
    ArrowRight: { query: chosen.query + 1 },
    ArrowUp: { layer: chosen.layer - 1 },
    ArrowDown: { layer: chosen.layer + 1 },
    Home: { query: 0 },
    End: { query: found.queries.length - 1 },
  }[event.key];
  if (!change) return;
  event.preventDefault();
  choose(change);
});
get("previous").addEventListener("click", () => choose({ query: chosen.query - 1 }));
get("next").addEventListener("click", () => choose({ query: chosen.query + 1 }));
get("layer").append(...found.layers.map((layer, l) => new Option(`${layer.layer} ${layer.kind}`, l)));
get("head").append(new Option("mean", MEAN), ...Array.from({ length: numHeads }, (_, head) => new Option(head, head)));
get("layer").addEventListener("change", () => choose({ layer: Number(get("layer").value) }));
get("head").addEventListener("change", () => choose({ head: Number(get("head").value) }));
document.querySelectorAll("[name=over]").forEach((radio) => radio.addEventListener("change", colour));

const layerAt = (number) => found.layers.findIndex((layer) => layer.layer === number);
const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
choose({
  query: queryAt(Number(given.t)) >= 0 ? queryAt(Number(given.t)) : chosen.query,
  layer: layerAt(Number(given.l)) >= 0 ? layerAt(Number(given.l)) : chosen.layer,
  head: Number.isInteger(Number(given.h)) && "h" in given ? Number(given.h) : MEAN,
});
