// The buttons at the top and the keys of the page and of the report.

import { startTheme } from "./theme.js";

// `charts()` returns the Charts that are shown, `toList()` leads to the list of runs.
export function startControls(view, redraw, charts, toList) {
  const axis = document.getElementById("axis");
  const dialog = document.getElementById("shortcuts");
  const toggleTheme = startTheme(document.getElementById("theme"), redraw);
  const toggleAxis = () => {
    view.axis = view.axis === "step" ? "time" : "step";
    view.range = null;
    axis.textContent = `by ${view.axis}`;
    redraw();
  };
  const help = () => dialog.showModal();
  axis.addEventListener("click", toggleAxis);
  document.getElementById("help").addEventListener("click", help);
  const keys = {
    x: toggleAxis, t: toggleTheme, r: toList, "?": help, j: () => move(1), k: () => move(-1),
    "+": () => charts()?.zoom(0.5), "=": () => charts()?.zoom(0.5), "-": () => charts()?.zoom(2), 0: () => charts()?.show(null),
  };
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, select, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey || typing || dialog.open) return;
    const act = keys[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });
}

// Moves the focus to the next section, or to the one before.
function move(by) {
  const sections = [...document.querySelectorAll("main section.card")].filter((each) => !each.hidden && each.offsetParent);
  const at = sections.findIndex((each) => each === document.activeElement?.closest("section.card"));
  const next = sections[Math.max(0, Math.min(sections.length - 1, at < 0 ? (by > 0 ? 0 : sections.length - 1) : at + by))];
  if (!next) return;
  next.tabIndex = -1;
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "start", behavior: "auto" });
}
