// Markdown to DOM nodes. Model output becomes only text nodes and checked attribute values; nothing is parsed as HTML.

import { element, toClipboard } from "./dom.js";

const WORDS = new Set(("and as assert async await bool break case catch char class const continue def del do double elif else enum except " +
  "export extends extern false final finally float fn for from func function global if impl import in int interface is lambda let long " +
  "match mod mut namespace new nil none None not null or package pass private protected public raise return self short static struct " +
  "super switch template this throw true True False try type typedef typeof union unsigned use using var virtual void where while with " +
  "yield SELECT FROM WHERE AND OR NOT INSERT UPDATE DELETE JOIN GROUP ORDER BY LIMIT").split(" "));
const CODE = /(\/\/[^\n]*|\/\*[\s\S]*?\*\/|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`)|(#[^\n]*)|\b(0[xX][\da-fA-F]+|\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)\b|([A-Za-z_]\w*)/g;
const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|__(?=\S)([\s\S]*?\S)__(?!\w)|~~(?=\S)([\s\S]*?\S)~~|\*(?=[^\s*])([^*]*[^\s*])\*|(?<![\w\\])_(?=[^\s_])([^_]*[^\s_])_(?!\w)|(!?)\[([^\]\n]*)\]\(\s*<?([^\s)>]*)>?(?:\s+"[^"\n]*")?\s*\)|(https?:\/\/[^\s<>()"'`\]]*[^\s<>()"'`\].,;:!?])|\\([\\`*_{}[\]()#+\-.!~|>])/;
const HASH_COMMENTS = /^(py|python|sh|bash|zsh|shell|console|yaml|yml|toml|rb|ruby|r|perl|make|makefile|dockerfile|ini|conf)$/i;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)(.*)$/;
const MAX_DEPTH = 24;

// Renders the blocks of `text` into `parent`; blocks with unchanged source keep their nodes.
export function render(parent, text) {
  const sources = split(text);
  sources.forEach((source, i) => {
    const old = parent.children[i];
    if (old && old.source === source) return;
    const node = block(source, 0);
    node.source = source;
    if (old) old.replaceWith(node);
    else parent.append(node);
  });
  while (parent.children.length > sources.length) parent.lastChild.remove();
}

// The sources of the blocks: fenced code as a whole, other text up to an empty line outside of lists.
function split(text) {
  const blocks = [];
  let lines = [], fence = null, list = false;
  const close = () => {
    while (lines.length && !lines[lines.length - 1].trim()) lines.pop();
    if (lines.length) blocks.push(lines.join("\n"));
    lines = [];
    list = false;
  };
  for (const line of text.replace(/\r\n?/g, "\n").split("\n")) {
    if (fence) {
      lines.push(line);
      const end = /^ {0,3}(`{3,}|~{3,})\s*$/.exec(line);
      if (end && end[1][0] === fence[0] && end[1].length >= fence.length) { fence = null; close(); }
      continue;
    }
    const start = /^ {0,3}(`{3,}|~{3,})([^`]*)$/.exec(line);
    if (start) { close(); fence = start[1]; lines.push(line); continue; }
    const heading = /^ {0,3}#{1,6}(\s|$)/.test(line), rule = /^ {0,3}([-*_])( *\1){2,}\s*$/.test(line);
    if (heading || (rule && !lines.length)) { close(); lines.push(line); close(); continue; }
    const item = ITEM.test(line) && !rule;
    if (list && !line.trim()) { lines.push(line); continue; }
    if (list && lines.length && !lines[lines.length - 1].trim() && !item && !/^\s/.test(line)) close();
    else if (!list && !line.trim()) { close(); continue; }
    else if (!list && item && lines.length) close();
    if (item && !lines.length) list = true;
    lines.push(line);
  }
  close();
  return blocks;
}

function block(source, depth) {
  const lines = source.split("\n"), first = lines[0];
  const fence = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/.exec(first);
  if (fence) return code(lines, fence);
  const heading = /^ {0,3}(#{1,6})(?:\s+(.*?))?\s*#*\s*$/.exec(first);
  if (heading) return element("h" + Math.min(6, heading[1].length + 1), {}, ...inline(heading[2] ?? "", depth));
  if (/^ {0,3}([-*_])( *\1){2,}\s*$/.test(first)) return element("hr");
  if (/^ {0,3}>/.test(first)) {
    const quote = element("blockquote");
    const inner = lines.map(line => line.replace(/^ {0,3}> ?/, "")).join("\n");
    if (depth < MAX_DEPTH) quote.append(...split(inner).map(part => block(part, depth + 1)));
    else quote.append(inner);
    return quote;
  }
  if (ITEM.test(first)) return list(lines, depth);
  if (lines.length > 1 && first.includes("|") && /^ *\|?( *:?-+:? *\|)+( *:?-+:? *)?$/.test(lines[1])) return table(lines, depth);
  return element("p", {}, ...inline(source, depth));
}

function code(lines, fence) {
  const closed = lines.length > 1 && lines[lines.length - 1].trim().startsWith(fence[1]);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = element("button", { type: "button", textContent: "copy" });
  copy.addEventListener("click", () => toClipboard(text, copy));
  const shown = element("code", {}, ...highlight(text, fence[2]));
  return element("div", { className: "block" }, element("div", {}, element("span", { textContent: fence[2] || "text" }), copy), element("pre", {}, shown));
}

// Highlights comments, strings, numbers and keywords that many languages share.
function highlight(text, language) {
  const nodes = [], hash = HASH_COMMENTS.test(language);
  let at = 0;
  const add = (start, end, kind) => {
    if (start > at) nodes.push(text.slice(at, start));
    nodes.push(element("span", { className: kind, textContent: text.slice(start, end) }));
    at = end;
  };
  for (const found of text.slice(0, 50000).matchAll(CODE)) {
    const end = found.index + found[0].length;
    if (found[1]) {
      const slashes = /^\/[/*]/.test(found[1]);
      if (!(slashes && hash)) add(found.index, end, slashes ? "c" : "s");
    } else if (found[2]) {
      if (hash) add(found.index, end, "c");
    } else if (found[3]) add(found.index, end, "n");
    else if (WORDS.has(found[4])) add(found.index, end, "w");
  }
  nodes.push(text.slice(at));
  return nodes;
}

function list(lines, depth) {
  const marker = ITEM.exec(lines[0]), ordered = /\d/.test(marker[2]), indent = marker[1].length;
  const node = element(ordered ? "ol" : "ul");
  if (ordered && parseInt(marker[2]) !== 1) node.start = parseInt(marker[2]);
  let inner = null;
  const close = () => {
    if (inner === null) return;
    const item = element("li"), parts = depth < MAX_DEPTH ? split(inner.join("\n")) : [];
    parts.forEach((part, i) => {
      const child = block(part, depth + 1);
      if (i === 0 && child.tagName === "P") item.append(...child.childNodes);
      else item.append(child);
    });
    if (depth >= MAX_DEPTH) item.append(inner.join("\n"));
    node.append(item);
  };
  let width = 0;
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length < indent + 2 && !(inner && found[1].length >= width)) {
      close();
      width = found[1].length + found[2].length + 1;
      inner = [found[3]];
    } else inner.push(line.slice(Math.min(width, line.length - line.trimStart().length)));
  }
  close();
  return node;
}

function table(lines, depth) {
  const cells = line => line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
  const sides = cells(lines[1]).map(cell => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  const row = (line, name) => element("tr", {}, ...cells(line).slice(0, sides.length).map((cell, i) => {
    const node = element(name, {}, ...inline(cell, depth));
    node.style.textAlign = sides[i];
    return node;
  }));
  return element("table", {}, element("thead", {}, row(lines[0], "th")), element("tbody", {}, ...lines.slice(2).map(line => row(line, "td"))));
}

function inline(text, depth) {
  const nodes = [];
  while (text) {
    const found = depth < MAX_DEPTH ? INLINE.exec(text) : null;
    if (!found) break;
    nodes.push(text.slice(0, found.index));
    nodes.push(span(found, depth + 1));
    text = text.slice(found.index + found[0].length);
  }
  nodes.push(text);
  return nodes;
}

function span(found, depth) {
  if (found[1]) return element("code", { textContent: found[2].replace(/^ (.*\S.*) $/s, "$1") });
  const strong = found[3] ?? found[4], soft = found[6] ?? found[7];
  if (strong !== undefined) return element("strong", {}, ...inline(strong, depth));
  if (found[5] !== undefined) return element("s", {}, ...inline(found[5], depth));
  if (soft !== undefined) return element("em", {}, ...inline(soft, depth));
  if (found[10] !== undefined) return link(found[10], inline(found[9] || found[10], depth)) ?? found[0];
  if (found[11]) return link(found[11], [found[11]]);
  return found[12];
}

// A link, also for images: nothing is fetched before a click. null for addresses that a browser might execute.
function link(address, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return null;
  return element("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}
