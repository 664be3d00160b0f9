// RunStore: what the server has sent of one run, put together. The server sends everything once and then what changes.

export const PHASES = ["data", "lane", "forward", "backward", "optimizer", "body", "exchange", "confirm", "between",
  "checkpoint", "evaluate", "recovery", "outside"];
const KEPT = 2000;

class Tiers {
  constructor() {
    this.coarse = new Map();
    this.fine = new Map();
    this.width = 1;
    this.joined = null;
  }

  apply(changes) {
    if (!changes) return;
    if (changes.reset) this.coarse.clear();
    this.width = changes.width;
    for (const group of changes.coarse) this.coarse.set(Math.floor((group.s - 1) / this.width), group);
    for (const group of changes.fine) this.fine.set(group.s, group);
    for (const step of this.fine.keys()) if (step < changes.firstFine) this.fine.delete(step);
    this.joined = null;
  }

  // All groups by step: groups of steps up to the newest steps, which are there one by one.
  groups() {
    if (this.joined) return this.joined;
    const fine = [...this.fine.values()].sort((a, b) => a.s - b.s);
    const first = fine.length ? fine[0].s : Infinity;
    const coarse = [...this.coarse.values()].filter((group) => group.e < first).sort((a, b) => a.s - b.s);
    this.joined = [...coarse, ...fine];
    return this.joined;
  }
}

export class RunStore {
  constructor(name = "") {
    this.name = name;
    this.clear();
  }

  clear() {
    this.run = null;
    this.steps = new Tiers();
    this.metrics = new Tiers();
    this.workers = new Map();
    this.lives = {};
    this.entries = [];
    this.generations = [];
    this.pauses = [];
    this.summary = [];
    this.logs = {};
    this.arrived = 0;
  }

  apply(changes) {
    if (changes.reset) this.clear();
    this.arrived = Date.now();
    this.run = changes.run;
    this.steps.apply(changes.steps);
    this.metrics.apply(changes.metrics);
    for (const worker of changes.workers) this.workers.set(worker.id, worker);
    Object.assign(this.lives, changes.lives);
    this.entries = [...this.entries, ...changes.entries].slice(-KEPT);
    this.generations = [...this.generations, ...changes.generations].slice(-KEPT);
    this.pauses = [...this.pauses, ...changes.pauses].slice(-KEPT);
    if (changes.summary) this.summary = changes.summary;
    if (changes.logs) this.logs = changes.logs;
  }

  get members() {
    return this.run?.members ?? [];
  }

  // The number of a worker, and its rank if that is another number, as after a replacement.
  nameOf(worker) {
    const rank = this.members.indexOf(worker);
    return rank < 0 || rank === worker ? `${worker}` : `${worker} (rank ${rank})`;
  }

  metricNames() {
    const names = Object.keys(this.run?.values ?? {});
    return names.sort((a, b) => (b === "loss") - (a === "loss"));
  }

  // Workers that ever trained, in the order of their ids.
  workerIds() {
    const ids = new Set([...Object.keys(this.lives).map(Number), ...this.workers.keys()]);
    return [...ids].sort((a, b) => a - b);
  }

  // The step at which the run was at time t.
  stepAt(t) {
    const groups = this.steps.groups();
    let [low, high] = [0, groups.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (groups[middle].b <= t) low = middle + 1; else high = middle;
    }
    return low ? groups[low - 1].e : 0;
  }

  // Seconds since the newest thing that is known of the run.
  idle() {
    if (!this.run || this.run.ended !== null) return 0;
    return (this.run.idle ?? 0) + (Date.now() - this.arrived) / 1000;
  }

  // Mean over the newest steps: the part of a step that is the worker's own work, in seconds, and the whole step.
  recent(worker, count = 20) {
    const found = this.steps.groups().slice(-count).map((group) => group.w[worker]).filter(Boolean);
    if (!found.length) return null;
    const mean = (index) => found.reduce((sum, each) => sum + each[index], 0) / found.length;
    return { own: mean(0), step: mean(2) };
  }
}
