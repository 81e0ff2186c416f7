"use strict";
// One configuration: its timeline, memory, units and settings, built when it is chosen.

const Detail = (() => {
  const place = document.getElementById("detail");
  const choice = document.getElementById("choice");
  let timeline = null;
  let onShow = () => {};

  function start(callback) {
    if (!place) return;
    onShow = callback;
    choice.addEventListener("change", () => show(choice.value));
    document.getElementById("previous").addEventListener("click", () => step(-1));
    document.getElementById("next").addEventListener("click", () => step(1));
    Theme.onChange(() => timeline?.draw());
    new ResizeObserver(() => { if (timeline && timeline.host.clientWidth !== timeline.width && !Theme.printing()) timeline.draw(); }).observe(place);
    window.addEventListener("hashchange", () => { const asked = fromAddress(); if (asked && asked !== choice.value) show(asked); });
    show(fromAddress() ?? choice.value);
  }

  function step(by) {
    const index = choice.selectedIndex + by;
    if (index >= 0 && index < choice.options.length) show(choice.options[index].value);
  }

  function fromAddress() {
    const match = /^#c=(.+)$/.exec(window.location.hash);
    const folder = match && decodeURIComponent(match[1]);
    return folder && has(folder) ? folder : null;
  }

  function has(folder) {
    return Boolean(choice) && [...choice.options].some((option) => option.value === folder);
  }

  function show(folder) {
    if (!has(folder)) return;
    choice.value = folder;
    document.getElementById("previous").disabled = choice.selectedIndex === 0;
    document.getElementById("next").disabled = choice.selectedIndex === choice.options.length - 1;
    const content = island(`script[data-detail="${CSS.escape(folder)}"]`);
    Theme.forget(place);
    timeline = null;
    place.replaceChildren(...parts(content));
    if (content.timeline) timeline = new Timeline(place.querySelector(".timeline"), content.timeline, content.retries);
    wireTools();
    for (const [name, figure] of [["memory", content.memory], ["units", content.units?.figure]]) {
      if (figure) Theme.draw(place.querySelector(`[data-chart="${name}"]`), figure);
    }
    onShow(folder);
  }

  function parts(content) {
    const built = [];
    if (content.problem) built.push(make("p", { class: "message bad", text: content.problem }));
    for (const warning of content.warnings) built.push(make("p", { class: "message warn", text: warning }));
    if (content.verdict.length) {
      built.push(make("h3", { text: "What this trace says" }), make("ul", { class: "said" }, ...content.verdict.map((text) => make("li", { text }))));
    }
    if (content.timeline) built.push(...timelineParts(content));
    if (content.kernels) {
      built.push(make("h3", { text: "Top kernels" }), make("p", { class: "muted small", text: content.roof_note }), table(content.kernels, "Top kernels"));
      if (content.families) built.push(behind(content.families, "By kind of work"));
      if (content.operators) built.push(behind(content.operators, "By operator, against the roof"));
      if (content.modules) built.push(behind(content.modules, "By module (forward)"));
      if (content.devices) built.push(behind(content.devices, "By device"));
    }
    if (content.units) {
      built.push(make("h3", { text: "Communication by FSDP unit" }), make("p", { class: "muted small", text: content.units.lead }));
      built.push(chart("units", "Bars of hidden and exposed communication by FSDP unit; the table below has the figures."));
      built.push(behind(content.units.table, "The units as a table"));
    }
    if (content.memory) {
      built.push(make("h3", { text: content.memory_words ? "Memory over the steps of the soak" : "Memory over time" }));
      built.push(chart("memory", content.memory_words ?? "Lines of allocated and reserved memory over the traced time, with allocator retries marked."));
      built.push(behind(content.memory_table, "Memory as a table"));
      if (content.held) built.push(behind(content.held, "What is held at the peak"));
      if (content.held_by_unit) built.push(behind(content.held_by_unit, "What each unit holds at the peak"));
    } else if (content.memory_note) {
      built.push(make("h3", { text: "Memory over time" }), make("p", { class: "muted", text: content.memory_note }));
    }
    if (content.ranks) {
      built.push(make("h3", { text: "Ranks" }), make("p", { class: "muted small", text: content.ranks.lead }), table(content.ranks.table, "Ranks"));
    }
    built.push(make("div", { class: "two" },
      block("Where each phase goes, ms", content.phases), block("Communication by type, a step", content.communication),
      block("Why the device idles", content.idle)));
    built.push(make("div", { class: "two lookup" }, content.settings.length ? make("div", {}, make("h3", { text: "Every setting" }), pairs(content.settings)) : null,
      make("div", {}, make("h3", { text: "Results" }), pairs(content.results), ...links(content.links))));
    return built;
  }

  function timelineParts(content) {
    const used = new Set(content.timeline.rows.flatMap((row) => [...row.c].map(Number)));
    const keys = Timeline.KINDS.map(([, words, fill], index) => used.has(index)
      ? make("li", {}, make("i", { style: `background:var(${fill})`, "aria-hidden": "true" }), words) : null).filter(Boolean);
    if (content.retries.length) keys.push(make("li", { text: "▼ allocator retry" }));
    return [make("div", { class: "together" },
      make("h3", { text: "Timeline by stream" }),
      make("div", { class: "tools" },
        make("button", { type: "button", class: "button", "data-do": "in", "aria-label": "Zoom in", text: "+" }),
        make("button", { type: "button", class: "button", "data-do": "out", "aria-label": "Zoom out", text: "−" }),
        make("button", { type: "button", class: "button", "data-do": "all", text: "Whole step" }),
        make("span", { class: "muted hint", text: "Drag to move, Ctrl and wheel to zoom; arrows, + − 0 n p on the keyboard." }),
        make("ul", { class: "keys" }, ...keys)),
      make("div", { class: "timeline" }),
      content.timeline.note ? make("p", { class: "muted small", text: content.timeline.note }) : null)];
  }

  function wireTools() {
    for (const button of place.querySelectorAll("[data-do]")) {
      button.addEventListener("click", () => ({ in: () => timeline.zoom(0.5), out: () => timeline.zoom(2), all: () => timeline.all() })[button.dataset.do]());
    }
  }

  function chart(name, label) {
    return make("div", { class: "chart", "data-chart": name, role: "group", "aria-label": label });
  }

  function behind(content, words) {
    return content ? make("details", {}, make("summary", { text: words }), table(content, words)) : null;
  }

  function block(words, content) {
    return content ? make("div", {}, make("h3", { text: words }), table(content, words)) : null;
  }

  function table(content, caption) {
    const numeric = new Set(content.numeric);
    const head = make("tr", {}, ...content.columns.map((name) => make("th", { scope: "col", class: numeric.has(name) ? "number" : null, text: name })));
    const rows = content.rows.map((row) => make("tr", {}, ...row.map((cell, index) =>
      make("td", numeric.has(content.columns[index]) ? { class: "number", text: cell } : { class: "value", title: cell, text: cell }))));
    return make("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": `${caption}, table` },
      make("table", {}, make("caption", { class: "visually-hidden", text: caption }), make("thead", {}, head), make("tbody", {}, ...rows)));
  }

  function pairs(list) {
    return make("dl", { class: "pairs" }, ...list.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { class: "clip", text: value })]));
  }

  function links(list) {
    if (!list.length) return [];
    const built = list.map(({ text, href }) => make("li", {}, make("a", { href, text })));
    return [make("h3", { text: "Traces and files" }), make("ul", { class: "small" }, ...built)];
  }

  return { start, show, has };
})();
