// The live view of /status.

import { $ } from "./dom.js";
import { errorOf, headers } from "./server.js";

const BUSY_POLL = 1000, IDLE_POLL = 4000; // milliseconds between two requests of /status
const MIN_RATE_SECONDS = 0.8; // for tokens/s: the server's counters are up to a tenth of a second old
const past = [];
let timer = null, before = null, answering = () => false;

export function startLive(isAnswering) {
  answering = isAnswering;
  $("live").addEventListener("shown", pollStatus);
  for (const [target, kind] of [[$("key"), "change"], [$("model"), "change"], [document, "visibilitychange"]]) {
    target.addEventListener(kind, () => { before = null; pollStatus(); });
  }
  pollStatus();
}

export async function pollStatus() {
  clearTimeout(timer);
  timer = null;
  if ($("live").hidden || document.visibilityState !== "visible") return;
  let active = false, pause = 0;
  try {
    const response = await fetch("status", { headers: headers() });
    if (response.status === 429) pause = 1000 * (Number(response.headers.get("Retry-After")) || 60); // the key's limit counts these, too
    if (!response.ok) throw await errorOf(response);
    active = showStatus(await response.json());
  } catch (error) {
    $("live-running").textContent = error instanceof TypeError ? "offline" : error.message;
    before = null;
  }
  clearTimeout(timer);
  timer = setTimeout(pollStatus, Math.max(pause, active || answering() ? BUSY_POLL : IDLE_POLL));
}

// Shows the figures of the selected model, or of all; returns whether any request is running.
function showStatus(status) {
  const all = Object.values(status.models), one = status.models[$("model").value];
  const models = one ? [one] : all, sum = read => models.reduce((total, model) => total + (read(model) ?? 0), 0);
  const now = performance.now(), tokens = sum(m => m.tokens), count = sum(m => m.running);
  const used = sum(m => m.blocks.used), cached = sum(m => m.blocks.cached), total = sum(m => m.blocks.total);
  const queries = sum(m => m.prefix?.queries), hits = sum(m => m.prefix?.hits);
  $("live-running").textContent = count;
  $("live-waiting").textContent = sum(m => m.waiting);
  const passed = before ? (now - before.now) / 1000 : 0;
  if (passed > MIN_RATE_SECONDS) $("live-rate").textContent = Math.max(0, (tokens - before.tokens) / passed).toFixed(1);
  $("live-hits").textContent = queries ? `${Math.round((100 * hits) / queries)} % of ${queries} tokens` : "none yet";
  $("live-blocks").textContent = `${used} used, ${cached} cached, of ${total}`;
  $("live-used").style.width = `${(100 * used) / (total || 1)}%`;
  $("live-cached").style.width = `${(100 * cached) / (total || 1)}%`;
  if (!before || passed > MIN_RATE_SECONDS) before = { now, tokens };
  past.push({ running: count, waiting: sum(m => m.waiting) });
  if (past.length > 60) past.shift();
  chart();
  return count > 0;
}

function chart() {
  const canvas = $("live-chart"), pen = canvas.getContext("2d"), max = Math.max(4, ...past.map(p => p.running + p.waiting));
  const height = canvas.height, bar = (x, from, to) => pen.fillRect(x * 2, height - (to / max) * height, 1.5, ((to - from) / max) * height);
  pen.clearRect(0, 0, canvas.width, height);
  const color = getComputedStyle(canvas).color;
  past.forEach((p, x) => {
    pen.fillStyle = color;
    pen.globalAlpha = 1;
    bar(x, 0, p.running);
    pen.globalAlpha = 0.35;
    bar(x, p.running, p.running + p.waiting);
  });
}
