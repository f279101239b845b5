// A conversation is a tree: an edited question or another answer is a sibling of the first one, and `leaf` ends the path that is shown.

const random = bytes => crypto.getRandomValues(new Uint8Array(bytes));
export const newId = () => Array.from(random(12), byte => byte.toString(16).padStart(2, "0")).join(""); // randomUUID needs https
const inOrder = (a, b) => a.created - b.created || (a.id < b.id ? -1 : 1);
const TITLE_LENGTH = 60;

export class Conversation {
  // head: id, title, updated (ms), leaf; messages: id, conversation, parent, created (ms), role, content, and what answers have.
  constructor(head = {}, messages = []) {
    this.head = { id: newId(), title: "", updated: Date.now(), leaf: null, ...head };
    this.run = null; // the answer or replay in progress
    this.messages = new Map(messages.map(message => [message.id, message]));
    this.below = new Map(); // id of a message, or null for the first ones -> those that follow it, the oldest first
    for (const message of [...this.messages.values()].sort(inOrder)) this.siblings(message).push(message);
    if (messages.length && !this.messages.has(this.head.leaf)) this.show(this.children(null).at(-1));
  }

  put(message) {
    this.messages.set(message.id, message);
    this.siblings(message).push(message);
    this.siblings(message).sort(inOrder);
  }

  drop(message) {
    this.messages.delete(message.id);
    this.below.set(message.parent, this.siblings(message).filter(m => m !== message));
    if (this.head.leaf === message.id) this.head.leaf = message.parent;
  }

  // The messages from the root to `leaf`. A parent that is absent or repeated ends it.
  path(leaf = this.head.leaf) {
    const path = new Set();
    for (let at = this.messages.get(leaf); at && !path.has(at); at = this.messages.get(at.parent)) path.add(at);
    return [...path].reverse();
  }

  children(id) {
    return this.below.get(id) ?? [];
  }

  // The versions of a message, itself included.
  siblings({ parent }) {
    if (!this.below.has(parent)) this.below.set(parent, []);
    return this.below.get(parent);
  }

  // Shows `message` and the newest messages below it.
  show(message) {
    const seen = new Set();
    for (let at = message; at && !seen.has(at); at = this.children(at.id).at(-1)) {
      seen.add(at);
      this.head.leaf = at.id;
    }
  }

  add(parent, role, fields) {
    const before = [this.children(parent).at(-1), this.messages.get(parent)].map(m => (m ? m.created + 1 : 0));
    const created = Math.max(Date.now(), ...before);
    const message = { id: newId(), conversation: this.head.id, parent, created, role, content: "", ...fields };
    this.put(message);
    this.head.leaf = message.id;
    this.head.updated = Date.now();
    if (role === "user" && !this.head.title) this.head.title = message.content.trim().split("\n")[0].slice(0, TITLE_LENGTH);
    return message;
  }
}
