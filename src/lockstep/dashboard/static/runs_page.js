// The list of the runs of a folder, and the comparison of several runs, one line each.

import { LINES, overlayFigure } from "./charts.js";
import { duration, make, number, plural } from "./format.js";
import { chartCard, Charts } from "./run_page.js";
import { replaceText } from "./sections.js";
import { getJson, pageOf } from "./stream.js";

const EVERY_MS = 2000;
const MOST = 12;

function when(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : "–";
}

export function mountList(root, found) {
  const chosen = new Set();
  const compare = make("a", { class: "button", "aria-disabled": "true", role: "link" }, "Compare");
  const body = make("tbody");
  const names = ["", "Run", "State", "Script", "Began", "Elapsed", "Step", "Workers", "Logged last"];
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name || make("span", { class: "unseen" }, "Compare"))));
  const table = make("table", { class: "runs" }, make("thead", {}, head), body);
  const region = make("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": "Runs" }, table);
  const count = make("p", { class: "caption" });
  root.replaceChildren(make("div", { class: "title" }, make("h1", {}, "Runs")), count,
    make("section", { class: "card", "aria-label": "Runs of the folder" }, region), make("p", {}, compare));

  const choose = () => {
    const names = [...chosen].slice(0, MOST);
    replaceText(compare, names.length > 1 ? `Compare ${names.length} runs` : "Choose two runs or more to compare them");
    compare.setAttribute("aria-disabled", String(names.length < 2));
    if (names.length > 1) compare.setAttribute("href", pageOf([...names.map((name) => ["run", name]), ["view", "compare"]]));
    else compare.removeAttribute("href");
  };
  const rowOf = (name) => {
    const box = make("input", { type: "checkbox", "aria-label": `compare ${name}` });
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(name); else chosen.delete(name);
      choose();
    });
    const state = make("span");
    const cells = ["script", "began", "elapsed", "step", "workers", "logged last"].map((each) => make("td", { "data-name": each }));
    const row = make("tr", { "data-run": name }, make("td", {}, box),
      make("th", { scope: "row" }, make("a", { href: pageOf([["run", name]]) }, name)), make("td", { "data-name": "state" }, state), ...cells);
    const update = (run, now) => {
      const values = Object.entries(run.values).slice(0, 3).map(([each, value]) => `${each} ${value}`).join(", ");
      const end = run.state === "running" ? now : run.newest;
      [state.className, state.title] = [`pill ${run.state}`, run.why];
      replaceText(state, run.state);
      const texts = [run.command || "–", when(run.began), duration(Math.max(0, end - run.began)), run.step < 0 ? "–" : number(run.step, 9),
        String(run.workers), values || "–"];
      texts.forEach((text, at) => replaceText(cells[at], text));
    };
    return { row, update };
  };
  const rows = new Map();
  const render = (list) => {
    const names = new Set(list.runs.map((run) => run.name));
    for (const run of list.runs) {
      if (!rows.has(run.name)) rows.set(run.name, rowOf(run.name));
      rows.get(run.name).update(run, list.now);
    }
    for (const name of [...rows.keys()].filter((each) => !names.has(each))) {
      rows.delete(name);
      chosen.delete(name);
    }
    const wanted = [...names].map((name) => rows.get(name).row);
    if (wanted.length !== body.children.length || wanted.some((row, at) => row !== body.children[at])) {
      const focused = document.activeElement;
      body.replaceChildren(...wanted);
      if (body.contains(focused)) focused.focus({ preventScroll: true });
    }
    replaceText(count, list.runs.length ? `${plural(list.runs.length, "run")} in ${list.path}` : `No run in ${list.path} yet.`);
    choose();
  };
  render(found);
  return { render, everyMs: EVERY_MS };
}

export function mountComparison(root, stores, view, redraw) {
  const charts = new Charts(view, redraw);
  const legend = make("ul", { class: "legend runs" });
  const grid = make("div", { class: "grid" });
  const table = make("tbody");
  const head = make("tr", {}, ...["Run", "State", "Step", "Samples/s", "Time per step", "Elapsed", "Failures"].map((name) => make("th", { scope: "col" }, name)));
  const region = make("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": "Table of the runs" },
    make("table", { class: "runs" }, make("thead", {}, head), table));
  root.replaceChildren(make("div", { class: "title" }, make("h1", {}, plural(stores.length, "run"))), legend, grid,
    make("section", { class: "card below", "aria-label": "The runs" }, region));
  legend.replaceChildren(...stores.map((store, index) => {
    const swatch = make("i");
    const tint = LINES[index % LINES.length];
    swatch.style.background = index < LINES.length ? tint : `repeating-linear-gradient(90deg, ${tint} 0 .3rem, transparent .3rem .4rem)`;
    return make("li", {}, swatch, make("a", { href: pageOf([["run", store.name]]) }, store.name));
  }));
  const shown = new Map();
  const add = (id, title, caption, pick, value, isFromZero = false) => {
    if (shown.has(id)) return;
    const section = chartCard(`compare-${shown.size}`, title, caption);
    shown.set(id, section);
    grid.append(section);
    const live = () => stores.filter((store) => store.run);
    charts.add(section.querySelector(".chart"), (narrow) => live().length && overlayFigure(stores, pick, value, view, narrow, isFromZero));
  };
  const render = () => {
    const names = [...new Set(stores.flatMap((store) => store.metricNames()))];
    for (const name of names.slice(0, 1)) addMetric(name);
    add("throughput", "Throughput", "Committed samples per second.", (store) => store.steps.groups(), (row) => row.r, true);
    add("time", "Time per step", "Milliseconds from the end of one step to the end of the next.", (store) => store.steps.groups(),
      (row) => (row.d === null ? null : row.d * 1000), true);
    for (const name of names.slice(1)) addMetric(name);
    table.replaceChildren(...stores.filter((store) => store.run || store.removed).map((store) => {
      const { run } = store;
      if (store.removed) return make("tr", {}, make("th", { scope: "row" }, store.name), make("td", { colspan: "6" }, "this run was removed"));
      const rows = store.steps.groups().slice(-20);
      const seconds = rows.reduce((sum, row) => sum + (row.d ?? 0), 0) / Math.max(1, rows.length);
      const cell = (name, text) => make("td", { "data-name": name }, text);
      return make("tr", {}, make("th", { scope: "row" }, make("a", { href: pageOf([["run", store.name]]) }, store.name)),
        make("td", { "data-name": "state" }, make("span", { class: `pill ${run.state}` }, run.state)),
        cell("step", number(run.step, 9)), cell("samples/s", number(run.rate, 3)), cell("time per step", duration(seconds || NaN)),
        cell("elapsed", duration(run.elapsed)), cell("failures", String(run.failures)));
    }));
  };
  const addMetric = (name) => add(`metric ${name}`, name, "What the scripts logged.",
    (store) => store.metrics.groups().filter((row) => row.v[name]), (row) => row.v[name][0]);
  return { render, charts };
}

export async function followList(onList) {
  let busy = false;
  const refresh = async () => {
    if (document.hidden || busy) return;
    busy = true;
    try {
      onList(await getJson("api/runs", []), "");
    } catch (error) {
      onList(null, error.cause ? error.message : "The server does not answer. This page asks again.");
    } finally {
      busy = false;
    }
  };
  setInterval(refresh, EVERY_MS);
  await refresh();
}
