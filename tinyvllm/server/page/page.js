// The chat page: a conversation with /v1/chat/completions, kept in this browser, and a live view of /status.

import { element, render, toClipboard } from "./markdown.js";

const $ = id => document.getElementById(id);
const STORE = "tinyvllm.";
const BUSY_POLL = 1000, IDLE_POLL = 4000; // milliseconds between two requests of /status
const MIN_RATE_SECONDS = 0.8; // for tokens/s: the server's counters are up to a tenth of a second old
const stored = (name, fallback) => {
  try { return JSON.parse(localStorage.getItem(STORE + name)) ?? fallback; } catch { return fallback; }
};
const store = (name, value) => {
  try { localStorage.setItem(STORE + name, JSON.stringify(value)); } catch { $("figures").textContent = "this browser does not allow storage; the conversation is lost when the page is closed"; }
};

let messages = stored("messages", []);
if (!Array.isArray(messages)) messages = [];
let running = null; // the AbortController of the answer in progress

// --- requests

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: "Bearer " + key }) };
}

async function errorOf(response) {
  let text = `${response.status} ${response.statusText}`;
  try { text = (await response.json()).error.message ?? text; } catch { /* not in the API's shape: show the status */ }
  if (response.status === 401) { show("settings", true); $("key").focus(); }
  return new Error(text);
}

function request() {
  const system = $("system").value.trim(), body = { model: $("model").value || undefined, stream: true, stream_options: { include_usage: true } };
  for (const input of document.querySelectorAll("[data-field]")) {
    if (input.value !== "") body[input.dataset.field] = input.type === "number" ? Number(input.value) : input.value;
  }
  const turns = messages.filter(m => !m.error).map(({ role, content }) => ({ role, content }));
  return { ...body, messages: [...(system ? [{ role: "system", content: system }] : []), ...turns] };
}

// The JSON objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const lines = buffer.split("\n");
    buffer = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line.trim() !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function answer() {
  const message = { role: "assistant", content: "", reasoning: "" }, began = performance.now();
  const body = request();
  messages.push(message);
  const view = appendMessage(message);
  running = new AbortController();
  busy(true);
  pollStatus();
  view.node.classList.add("busy");
  let first = null, pieces = 0, usage = null, reason = null;
  const figures = () => {
    const now = performance.now(), count = usage?.completion_tokens ?? pieces;
    const rate = first !== null && count > 1 ? ((count - 1) / ((view.last - first) / 1000)).toFixed(1) : null;
    return [
      first !== null && `first token after ${Math.round(first - began)} ms`,
      rate && isFinite(rate) && `${rate} tok/s`,
      `${count} tokens`,
      usage && `prompt ${usage.prompt_tokens}${usage.prompt_tokens_details?.cached_tokens ? `, ${usage.prompt_tokens_details.cached_tokens} cached` : ""}`,
      reason && reason !== "stop" && reason,
      first === null && `${((now - began) / 1000).toFixed(1)} s`,
    ].filter(Boolean).join(" · ");
  };
  const ticking = setInterval(() => { $("figures").textContent = figures(); }, 250);
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (!response.ok) throw await errorOf(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const { content, reasoning_content: reasoning } = choice.delta ?? {};
      if (!content && !reasoning) continue;
      view.last = performance.now();
      first ??= view.last;
      pieces += 1;
      message.content += content ?? "";
      message.reasoning += reasoning ?? "";
      view.update();
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else {
      message.error = error instanceof TypeError ? "cannot reach the server" : error.message;
      reason = "failed";
    }
  }
  clearInterval(ticking);
  running = null;
  busy(false);
  if (reason !== "stop") message.end = reason;
  if (!message.content && !message.reasoning && !message.error) messages.pop();
  message.figures = figures();
  $("figures").textContent = message.figures;
  store("messages", messages);
  draw();
}

function busy(yes) {
  $("send").hidden = yes;
  $("stop").hidden = !yes;
  if (!yes) $("input").focus();
}

// --- the conversation

function draw() {
  $("log").replaceChildren();
  if (!messages.length) $("log").append(element("p", { className: "empty", textContent: "No messages yet." }));
  messages.forEach(message => appendMessage(message));
  scroll(true);
}

// Appends the node of a message to the log; returns it with a function that updates it at most once per frame.
function appendMessage(message) {
  $("log").querySelector(".empty")?.remove();
  const body = element("div", { className: "body" }), tools = element("div", { className: "tools" });
  const node = element("article", { className: `message ${message.role}`, "aria-label": message.role }, body, tools);
  const view = { node, last: 0, update: () => { frame ??= requestAnimationFrame(paint); } };
  let frame = null, thought = null;
  const paint = () => {
    frame = null;
    const near = atEnd();
    if (message.reasoning) {
      if (!thought) {
        thought = element("div");
        node.prepend(element("details", { className: "reasoning" }, element("summary", { textContent: "Reasoning" }), thought));
      }
      thought.textContent = message.reasoning;
    }
    if (message.role === "user") body.textContent = message.content;
    else render(body, message.content);
    scroll(near);
  };
  const own = messages.indexOf(message);
  const button = (text, action) => {
    const made = element("button", { type: "button", textContent: text });
    made.addEventListener("click", () => action(made));
    tools.append(made);
  };
  button("copy", made => toClipboard(message.content, made));
  if (message.role === "user") button("edit", () => edit(own));
  else if (!running) button("again", () => regenerate(own));
  if (message.end || message.figures) tools.append(element("span", { textContent: message.end ? `${message.end}` : "", title: message.figures ?? "" }));
  paint();
  $("log").append(node);
  if (message.error) $("log").append(element("article", { className: "message error", role: "alert" }, element("div", { className: "body", textContent: message.error })));
  return view;
}

function atEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

function scroll(yes) {
  if (yes) $("log").scrollTop = $("log").scrollHeight;
}

function send() {
  const text = $("input").value;
  if (running || !text.trim()) return;
  $("input").value = "";
  fitInput();
  const message = { role: "user", content: text };
  messages.push(message);
  store("messages", messages);
  appendMessage(message);
  scroll(true);
  answer();
}

function edit(index) {
  if (running) return;
  $("input").value = messages[index].content;
  messages = messages.slice(0, index);
  store("messages", messages);
  draw();
  fitInput();
  $("input").focus();
}

function regenerate(index = messages.length - 1) {
  while (index >= 0 && messages[index].role !== "user") index -= 1;
  if (running || index < 0) return;
  messages = messages.slice(0, index + 1);
  draw();
  answer();
}

function newConversation() {
  running?.abort();
  messages = [];
  store("messages", messages);
  $("figures").textContent = "";
  draw();
  $("input").focus();
}

function fitInput() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

// --- the live view

let timer = null, before = null;
const past = [];

async function pollStatus() {
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
  timer = setTimeout(pollStatus, Math.max(pause, active || running ? BUSY_POLL : IDLE_POLL));
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

// --- settings, keys, start

function show(id, yes) {
  $(id).hidden = !yes;
  $("show-" + id).setAttribute("aria-expanded", String(yes));
  store("show-" + id, yes);
  if (id === "live" && yes) pollStatus();
}

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  $("theme").textContent = name ? name[0].toUpperCase() + name.slice(1) : "Theme";
  store("theme", name);
}

async function listModels() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw await errorOf(response);
    const names = (await response.json()).data.map(model => model.id), selected = $("model").value || stored("model", "");
    $("model").replaceChildren(...names.map(name => element("option", { value: name, textContent: name })));
    if (names.includes(selected)) $("model").value = selected;
    $("figures").textContent = "";
  } catch (error) {
    $("figures").textContent = error instanceof TypeError ? "cannot reach the server" : error.message;
  }
}

const SETTINGS = [$("system"), ...document.querySelectorAll("[data-field]")];
const nameOf = input => input.dataset.field ?? input.id;
const kept = stored("settings", {});
for (const input of SETTINGS) {
  input.value = kept[nameOf(input)] ?? "";
  input.addEventListener("input", () => store("settings", Object.fromEntries(SETTINGS.map(i => [nameOf(i), i.value]))));
}
$("key").value = sessionStorage.getItem(STORE + "key") ?? "";
$("key").addEventListener("change", () => { sessionStorage.setItem(STORE + "key", $("key").value); listModels(); pollStatus(); });
$("model").addEventListener("change", () => { store("model", $("model").value); before = null; pollStatus(); });
$("form").addEventListener("submit", event => { event.preventDefault(); send(); });
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", newConversation);
$("show-live").addEventListener("click", () => show("live", $("live").hidden));
$("key-form").addEventListener("submit", event => event.preventDefault());  // browsers want a password field inside a form
$("show-settings").addEventListener("click", () => show("settings", $("settings").hidden));
$("theme").addEventListener("click", () => theme({ "": "light", light: "dark", dark: "" }[document.documentElement.dataset.theme ?? ""]));
$("input").addEventListener("input", fitInput);
$("input").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  else if (event.key === "ArrowUp" && !$("input").value && !running) {
    const last = messages.map(m => m.role).lastIndexOf("user");
    if (last >= 0) { event.preventDefault(); edit(last); }
  }
});
document.addEventListener("keydown", event => {
  const writing = event.target.matches?.("input, textarea, select");
  if (event.key === "Escape") running?.abort();
  else if (event.key === "/" && !writing) { event.preventDefault(); $("input").focus(); }
  else if (event.altKey && !event.ctrlKey && !event.metaKey) {
    const action = { KeyN: newConversation, KeyR: () => regenerate(), KeyL: () => $("show-live").click(), KeyS: () => $("show-settings").click() }[event.code];
    if (action) { event.preventDefault(); action(); }
  }
});
document.addEventListener("visibilitychange", () => { before = null; pollStatus(); });
window.addEventListener("storage", event => { if (event.key === STORE + "messages" && !running) { messages = stored("messages", []); draw(); } });

theme(stored("theme", ""));
show("settings", stored("show-settings", false));
show("live", stored("show-live", true));
draw();
listModels();
