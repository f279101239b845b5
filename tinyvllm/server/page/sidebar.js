// The list of conversations: search, rename, delete, export and import.

import { $, button, element, notice, show } from "./dom.js";
import { headOf, heads, isSaved, messagesOf, remove, save, search } from "./storage.js";
import { exported, imported, MAX_FILE } from "./transfer.js";

let actions = null, drawn = 0;

// actions: open(id), removed(id), rename(id, title), current(), isRunning(id).
export function startSidebar(given) {
  actions = given;
  $("search").addEventListener("input", drawList);
  $("list").addEventListener("shown", drawList);
  $("list").addEventListener("keydown", onKey);
  $("export").addEventListener("click", async () => download(await heads(), "tinyvllm-conversations"));
  $("export-this").addEventListener("click", async () => download([await headOf(actions.current())].filter(Boolean), "tinyvllm-conversation"));
  $("import").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", importFile);
}

export async function drawList() {
  const turn = ++drawn;
  if ($("list").hidden) return;
  const wanted = $("search").value.trim(), all = await heads();
  const found = wanted ? await search(wanted, () => turn !== drawn) : null;
  if (turn !== drawn || $("conversations").querySelector("input")) return; // a title is being written
  const shown = all.filter(head => !wanted || found.has(head.id)), focused = document.activeElement.closest?.("[data-id]")?.dataset.id;
  $("conversations").replaceChildren(...shown.map(item));
  $("count").textContent = wanted ? `${shown.length} of ${all.length}` : all.length === 1 ? "1 conversation" : `${all.length} conversations`;
  if (focused) entryOf(focused)?.focus();
}

const entryOf = id => document.querySelector(`[data-id="${CSS.escape(id)}"] .open`);

function item(head) {
  const open = button(head.title || "untitled", new Date(head.updated).toLocaleString(), () => actions.open(head.id));
  open.classList.add("open");
  if (head.id === actions.current()) open.setAttribute("aria-current", "true");
  if (actions.isRunning(head.id)) open.classList.add("running");
  const node = element("li", { "data-id": head.id }, open, button("✎", "Rename (F2)", () => rename(head, node)), button("×", "Delete (Del)", () => removeWithUndo(head)));
  return node;
}

function rename(head, node) {
  const input = element("input", { value: head.title, maxLength: 1000, "aria-label": "Title" });
  const end = async keep => {
    const title = keep && input.value.trim();
    input.onblur = null;
    input.remove();
    const now = title && (await headOf(head.id)); // which may have another leaf by now
    if (now) actions.rename(head.id, title);
    if (now) await save({ ...now, title });
    await drawList();
    entryOf(head.id)?.focus();
  };
  input.onblur = () => end(true);
  input.addEventListener("keydown", event => {
    event.stopPropagation();
    if (event.key === "Enter" && !event.isComposing) end(true);
    else if (event.key === "Escape") end(false);
  });
  node.replaceChildren(input);
  input.select();
}

async function removeWithUndo({ id }) {
  const head = await headOf(id);
  actions.removed(id);
  if (!head) return drawList(); // another tab was faster
  const messages = await remove(id);
  await drawList();
  notice(`“${head.title}” is deleted.`, "undo", async () => {
    await save(head, ...messages);
    await drawList();
  });
}

function onKey(event) {
  const node = event.target.closest("[data-id]"), open = [...document.querySelectorAll("#conversations .open")];
  const at = open.indexOf(node?.querySelector(".open")), move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.altKey || (move === undefined && !["F2", "Delete"].includes(event.key))) return;
  if (event.target === $("search") && move !== 1) return;
  event.preventDefault();
  if (move) (open[at + move] ?? $("search")).focus();
  else node?.children[event.key === "F2" ? 1 : 2].click();
}

async function download(shown, name) {
  const conversations = [];
  for (const head of shown) conversations.push({ head, messages: new Map((await messagesOf(head.id)).map(m => [m.id, m])) });
  const url = URL.createObjectURL(new Blob([exported(conversations)], { type: "application/json" }));
  element("a", { href: url, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

async function importFile() {
  const [file] = $("file").files;
  $("file").value = "";
  if (!file) return;
  try {
    if (file.size > MAX_FILE) throw new Error(`the file has ${file.size} bytes, more than ${MAX_FILE}`);
    const conversations = imported(await file.text());
    for (const { head, messages } of conversations) await save(head, ...messages.values());
    show("list", true);
    if (isSaved()) notice(`${conversations.length} imported.`);
  } catch (error) {
    notice(`Nothing was imported: ${error.message}`);
  }
}
