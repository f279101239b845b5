// A conversation is a tree: an edited question or another answer is a sibling of the first one, and `leaf` ends the path that is shown.

const random = bytes => crypto.getRandomValues(new Uint8Array(bytes));
export const newId = () => Array.from(random(12), byte => byte.toString(16).padStart(2, "0")).join(""); // randomUUID needs https
const TITLE_LENGTH = 60;

export class Conversation {
  // head: id, title, updated (ms), leaf; messages: id, conversation, parent, created (ms), role, content, and what answers have.
  constructor(head = {}, messages = []) {
    this.head = { id: newId(), title: "", updated: Date.now(), leaf: null, ...head };
    this.messages = new Map(messages.map(message => [message.id, message]));
    this.run = null; // the answer or replay in progress
  }

  // The messages from the root to `leaf`. A parent that is absent or repeated ends it.
  path(leaf = this.head.leaf) {
    const path = new Set();
    for (let at = this.messages.get(leaf); at && !path.has(at); at = this.messages.get(at.parent)) path.add(at);
    return [...path].reverse();
  }

  children(parent) {
    return [...this.messages.values()].filter(m => m.parent === parent).sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
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
    const before = [...this.children(parent), ...(parent ? [this.messages.get(parent)] : [])];
    const created = Math.max(Date.now(), ...before.map(m => m.created + 1));
    const message = { id: newId(), conversation: this.head.id, parent, created, role, content: "", ...fields };
    this.messages.set(message.id, message);
    this.head.leaf = message.id;
    this.head.updated = Date.now();
    if (role === "user" && !this.head.title) this.head.title = message.content.trim().split("\n")[0].slice(0, TITLE_LENGTH);
    return message;
  }
}
