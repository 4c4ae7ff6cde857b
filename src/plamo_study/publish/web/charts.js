"use strict";
// Draws every chart again, interactively, from the spec beside its picture. Where that fails, the picture stays.
// Fonts differ between machines, so texts are measured here: a chart is drawn, looked at, and drawn again until all fits.

const NARROW = 480; // CSS pixels; below, panels stand below one another and legends in one column
const MARGIN = 24; // CSS pixels, the theme's padding on both sides
const BESIDE = 130; // and about what axis, header and padding take from the width of a panel
const SYMBOL = 34; // a legend's symbol and the gaps around it
const LABELS = 0.45; // of the room, the most that labels left of a plot take before they wrap
const LINE = 14; // and the height of one of their lines
const FEWEST = 10; // letters on a line of a legend
const MOST = 0.5; // of the room, the most that a plot gives up to texts beside it
const TRIES = 7;
const SMALLEST = 0.85; // of its size, the least to which a chart is scaled; one that needs more room scrolls

const pen = document.createElement("canvas").getContext("2d");

function widthOf(text, style) {
  pen.font = style;
  return pen.measureText(text).width;
}

function wrap(text, room, style) {
  const lines = [""];
  for (const word of text.split(/\s+/)) {
    const longer = (lines[lines.length - 1] + " " + word).trim();
    if (lines[lines.length - 1] === "" || widthOf(longer, style) <= room) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

// A title keeps its own lines where they fit; in a narrow window they are filled anew.
function wrapTitle(title, room, narrow, font) {
  const parts = typeof title === "object" && !Array.isArray(title) ? { ...title } : { text: title };
  const filled = (text, style) =>
    (narrow ? [[].concat(text).join(" ")] : [].concat(text)).flatMap((line) => wrap(String(line), room, style));
  const isText = (text) => typeof text === "string" || Array.isArray(text);
  if (isText(parts.text)) parts.text = filled(parts.text, `600 ${parts.fontSize || 16}px ${font}`);
  if (isText(parts.subtitle)) parts.subtitle = filled(parts.subtitle, `${parts.subtitleFontSize || 13}px ${font}`);
  return { ...parts, frame: "bounds" };
}

// Of a spec: titles on lines that fit and, in a narrow window, panels below one another, as wide as there is room.
function arranged(spec, room, narrow, font, panel) {
  const { hconcat, ...rest } = spec;
  const made = narrow && hconcat ? { ...rest, vconcat: hconcat } : { ...spec };
  if (made.title) made.title = wrapTitle(made.title, room - MARGIN, narrow, font);
  if (made.vconcat) made.vconcat = made.vconcat.map((each) => arranged(each, room, narrow, font, panel));
  if (!narrow) return made;
  if (made.concat || (made.facet && made.facet.field)) made.columns = 1;
  if (made.facet && made.facet.column && !made.facet.row) {
    const { column, ...others } = made.facet;
    made.facet = { ...others, row: column };
  }
  if (made.facet && made.facet.row) {
    const header = { ...made.facet.row.header, labelAngle: 0, labelOrient: "top", labelAnchor: "start" };
    made.facet = { ...made.facet, row: { ...made.facet.row, header } };
  }
  if (made.facet && !made.facet.column) made.spec = { ...made.spec, width: panel };
  return made;
}

// An axis or a legend with its labels on lines of at most so many letters, unless it has an expression of its own.
function broken(guide, letters, more) {
  const labels = (guide.encode || {}).labels || {};
  const update = { text: { signal: brokenInVega(letters) }, ...more, ...labels.update };
  guide.encode = { ...guide.encode, labels: { ...labels, update } };
}

// Of a compiled chart, in every panel: columns of legends, titles and labels of axes on lines that fit.
function fitted(part, how) {
  for (const scale of part.scales || []) {
    if (how.narrow && scale.type === "log") delete scale.padding; // a plot no wider than it ends at infinity
  }
  for (const legend of part.legends || []) {
    if (how.columns) legend.columns = how.columns;
    if (how.entries) broken(legend, how.entries, {});
  }
  for (const axis of part.axes || []) {
    const below = axis.orient === "bottom";
    if (below && how.narrow && typeof axis.title === "string") {
      axis.title = wrap(axis.title, how.room - MARGIN, `12px ${how.font}`);
      axis.titleAnchor = "end"; // where the labels on the left leave room
    }
    if (below && how.narrow && axis.labelOverlap === undefined) axis.labelOverlap = true;
    if (axis.orient === "left" && how.letters) broken(axis, how.letters, { baseline: { value: "middle" } });
  }
  for (const signal of part.signals || [])
    if (how.letters && /y_step$/.test(signal.name)) signal.value = Math.max(signal.value, LINE * (how.lines + 0.5));
  for (const mark of part.marks || []) fitted(mark, how);
  return part;
}

// Legends below one another, from the left edge of the labels.
function stacked(vega) {
  const top = { anchor: "start", bounds: "full", direction: "vertical", margin: 2 };
  const legend = { ...(vega.config || {}).legend, layout: { top } };
  return { ...vega, config: { ...vega.config, legend } };
}

// A compiled chart with one width takes the room there is; panels side by side keep their size.
function fit(vega, width) {
  const fits = typeof vega.width === "number";
  return fits ? { ...vega, width, autosize: { type: "fit-x", contains: "padding" } } : vega;
}

// The box of all that a drawing shows, in its own units.
function bounds(svg) {
  const at = svg.getBoundingClientRect();
  const box = { left: 0, top: 0, right: at.width, bottom: at.height };
  for (const text of svg.querySelectorAll("text")) {
    if (!text.textContent.trim() || getComputedStyle(text).opacity === "0") continue; // hidden for want of room
    const each = text.getBoundingClientRect();
    box.left = Math.min(box.left, each.left - at.left);
    box.top = Math.min(box.top, each.top - at.top);
    box.right = Math.max(box.right, each.right - at.left);
    box.bottom = Math.max(box.bottom, each.bottom - at.top);
  }
  return box;
}

// The texts of a kind, by the class that Vega gives it.
function texts(svg, kind) {
  return [...svg.querySelectorAll(`.${kind} text`)];
}

function widest(svg, kind) {
  return Math.max(0, ...texts(svg, kind).map((text) => text.getBoundingClientRect().width));
}

// Whether texts of a kind reach as far as anything does.
function beyond(svg, kind, box) {
  const at = svg.getBoundingClientRect().left;
  return texts(svg, kind).some((text) => text.getBoundingClientRect().right - at >= box.right - 1);
}

// An expression of Vega's: a label on lines of at most so many letters.
function brokenInVega(letters) {
  return `split(trim(replace(datum.label, regexp('(.{1,${letters}})(\\\\s+|$)', 'g'), '$1\\n')), '\\n')`;
}

// Changes how a drawing is made where it needs more room than it has; false where nothing is left to change.
function adjusted(how, svg, box, available) {
  const over = Math.max(-box.left + box.right - how.room, box.right - box.left - svg.getBoundingClientRect().width);
  if (how.narrow && !how.letters && widest(svg, "role-axis-label") > LABELS * how.room) {
    how.letters = Math.floor((LABELS * how.room) / widthOf("n", `12px ${how.font}`));
    return true;
  }
  const tallest = Math.max(0, ...texts(svg, "role-axis-label").map((text) => text.getBoundingClientRect().height));
  if (how.letters && Math.round(tallest / LINE) > how.lines) {
    how.lines = Math.round(tallest / LINE);
    return true;
  }
  if (over <= 1) return false;
  const columns = Math.max(Math.floor((how.room - MARGIN) / (widest(svg, "role-legend-label") + SYMBOL)), 1);
  const legend = beyond(svg, "role-legend-label", box);
  const letters = Math.floor((widest(svg, "role-legend-label") - over) / widthOf("n", `12px ${how.font}`));
  if (legend && (!how.columns || how.columns > columns)) how.columns = columns;
  else if (legend && how.columns === 1 && !how.entries && letters > FEWEST) how.entries = letters;
  else if (how.room < available) how.room = Math.min(available, how.room + over);
  else if (how.taken + over < MOST * how.room) how.taken += over;
  else return false;
  return true;
}

// A drawing grows by what its texts need, so that none is cut.
function grown(svg, box, room) {
  const [width, height] = [box.right - box.left, box.bottom - box.top];
  const scale = Math.max(Math.min(room / width, 1), SMALLEST);
  svg.setAttribute("viewBox", `${box.left} ${box.top} ${width} ${height}`);
  svg.setAttribute("width", width * scale);
  svg.setAttribute("height", height * scale);
}

async function draw(figure) {
  const drawing = figure.querySelector(".drawing");
  const picture = figure.querySelector("img");
  const spec = JSON.parse(figure.querySelector("script").textContent);
  figure.style.setProperty("--width", "100vw");
  const available = drawing.clientWidth;
  const room = Math.min(Number(picture.getAttribute("width")), available);
  const narrow = room < NARROW && room === available;
  const font = (spec.config || {}).font || "sans-serif";
  const how = { room, narrow, font, columns: narrow ? 1 : 0, letters: 0, lines: 0, entries: 0, taken: 0 };
  for (let left = TRIES; left > 0; left--) {
    const shown = arranged(spec, how.room, narrow, font, how.room - BESIDE - how.taken);
    const patch = (vega) => fit(fitted(narrow ? stacked(vega) : vega, how), how.room - how.taken);
    const options = { mode: "vega-lite", renderer: "svg", ast: true, actions: false, patch };
    if (figure.finalize) figure.finalize();
    ({ finalize: figure.finalize } = await window.vegaEmbed(drawing, shown, options));
    figure.style.setProperty("--width", `${how.room}px`);
    const svg = drawing.querySelector("svg");
    const box = bounds(svg);
    if (left > 1 && adjusted(how, svg, box, available)) continue;
    grown(svg, box, how.room);
    break;
  }
  const words = { role: "img", "aria-label": picture.alt, "aria-roledescription": "chart" }; // Vega's role is known to few
  for (const [name, value] of Object.entries(words)) drawing.setAttribute(name, value);
}

// What lies in a folded section has no size; it is drawn when it is opened.
const isFolded = (figure) => figure.closest("details:not([open])");

function drawAll(figures) {
  for (const figure of figures) {
    figure.classList.toggle("drawn", !isFolded(figure));
    if (isFolded(figure)) continue;
    draw(figure).catch((problem) => {
      figure.classList.remove("drawn");
      console.error(problem);
    });
  }
}

let waiting = 0; // a window that changes its width is drawn for once it has been still
let drawnAt = window.innerWidth; // on a telephone scrolling changes the height alone

function begin() {
  window.addEventListener("resize", () => {
    if (window.innerWidth === drawnAt) return;
    drawnAt = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => drawAll(document.querySelectorAll("figure.chart")), 150);
  });
  document.addEventListener("toggle", (event) => drawAll(event.target.querySelectorAll("figure.chart:not(.drawn)")), true);
  drawAll(document.querySelectorAll("figure.chart"));
}

// Vega stands on the page, or in a file that all pages of a site share. Of a disk's files no browser checks a hash.
const { library, integrity } = document.currentScript.dataset;
if (library) {
  const script = document.createElement("script");
  if (location.protocol !== "file:") script.integrity = integrity;
  script.addEventListener("load", begin);
  script.src = library;
  document.head.append(script);
} else begin();
