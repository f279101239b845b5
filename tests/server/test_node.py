"""The Node `openai` client: streams, tools and errors. Skipped without Node, or without a source for the client."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.conftest import HERMES, LOOK, Running

SCRIPT = """
import OpenAI from "openai";
const [url, template, tool] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me a story." }];
const ask = { model: "demo", messages, max_tokens: 8, temperature: 0 };
const out = {};
const whole = await client.chat.completions.create(ask);
out.whole = whole.choices[0].message.content;
let text = "";
const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) out.tokens = chunk.usage.completion_tokens;
}
out.stream = text;
const called = await client.chat.completions.create({
  ...ask, max_tokens: 150, tools: [JSON.parse(tool)], tool_choice: "required", parallel_tool_calls: false, chat_template: template,
});
out.call = called.choices[0].message.tool_calls[0].function;
try { await client.chat.completions.create({ ...ask, wish: 1 }); } catch (error) { out.error = [error.status, error.param, error.code]; }
const response = await client.responses.create({ model: "demo", input: "Hello", max_output_tokens: 4 });
out.response = response.output_text;
const controller = new AbortController();
const endless = await client.chat.completions.create({ ...ask, max_tokens: 900, stream: true }, { signal: controller.signal });
let seen = 0;
for await (const _ of endless) { if (++seen === 3) { controller.abort(); break; } }
out.seen = seen;
console.log(JSON.stringify(out));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no Node here")
    made = tmp_path_factory.mktemp("node")
    (made / "package.json").write_text('{"name": "a", "type": "module", "private": true}')
    kept = os.environ.get("NODE_OPENAI")  # a folder with node_modules, for machines without a registry
    if kept is not None:
        (made / "node_modules").symlink_to(Path(kept) / "node_modules")
        return made
    got = subprocess.run(["npm", "install", "--no-audit", "--no-fund", "openai@6"], cwd=made, capture_output=True, text=True, timeout=120)
    if got.returncode:
        pytest.skip(f"npm cannot get the client: {got.stderr[-200:]}")
    return made


def test_node_client(server: Running, folder: Path) -> None:
    (folder / "ask.mjs").write_text(SCRIPT)
    command = ["node", "ask.mjs", server.url, HERMES, json.dumps(LOOK)]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    out = json.loads(ran.stdout)
    assert out["whole"] == out["stream"] and out["tokens"] == 8 and out["seen"] == 3 and out["response"]
    assert out["error"] == [400, "wish", "unknown_parameter"]
    assert out["call"]["name"] == "look" and json.loads(out["call"]["arguments"])["place"] in ("tree", "river")
