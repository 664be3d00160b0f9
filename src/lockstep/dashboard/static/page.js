// The page of `lockstep dash`: what the address asks for, keys, and what is shown when.

import { make } from "./format.js";
import { mountLogs } from "./logs.js";
import { mountRun } from "./run_page.js";
import { followList, mountComparison, mountList } from "./runs_page.js";
import { startControls } from "./controls.js";
import { RunStore } from "./store.js";
import { getJson, pageOf, Stream } from "./stream.js";

const root = document.getElementById("content");
const query = new URLSearchParams(location.search);
const connection = document.getElementById("connection");
const view = { axis: "step", range: null };
let shown = null;

// The reader has changed what the charts show.
function redraw() {
  shown?.render();
  shown?.charts.drawAll();
}

// Something new has come from the server.
function update() {
  shown.render();
  shown.charts.drawSoon();
}

function say(text) {
  if (connection.textContent !== text) connection.textContent = text;
  const empty = root.querySelector(".empty");
  if (empty && text) empty.textContent = text;
}

function showRun(name) {
  const store = new RunStore(name);
  store.live = true;
  const onMessage = (message) => {
    if (message[name] === null) {
      say("This run was removed.");
      return;
    }
    store.apply(message[name]);
    if (!shown) {
      shown = mountRun(root, store, view, redraw);
      document.title = `${name} · Lockstep`;
      mountLogs(shown.logs, () => getJson("api/logs", [["run", name]]),
        (worker, start) => getJson("api/log", [["run", name], ["worker", worker], ["start", start]]), store, true);
    }
    update();
  };
  new Stream([name], "full", onMessage, say);
}

function showComparison(names) {
  const stores = names.map((name) => new RunStore(name));
  shown = mountComparison(root, stores, view, redraw);
  new Stream(names, "compare", (message) => {
    for (const store of stores.filter((each) => each.name in message)) {
      store.removed = message[store.name] === null;
      if (!store.removed) store.apply(message[store.name]);
    }
    update();
  }, say);
}

function showList() {
  let list = null;
  followList((found, text) => {
    say(text);
    if (!found) return;
    if (list) list.render(found); else list = mountList(root, found);
  });
}

async function start() {
  const found = await getJson("api/runs", []);
  const names = query.getAll("run");
  const crumbs = document.getElementById("crumbs");
  const folder = make("a", { href: pageOf([]) }, found.single ? "Lockstep" : found.folder);
  crumbs.replaceChildren(folder);
  startControls(view, redraw, () => shown?.charts, () => { location.href = folder.href; });
  if (found.single) showRun(found.runs[0]?.name ?? found.folder);
  else if (names.length > 1) showComparison(names);
  else if (names.length === 1) showRun(names[0]);
  else showList();
  document.getElementById("axis").hidden = !found.single && !names.length;
}

start().catch((error) => {
  root.replaceChildren(make("p", { class: "empty" }, error.cause ? error.message : "The server does not answer. Load this page again when it runs."));
});
