// The one script of the dashboard: live parts by server-sent events, keys, copying. Pages work without it.
const home = "/_oncekey";
const $ = (id) => document.getElementById(id);
const main = $("main");
const announce = (text) => { const place = $("announce"); if (place) place.textContent = text; };

// --- Live parts: on a tick the page is read again, and its marked parts are put in place.
let first = null;
let busy = false;
let again = false;
let lastGood = Date.now();
let lastTick = Date.now();

async function refresh() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const answer = await fetch(location.href, { headers: { "X-Oncekey-Live": "1" } });
    if (answer.status === 401) { location.reload(); return; }
    if (!answer.ok) throw new Error(String(answer.status));
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of document.querySelectorAll("[data-live]")) swap(part, fresh.getElementById(part.id));
    lastGood = Date.now();
    main.removeAttribute("data-stale");
  } catch {
    main.setAttribute("data-stale", "");
  } finally {
    busy = false;
    if (again) { again = false; refresh(); }
  }
}

function swap(part, fresh) {
  if (!fresh) { if (part.id === "first") part.remove(); return; }
  if (part.contains(document.activeElement)) return;     // nobody loses their place
  for (const open of part.querySelectorAll("details[open][id]")) fresh.querySelector(`#${open.id}`)?.setAttribute("open", "");
  if (part.innerHTML !== fresh.innerHTML) part.replaceChildren(...fresh.childNodes);
}

function show(state, text) {
  const live = $("live");
  if (!live || live.dataset.state === state) return;
  live.dataset.state = state;
  $("live-text").textContent = text;
}

function lost() {
  show("lost", "lost");
  const banner = $("lost");
  banner.textContent = `Live updates are lost; trying again. Last good: ${new Date(lastGood).toLocaleTimeString()}`;
  banner.hidden = false;
}

function tick(event) {
  lastTick = Date.now();
  const told = JSON.parse(event.data);
  if (told.error) { lost(); return; }
  show("live", "live");
  $("lost").hidden = true;
  const received = told.totals.received ?? 0;
  const state = JSON.stringify([told.totals, told.waiting]);
  if (first === null) { first = { received, state }; return; }
  const pill = $("fresh");
  if (pill && received > first.received) {
    pill.textContent = `${received - first.received} new`;
    if (pill.hidden) announce("There are new events");
    pill.hidden = false;
  }
  if (state !== first.state || Date.now() - lastGood > 15000) { first.state = state; refresh(); }
}

if (main?.hasAttribute("data-live-page")) {
  const stream = new EventSource(`${home}/live`);
  stream.addEventListener("tick", tick);
  stream.addEventListener("error", () => { if (stream.readyState !== EventSource.OPEN) lost(); });
  setInterval(() => { if (Date.now() - lastTick > 15000) { lost(); refresh(); } }, 10000);
}

// --- Choosing rows
const rows = () => [...document.querySelectorAll("[data-rows] [data-row]")];
let at = -1;
function go(step) {
  const all = rows();
  if (!all.length) return;
  all[at]?.removeAttribute("data-at");
  at = Math.max(0, Math.min(all.length - 1, at + step));
  all[at].setAttribute("data-at", "");
  all[at].querySelector("a")?.focus();
  all[at].scrollIntoView({ block: "nearest" });
}
function count() {
  const form = $("chosen");
  if (!form) return;
  const number = document.querySelectorAll('input[name="id"]:checked').length;
  $("replay-chosen").disabled = number === 0;
  $("chosen-count").textContent = `${number} chosen`;
}
document.addEventListener("change", (event) => { if (event.target.name === "id") count(); });
count();

// --- Keys
let waiting = false;
const keys = {
  j: () => go(1),
  k: () => go(-1),
  x: () => { const box = rows()[at]?.querySelector('input[type="checkbox"]'); if (box) { box.checked = !box.checked; count(); } },
  R: () => { const one = $("replay-open") ?? $("replay-chosen"); if (one && !one.disabled) one.click(); },
  "/": () => $("q") ? $("q").focus() : location.assign(`${home}/events`),
  "?": () => $("help")?.showModal(),
  g: () => { waiting = true; setTimeout(() => { waiting = false; }, 1500); },
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  if (waiting) {
    waiting = false;
    const link = document.querySelector(`[data-go="${CSS.escape(event.key)}"]`);
    if (link) { event.preventDefault(); link.click(); }
    return;
  }
  const act = keys[event.key];
  if (act) { event.preventDefault(); act(); }
});
$("help-button")?.addEventListener("click", () => $("help").showModal());

// --- Small things
document.querySelector("nav [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
document.addEventListener("submit", (event) => {
  const asked = event.target.dataset.confirm;
  if (asked && !confirm(asked)) event.preventDefault();
});
document.addEventListener("click", async (event) => {
  const name = event.target.dataset?.copy;
  if (!name) return;
  try { await navigator.clipboard.writeText($(name).textContent); announce("Copied"); event.target.textContent = "Copied"; }
  catch { getSelection().selectAllChildren($(name)); announce("Selected: copy it with the keyboard"); }
});
