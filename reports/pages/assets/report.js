"use strict";
// Start: draw the charts of the run, wire the table, and show the configuration that the address or the ranking names.

(() => {
  for (const element of document.querySelectorAll("[data-figure]")) {
    Theme.draw(element, island(`#${element.dataset.figure}`));
    element.on("plotly_click", ({ points }) => { const folder = points[0].customdata?.[0]; if (folder) choose(folder, true); });
  }

  function choose(folder, scroll) {
    if (!Detail.has(folder)) return;
    Detail.show(folder);
    if (scroll) document.getElementById("configuration").scrollIntoView();
  }

  RankedTable.start(choose);
  Detail.start((folder) => {
    RankedTable.mark(folder);
    window.history.replaceState(null, "", `#c=${encodeURIComponent(folder)}`);
  });

  const row = document.getElementById("row");
  if (row) {
    const articles = document.querySelectorAll("#reproduce article");
    const only = () => articles.forEach((article, index) => { article.hidden = index !== row.selectedIndex; });
    row.addEventListener("change", only);
    row.closest(".chooser").hidden = false;
    only();
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const command = button.parentElement.querySelector("pre").textContent;
      try {
        await navigator.clipboard.writeText(command);
        button.textContent = "Copied";
      } catch {
        window.getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
        button.textContent = "Selected";
      }
      window.setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }
})();
