"use strict";
// The ranked table: sorting by its headers, filtering by text and by the value of a setting.

const RankedTable = (() => {
  const table = document.querySelector("table.ranking");

  function start(onChoose) {
    if (!table) return;
    const rows = [...table.tBodies[0].rows];
    const filters = document.querySelector(".filters");
    filters.hidden = false;
    table.tHead.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) sort(button, rows);
    });
    filters.addEventListener("input", () => filter(filters, rows));
    document.getElementById("clear").addEventListener("click", () => {
      for (const field of filters.querySelectorAll("input, select")) field.value = "";
      filter(filters, rows);
    });
    table.tBodies[0].addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row && !window.getSelection().toString()) onChoose(row.dataset.configuration, Boolean(event.target.closest("button")));
    });
    filter(filters, rows);
  }

  function sort(button, rows) {
    const header = button.closest("th");
    const column = header.cellIndex;
    const numeric = button.dataset.kind === "number";
    // Figures: the largest first, except for the place; a second press turns the order round.
    const before = header.getAttribute("aria-sort");
    const first = numeric && column > 0 ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const order = before === first ? other : first;
    for (const cell of table.tHead.rows[0].cells) cell.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const keyed = rows.map((row, index) => [key(row.cells[column], numeric), index, row]);
    keyed.sort(([a, i], [b, j]) => {
      if (a === null || b === null) return (a === null) - (b === null) || i - j; // Nothing known: last either way.
      const difference = numeric ? a - b : a.localeCompare(b, "en", { numeric: true });
      return sign * difference || i - j;
    });
    table.tBodies[0].append(...keyed.map(([, , row]) => row));
  }

  function key(cell, numeric) {
    const value = cell.dataset.sort ?? cell.textContent.trim();
    if (value === "" || value === "–") return null;
    return numeric ? Number(value) : value;
  }

  function filter(filters, rows) {
    const words = document.getElementById("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = [...filters.querySelectorAll("select")].filter((select) => select.value);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const fits = words.every((word) => text.includes(word))
        && chosen.every((select) => value(row.cells[Number(select.dataset.column)]) === select.value);
      row.hidden = !fits;
      shown += fits;
    }
    filters.querySelector(".shown").textContent = shown === rows.length ? `${shown} configuration${shown === 1 ? "" : "s"}` : `${shown} of ${rows.length} configurations`;
  }

  function value(cell) {
    return cell.dataset.value ?? cell.firstChild?.textContent.trim() ?? "";
  }

  function mark(folder) {
    if (!table) return;
    for (const row of table.tBodies[0].rows) {
      const chosen = row.dataset.configuration === folder;
      row.classList.toggle("chosen", chosen);
      row.querySelector(".choose")?.setAttribute("aria-pressed", String(chosen));
    }
  }

  return { start, mark };
})();
