"use strict";
// Colours and drawing. Figures carry `var(--name)`; they are resolved when drawn, so that the same figure serves the
// light, the dark and the printed page. Every chart that was drawn is remembered and drawn again when that changes.

const Theme = (() => {
  const NARROW = window.matchMedia("(max-width: 640px)");
  const LEAST_NARROW_HEIGHT = 230; // CSS pixels
  const PAPER_WIDTH = 1000; // CSS pixels across A4 landscape inside its margins,
  const PAPER_HEIGHT = 330; // and down it: the breakdown's many bars,
  const PAPER_HALF = 180; // and what others get.
  const drawn = new Map();
  const listeners = [];
  let printing = false;

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function resolve(value) {
    if (Array.isArray(value)) return value.map(resolve);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, resolve(inner)]));
    }
    const match = typeof value === "string" && /^var\((--[a-z-]+)\)$/.exec(value);
    return match ? colour(match[1]) : value;
  }

  function merged(base, over) {
    const result = { ...base };
    for (const [key, value] of Object.entries(over)) {
      const both = value && typeof value === "object" && !Array.isArray(value) && base[key];
      result[key] = both ? merged(base[key], value) : value;
    }
    return result;
  }

  function house() {
    const axis = { gridcolor: "var(--grid)", linecolor: "var(--line)", tickcolor: "var(--line)", automargin: true };
    return {
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "var(--text)" },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 16, t: 8, b: 8 },
      xaxis: axis, yaxis: axis, hovermode: "closest", dragmode: NARROW.matches ? false : "zoom",
      hoverlabel: { bgcolor: "var(--text)", bordercolor: "var(--text)", font: { color: "var(--surface)", size: 12 }, align: "left" },
      legend: {
        font: { color: "var(--muted)" }, bgcolor: "rgba(0,0,0,0)", traceorder: "normal",
        orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom",
      },
    };
  }

  function draw(element, figure) {
    drawn.set(element, figure);
    let layout = merged(house(), figure.layout);
    if (NARROW.matches && !printing) {
      layout = merged(layout, figure.narrow || {});
      layout.height = Math.max(layout.height, LEAST_NARROW_HEIGHT); // a legend of four lines above two bars
    }
    if (printing) Object.assign(layout, { width: element.closest(".why") ? 0.58 * PAPER_WIDTH : PAPER_WIDTH, height: Math.min(layout.height, element.closest("#breakdown") ? PAPER_HEIGHT : PAPER_HALF) });
    return Plotly.react(element, resolve(figure.data), resolve(layout), {
      displaylogo: false, responsive: true, scrollZoom: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    });
  }

  function forget(root) {
    for (const element of [...drawn.keys()]) {
      if (root.contains(element)) { Plotly.purge(element); drawn.delete(element); }
    }
  }

  function redraw() {
    for (const [element, figure] of drawn) draw(element, figure);
    for (const listener of listeners) listener();
  }

  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  NARROW.addEventListener("change", redraw);
  // Paper: both ways in which browsers announce it, so that the charts are light and as wide as the sheet.
  function paper(now) { if (now !== printing) { printing = now; redraw(); } }
  window.addEventListener("beforeprint", () => paper(true));
  window.addEventListener("afterprint", () => paper(false));
  window.matchMedia("print").addEventListener("change", (event) => paper(event.matches));

  return { colour, draw, forget, onChange: (listener) => listeners.push(listener), printing: () => printing, PAPER_WIDTH };
})();

// Small builders of elements. Texts go in as text nodes, never as markup.
function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") element.textContent = value;
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function island(selector) {
  const element = document.querySelector(selector);
  return element ? JSON.parse(element.textContent) : null;
}
