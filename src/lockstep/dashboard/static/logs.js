// The logs of the workers: the end of one log, which follows what is written while the reader is at its end.

import { make } from "./format.js";
import { card } from "./run_page.js";
import { replaceText } from "./sections.js";

const MOST_CHARS = 400_000;
const EVERY_MS = 1000;

// `readList()` returns the workers that have a log, and a note; `readPart(worker, start)` a part as log_parts.py says.
export function mountLogs(place, readList, readPart, store, isLive) {
  const choice = make("select", { id: "log-worker" });
  const label = make("label", { for: "log-worker" }, "Worker ");
  const note = make("span", { class: "note", role: "status" });
  const [whole, unfinished] = [document.createTextNode(""), document.createTextNode("")];
  const text = make("pre", { class: "log", tabindex: "0", role: "log", "aria-label": "Log", "aria-live": "off" }, whole, unfinished);
  const section = card("logs", "Logs", null, make("div", { class: "controls" }, label, choice, note), text);
  section.classList.add("wide");
  place.replaceChildren(section);
  let [end, shown, isCut, busy] = [-1, null, false, false];

  async function refreshList() {
    const list = await readList();
    const workers = list.workers.map(String);
    const names = list.workers.map((id) => store.nameOf(id));
    for (const each of [label, choice, text]) each.hidden = !workers.length;
    if (names.join() === [...choice.options].map((each) => each.textContent).join()) return list.note;
    const chosen = choice.value;
    choice.replaceChildren(...workers.map((id, at) => make("option", { value: id }, names[at])));
    if (workers.includes(chosen)) choice.value = chosen;
    return list.note;
  }

  async function refresh() {
    if (busy || document.hidden || store.run.state === "removed") return;
    busy = true;
    try {
      const listNote = await refreshList();
      const wanted = `${choice.value} ${store.run.began}`;  // another run may have taken the folder
      if (wanted !== shown) {
        [shown, end, isCut] = [wanted, -1, false];
        whole.data = unfinished.data = "";
      }
      if (choice.value === "") {
        replaceText(note, listNote);
        return;
      }
      const part = await readPart(Number(choice.value), end);
      const follows = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
      const before = part.skipped || end < 0 || end > part.end ? "" : whole.data;
      isCut ||= part.skipped;
      replaceText(note, listNote || (isCut ? "the end of the log; all of it is in the run folder" : ""));
      if (part.text || before !== whole.data) whole.data = (before + part.text).slice(-MOST_CHARS);
      if (part.unfinished !== unfinished.data) unfinished.data = part.unfinished;
      if (follows || end < 0) text.scrollTop = text.scrollHeight;
      end = part.end;
    } catch (error) {
      if (error.cause === undefined && !(error instanceof TypeError)) throw error;
      replaceText(note, "the log cannot be read now");
    } finally {
      busy = false;
    }
  }

  choice.addEventListener("change", refresh);
  refresh();
  if (isLive) setInterval(refresh, EVERY_MS);
}
