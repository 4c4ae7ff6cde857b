"use strict";
// Draws every chart again, interactively, from the spec beside its picture. Where that fails, the picture stays.

const NARROW = 480; // CSS pixels; below, legends stack and titles wrap
const PADDING = 32; // CSS pixels, about what padding takes from a title's width
const AXIS = 80; // and what axis and padding take from the width of an axis's title
const BESIDE = 130; // and what axis, header and padding take from the width of a panel
const TITLE_CHARACTER = 9; // CSS pixels, a generous mean at the theme's title size
const SUBTITLE_CHARACTER = 7; // of a subtitle and of an axis's title

function wrap(text, characters) {
  const lines = [""];
  for (const word of [].concat(text).join(" ").split(/\s+/)) {
    const longer = (lines[lines.length - 1] + " " + word).trim();
    if (longer.length <= characters || lines[lines.length - 1] === "") lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

function wrapTitle(title, width) {
  const parts = typeof title === "object" && !Array.isArray(title) ? { ...title } : { text: title };
  if (typeof parts.text === "string" || Array.isArray(parts.text)) parts.text = wrap(parts.text, width / TITLE_CHARACTER);
  if (parts.subtitle) parts.subtitle = wrap(parts.subtitle, width / SUBTITLE_CHARACTER);
  return { ...parts, frame: "bounds" };
}

function forNarrow(spec, width) {
  const config = { ...spec.config, legend: { ...(spec.config || {}).legend, columns: 1 } };
  const below = spec.facet && spec.facet.row && !spec.facet.column; // panels below one another have the width to themselves
  const panels = below ? { spec: { ...spec.spec, width: width - BESIDE } } : {};
  return { ...spec, ...panels, config, ...(spec.title ? { title: wrapTitle(spec.title, width - PADDING) } : {}) };
}

// Of a compiled chart: legends in one column, titles below the horizontal axis on lines that fit, in every panel.
function stacked(part, characters) {
  for (const legend of part.legends || []) legend.columns = 1;
  for (const axis of part.axes || [])
    if (axis.orient === "bottom" && typeof axis.title === "string") axis.title = wrap(axis.title, characters);
  for (const mark of part.marks || []) stacked(mark, characters);
  return part;
}

// A compiled chart with one width takes the room there is; panels side by side keep their size and scroll.
function fit(vega, width) {
  const fits = typeof vega.width === "number";
  return fits ? { ...vega, width, autosize: { type: "fit-x", contains: "padding" } } : vega;
}

async function draw(figure) {
  const drawing = figure.querySelector(".drawing");
  const picture = figure.querySelector("img");
  const natural = Number(picture.getAttribute("width"));
  const room = Math.min(natural, drawing.clientWidth);
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const narrow = room < NARROW;
  const shown = narrow ? forNarrow(spec, room) : spec;
  const lines = (vega) => (narrow ? stacked(vega, (room - AXIS) / SUBTITLE_CHARACTER) : vega);
  const patch = (vega) => fit(lines(vega), room);
  const options = { mode: "vega-lite", renderer: "svg", ast: true, actions: false, patch };
  if (figure.finalize) figure.finalize();
  ({ finalize: figure.finalize } = await window.vegaEmbed(drawing, shown, options));
  const words = { role: "img", "aria-label": picture.alt, "aria-roledescription": "chart" }; // Vega's role is known to few
  for (const [name, value] of Object.entries(words)) drawing.setAttribute(name, value);
}

function drawAll() {
  for (const figure of document.querySelectorAll("figure.chart")) {
    figure.classList.add("drawn");
    draw(figure).catch((problem) => {
      figure.classList.remove("drawn");
      console.error(problem);
    });
  }
}

let waiting = 0; // a window that changes its width is drawn for once it has been still
let drawnAt = window.innerWidth; // on a telephone scrolling changes the height alone
window.addEventListener("resize", () => {
  if (window.innerWidth === drawnAt) return;
  drawnAt = window.innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(drawAll, 150);
});
drawAll();
