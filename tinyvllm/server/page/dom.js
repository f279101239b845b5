// DOM nodes, the notice line, and settings in local storage. Text of models and files becomes text nodes only.

export const $ = id => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

export function button(text, title, action) {
  const node = element("button", { type: "button", textContent: text, title });
  node.addEventListener("click", () => action(node));
  return node;
}

// Shows what the user must not miss, until it is dismissed or replaced; with a button if `label` names one.
export function notice(text, label = "", action = () => {}) {
  $("notice").hidden = !text;
  const act = button(label, "", () => { notice(""); action(); });
  $("notice").replaceChildren(text, " ", ...(label ? [act] : []), button("×", "Dismiss", () => notice("")));
}

export async function toClipboard(text, node) {
  const before = node.textContent;
  try {
    await navigator.clipboard.writeText(text);
    node.textContent = "copied";
  } catch {
    node.textContent = "not allowed";
  }
  setTimeout(() => { node.textContent = before; }, 1200);
}

export const STORE = "tinyvllm.";

export function stored(name, fallback) {
  try { return JSON.parse(localStorage.getItem(STORE + name)) ?? fallback; } catch { return fallback; }
}

export function store(name, value) {
  try { localStorage.setItem(STORE + name, JSON.stringify(value)); } catch { notice("This browser does not store the page's settings."); }
}

// Shows or hides the panel `id`, which gets an event `shown`, and remembers it.
export function show(id, yes) {
  $(id).hidden = !yes;
  $("show-" + id).setAttribute("aria-expanded", String(yes));
  store("show-" + id, yes);
  if (yes) $(id).dispatchEvent(new Event("shown"));
}
