// The parts of a run's page that are text: facts, the verdict on stragglers, the table of workers, what happened, the summary.

import { PHASE_TEXT } from "./charts.js";
import { bytes, clock, duration, make, median, number, plural } from "./format.js";
import { PHASES } from "./store.js";

const STATE_MORE = {
  lost: "The process that supervised this run is gone, and the run has not said how it ended.",
  unknown: "It is not known whether this run goes on: its files are those of another machine, or they are damaged.",
  removed: "The folder of this run was removed. What you see was read before.",
};

// Changes an element only if its text would change, so that a selection and a screen reader are left in peace.
export function replaceText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Its class, the text, and more text that a screen reader does not say each time that it changes.
export function stateOf(store) {
  const run = store.run;
  const idle = store.idle();
  const typical = store.steps.groups().slice(-20).reduce((most, group) => Math.max(most, group.d ?? 0), 0);
  if (run.state === "running" && store.live && idle > Math.max(4, 4 * typical)) return ["waiting", "no step", ` for ${duration(Math.floor(idle))}`];
  return [run.state, run.state, ""];
}

export function facts(store) {
  const run = store.run;
  const groups = store.steps.groups();
  const last = groups.slice(-20);
  const seconds = last.reduce((sum, group) => sum + (group.d ?? 0), 0) / Math.max(1, last.filter((group) => group.d).length);
  const metric = store.metricNames()[0];
  const running = run.state === "running";
  const elapsed = running && store.live ? run.elapsed + store.idle() : run.elapsed;
  const found = [["Step", number(run.step, 9)]];
  if (metric) found.push([metric, run.values[metric]]);
  found.push(["Samples/s", run.rate ? number(run.rate, 3) : "–"]);
  found.push(["Time per step", seconds ? duration(seconds) : "–"]);
  found.push(["Workers", String(run.members.length)]);
  if (run.generation !== null) found.push(["Generation", String(run.generation)]);
  found.push(["Failures", String(run.failures)]);
  if (run.checkpoint >= 0) found.push(["Checkpoint", `step ${run.checkpoint}`]);
  found.push(["Elapsed", duration(elapsed)]);
  return found;
}

export function percent(part) {
  return `${number(part * 100, 2)}%`;
}

export function renderFacts(element, store) {
  const found = facts(store);
  if (element.childElementCount !== found.length) {
    element.replaceChildren(...found.map(([name]) => make("div", {}, make("dt", {}, name), make("dd"))));
  }
  found.forEach(([name, value], index) => {
    const [title, text] = element.children[index].children;
    replaceText(title, name);
    replaceText(text, value);
  });
}

export function renderVerdict(element, store) {
  const run = store.run;
  const [sentence, level] = run.state === "failed" ? [`The run failed: ${run.why}`, "fault"]
    : run.verdict ? [(run.ended === null ? "" : "At the end: ") + run.verdict.sentence, "warn"]
    : STATE_MORE[run.state] ? [STATE_MORE[run.state], "warn"]
    : run.state === "finished" ? [`The run has ended: ${run.why}`, "calm"] : ["", "calm"];
  element.hidden = !sentence;
  element.className = `verdict ${level}`;
  replaceText(element, sentence && sentence[0].toUpperCase() + sentence.slice(1));
}

function lifeText(store, id) {
  const [state, how, ended] = store.lives[id] ?? ["training", "", 0];
  if (state === "died") return [`died: ${how}, at ${clock(ended)}`, "fault"];
  if (state === "ended") return ["ended", "calm"];
  if (state === "left") return ["left", "calm"];
  if (store.run.ended !== null) return ["ended", "calm"];
  return store.members.includes(id) ? ["training", "good"] : ["starting", "warn"];
}

function waitsText(store, waits) {
  if (!waits) return "–";
  const [part, whom] = waits;
  return percent(part) + (whom === null ? "" : `, most for worker ${store.nameOf(whom)}`);
}

function laneStrip(worker, total) {
  const strip = make("span", { class: "lanes", role: "img", "aria-label": `lanes ${worker.lanes[0]} to ${worker.lanes[1] - 1} of ${total}` });
  const shown = Math.min(total, 32);
  for (let lane = 0; lane < shown; lane++) {
    const at = Math.floor((lane * total) / shown);
    strip.append(make("i", { class: at >= worker.lanes[0] && at < worker.lanes[1] ? "own" : null }));
  }
  return strip;
}

function phaseBar(worker) {
  const total = Object.values(worker.phases).reduce((sum, each) => sum + each, 0) || 1;
  const bar = make("span", { class: "phases", role: "img", "aria-label": "phases of its newest step: " +
    Object.entries(worker.phases).map(([phase, seconds]) => `${PHASE_TEXT[phase] ?? phase} ${duration(seconds)}`).join(", ") });
  for (const phase of PHASES) {
    const part = (worker.phases[phase] ?? 0) / total;
    if (part < 0.004) continue;
    const piece = make("i", { title: `${PHASE_TEXT[phase]}: ${duration(worker.phases[phase])}` });
    piece.style.width = `${(part * 100).toFixed(2)}%`;
    piece.style.background = `var(--phase-${phase})`;
    bar.append(piece);
  }
  return bar;
}

// Members first; of those that are gone, the last ones.
function shownWorkers(store) {
  const gone = store.workerIds().filter((id) => !store.members.includes(id));
  return [...store.members, ...gone.slice(-20).reverse()];
}

export function renderWorkers(body, store) {
  const total = Math.max(0, ...store.members.map((id) => store.workers.get(id)?.lanes[1] ?? 0));
  const recent = new Map(store.members.map((id) => [id, store.recent(id)]));
  const typical = median([...recent.values()].filter(Boolean).map((each) => each.own));
  body.replaceChildren(...shownWorkers(store).map((id) => {
    const [life, level] = lifeText(store, id);
    const worker = store.workers.get(id);
    const own = recent.get(id)?.own;
    const isSlow = own && typical && own > 1.1 * typical;
    const cell = (name, ...children) => make("td", { "data-name": name }, ...children);
    const member = store.members.includes(id);
    const isNamed = store.run.verdict?.worker === `${id}`;
    return make("tr", { class: member ? (isNamed ? "named" : null) : "gone" },
      make("th", { scope: "row" }, `${id}`),
      cell("state", make("span", { class: `state ${level}` }, life)),
      cell("rank", member && worker ? `${worker.rank}` : "–"),
      cell("step", worker ? `${worker.step}` : "–"),
      cell("lanes", ...(member && worker ? [laneStrip(worker, total), ` ${worker.lanes[1] - worker.lanes[0]}`] : ["–"])),
      cell("own work", make("span", { class: isSlow ? "slow" : null }, own ? duration(own) : "–",
        isSlow ? ` (${number(own / typical, 3)}×)` : "")),
      cell("waits", member && worker ? waitsText(store, worker.waits) : "–"),
      cell("newest step", member && worker ? phaseBar(worker) : "–"),
      cell("memory", worker && member ? bytes(worker.memory) : "–"),
      cell("GPU", worker && member && worker.gpu >= 0 ? `${worker.gpu}%, ${bytes(worker.gpuMemory)}` : "–"));
  }));
}

export function renderEntries(list, store) {
  const shown = store.entries.filter((each) => each.mark !== "joined").slice(-200).reverse();
  const key = `${shown.length} ${shown[0]?.t} ${store.entries.length}`;
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...shown.map((each) => make("li", { class: each.level },
    make("time", {}, clock(each.t)), make("span", {}, each.text))));
}

export function renderSummary(section, element, store) {
  section.hidden = !store.summary.length;
  const key = store.summary.join("\n");
  if (element.dataset.key === key) return;
  element.dataset.key = key;
  element.replaceChildren(...store.summary.map((line) => make("li", {}, line[0].toUpperCase() + line.slice(1))));
}

export function captionOfWorkers(store) {
  const gone = store.workerIds().length - store.members.length;
  return `${plural(store.members.length, "member")} of the generation${gone > 0 ? `, then ${plural(gone, "other worker")}` : ""}. Own work is the time in ` +
    "which a worker waits for nobody, as mean over the last 20 steps. Waits are the part of a step in which it waits for other workers and for the transport.";
}
