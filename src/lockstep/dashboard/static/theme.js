// Light or dark, and the colours of charts, which are read from the style sheet.

const KEY = "lockstep-theme";

export function startTheme(button, redraw) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem(KEY); } catch { /* a file that may not store */ }
  const apply = () => {
    const dark = chosen ? chosen === "dark" : system.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "light" : "dark";
    redraw();
  };
  const toggle = () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem(KEY, chosen); } catch { /* the choice lasts until the page is closed */ }
    apply();
  };
  button.addEventListener("click", toggle);
  system.addEventListener("change", apply);
  apply();
  return toggle;
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// What all charts share. `range`: the part of the x axis that is shown; null: all.
export function baseLayout(range, title) {
  const grid = { gridcolor: color("grid"), zeroline: false, linecolor: color("grid"), tickcolor: color("grid"), automargin: true };
  return {
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("muted") },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 8, r: 12, t: 8, b: 8 },
    hovermode: "x unified",
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text"), size: 12 }, namelength: -1 },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    showlegend: false,
    uirevision: "kept",
    xaxis: { ...grid, title: { text: title, standoff: 6, font: { size: 11 } }, ...(range ? { range: [...range] } : { autorange: true }) },
    yaxis: { ...grid, fixedrange: true },
  };
}

export function translucent(hex, alpha) {
  const value = parseInt(hex.slice(1), 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${alpha})`;
}
