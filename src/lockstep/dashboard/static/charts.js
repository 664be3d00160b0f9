// The charts over steps or over time: what Plotly draws, from a RunStore. `view` is {axis: "step" | "time", range: null | [from, to]}.

import { clock, duration, forHover, median, number, quantile } from "./format.js";
import { grouped, trend, visible } from "./grouping.js";
import { PHASES } from "./store.js";
import { baseLayout, color, translucent } from "./theme.js";

export const LINES = ["#3b76d1", "#d9792b", "#2f9a78", "#b8568f", "#8a6bd1", "#a08a1f", "#4aa3bf", "#c14f4f"];

const MOST_LABELS = 40; // of more workers, Plotly shows the numbers that fit

export const PHASE_TEXT = {
  data: "waits for data", lane: "prepares lanes, adds gradients", forward: "forward", backward: "backward",
  optimizer: "optimizer", body: "loop body", exchange: "waits for gradients", confirm: "waits for the commit",
  between: "between steps", checkpoint: "checkpoint", evaluate: "evaluation", recovery: "recovery", outside: "outside the loop",
};

export function axisTitle(view) {
  return view.axis === "step" ? "step" : "time since the beginning";
}

function xFor(view) {
  return view.axis === "step" ? (group) => group.e : (group) => group.t;
}

function xOf(groups, view) {
  return groups.map(xFor(view));
}

// Ticks of a time axis as 0:30, 1:00 ...: Plotly knows dates, not durations.
export function timeTicks(from, to, room = 7) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const step = steps.find((each) => (to - from) / each <= room) ?? Math.ceil((to - from) / room);
  const values = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) values.push(at);
  return { tickmode: "array", tickvals: values, ticktext: values.map(clock) };
}

// The y axis of a chart with a line for each worker, whose y values are `lines`: "run", or the number of a worker.
export function workerAxis(store, lines) {
  const labels = { tickmode: "array", tickvals: lines, ticktext: lines.map((line) => (line === "run" ? line : store.nameOf(Number(line)))) };
  return { type: "category", autorange: "reversed", showgrid: false, categoryorder: "array", categoryarray: lines,
    title: { text: "worker", standoff: 4, font: { size: 11 } }, ...(lines.length <= MOST_LABELS ? labels : {}) };
}

export function layoutFor(view, xs, narrow) {
  const layout = baseLayout(view.range, axisTitle(view));
  if (view.axis === "time") {
    const [from, to] = view.range ?? [xs[0] ?? 0, xs[xs.length - 1] ?? 1];
    Object.assign(layout.xaxis, timeTicks(from, to, narrow ? 4 : 7), { hoverformat: ".1f" });
  }
  return layout;
}

// A line; if it is noisy, it is thin, and its trend is drawn over it.
function lines(x, y, tint, more, dash = "solid") {
  const known = y.filter((value) => value !== null);
  const means = trend(y, Math.max(...known) - Math.min(...known));
  const line = { x, y, mode: "lines", line: { width: means ? 1 : 2, color: means ? translucent(tint, 0.35) : tint, dash: means ? "solid" : dash }, ...more };
  return means ? [line, { x, y: means, mode: "lines", line: { width: 2, color: tint, dash }, hoverinfo: "skip", name: more.name }] : [line];
}

export function metricFigure(store, name, view, narrow) {
  const groups = store.metrics.groups().filter((group) => name in group.v);
  const xs = xOf(groups, view);
  const values = groups.map((group) => group.v[name]?.[0] ?? null);
  const layout = layoutFor(view, xs, narrow);
  const tint = LINES[0];
  const data = [];
  if (groups.some((group) => group.v[name] && group.v[name][1] < group.v[name][2])) {
    const band = { x: xs, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    data.push({ ...band, y: groups.map((group) => group.v[name]?.[1] ?? null) });
    data.push({ ...band, y: groups.map((group) => group.v[name]?.[2] ?? null), fill: "tonexty", fillcolor: translucent(tint, 0.14) });
  }
  data.push(...lines(xs, values, tint, { name, hovertemplate: `%{y:.5g}<extra>${forHover(name)}</extra>` }));
  return { data, layout };
}

export function throughputFigure(store, view, narrow) {
  const groups = grouped(visible(store.steps.groups(), view, xFor(view)), narrow ? 120 : 240);
  const xs = xOf(groups, view);
  const layout = layoutFor(view, xs, narrow);
  const hasSamples = groups.some((group) => group.r > 0);
  const values = groups.map((group) => (hasSamples ? group.r : group.q));
  Object.assign(layout.yaxis, { range: [0, Math.max(...values.map((value) => value ?? 0), 1e-9) * 1.08] });
  const data = lines(xs, values, LINES[2], {
    fill: "tozeroy", fillcolor: translucent(LINES[2], 0.08), customdata: groups.map((group) => [group.q, group.n]),
    hovertemplate: (hasSamples ? "%{y:.5g} samples/s<br>" : "") + "%{customdata[0]:.4g} steps/s<br>%{customdata[1]:.3g} workers<extra></extra>",
  });
  return { data, layout };
}

export function breakdownFigure(store, view, narrow) {
  const groups = grouped(visible(store.steps.groups(), view, xFor(view)), narrow ? 90 : 160);
  const xs = xOf(groups, view);
  const layout = layoutFor(view, xs, narrow);
  const totals = groups.map((group) => Object.values(group.ph).reduce((sum, each) => sum + each, 0) * 1000);
  const most = Math.max(...totals, 1e-6);
  const top = Math.min(most, 1.5 * quantile(totals, 0.95)) * 1.05;
  const cut = totals.filter((each) => each > top).length;
  Object.assign(layout.yaxis, { range: [0, top], ticksuffix: " ms" });
  const used = PHASES.filter((phase) => groups.some((group) => group.ph[phase] > 0));
  const data = used.map((phase) => ({
    x: xs, y: groups.map((group) => (group.ph[phase] ?? 0) * 1000), name: PHASE_TEXT[phase], stackgroup: "phases", mode: "lines",
    line: { width: 0, color: color(`phase-${phase}`) }, fillcolor: color(`phase-${phase}`),
    hovertemplate: `%{y:.3~f} ms<extra>${PHASE_TEXT[phase]}</extra>`,
  }));
  return { data, layout, used, cut };
}

// Columns of the heat map: the borders of each group of steps, and an empty column where the run wrote nothing for long.
function columns(groups, view) {
  const edges = [];
  const kept = [];
  groups.forEach((group, index) => {
    const next = groups[index + 1];
    if (view.axis === "step") {
      edges.push(group.s - 0.5);
      kept.push(group);
      if (!next) edges.push(group.e + 0.5);
      return;
    }
    const long = Math.max(group.t * 2 - group.b * 2, (group.e - group.s + 1) * (group.d || 0));
    edges.push(group.b);
    kept.push(group);
    if (!next) edges.push(group.b + long);
    else if (next.b > group.b + 2 * long + 0.5) {
      edges.push(group.b + long);
      kept.push(null);
    }
  });
  return { edges, kept };
}

export function heatFigure(store, view, narrow) {
  const groups = grouped(visible(store.steps.groups(), view, xFor(view)), narrow ? 60 : 120);
  const workers = [...new Set([...store.members, ...groups.flatMap((group) => Object.keys(group.w).map(Number))])].sort((a, b) => a - b);
  const { edges, kept } = columns(groups, view);
  const layout = layoutFor(view, [edges[0], edges[edges.length - 1]], narrow);
  const typical = kept.map((group) => (group ? median(Object.values(group.w).map((each) => each[0])) : 0));
  const z = workers.map((id) => kept.map((group, at) => (group?.w[id] && typical[at] ? group.w[id][0] / typical[at] : null)));
  const detail = workers.map((id) => kept.map((group) => {
    if (!group) return "";
    const steps = group.s === group.e ? `step ${group.s}` : `steps ${group.s} to ${group.e}`;
    const own = group.w[id];
    return own ? `worker ${store.nameOf(id)}, ${steps}<br>own work ${duration(own[0])}, lanes: ${own[1]}` : `worker ${id}, ${steps}<br>does not take part`;
  }));
  const names = workers.map((id) => `${id}`);
  const scale = ["fast", "even", "slow", "slower", "slowest"].map((name, index) => [index / 4, color(`heat-${name}`)]);
  const gap = workers.length > 24 ? 0 : 2;
  // Not known yet: a member whose records of the newest steps are on their way.
  const isPending = (id, group) => group && store.members.includes(id) && (store.workers.get(id)?.step ?? 0) < group.s && store.run.ended === null;
  const absent = workers.map((id, line) => kept.map((group, at) => (z[line][at] === null && !isPending(id, group) ? 1 : null)));
  const data = [{
    type: "heatmap", x: edges, y: names, z: absent, text: detail, showscale: false,
    colorscale: [[0, color("absent")], [1, color("absent")]], ygap: gap, hoverongaps: false, hovertemplate: "%{text}<extra></extra>",
  }, {
    type: "heatmap", x: edges, y: names, z, text: detail, zmin: 0.8, zmax: 1.6, colorscale: scale, ygap: gap,
    hovertemplate: "%{text}<br>%{z:.2f} × the median<extra></extra>", hoverongaps: false, xgap: 0,
    colorbar: { thickness: 8, outlinewidth: 0, tickvals: [0.8, 1, 1.2, 1.4, 1.6], ticktext: ["0.8×", "1×", "1.2×", "1.4×", "≥1.6×"],
      tickfont: { size: 10 }, len: 1.05, xpad: 6 },
  }];
  for (const [mark, symbol, tint, text] of [["died", "x", "fault", "died"], ["joined", "triangle-right", "good", "joined"]]) {
    const marks = store.entries.filter((each) => each.mark === mark && workers.includes(each.worker));
    data.push({
      x: marks.map((each) => (view.axis === "step" ? store.stepAt(each.t) + 0.5 : each.t)), y: marks.map((each) => `${each.worker}`),
      mode: "markers", cliponaxis: false,
      marker: { symbol, size: 11, color: color(tint), line: { width: 1.5, color: color("card") } },
      text: marks.map((each) => forHover(each.text)), hovertemplate: "%{text}<extra></extra>", name: text,
    });
  }
  layout.hovermode = "closest";
  layout.margin.t = 14;
  layout.xaxis.showgrid = false;
  Object.assign(layout.yaxis, workerAxis(store, names));
  if (!view.range && edges.length) Object.assign(layout.xaxis, { autorange: false, range: [edges[0], edges[edges.length - 1]] });
  return { data, layout, lines: workers.length };
}

// One line for each of some runs. `pick` returns the groups, and `value` a group's value.
export function overlayFigure(stores, pick, value, view, narrow, fromZero = false) {
  const found = stores.map((store) => visible(pick(store), view, xFor(view)));
  const xs = found.flatMap((groups) => xOf(groups, view)).sort((a, b) => a - b);
  const layout = layoutFor(view, xs, narrow);
  if (fromZero) layout.yaxis.rangemode = "tozero";
  const data = found.flatMap((groups, index) => lines(xOf(groups, view), groups.map(value), LINES[index % LINES.length], {
    name: stores[index].name, hovertemplate: `%{y:.5g}<extra>${forHover(stores[index].name)}</extra>`,
  }, index < LINES.length ? "solid" : "dash"));
  return { data, layout };
}

export function textOfMetric(store, name) {
  const groups = store.metrics.groups();
  const [first, last] = [groups.find((group) => group.v[name]), groups.findLast((group) => group.v[name])];
  if (!last) return `${name}: no value yet`;
  return `${name}: ${number(first.v[name][0])} at step ${first.s}, ${number(last.v[name][0])} at step ${last.e}`;
}
