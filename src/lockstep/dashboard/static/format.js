// Numbers, times and sizes as text, and DOM elements from plain data. Knows nothing of runs.

export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= limit) return `${trim(value / (unit === "k" ? 1e3 : limit), digits)}${unit}`;
  }
  return trim(value, digits);
}

function trim(value, digits) {
  const text = value.toPrecision(digits);
  return text.includes("e") || !text.includes(".") ? String(Number(text)) : text.replace(/\.?0+$/, "");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0.9995) return `${number(seconds * 1000, 3)} ms`;
  if (seconds < 100) return `${number(seconds, 3)} s`;
  const whole = Math.round(seconds);
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  if (h >= 48) return `${Math.floor(h / 24)} d ${h % 24} h`;
  return h ? `${h} h ${String(m).padStart(2, "0")} min` : `${m} min ${String(s).padStart(2, "0")} s`;
}

export function clock(seconds) {
  const sign = seconds < 0 ? "−" : "";
  const whole = Math.floor(Math.abs(seconds));
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const tail = String(s).padStart(2, "0");
  return sign + (h ? `${h}:${String(m).padStart(2, "0")}:${tail}` : `${m}:${tail}`);
}

export function bytes(count) {
  if (!count) return "–";
  for (const [limit, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (count >= limit) return `${number(count / limit, 3)} ${unit}`;
  }
  return `${count} B`;
}

export function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

export function median(values) {
  const sorted = values.filter((each) => each > 0).sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  if (!sorted.length) return 0;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

export function quantile(values, part) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))] : 0;
}

// Text for a hover of Plotly, which reads HTML and puts values in the place of %{...}.
export function forHover(text) {
  return text.replace(/[&<>]/g, (each) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[each]).replace(/%\{/g, "%\u200b{");
}

// make("td", {class: "number"}, "12"): an element with attributes and children. Text is never read as HTML.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((each) => each !== null && each !== undefined));
  return element;
}
