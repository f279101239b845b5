// The chat page: glues the conversation, the list, the settings and the live view together, and has the keys.

import { $, notice, store, stored } from "./dom.js";
import { answer, discard, isReplayable, replay } from "./answers.js";
import { draw, isResumable, scroll, toggleTokens, update } from "./log.js";
import { pollStatus, startLive } from "./live.js";
import { listModels, newRequest, startSettings } from "./settings.js";
import { drawList, startSidebar } from "./sidebar.js";
import * as storage from "./storage.js";
import { Conversation } from "./tree.js";

let current = new Conversation(), editing = null; // the message whose other version is written
let opened = 0; // counts what was opened, for answers of the storage that come too late
const running = new Map(); // id -> conversation with an answer or replay in progress, also one that is not shown

// --- conversations

function redraw() {
  draw(current, { edit, again, resume, replay: compare, tokens, version }, editing ? editing.parent : undefined);
  $("send").hidden = Boolean(current.run);
  $("stop").hidden = !current.run;
  if (!current.run) $("figures").textContent = editing ? "editing: Esc keeps the old version" : current.path().at(-1)?.figures ?? "";
}

function enter(conversation) {
  opened += 1;
  current = conversation;
  editing = null;
  store("conversation", conversation.messages.size ? conversation.head.id : "");
  redraw();
  drawList();
}

async function open(id) {
  const turn = ++opened, head = await storage.headOf(id);
  const found = running.get(id) ?? (head && new Conversation(head, await storage.messagesOf(id)));
  if (turn === opened && found) enter(found);
}

function newConversation() {
  enter(new Conversation());
  $("input").focus();
}

function removed(id) {
  const conversation = running.get(id) ?? current;
  if (conversation.head.id !== id) return;
  conversation.removed = true;
  conversation.run?.stop();
  if (conversation === current) newConversation();
}

// Another tab has changed or deleted the conversation `id`.
async function changedElsewhere(id) {
  drawList();
  const head = await storage.headOf(id);
  if (!head) return removed(id);
  const same = running.get(id) ?? current;
  if (same.head.id !== id) return;
  same.head.title = head.title;
  for (const message of await storage.messagesOf(id)) if (!same.messages.has(message.id)) same.put(message);
  if (same === current && !current.run) redraw();
}

// Runs answer or replay for a message of the conversation that is shown; it continues when another one is opened.
async function run(action, message) {
  const conversation = current, { id } = conversation.head;
  const progress = () => { if (conversation === current) update(message); };
  const work = action(conversation, message, progress);
  running.set(id, conversation);
  editing = null;
  store("conversation", id);
  redraw();
  pollStatus();
  drawList();
  await work;
  running.delete(id);
  if (conversation === current) redraw();
  if (conversation === current && document.activeElement === document.body) $("input").focus();
  drawList();
}

// --- actions

function send() {
  const content = $("input").value;
  if (current.run || !content.trim()) return;
  $("input").value = "";
  fitInput();
  const old = editing, parent = old ? old.parent : current.head.leaf;
  editing = null;
  const message = current.add(parent, old?.role ?? "user", { content });
  storage.save(current.head, message);
  if (message.role === "user") ask(message);
  else redraw();
  scroll(true);
}

const ask = question => run(answer, current.add(question.id, "assistant", { requests: [newRequest()] }));

function edit(message) {
  if (current.run) return;
  editing = message;
  $("input").value = message.content;
  redraw();
  fitInput();
  $("input").focus();
}

function endEditing() {
  editing = null;
  $("input").value = "";
  fitInput();
  redraw();
}

async function again(message = current.path().at(-1)) {
  const question = message?.role === "user" ? message : current.messages.get(message?.parent);
  if (current.run || question?.role !== "user") return;
  if (message.error && !message.content && !current.children(message.id).length) await discard(current, message);
  ask(question);
}

function resume(message = lastAnswer()) {
  if (current.run || !message || !isResumable(current, message)) return;
  message.requests = [...(message.requests ?? []), { ...newRequest(), from: message.content.length }];
  run(answer, message);
}

const compare = (message = lastAnswer()) => (!current.run && message && isReplayable(message) ? run(replay, message) : null);

// Shows the tokens of an answer or its text; tokens that are not there yet come from a replay.
async function tokens(message = lastAnswer()) {
  if (!message) return;
  if (!message.tokens) await compare(message);
  if (message.tokens) toggleTokens(message);
  redraw();
}

function version(message, index) {
  const sibling = current.siblings(message)[index];
  if (!sibling) return;
  current.show(sibling);
  storage.save(current.head);
  redraw();
}

const lastAnswer = () => current.path().findLast(m => m.role === "assistant");

function step(by) {
  const message = current.path().findLast(m => current.siblings(m).length > 1);
  if (message) version(message, current.siblings(message).indexOf(message) + by);
}

async function neighbour(by) {
  const ids = (await storage.heads()).map(head => head.id), at = ids.indexOf(current.head.id);
  const id = ids[at < 0 ? 0 : at + by];
  if (id) open(id);
}

function fitInput() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

// --- keys, start

const KEYS = {
  KeyN: newConversation, KeyR: () => again(), KeyM: () => resume(), KeyP: () => compare(), KeyT: () => tokens(), KeyJ: () => step(-1), KeyK: () => step(1),
  KeyL: () => $("show-live").click(), KeyS: () => $("show-settings").click(), KeyC: () => { $("show-list").click(); if (!$("list").hidden) $("search").focus(); },
  ArrowUp: () => neighbour(-1), ArrowDown: () => neighbour(1),
};

$("form").addEventListener("submit", event => { event.preventDefault(); send(); });
$("stop").addEventListener("click", () => current.run?.stop());
$("new").addEventListener("click", newConversation);
$("input").addEventListener("input", fitInput);
$("input").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  else if (event.key === "ArrowUp" && !event.altKey && !$("input").value && !current.run) {
    const last = current.path().findLast(m => m.role === "user");
    if (last) { event.preventDefault(); edit(last); }
  }
});
window.addEventListener("unhandledrejection", event => notice(`The page failed: ${event.reason?.message ?? event.reason}`)); // the storage's, as a rule
document.addEventListener("keydown", event => {
  const writing = event.target.matches?.("input, textarea, select");
  if (event.key === "Escape") { if (current.run) current.run.stop(); else if (editing) endEditing(); }
  else if (event.key === "/" && !writing) { event.preventDefault(); $("input").focus(); }
  else if (event.altKey && !event.ctrlKey && !event.metaKey && KEYS[event.code]) { event.preventDefault(); KEYS[event.code](); }
});

startSettings();
startLive(() => running.size > 0);
await storage.open(changedElsewhere);
startSidebar({
  open, removed, current: () => current.head.id, isRunning: id => running.has(id),
  rename: (id, title) => { for (const one of [current, ...running.values()]) if (one.head.id === id) one.head.title = title; },
});
redraw();
await open(stored("conversation", ""));
drawList();
listModels();
