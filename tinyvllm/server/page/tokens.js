// The tokens of an answer: improbable ones are coloured; hover, focus or arrow keys show the alternatives of one.

import { element } from "./dom.js";

const MAX_SHOWN = 5000;
const percent = logprob => `${(100 * Math.exp(logprob)).toFixed(logprob > -7 ? 2 : 5)} %`;

export function tokensView(tokens) {
  const detail = element("p", { className: "detail", role: "status" }), shown = tokens.slice(0, MAX_SHOWN);
  const spans = shown.map(([text, logprob]) => {
    const span = element("span", { textContent: text.replaceAll("\n", "↵\n") || "∅", tabIndex: -1 });
    span.style.setProperty("--p", Math.exp(logprob).toFixed(3));
    return span;
  });
  const tell = i => {
    const [text, logprob, top] = shown[i], others = top.filter(([other]) => other !== text);
    const entry = ([other, p]) => `${JSON.stringify(other)} ${percent(p)}`;
    detail.replaceChildren(`${i + 1}: `, element("b", { textContent: entry([text, logprob]) }), ...others.map(other => ` · ${entry(other)}`));
    spans.forEach((span, at) => { span.tabIndex = at === i ? 0 : -1; });
  };
  const pick = event => { const i = spans.indexOf(event.target); if (i >= 0) tell(i); };
  const text = element("div", { className: "tokens", role: "group", "aria-label": "Tokens; arrow keys move" }, ...spans);
  if (spans.length) spans[0].tabIndex = 0;
  text.addEventListener("mouseover", pick);
  text.addEventListener("focusin", pick);
  text.addEventListener("keydown", event => {
    const at = spans.indexOf(event.target), to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined || event.altKey) return;
    event.preventDefault();
    spans[Math.min(Math.max(to, 0), spans.length - 1)].focus();
  });
  detail.textContent = tokens.length > MAX_SHOWN ? `The first ${MAX_SHOWN} of ${tokens.length} tokens` : "Point at a token, or use the arrow keys";
  return [text, detail];
}
