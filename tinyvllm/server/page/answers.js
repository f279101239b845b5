// Answers of the model: streamed into a message, or streamed again and compared with it.

import { removeMessage, save } from "./storage.js";
import { complete, textOf } from "./server.js";

const ALTERNATIVES = 5; // of each token, with their log-probabilities
const TICK = 250, SAVE_EVERY = 2000; // milliseconds

// A message has one request for its beginning and one for each continuation; `from` is the length of the text that it continues.
function bodyOf(conversation, message, { from, system, ...fields }) {
  const turns = conversation.path(message.parent).filter(m => !m.error).map(({ role, content }) => ({ role, content }));
  if (system) turns.unshift({ role: "system", content: system });
  if (from) turns.push({ role: "assistant", content: message.content.slice(0, from) });
  return { ...fields, ...(from && { continue_final_message: true, add_generation_prompt: false }), messages: turns };
}

// Streams the answer to the last request of `message` into it; progress() follows each change. The message is removed if it stays empty.
export async function answer(conversation, message, progress) {
  const request = message.requests.at(-1), began = performance.now(), controller = new AbortController(), old = message.end;
  let first = null, last = null, pieces = 0, usage = null, reason = null, saved = began;
  const figures = () => {
    const count = usage?.completion_tokens ?? pieces, cached = usage?.prompt_tokens_details?.cached_tokens;
    const rate = first !== null && count > 1 ? (count - 1) / ((last - first) / 1000) : NaN;
    return [
      first === null ? `${((performance.now() - began) / 1000).toFixed(1)} s` : `first token after ${Math.round(first - began)} ms`,
      isFinite(rate) && `${rate.toFixed(1)} tok/s`,
      `${count} tokens`,
      usage && `prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`,
      reason && reason !== "stop" && reason,
    ].filter(Boolean).join(" · ");
  };
  const keep = () => (conversation.removed ? null : save(conversation.head, message));
  conversation.run = { message, stop: () => controller.abort() };
  Object.assign(message, { end: "interrupted", reasoning: message.reasoning ?? "" }); // which is what a page that is closed now will find
  delete message.error;
  delete message.verdict;
  delete message.tokens; // they would end before the text does
  const tick = () => {
    message.figures = figures();
    progress();
    if (performance.now() - saved > SAVE_EVERY) { saved = performance.now(); keep(); }
  };
  const ticking = setInterval(tick, TICK);
  progress();
  try {
    await complete(bodyOf(conversation, message, request), controller.signal, (choice, counted) => {
      usage = counted ?? usage;
      reason = choice?.finish_reason ?? reason;
      const { content, reasoning_content: reasoning } = choice?.delta ?? {};
      if (!content && !reasoning) return;
      last = performance.now();
      first ??= last;
      pieces += 1;
      message.content += content ?? "";
      message.reasoning += reasoning ?? "";
      progress();
    });
  } catch (error) {
    reason = error.name === "AbortError" ? "stopped" : "failed";
    if (reason === "failed") message.error = textOf(error);
  }
  clearInterval(ticking);
  conversation.run = null;
  Object.assign(message, { end: reason === "stop" ? null : reason, figures: figures() });
  if (request.from && message.content.length === request.from && message.requests.length > 1) { // nothing came: as before
    message.requests.pop();
    message.end = reason === "stop" ? null : old;
  }
  if (message.content || message.reasoning || message.error) await keep();
  else await discard(conversation, message);
}

// Removes a message that nothing follows.
export async function discard(conversation, message) {
  conversation.drop(message);
  await removeMessage(message);
  if (!conversation.removed) await save(conversation.head);
}

export const isReplayable = message => Boolean(message.requests?.length && (message.content || message.reasoning));

// Sends the requests of `message` again, and compares. Sets its verdict, and if the text is equal its tokens with their log-probabilities.
export async function replay(conversation, message, progress) {
  const tokens = [], user = new AbortController();
  conversation.run = { message, stop: () => user.abort() };
  message.verdict = "replay…";
  progress();
  try {
    let difference = null;
    for (const part of partsOf(message)) difference ??= await replayPart(bodyOf(conversation, message, part.request), part, tokens, user.signal);
    message.verdict = difference ?? `replay: equal, ${tokens.length} tokens`;
    if (!difference) message.tokens = tokens;
  } catch (error) {
    message.verdict = error.name === "AbortError" ? "replay: stopped" : `replay: ${textOf(error)}`;
  }
  conversation.run = null;
  if (!conversation.removed) await save(conversation.head, message);
}

// The requests of a message with the text that each has brought; `cut` if it was ended from here, so that a replay brings more.
function partsOf(message) {
  return message.requests.map((request, i) => {
    const next = message.requests[i + 1], start = i ? "" : message.reasoning ?? "";
    return { request, text: start + message.content.slice(request.from, next?.from), cut: Boolean(next) || ["stopped", "failed", "interrupted"].includes(message.end) };
  });
}

// Streams one part again and collects its tokens; returns null, or how it differs.
async function replayPart(body, { text, cut }, tokens, userSignal) {
  const controller = new AbortController(), enough = new Error(), quote = piece => JSON.stringify(piece.slice(0, 20));
  userSignal.addEventListener("abort", () => controller.abort());
  let count = 0, difference = null;
  try {
    await complete({ ...body, logprobs: true, top_logprobs: ALTERNATIVES }, controller.signal, choice => {
      const { content, reasoning_content: reasoning } = choice?.delta ?? {}, piece = (reasoning ?? "") + (content ?? "");
      for (const { token, logprob, top_logprobs: top } of choice?.logprobs?.content ?? []) tokens.push([token, logprob, top.map(t => [t.token, t.logprob])]);
      const wanted = text.slice(count, count + piece.length);
      if (cut ? !piece.startsWith(wanted) : piece !== wanted) difference = `replay: differs after ${count} characters: ${quote(piece)} is now, ${quote(wanted)} was`;
      count += piece.length;
      if (difference || (cut && count >= text.length)) throw enough;
    });
  } catch (error) {
    if (error !== enough) throw error;
  }
  controller.abort();
  return difference ?? (count < text.length ? `replay: differs: it ends after ${count} of ${text.length} characters` : null);
}
