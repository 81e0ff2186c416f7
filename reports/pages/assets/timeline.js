"use strict";
// The timeline of one step, drawn on a canvas: thousands of kernels stay quick to zoom and pan there.
//
//   data = { duration, names: [...], units: [...],            duration and times in nanoseconds
//            rows: [{ label, detail, lanes, s, d, n, u, c, l }] }
//
// A row's columns are: s the distance of each start from the start before, d durations, n and u indices into names and
// units (u = -1: none); c the kind of work and l the lane in a row whose events nest, one digit an event. Starts rise.

class Timeline {
  static KINDS = [
    ["compute", "computation", "--compute", "--on-dark"],
    ["all_gather", "all-gather", "--gather", "--on-light"],
    ["reduce_scatter", "reduce-scatter", "--reduce", "--on-dark"],
    ["all_reduce", "all-reduce", "--allreduce", "--on-dark"],
    ["communication", "other communication", "--exposed", "--on-dark"],
    ["memory", "copies", "--copy", "--on-dark"],
    ["phase", "phase", "--phase", "--on-light"],
    ["event", "FSDP event", "--event", "--on-light"],
    ["wait", "CPU waits", "--wait", "--on-light"],
  ];
  static LANE = 19;
  static AXIS = 24;

  constructor(host, data, retries) {
    this.host = host;
    this.data = data;
    this.retries = retries;
    this.rows = data.rows.map((row) => Timeline.#unpack(row));
    this.window = [0, data.duration];
    this.cursor = null;
    this.canvas = make("canvas", {
      tabindex: "0", role: "application", "aria-roledescription": "timeline",
      "aria-label": "Timeline of one step by stream. Left and right pan, plus and minus zoom, zero shows all, up and down choose a row, n and p go to its next and previous event.",
    });
    this.tip = make("div", { class: "tip", hidden: "" });
    this.said = make("p", { class: "visually-hidden", role: "status", "aria-live": "polite" });
    host.replaceChildren(this.canvas, this.tip, this.said);
    this.#listen();
    this.draw();
  }

  static #unpack(row) {
    const starts = new Float64Array(row.s.length);
    let at = 0;
    row.s.forEach((distance, index) => { at += distance; starts[index] = at; });
    return { ...row, c: Uint8Array.from(row.c), l: Uint8Array.from(row.l), starts, longest: row.d.reduce((most, each) => Math.max(most, each), 0) };
  }

  get gutter() { return this.width < 620 ? 84 : 168; }
  get span() { return this.window[1] - this.window[0]; }
  x(time) { return this.gutter + ((time - this.window[0]) / this.span) * (this.width - this.gutter); }
  time(x) { return this.window[0] + ((x - this.gutter) / (this.width - this.gutter)) * this.span; }

  draw() {
    const scale = Math.min(3, (window.devicePixelRatio || 1) * (Theme.printing() ? 2 : 1));
    this.width = Theme.printing() ? Theme.PAPER_WIDTH : Math.max(200, this.host.clientWidth);
    this.height = Timeline.AXIS + this.rows.reduce((sum, row) => sum + row.lanes * Timeline.LANE + 9, 6);
    this.canvas.width = this.width * scale;
    this.canvas.height = this.height * scale;
    this.canvas.style.height = `${this.height}px`;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    this.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    pen.font = this.font;
    pen.textBaseline = "middle";
    this.#axis(pen);
    let top = Timeline.AXIS + 4;
    for (const row of this.rows) {
      row.top = top;
      this.#row(pen, row);
      top += row.lanes * Timeline.LANE + 9;
    }
    this.#retryMarks(pen);
    this.#cursorMark(pen);
  }

  #axis(pen) {
    const wide = this.width - this.gutter;
    const step = Timeline.#niceStep((this.span / wide) * 90);
    pen.fillStyle = Theme.colour("--muted");
    pen.strokeStyle = Theme.colour("--grid");
    pen.lineWidth = 1;
    for (let at = Math.ceil(this.window[0] / step) * step; at <= this.window[1]; at += step) {
      const x = Math.round(this.x(at)) + 0.5;
      pen.beginPath(); pen.moveTo(x, Timeline.AXIS - 5); pen.lineTo(x, this.height); pen.stroke();
      const words = Timeline.#duration(at, step);
      if (x + pen.measureText(words).width + 4 < this.width) pen.fillText(words, x + 3, Timeline.AXIS / 2);
    }
  }

  static #niceStep(least) {
    const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
  }

  static #duration(ns, resolution = ns / 1000) {
    const [unit, size] = ns >= 1e6 || resolution >= 1e6 ? ["ms", 1e6] : ["µs", 1e3];
    const places = Math.max(0, Math.min(3, Math.ceil(Math.log10(size / Math.max(1, resolution)))));
    return `${(ns / size).toFixed(places)} ${unit}`;
  }

  #row(pen, row) {
    pen.fillStyle = Theme.colour("--text");
    pen.fillText(this.#fit(pen, row.label, this.gutter - 14), 8, row.top + Timeline.LANE / 2);
    if (row.detail && row.lanes > 1) {
      pen.fillStyle = Theme.colour("--muted");
      pen.fillText(this.#fit(pen, row.detail, this.gutter - 14), 8, row.top + Timeline.LANE * 1.5);
    }
    pen.save();
    pen.beginPath(); pen.rect(this.gutter, 0, this.width - this.gutter, this.height); pen.clip();
    const colours = Timeline.KINDS.map(([, , fill, ink]) => [Theme.colour(fill), Theme.colour(ink)]);
    const painted = new Float64Array(row.lanes * Timeline.KINDS.length).fill(-1);
    for (let index = this.#firstVisible(row); index < row.starts.length && row.starts[index] <= this.window[1]; index++) {
      const left = this.x(row.starts[index]);
      const right = Math.max(left + 0.7, this.x(row.starts[index] + row.d[index]));
      const slot = row.l[index] * Timeline.KINDS.length + row.c[index];
      if (right < this.gutter || right - painted[slot] < 0.5) continue; // Out of sight, or in a pixel already painted.
      painted[slot] = right;
      const y = row.top + row.l[index] * Timeline.LANE;
      const [fill, ink] = colours[row.c[index]];
      pen.fillStyle = fill;
      pen.fillRect(left, y, Math.max(0.7, right - left - (right - left > 3 ? 0.8 : 0)), Timeline.LANE - 2);
      const room = Math.min(right, this.width) - Math.max(left, this.gutter) - 6;
      if (room > 22) {
        pen.fillStyle = ink;
        pen.fillText(this.#fit(pen, this.#shortWords(row, index), room), Math.max(left, this.gutter) + 3, y + Timeline.LANE / 2 - 1);
      }
    }
    pen.restore();
  }

  // Events nest and differ in length: go back by the longest one before looking.
  #firstVisible(row) {
    let low = 0, high = row.starts.length;
    const target = this.window[0] - row.longest;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.starts[middle] < target) low = middle + 1; else high = middle;
    }
    return low;
  }

  #fit(pen, text, room) {
    if (pen.measureText(text).width <= room) return text;
    let length = Math.min(text.length, Math.floor(room / 4));
    while (length > 0 && pen.measureText(`${text.slice(0, length)}…`).width > room) length--;
    return length > 1 ? `${text.slice(0, length)}…` : "";
  }

  #shortWords(row, index) {
    const unit = this.data.units[row.u[index]];
    return unit && row.c[index] !== 6 ? (row.c[index] === 7 ? `${this.data.names[row.n[index]]} ${unit}` : unit) : this.data.names[row.n[index]];
  }

  #retryMarks(pen) {
    pen.fillStyle = Theme.colour("--bad");
    for (const at of this.retries) {
      const x = this.x(at);
      if (x < this.gutter || x > this.width) continue;
      pen.beginPath(); pen.moveTo(x - 4, Timeline.AXIS - 7); pen.lineTo(x + 4, Timeline.AXIS - 7); pen.lineTo(x, Timeline.AXIS); pen.fill();
    }
  }

  #cursorMark(pen) {
    if (!this.cursor) return;
    const { row, index } = this.cursor;
    const left = Math.max(this.gutter, this.x(row.starts[index]));
    const right = Math.max(left + 2, this.x(row.starts[index] + row.d[index]));
    pen.strokeStyle = Theme.colour("--text");
    pen.lineWidth = 2;
    if (right > this.gutter) pen.strokeRect(left, row.top + row.l[index] * Timeline.LANE - 1, right - left, Timeline.LANE);
  }

  // Which event is under the pointer: the row and lane by height, then the last one that starts before and still runs.
  #at(x, y) {
    const row = this.rows.find((each) => y >= each.top && y < each.top + each.lanes * Timeline.LANE);
    if (!row || x < this.gutter) return null;
    const lane = Math.floor((y - row.top) / Timeline.LANE);
    const slack = (2 / (this.width - this.gutter)) * this.span;
    const time = this.time(x);
    let found = null;
    for (let index = this.#firstVisible(row); index < row.starts.length && row.starts[index] <= time + slack; index++) {
      if (row.l[index] === lane && row.starts[index] + row.d[index] >= time - slack) found = index;
    }
    return found === null ? null : { row, index: found };
  }

  #words({ row, index }) {
    const unit = this.data.units[row.u[index]];
    const kind = Timeline.KINDS[row.c[index]][1];
    return [
      this.data.names[row.n[index]],
      [row.label.startsWith(kind) ? null : kind, unit ? `unit ${unit}` : null, row.label].filter(Boolean).join(" · "),
      `${Timeline.#duration(row.d[index])} from ${Timeline.#duration(row.starts[index])}`,
    ];
  }

  #showTip(found, x, y) {
    this.tip.hidden = !found;
    if (!found) return;
    const [name, where, when] = this.#words(found);
    this.tip.replaceChildren(make("b", { text: name.length > 160 ? `${name.slice(0, 160)}…` : name }), make("br"), where.slice(0, 200), make("br"), when);
    const wide = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(4, Math.min(x + 14, this.width - wide - 4))}px`;
    const below = y + 18;
    this.tip.style.top = `${below + this.tip.offsetHeight > this.height ? Math.max(2, y - this.tip.offsetHeight - 10) : below}px`;
  }

  zoom(factor, around = (this.window[0] + this.window[1]) / 2) {
    const span = Math.min(this.data.duration, Math.max(2000, this.span * factor));
    const start = around - ((around - this.window[0]) / this.span) * span;
    this.#show(start, span);
  }

  pan(share) { this.#show(this.window[0] + share * this.span, this.span); }
  all() { this.#show(0, this.data.duration); }

  #show(start, span) {
    const from = Math.max(0, Math.min(start, this.data.duration - span));
    this.window = [from, from + span];
    this.draw();
  }

  #move(by) {
    const row = this.cursor?.row ?? this.rows[0];
    if (!row?.starts.length) return;
    const index = this.cursor ? this.cursor.index + by : this.#firstVisible(row);
    this.#select(row, Math.max(0, Math.min(index, row.starts.length - 1)));
  }

  #changeRow(by) {
    const place = this.cursor ? this.rows.indexOf(this.cursor.row) : -by;
    const row = this.rows[Math.max(0, Math.min(place + by, this.rows.length - 1))];
    if (!row?.starts.length) return;
    const time = this.cursor ? this.cursor.row.starts[this.cursor.index] : this.window[0];
    const next = row.starts.findIndex((start) => start >= time);
    this.#select(row, next < 0 ? row.starts.length - 1 : next);
  }

  #select(row, index) {
    this.cursor = { row, index };
    const at = row.starts[index];
    if (at < this.window[0] || at > this.window[1]) this.#show(at - this.span * 0.2, this.span); else this.draw();
    this.#showTip(this.cursor, this.x(at), row.top + row.l[index] * Timeline.LANE);
    this.said.textContent = this.#words(this.cursor).join(", ");
  }

  #listen() {
    const canvas = this.canvas;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.offsetX, start: this.window[0] };
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("dragging");
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        const moved = ((drag.x - event.offsetX) / (this.width - this.gutter)) * this.span;
        this.#show(drag.start + moved, this.span);
      }
      this.#showTip(drag ? null : this.#at(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
    });
    const release = () => { drag = null; canvas.classList.remove("dragging"); };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => this.#showTip(null));
    canvas.addEventListener("blur", () => this.#showTip(null));
    canvas.addEventListener("dblclick", (event) => this.zoom(0.35, this.time(event.offsetX)));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return; // A plain wheel scrolls the page.
      event.preventDefault();
      this.zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, this.time(event.offsetX));
    }, { passive: false });
    const keys = {
      ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15), ArrowUp: () => this.#changeRow(-1), ArrowDown: () => this.#changeRow(1),
      "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1.4), 0: () => this.all(), n: () => this.#move(1), p: () => this.#move(-1),
    };
    canvas.addEventListener("keydown", (event) => {
      const act = event.ctrlKey || event.metaKey || event.altKey ? null : keys[event.key];
      if (act) { event.preventDefault(); act(); }
    });
  }
}
