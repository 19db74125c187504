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
let isLost = false;
let isPaused = sessionStorage.getItem("oncekey-paused") === "1";

async function refresh() {
  if (busy) { again = true; return; }
  busy = true;
  const slow = setTimeout(() => loading(true), 500);
  try {
    const answer = await fetch(location.href, { headers: { "X-Oncekey-Live": "1" } });
    if (answer.status === 401) { location.reload(); return; }
    if (!answer.ok) throw new Error(String(answer.status));
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of document.querySelectorAll("[data-live]")) swap(part, fresh.getElementById(part.id));
    lastGood = Date.now();
    main.removeAttribute("data-stale");
    if (!isLost) $("lost").hidden = true;
  } catch {
    main.setAttribute("data-stale", "");
    warn("This page can't be read again just now.");
  } finally {
    clearTimeout(slow);
    loading(false);
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

// What is shown while something better is on its way: the same, dimmed.
function loading(is) {
  main.toggleAttribute("data-loading", is);
  if (is) main.setAttribute("aria-busy", "true"); else main.removeAttribute("aria-busy");
}

function show(state, text) {
  const live = $("live");
  if (!live || live.dataset.state === state) return;
  live.dataset.state = state;
  live.setAttribute("aria-pressed", String(state !== "paused"));
  $("live-text").textContent = text;
}

function warn(text) {
  $("lost-text").textContent = `${text} Last good: ${new Date(lastGood).toLocaleTimeString()}.`;
  $("lost").hidden = false;
}

function lost() {
  isLost = true;
  if (isPaused) return;
  show("lost", "lost");
  warn("Live updates are lost; this page is read again every 10 seconds.");
}

function tick(event) {
  lastTick = Date.now();
  const told = JSON.parse(event.data);
  if (told.error) { lost(); return; }
  const back = isLost;
  isLost = false;
  if (isPaused) return;
  show("live", "live");
  const received = told.totals.received ?? 0;
  const state = JSON.stringify([told.totals, told.waiting]);
  if (back) refresh();
  if (first === null) { first = { received, state }; return; }
  const pill = $("fresh");
  if (pill && received > first.received) {
    pill.textContent = `${received - first.received} new`;
    if ($("none-yet")) { location.reload(); return; }    // nothing is there that could shift
    if (pill.hidden) announce("There are new events");
    pill.hidden = false;
  }
  if (state !== first.state || Date.now() - lastGood > 15000) { first.state = state; refresh(); }
}

function connect() {
  const stream = new EventSource(`${home}/live`);
  stream.addEventListener("tick", tick);
  stream.addEventListener("error", () => {
    if (stream.readyState === EventSource.OPEN) return;
    lost();
    if (stream.readyState === EventSource.CLOSED) { stream.close(); setTimeout(connect, 10000); }  // it was refused
  });
}

function pause(is) {
  isPaused = is;
  sessionStorage.setItem("oncekey-paused", is ? "1" : "0");
  announce(is ? "Live updates are paused" : "Live updates go on");
  if (is) { show("paused", "paused"); $("lost").hidden = true; return; }
  if (isLost) lost(); else show("live", "live");
  refresh();
}

if (main?.hasAttribute("data-live-page")) {
  if (isPaused) show("paused", "paused");
  connect();
  setInterval(() => {
    if (Date.now() - lastTick <= 15000 && !isLost) return;
    lost();
    if (!isPaused) refresh();
  }, 10000);
  $("live").addEventListener("click", () => pause(!isPaused));
  $("retry").addEventListener("click", refresh);
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
  L: () => { if ($("live")) pause(!isPaused); },
  "?": () => $("help")?.showModal(),
  g: () => { waiting = true; },
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog[open]")) return;  // a closed one may hold the focus a moment longer
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
  else if (event.target.method !== "dialog") loading(true);
});
addEventListener("pageshow", () => loading(false));      // somebody came back to it
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  if (!link.hasAttribute("download") && !link.getAttribute("href").includes("#")) loading(true);
});
document.addEventListener("click", async (event) => {
  const name = event.target.dataset?.copy;
  if (!name) return;
  try { await navigator.clipboard.writeText($(name).textContent); announce("Copied"); event.target.textContent = "Copied"; }
  catch { getSelection().selectAllChildren($(name)); announce("Selected: copy it with the keyboard"); }
});
