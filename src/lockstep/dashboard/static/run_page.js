// The page of one run: its sections, and when each chart is drawn.

import { breakdownFigure, heatFigure, metricFigure, PHASE_TEXT, textOfMetric, throughputFigure } from "./charts.js";
import { duration, make, number, plural } from "./format.js";
import * as sections from "./sections.js";
import { timelineFigure } from "./timeline.js";

const CONFIG = { displayModeBar: false, responsive: false, doubleClick: false };

export function card(id, title, caption, ...content) {
  return make("section", { class: "card", id, "aria-labelledby": `${id}-title` },
    make("h2", { id: `${id}-title` }, title), caption === null ? null : make("p", { class: "caption", id: `${id}-caption` }, caption), ...content);
}

export function chartCard(id, title, caption, classes = "") {
  const chart = make("div", { class: "chart", tabindex: "0", role: "img", "aria-label": title });
  const legend = make("ul", { class: "legend", "aria-label": `Colours of: ${title}` });
  legend.hidden = true;
  const found = card(id, title, caption, chart, legend);
  found.className = `card ${classes}`;
  return found;
}

// Draws charts that can be seen, again if their size changes, and tells `view` what part the user has chosen.
export class Charts {
  constructor(view, redraw) {
    this.view = view;
    this.redraw = redraw;
    this.figures = new Map();
    this.seen = new Set();
    this.observer = new IntersectionObserver((found) => {
      for (const each of found) {
        if (each.isIntersecting) this.seen.add(each.target); else this.seen.delete(each.target);
        if (each.isIntersecting) this.draw(each.target);
      }
    }, { rootMargin: "200px" });
    this.sizes = new ResizeObserver((found) => {
      for (const { target } of found) {
        if (target.data && Math.abs(target.clientWidth - (target.drawnWidth ?? 0)) > 1) this.draw(target);
      }
    });
  }

  // `make` returns the figure; it is called whenever the chart is drawn.
  add(element, makeFigure) {
    this.figures.set(element, makeFigure);
    this.observer.observe(element);
    this.sizes.observe(element);
    element.addEventListener("keydown", (event) => this.onKey(event));
  }

  remove(element) {
    this.figures.delete(element);
    this.seen.delete(element);
    this.observer.unobserve(element);
    this.sizes.unobserve(element);
    Plotly.purge(element);
  }

  drawAll() {
    clearTimeout(this.timer);
    this.timer = null;
    const began = performance.now();
    for (const element of this.seen) this.draw(element);
    const end = performance.now();
    this.due = end + Math.max(400, 3 * (end - began));
  }

  // Draw when it is time: charts may take a quarter of a slow device, so that the rest of the page stays quick.
  drawSoon() {
    this.timer ??= setTimeout(() => this.drawAll(), Math.max(0, (this.due ?? 0) - performance.now()));
  }

  draw(element) {
    const makeFigure = this.figures.get(element);
    const figure = makeFigure?.(element.clientWidth < 520, element);
    if (!figure || !element.clientWidth) return;
    if (figure.lines) element.style.height = `${Math.min(900, Math.max(170, 70 + figure.lines * 26))}px`;
    figure.layout.width = element.clientWidth;
    figure.layout.height = element.clientHeight;
    this.extent = this.view.range ? this.extent : figure.layout.xaxis.range ?? this.extent;
    element.drawnWidth = element.clientWidth;
    Plotly.react(element, figure.data, figure.layout, CONFIG);
    if (!element.isFollowed) {
      element.isFollowed = true;
      element.on("plotly_relayout", (change) => this.onRelayout(element, change));
      element.on("plotly_doubleclick", () => this.show(null));
    }
  }

  onRelayout(element, change) {
    if (change["xaxis.range[0]"] === undefined || element.dataset.alone) return;
    this.show([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
  }

  show(range) {
    this.view.range = range;
    this.redraw();
  }

  // Zoom by `factor` around the middle, or move by `part` of what is shown.
  zoom(factor, part = 0) {
    const first = [...this.seen].find((each) => !each.dataset.alone && each.layout?.xaxis?.range);
    if (!first) return;
    const [from, to] = this.view.range ?? first.layout.xaxis.range;
    const [middle, half] = [(from + to) / 2 + part * (to - from), ((to - from) / 2) * factor];
    this.show([middle - half, middle + half]);
  }

  onKey(event) {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      event.preventDefault();
      this.zoom(1, event.key === "ArrowLeft" ? -0.25 : 0.25);
    }
  }
}

export function mountRun(root, store, view, redraw) {
  const charts = new Charts(view, redraw);
  const [stateText, stateSince] = [make("span", { role: "status" }), make("span")];
  const state = make("span", { class: "pill" }, stateText, stateSince);
  const title = make("h1", {}, store.name);
  const factsList = make("dl", { class: "facts" });
  const verdict = make("p", { class: "verdict", role: "status" });
  verdict.hidden = true;
  const metricsGrid = make("div", { class: "grid more" });
  const throughput = chartCard("throughput", "Throughput", "Committed samples per second.");
  const breakdown = chartCard("breakdown", "Where a step spends its time", "Mean over the workers, for each step.");
  const heat = chartCard("heat", "Workers against each other",
    "The time that a worker works itself, relative to the median of the workers in the same steps. Orange and red cells are slow "
    + "workers. In dark cells the worker did not train.");
  const timeline = chartCard("timeline", "Generations and faults",
    "A bar is a worker in one generation. The narrow parts are recoveries, checkpoints, evaluations and time outside the loop.", "wide");
  const [workersCard, workersBody] = workersTable();
  const entries = make("ol", { class: "entries", tabindex: "0", "aria-label": "What happened, newest first" });
  const happened = card("happened", "What happened", null, entries);
  const summaryText = make("ul", { class: "summary" });
  const summary = card("summary", "Summary", null, summaryText);
  summary.classList.add("wide");
  summary.hidden = true;
  const logs = make("div", { class: "wide", id: "logs-place" });
  const first = chartCard("metric-0", "Logged values", "");
  root.replaceChildren(
    make("div", { class: "title" }, title, state), verdict, factsList, summary,
    make("div", { class: "grid" }, first, throughput, breakdown, heat, timeline, workersCard, happened), logs, metricsGrid);

  const chartOf = (section) => section.querySelector(".chart");
  const metricCards = [first];
  charts.add(chartOf(first), (narrow, element) => drawMetric(store, view, narrow, element, 0));
  charts.add(chartOf(throughput), (narrow) => store.steps.groups().length && throughputFigure(store, view, narrow));
  charts.add(chartOf(breakdown), (narrow) => drawBreakdown(store, view, narrow, breakdown));
  charts.add(chartOf(heat), (narrow) => store.steps.groups().length && heatFigure(store, view, narrow));
  chartOf(timeline).dataset.alone = "yes";
  charts.add(chartOf(timeline), (narrow) => store.generations.length && timelineFigure(store, view, narrow));

  const render = () => {
    if (!store.run) return;
    const [kind, text, since] = sections.stateOf(store);
    state.className = `pill ${kind}`;
    sections.replaceText(stateText, text);
    sections.replaceText(stateSince, since);
    sections.renderVerdict(verdict, store);
    sections.renderFacts(factsList, store);
    sections.renderSummary(summary, summaryText, store);
    sections.renderWorkers(workersBody, store);
    sections.replaceText(workersCard.querySelector(".caption"), sections.captionOfWorkers(store));
    sections.renderEntries(entries, store);
    addMetrics(store, view, charts, metricCards, metricsGrid);
    describe(store, metricCards, { throughput, breakdown, heat, timeline });
  };
  return { render, charts, logs };
}

function workersTable() {
  const names = ["Worker", "State", "Rank", "Step", "Lanes", "Own work", "Waits", "Newest step", "Memory", "GPU"];
  const body = make("tbody");
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)));
  const table = make("table", { class: "workers" }, make("thead", {}, head), body);
  const region = make("div", { class: "scroll", role: "region", tabindex: "0", "aria-labelledby": "workers-title" }, table);
  const found = card("workers", "Workers", "", region);
  found.classList.add("wide");
  return [found, body];
}

function drawMetric(store, view, narrow, element, index) {
  const name = store.metricNames()[index];
  const section = element.closest("section");
  sections.replaceText(section.querySelector("h2"), name ?? "Logged values");
  sections.replaceText(section.querySelector(".caption"), name ? "What the script logged. A thick line is the trend."
    : "The script has logged nothing yet: run.log(loss=loss).");
  return name ? metricFigure(store, name, view, narrow) : null;
}

function addMetrics(store, view, charts, cards, grid) {
  const names = store.metricNames();
  while (cards.length < names.length) {
    const index = cards.length;
    const found = chartCard(`metric-${index}`, names[index], "");
    cards.push(found);
    grid.append(found);
    charts.add(found.querySelector(".chart"), (narrow, element) => drawMetric(store, view, narrow, element, index));
  }
}

function drawBreakdown(store, view, narrow, section) {
  if (!store.steps.groups().length) return null;
  const figure = breakdownFigure(store, view, narrow);
  const legend = section.querySelector(".legend");
  const key = figure.used.join();
  if (legend.dataset.key !== key) {
    legend.dataset.key = key;
    legend.hidden = false;
    legend.replaceChildren(...figure.used.map((phase) => {
      const swatch = make("i");
      swatch.style.background = `var(--phase-${phase})`;
      return make("li", {}, swatch, PHASE_TEXT[phase]);
    }));
  }
  const cut = figure.cut ? ` ${plural(figure.cut, "longer step")} ${figure.cut === 1 ? "is" : "are"} cut off.` : "";
  const costs = store.run.costs && ` The last steps: ${store.run.costs.replace("a step: ", "")}.`;
  sections.replaceText(section.querySelector(".caption"), `Mean over the workers.${cut}${costs}`);
  return figure;
}

// Says in words what a chart shows, for those who do not see it.
function describe(store, metricCards, cards) {
  const say = (section, text) => section.querySelector(".chart").setAttribute("aria-label", text);
  const groups = store.steps.groups();
  const last = groups[groups.length - 1];
  metricCards.forEach((section, index) => {
    const name = store.metricNames()[index];
    if (name) say(section, textOfMetric(store, name));
  });
  if (!last) return;
  say(cards.throughput, `Throughput: ${number(last.r)} samples/s at step ${last.e}`);
  say(cards.breakdown, `Step ${last.e}: ` + Object.entries(last.ph).map(([phase, s]) => `${PHASE_TEXT[phase] ?? phase} ${duration(s)}`).join(", "));
  say(cards.heat, `Own work at step ${last.e}: ` + Object.entries(last.w).map(([id, each]) => `worker ${id} ${duration(each[0])}`).join(", "));
  say(cards.timeline, `${store.generations.length} generations; the list below says what happened`);
}
