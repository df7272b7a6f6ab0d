// The frame: tabs, key, state of the server; each view is a module with show(root, ...) -> stop().

import { getJson, key, setKey } from "./door.js";
import * as live from "./live.js";
import * as requests from "./requests.js";
import * as trace from "./trace.js";
import * as tryIt from "./try.js";

const view = document.getElementById("view");
const notice = document.getElementById("notice");
let stop = () => {};

export function say(message) {
  notice.hidden = !message;
  notice.textContent = message ?? "";
}

/** "#/trace/ID/step/12" -> the view and what it is of. */
function route() {
  const [name, id, , step] = (location.hash.replace(/^#\/?/, "") || "live").split("/").map(decodeURIComponent);
  for (const tab of document.querySelectorAll("nav a")) {
    tab.classList.toggle("on", tab.dataset.tab === name || (name === "trace" && tab.dataset.tab === "requests"));
  }
  stop();
  say("");
  view.replaceChildren();
  if (name === "trace" && id) stop = trace.show(view, say, id, step === undefined ? null : Number(step));
  else if (name === "requests") stop = requests.show(view, say);
  else if (name === "try") stop = tryIt.show(view, say);
  else stop = live.show(view, say);
}

async function watchState() {
  const pill = document.getElementById("state");
  try {
    const health = await fetch("readyz", { cache: "no-store" });
    pill.textContent = health.ok ? "ready" : "not ready";
    pill.className = `pill ${health.ok ? "good" : "bad"}`;
  } catch {
    pill.textContent = "no answer";
    pill.className = "pill bad";
  }
}

async function nameModels() {
  try {
    document.getElementById("model").textContent = (await getJson("v1/models")).data.map((model) => model.id).join(", ");
  } catch { /* the view says what is wrong */ }
}

const box = document.getElementById("key");
box.value = key();
document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  box.blur();
});
box.addEventListener("change", () => {
  setKey(box.value);
  nameModels();
  route();
});
window.addEventListener("hashchange", route);
setInterval(watchState, 5000);
watchState();
nameModels();
route();
