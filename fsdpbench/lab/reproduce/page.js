"use strict";
// Start: draw charts and timelines, and the key of the timelines' colours.

(() => {
  for (const element of document.querySelectorAll("[data-figure]")) Theme.draw(element, island(`#${element.dataset.figure}`));

  const drawn = [...document.querySelectorAll("[data-timeline]")].map(
    (element) => new Timeline(element, island(`#${element.dataset.timeline}`), []));
  const again = () => { for (const each of drawn) each.draw(); };
  Theme.onChange(again);
  new ResizeObserver(() => { if (!Theme.printing()) again(); }).observe(document.querySelector("main"));

  const keys = document.getElementById("keys");
  if (drawn.length) {
    keys.append(...Timeline.KINDS.map(([, words, fill]) => make("span", { style: "white-space: nowrap; margin-right: .8em" },
      make("i", { style: `display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; background: var(${fill})`, "aria-hidden": "true" }), words)));
  } else keys.parentElement.lastChild.remove();
})();
