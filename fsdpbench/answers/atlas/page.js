"use strict";
// The filter: rows stay whose keys match and that hold the text. What is chosen stands in the address, to be shared.

(() => {
  const filters = document.querySelector(".filters");
  const find = document.getElementById("find");
  const choices = [...filters.querySelectorAll("[data-key]")];
  const rows = [...document.querySelectorAll("tbody tr")];
  const shown = filters.querySelector(".shown");
  filters.hidden = false;

  function apply() {
    const text = find.value.trim().toLowerCase();
    let count = 0;
    for (const row of rows) {
      const matches = choices.every((choice) => !choice.value || row.dataset[choice.dataset.key] === choice.value)
        && row.textContent.toLowerCase().includes(text);
      row.hidden = !matches;
      count += matches;
    }
    shown.textContent = `${count} of ${rows.length}`;
    const chosen = new URLSearchParams(choices.filter((choice) => choice.value).map((choice) => [choice.dataset.key, choice.value]));
    if (text) chosen.set("find", text);
    window.history.replaceState(null, "", chosen.size ? `#${chosen}` : window.location.pathname);
  }

  const asked = new URLSearchParams(window.location.hash.slice(1));
  for (const choice of choices) {
    const value = asked.get(choice.dataset.key) ?? "";
    if ([...choice.options].some((option) => option.value === value)) choice.value = value;
  }
  find.value = asked.get("find") ?? "";
  find.addEventListener("input", apply);
  for (const choice of choices) choice.addEventListener("change", apply);
  document.getElementById("clear").addEventListener("click", () => {
    find.value = "";
    for (const choice of choices) choice.value = "";
    apply();
  });
  apply();
})();
