// Conversations in this browser's IndexedDB. Each message is a record, so that two tabs that write to one conversation make branches of it.
// What could not be written stays in `unsaved`, is shown and exported like the rest, and is tried again with every later write.

import { notice, stored, STORE } from "./dom.js";
import { checkedTurns } from "./transfer.js";
import { Conversation } from "./tree.js";

const NAME = "tinyvllm", TABLES = ["heads", "messages"];
const keyOf = { heads: head => head.id, messages: message => [message.conversation, message.id] };
const rangeOf = id => IDBKeyRange.bound([id], [id, []]);
const unsaved = new Map(); // table and key -> [table, record]
const channel = new BroadcastChannel(NAME);
let database = null, cause = null, failed = false, writing = Promise.resolve();

export async function open(changed) {
  channel.addEventListener("message", event => changed(event.data));
  window.addEventListener("beforeunload", event => { if (failed) event.preventDefault(); });
  try {
    database = await new Promise((resolve, reject) => {
      const opening = indexedDB.open(NAME, 1);
      opening.onupgradeneeded = () => TABLES.forEach(table => opening.result.createObjectStore(table, { keyPath: { heads: "id", messages: ["conversation", "id"] }[table] }));
      opening.onsuccess = () => resolve(opening.result);
      opening.onerror = () => reject(opening.error);
    });
    database.onversionchange = () => database.close();
  } catch (error) {
    cause = error;
    notice(`This browser stores no conversations (${error.message}). They are lost when the page is closed: export those to keep.`);
  }
  await migrate();
}

// Runs work(heads, messages) in one transaction; returns the result of the request that it returns.
function transaction(mode, work) {
  return new Promise((resolve, reject) => {
    if (!database) throw cause;
    const transaction = database.transaction(TABLES, mode);
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = () => reject(transaction.error ?? new Error("the browser has ended the transaction"));
    const request = work(...TABLES.map(table => transaction.objectStore(table)));
  });
}

const read = work => (database ? transaction("readonly", work) : Promise.resolve([]));

function withUnsaved(table, records, belongs) {
  const found = new Map(records.map(record => [String(keyOf[table](record)), record]));
  for (const [name, record] of unsaved.values()) if (name === table && belongs(record)) found.set(String(keyOf[table](record)), structuredClone(record));
  return [...found.values()];
}

// The heads of all conversations, the newest first.
export async function heads() {
  return withUnsaved("heads", await read(heads => heads.getAll()), () => true).sort((a, b) => b.updated - a.updated);
}

export const headOf = async id => (await heads()).find(head => head.id === id);

export async function messagesOf(id) {
  const found = await read((_, messages) => messages.getAll(rangeOf(id)));
  return withUnsaved("messages", found, message => message.conversation === id).sort((a, b) => a.created - b.created);
}

// Writes a head and messages of it; a failure is shown, and what was to be written is kept in memory.
export function save(head, ...messages) {
  for (const [table, record] of [["heads", head], ...messages.map(message => ["messages", message])]) {
    unsaved.set(`${table}/${keyOf[table](record)}`, [table, structuredClone(record)]);
  }
  return flush();
}

export const isSaved = () => !failed;

export function flush() {
  writing = writing.then(async () => {
    const batch = [...unsaved];
    if (!batch.length) return;
    try {
      await transaction("readwrite", (...tables) => batch.forEach(([, [table, record]]) => tables[TABLES.indexOf(table)].put(record)));
      if (failed) notice("All is saved now.");
      failed = false;
    } catch (error) {
      failed = true;
      if (error !== cause) notice(`Not saved: ${error.name === "QuotaExceededError" ? "the browser's storage for this page is full" : error.message}. Export conversations, then delete some; all is kept while this page is open.`);
      return;
    }
    for (const [key, entry] of batch) if (unsaved.get(key) === entry) unsaved.delete(key);
    for (const id of new Set(batch.map(([, [table, record]]) => (table === "heads" ? record.id : record.conversation)))) channel.postMessage(id);
  });
  return writing;
}

// Deletes a conversation; returns its messages, with which `save` restores it.
export async function remove(id) {
  const messages = await messagesOf(id);
  await writing;
  for (const [key, [table, record]] of unsaved) if (id === (table === "heads" ? record.id : record.conversation)) unsaved.delete(key);
  if (database) await transaction("readwrite", (heads, messages) => { heads.delete(id); messages.delete(rangeOf(id)); });
  channel.postMessage(id);
  await flush(); // there may be room now
  return messages;
}

// Deletes one message that nothing follows.
export async function removeMessage(message) {
  await writing;
  unsaved.delete(`messages/${keyOf.messages(message)}`);
  if (database) await transaction("readwrite", (_, messages) => { messages.delete(keyOf.messages(message)); });
}

// The ids of the conversations whose title or messages contain `text`; null once `stale` returns true.
export async function search(text, stale) {
  const wanted = text.toLowerCase(), found = new Set(), contains = value => value.toLowerCase().includes(wanted);
  for (const { id, title } of await heads()) {
    if (contains(title) || (await messagesOf(id)).some(message => contains(message.content))) found.add(id);
    if (stale()) return null;
  }
  return found;
}

// The one conversation that versions before this one kept in local storage.
async function migrate() {
  const turns = stored("messages", null);
  if (turns === null || !database) return;
  try {
    const conversation = new Conversation();
    for (const turn of checkedTurns(turns)) conversation.add(conversation.head.leaf, turn.role, turn);
    if (conversation.messages.size) await save(conversation.head, ...conversation.messages.values());
    if (!unsaved.size) localStorage.removeItem(STORE + "messages");
  } catch (error) {
    notice(`The conversation of an earlier version cannot be read (${error.message}); it stays in local storage as ${STORE}messages.`);
  }
}
