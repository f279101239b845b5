// Conversations as a JSON file. A file comes from anywhere: all is bounded, known fields alone are read, and each conversation gets new ids.

import { Conversation, newId } from "./tree.js";

const FORMAT = "tinyvllm-conversations", VERSION = 1;
export const MAX_FILE = 64 << 20; // bytes
const MAX_CONVERSATIONS = 10000, MAX_MESSAGES = 20000, MAX_REQUESTS = 1000, MAX_TOKENS = 200000, MAX_ALTERNATIVES = 20;
const MAX_TEXT = 16 << 20, MAX_LINE = 1000; // characters

function refuse(where, expected, got) {
  const shown = got === undefined ? "nothing" : JSON.stringify(got);
  throw new Error(`${where}: expected ${expected}, got ${shown.length > 60 ? shown.slice(0, 60) + "…" : shown}`);
}

const text = max => (value, where) => {
  if (typeof value !== "string") refuse(where, "a text", value);
  if (value.length > max) refuse(where, `at most ${max} characters`, value.length);
  return value;
};
const number = (value, where) => (Number.isFinite(value) ? value : refuse(where, "a number", value));
const oneOf = (...values) => (value, where) => (values.includes(value) ? value : refuse(where, values.map(v => JSON.stringify(v)).join(" or "), value));
const list = (entry, max) => (value, where) => {
  if (!Array.isArray(value)) refuse(where, "a list", value);
  if (value.length > max) refuse(where, `at most ${max} entries`, value.length);
  return value.map((one, i) => entry(one, `${where}[${i}]`));
};
// The known fields of an object; those in `required` must be there.
const record = (fields, ...required) => (value, where) => {
  if (value === null || typeof value !== "object" || Array.isArray(value)) refuse(where, "an object", value);
  const known = Object.entries(fields).filter(([name]) => Object.hasOwn(value, name) || required.includes(name));
  return Object.fromEntries(known.map(([name, check]) => [name, check(value[name], `${where}.${name}`)]));
};
const optional = check => (value, where) => (value === null ? null : check(value, where));
const token = (value, where) => {
  if (!Array.isArray(value) || value.length !== 3) refuse(where, "[text, log-probability, alternatives]", value);
  const pair = (one, at) => (Array.isArray(one) && one.length === 2 ? [text(MAX_LINE)(one[0], `${at}[0]`), number(one[1], `${at}[1]`)] : refuse(at, "[text, log-probability]", one));
  return [...pair(value.slice(0, 2), where), list(pair, MAX_ALTERNATIVES)(value[2], `${where}[2]`)];
};

const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens", "seed"];
const request = record({ ...Object.fromEntries(SAMPLING.map(name => [name, number])), model: text(MAX_LINE), stop: text(MAX_LINE), system: text(MAX_TEXT), from: number }, "from");
const TURN = {
  role: oneOf("user", "assistant"), content: text(MAX_TEXT), reasoning: text(MAX_TEXT), error: text(MAX_TEXT), end: optional(text(MAX_LINE)), figures: text(MAX_LINE),
};
const turns = list(record(TURN, "role", "content"), MAX_MESSAGES);
const message = record(
  { ...TURN, id: text(100), parent: optional(text(100)), created: number, requests: list(request, MAX_REQUESTS), tokens: list(token, MAX_TOKENS), verdict: text(MAX_LINE) },
  "id", "parent", "created", "role", "content",
);
const conversation = record({ title: text(MAX_LINE), updated: number, leaf: optional(text(100)), messages: list(message, MAX_MESSAGES) }, "title", "updated", "leaf", "messages");
const file = record({ format: oneOf(FORMAT), version: oneOf(VERSION), conversations: list(conversation, MAX_CONVERSATIONS) }, "format", "version", "conversations");

// The messages of a list without branches.
export const checkedTurns = value => turns(value, "messages");

export function exported(conversations) {
  const shown = conversations.map(({ head: { title, updated, leaf }, messages }) => ({
    title, updated, leaf, messages: [...messages.values()].map(({ conversation: _, ...fields }) => fields),
  }));
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations: shown }, null, 1);
}

// The conversations of a file's text; an Error names the first entry that is wrong.
export function imported(source) {
  let value;
  try { value = JSON.parse(source); } catch (error) { throw new Error(`not JSON: ${error.message}`); }
  return file(value, "file").conversations.map((one, i) => withNewIds(one, `file.conversations[${i}]`));
}

function withNewIds({ messages, leaf, title, updated }, where) {
  const ids = new Map(messages.map(m => [m.id, newId()]));
  if (ids.size !== messages.length) throw new Error(`${where}.messages: expected ids that differ, got one twice`);
  const known = (id, at) => (id === null ? null : ids.get(id) ?? refuse(at, "the id of a message of this conversation, or null", id));
  const head = { id: newId(), title, updated, leaf: known(leaf, `${where}.leaf`) };
  const moved = (m, i) => ({ ...m, id: ids.get(m.id), parent: known(m.parent, `${where}.messages[${i}].parent`), conversation: head.id });
  const made = new Conversation(head, messages.map(moved)), waiting = [null];
  let reached = 0;
  while (waiting.length) for (const { id } of made.children(waiting.pop())) { reached += 1; waiting.push(id); }
  if (reached !== messages.length) throw new Error(`${where}.messages: expected a tree, got messages that are their own ancestors`);
  return made;
}
