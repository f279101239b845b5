// The messages that are shown, and their buttons.

import { $, button, element, toClipboard } from "./dom.js";
import { isReplayable } from "./answers.js";
import { render } from "./markdown.js";
import { tokensView } from "./tokens.js";

const views = new Map(); // id of a message that is shown -> its view
const asTokens = new Set(); // ids of messages whose tokens are shown
let drawn = null; // the conversation that is shown

// Shows the conversation up to `leaf`; actions: edit, again, resume, replay, tokens, version, each called with a message.
export function draw(conversation, actions, leaf = conversation.head.leaf) {
  const path = conversation.path(leaf), { scrollTop } = $("log"), end = drawn !== conversation || atEnd(), focused = document.activeElement;
  const at = [...$("log").children].indexOf(focused.closest(".message"));
  drawn = conversation;
  views.clear();
  $("log").replaceChildren();
  if (!path.length) $("log").append(element("p", { className: "empty", textContent: "No messages yet." }));
  for (const message of path) {
    const view = newView(conversation, message, actions);
    views.set(message.id, view);
    $("log").append(view.node);
    view.paint();
  }
  $("log").scrollTop = scrollTop;
  scroll(end);
  if (at >= 0) [...($("log").children[at]?.querySelectorAll("button") ?? [])].find(node => node.textContent === focused.textContent)?.focus({ preventScroll: true });
}

// Shows what a message has got since, at most once per frame.
export function update(message) {
  const view = views.get(message.id);
  if (view) view.frame ??= requestAnimationFrame(view.paint);
}

export function toggleTokens(message) {
  if (!asTokens.delete(message.id)) asTokens.add(message.id);
}

function newView(conversation, message, actions) {
  const body = element("div", { className: "body" }), reasoning = element("div"), note = element("span", { className: "note" });
  const tools = element("div", { className: "tools" }, ...buttons(conversation, message, actions), note);
  const node = element("article", { className: `message ${message.role}`, "aria-label": message.role }, body, tools);
  const busy = conversation.run?.message === message;
  node.classList.toggle("busy", busy);
  if (message.error) node.append(element("div", { className: "message error", role: "alert" }, element("div", { className: "body", textContent: message.error })));
  const view = { node, frame: null };
  view.paint = () => {
    view.frame = null;
    const near = atEnd();
    if (message.reasoning) {
      if (!reasoning.isConnected) node.prepend(element("details", { className: "reasoning" }, element("summary", { textContent: "Reasoning" }), reasoning));
      reasoning.textContent = message.reasoning;
    }
    if (message.role === "user") body.textContent = message.content;
    else if (asTokens.has(message.id) && message.tokens) { if (!body.querySelector(".tokens")) body.replaceChildren(...tokensView(message.tokens)); }
    else render(body, message.content);
    const seed = message.requests?.at(-1)?.seed;
    const end = !busy && !message.figures?.endsWith(message.end) && message.end;
    note.textContent = [message.verdict, end, seed !== undefined && `seed ${seed}`, message.figures].filter(Boolean).join(" · ");
    if (busy) $("figures").textContent = message.verdict ?? message.figures ?? "";
    scroll(near);
  };
  return view;
}

function buttons(conversation, message, { edit, again, resume, replay, tokens, version }) {
  const siblings = conversation.siblings(message), at = siblings.indexOf(message), idle = !conversation.run;
  const answerable = message.role === "assistant" || !conversation.children(message.id).length;
  const step = (text, to, title) => Object.assign(button(text, title, () => version(message, to)), { disabled: !siblings[to] });
  return [
    ...(siblings.length > 1 ? [step("<", at - 1, "Previous version (Alt+J)"), element("span", { textContent: `${at + 1}/${siblings.length}` }), step(">", at + 1, "Next version (Alt+K)")] : []),
    button("copy", "Copy the text", node => toClipboard(message.content, node)),
    idle && button("edit", "Change the text; this version remains", () => edit(message)),
    idle && answerable && button("again", "Another answer; those that are there remain (Alt+R)", () => again(message)),
    idle && isResumable(conversation, message) && button("continue", "Write on from the end of this text (Alt+M)", () => resume(message)),
    idle && isReplayable(message) && button("replay", "Send the same request again and compare (Alt+P)", () => replay(message)),
    idle && (message.tokens || isReplayable(message)) && button("tokens", "Tokens with their probabilities (Alt+T)", () => tokens(message)),
  ].filter(Boolean);
}

// A message that something follows is not continued: the answers below it belong to its present text.
export const isResumable = (conversation, message) => message.role === "assistant" && Boolean(message.content) && !conversation.children(message.id).length;

function atEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

export function scroll(yes) {
  if (yes) $("log").scrollTop = $("log").scrollHeight;
}
