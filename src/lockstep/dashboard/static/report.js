// The report: the page of a run whose data is in the file.

import { make } from "./format.js";
import { startControls } from "./controls.js";
import { mountLogs } from "./logs.js";
import { mountRun } from "./run_page.js";
import { RunStore } from "./store.js";

const reportData = JSON.parse(document.getElementById("report-data").textContent);
const reportStore = new RunStore(reportData.run.name);
const reportView = { axis: "step", range: null };
reportStore.apply(reportData);
const reportPage = mountRun(document.getElementById("content"), reportStore, reportView, () => reportPage.charts.drawAll());
const readList = async () => ({ workers: Object.keys(reportData.logs).map(Number), note: reportData.logsNote });
const readPart = async (worker, start) => ({ text: start < 0 ? reportData.logs[worker] : "", unfinished: "", end: 0, skipped: false });
document.getElementById("crumbs").replaceChildren(make("span", {}, `Report of ${reportData.made}`));
startControls(reportView, () => reportPage.charts.drawAll(), () => reportPage.charts, () => {});
mountLogs(reportPage.logs, readList, readPart, reportStore, false);
reportPage.render();
