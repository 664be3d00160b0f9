// The timeline: one row for each worker that was a member meanwhile, with its generations, its pauses, and faults.

import { PHASE_TEXT, timeTicks, workerAxis } from "./charts.js";
import { duration, forHover } from "./format.js";
import { baseLayout, color } from "./theme.js";

const MARKS = {
  died: ["x", "fault"], failed: ["x-thin", "fault"], joined: ["triangle-right", "good"], stopped: ["square", "warn"],
  saved: ["diamond", "accent"],
};
const PAUSES = ["recovery", "checkpoint", "evaluate", "outside"];

function bars(store, end) {
  const found = [];
  store.generations.forEach((generation, index) => {
    const until = store.generations[index + 1]?.t ?? end;
    for (const worker of generation.members) {
      const [, , ended] = store.lives[worker] ?? ["", "", 0];
      const stop = ended && ended >= generation.t ? Math.min(until, ended) : until;
      found.push({ worker, from: generation.t, to: stop, number: generation.number });
    }
  });
  return found;
}

function bar(parts, tint, text, width, border = 1) {
  return {
    type: "bar", orientation: "h", base: parts.map((each) => each.from), x: parts.map((each) => Math.max(0, each.to - each.from)),
    y: parts.map((each) => `${each.worker}`), width: parts.map(() => width), marker: { color: tint, line: { width: border, color: border ? color("card") : tint } },
    text: parts.map(text), textposition: "none", hovertemplate: "%{text}<extra></extra>",
  };
}

export function timelineFigure(store, view, narrow) {
  const end = Math.max(store.run.elapsed, store.run.ended ?? 0, 1);
  const range = view.axis === "time" ? view.range : null;
  const layout = baseLayout(range ?? [-end * 0.01, end * 1.01], "time since the beginning");
  const [from, to] = range ?? [0, end];
  const members = bars(store, end).filter((each) => each.from <= to && each.to >= from);
  const workers = [...new Set([...store.members, ...members.map((each) => each.worker)])].sort((a, b) => a - b);
  const hasRow = (each) => each.worker < 0 || workers.includes(each.worker);
  const say = (each) => `worker ${each.worker}, generation ${each.number}<br>${duration(each.to - each.from)}`;
  const data = [0, 1].map((odd) => bar(members.filter((each) => each.number % 2 === odd), color(odd ? "life-odd" : "life-even"), say, 0.62));
  for (const phase of PAUSES) {
    const parts = store.pauses.filter((each) => each.phase === phase && hasRow(each)).map((each) => ({ worker: each.worker, from: each.t, to: each.t + each.d }));
    if (parts.length) {
      const text = (each) => `worker ${each.worker}: ${PHASE_TEXT[phase]}, ${duration(each.to - each.from)}`;
      data.push({ ...bar(parts, color(`phase-${phase}`), text, 0.34, 0), name: phase });
    }
  }
  for (const [mark, [symbol, tint]] of Object.entries(MARKS)) {
    const marks = store.entries.filter((each) => each.mark === mark && hasRow(each));
    if (!marks.length) continue;
    data.push({
      x: marks.map((each) => each.t), y: marks.map((each) => (each.worker < 0 ? "run" : `${each.worker}`)), mode: "markers", cliponaxis: false,
      marker: { symbol, size: mark === "saved" ? 8 : 11, color: color(tint), line: { width: mark === "failed" ? 3 : 1.5, color: color(mark === "failed" ? tint : "card") } },
      text: marks.map((each) => forHover(each.text)), hovertemplate: "%{text}<extra></extra>",
    });
  }
  const names = ["run", ...workers.map(String)];
  layout.barmode = "overlay";
  layout.hovermode = "closest";
  layout.shapes = store.generations.slice(1).map((each) => ({
    type: "line", x0: each.t, x1: each.t, y0: 0, y1: 1, yref: "paper", line: { width: 1, dash: "dot", color: color("muted") }, layer: "below",
  }));
  layout.annotations = labels(store, end, narrow);
  Object.assign(layout.xaxis, timeTicks(from, to, narrow ? 4 : 9));
  Object.assign(layout.yaxis, workerAxis(store, names));
  layout.margin.t = 22;
  return { data, layout, lines: names.length };
}

// The numbers of generations above the chart, as many as have room.
function labels(store, end, narrow) {
  const found = [];
  let free = -Infinity;
  for (const each of store.generations) {
    if (each.t < free) continue;
    found.push({ x: Math.max(each.t, 0), y: 1, yref: "paper", yanchor: "bottom", xanchor: "left", showarrow: false,
      text: `${found.length ? "" : "generation "}${each.number}`, font: { size: 11, color: color("muted") } });
    free = each.t + end * (found.length === 1 ? (narrow ? 0.3 : 0.12) : narrow ? 0.08 : 0.03);
  }
  return found;
}
