// The logs of the workers: the end of one log, which follows what is written while the reader is at its end.

import { make } from "./format.js";
import { card } from "./run_page.js";

const MOST_CHARS = 400_000;
const EVERY_MS = 1000;

// `readList()` returns the workers that have a log; `readPart(worker, start)` a part: {text, end, skipped}.
export function mountLogs(place, readList, readPart, isLive) {
  const choice = make("select", { id: "log-worker" });
  const label = make("label", { for: "log-worker" }, "Worker ");
  const note = make("span", { class: "note", role: "status" });
  const text = make("pre", { class: "log", tabindex: "0", role: "log", "aria-label": "Log", "aria-live": "off" });
  const section = card("logs", "Logs", null, make("div", { class: "controls" }, label, choice, note), text);
  section.classList.add("wide");
  place.replaceChildren(section);
  let [end, shown, busy] = [-1, null, false];

  async function refreshList() {
    const workers = await readList();
    if (choice.options.length === workers.length) return;
    const chosen = choice.value;
    choice.replaceChildren(...workers.map((id) => make("option", { value: id }, String(id))));
    if (workers.map(String).includes(chosen)) choice.value = chosen;
    note.textContent = workers.length ? "" : "no worker has written anything yet";
  }

  async function refresh() {
    if (busy || document.hidden) return;
    busy = true;
    try {
      await refreshList();
      if (choice.value === "") return;
      if (choice.value !== shown) {
        [shown, end] = [choice.value, -1];
        text.textContent = "";
      }
      const part = await readPart(Number(choice.value), end);
      if (part.end === end) return;
      const follows = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
      if (end < 0 && part.skipped) note.textContent = "the end of the log; all of it is in the run folder";
      if (part.skipped || end > part.end) text.textContent = "";
      text.append(part.text);
      if (text.textContent.length > MOST_CHARS) text.textContent = text.textContent.slice(-MOST_CHARS);
      text.normalize();
      if (follows || end < 0) text.scrollTop = text.scrollHeight;
      end = part.end;
    } catch (error) {
      if (error.cause === undefined && !(error instanceof TypeError)) throw error;
      note.textContent = "the log cannot be read now";
    } finally {
      busy = false;
    }
  }

  choice.addEventListener("change", refresh);
  refresh();
  if (isLive) setInterval(refresh, EVERY_MS);

}
