// Requests to the server that serves this page.

import { $, show } from "./dom.js";

export function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: "Bearer " + key }) };
}

export async function errorOf(response) {
  let text = `${response.status} ${response.statusText}`;
  try { text = (await response.json()).error.message ?? text; } catch { /* not in the API's shape: show the status */ }
  if (response.status === 401) { show("settings", true); $("key").focus(); }
  return new Error(text);
}

export const textOf = error => (error instanceof TypeError ? "cannot reach the server" : error.message);

export async function modelNames() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await errorOf(response);
  return (await response.json()).data.map(model => model.id);
}

// Streams a chat completion: take(choice, usage) for each event. An Error if the stream ends before the answer does.
export async function complete(body, signal, take) {
  const options = { method: "POST", headers: headers(), body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }), signal };
  const response = await fetch("v1/chat/completions", options);
  if (!response.ok) throw await errorOf(response);
  let ended = false;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    ended ||= Boolean(choice?.finish_reason);
    take(choice, event.usage);
  }
  if (!ended) throw new Error("the connection ended before the answer did");
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
