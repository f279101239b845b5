// The settings panel, the model, and light or dark.

import { $, element, notice, show, store, stored, STORE } from "./dom.js";
import { modelNames, textOf } from "./server.js";

const inputs = [$("system"), ...document.querySelectorAll("[data-field]")];
const nameOf = input => input.dataset.field ?? input.id;

// What an answer is requested with, messages apart. What is empty is not sent; the seed always is, so that the answer can be replayed.
export function newRequest() {
  const request = { model: $("model").value || undefined, seed: crypto.getRandomValues(new Uint32Array(1))[0], from: 0 };
  for (const input of inputs) {
    if (input.dataset.field && input.value !== "") request[input.dataset.field] = input.type === "number" ? Number(input.value) : input.value;
  }
  const system = $("system").value.trim();
  return system ? { ...request, system } : request;
}

export async function listModels() {
  try {
    const names = await modelNames(), selected = $("model").value || stored("model", "");
    $("model").replaceChildren(...names.map(name => element("option", { value: name, textContent: name })));
    if (names.includes(selected)) $("model").value = selected;
    $("figures").textContent = "";
  } catch (error) {
    $("figures").textContent = textOf(error);
  }
}

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  $("theme").textContent = name ? name[0].toUpperCase() + name.slice(1) : "Theme";
  store("theme", name);
}

export function startSettings() {
  const kept = stored("settings", {});
  for (const input of inputs) {
    input.value = kept[nameOf(input)] ?? "";
    input.addEventListener("input", () => store("settings", Object.fromEntries(inputs.map(i => [nameOf(i), i.value]))));
  }
  try { $("key").value = sessionStorage.getItem(STORE + "key") ?? ""; } catch { /* no storage: the key is entered again */ }
  $("key").addEventListener("change", () => {
    try { sessionStorage.setItem(STORE + "key", $("key").value); } catch { notice("This browser does not store the API key."); }
    listModels();
  });
  $("key-form").addEventListener("submit", event => event.preventDefault()); // browsers want a password field inside a form
  $("model").addEventListener("change", () => store("model", $("model").value));
  $("theme").addEventListener("click", () => theme({ "": "light", light: "dark", dark: "" }[document.documentElement.dataset.theme ?? ""]));
  theme(stored("theme", ""));
  for (const [id, open] of [["settings", false], ["live", true], ["list", false]]) {
    $("show-" + id).addEventListener("click", () => show(id, $(id).hidden));
    show(id, stored("show-" + id, open));
  }
}
