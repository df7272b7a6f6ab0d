// A prompt, its streamed answer, and the way to its trace.

import { headers, getJson, refusal } from "./door.js";
import { count, digits, h, seconds } from "./dom.js";

export function show(root, say) {
  const prompt = h("textarea", { id: "prompt", "aria-label": "prompt" }, "What is the capital of France? Answer in one sentence.");
  const limit = h("input", { type: "number", value: 128, min: 1, style: { width: "90px" }, "aria-label": "max tokens" });
  const heat = h("input", { type: "number", value: 0, min: 0, max: 2, step: 0.1, style: { width: "80px" }, "aria-label": "temperature" });
  const send = h("button", { id: "send" }, "Send");
  const halt = h("button", { class: "quiet", disabled: true }, "Stop");
  const answer = h("div", { class: "answer", id: "answer" });
  const facts = h("p", { class: "muted", id: "facts" });
  root.append(
    h("section", { class: "panel talk" },
      h("h2", {}, "Try it"), prompt,
      h("div", {}, h("label", {}, "max tokens ", limit), "  ", h("label", {}, "temperature ", heat), "  ", send, " ", halt),
      answer, facts));
  let running = null;

  async function ask() {
    running = new AbortController();
    send.disabled = true;
    halt.disabled = false;
    answer.textContent = "";
    facts.textContent = "";
    say("");
    const started = performance.now();
    let first = null;
    try {
      const model = (await getJson("v1/models")).data[0].id;
      const response = await fetch("v1/chat/completions", {
        method: "POST",
        signal: running.signal,
        headers: { "content-type": "application/json", ...headers() },
        body: JSON.stringify({
          model, stream: true, stream_options: { include_usage: true }, max_tokens: Number(limit.value), temperature: Number(heat.value),
          messages: [{ role: "user", content: prompt.value }],
        }),
      });
      if (!response.ok) throw await refusal(response);
      const trace = response.headers.get("x-ai-trace-id");
      let usage = null;
      for await (const event of events(response.body)) {
        if (event.error) throw new Error(event.error.message);
        const delta = event.choices?.[0]?.delta ?? {};
        const text = (delta.reasoning_content ?? "") + (delta.content ?? "");
        if (text && first === null) first = performance.now();
        answer.append(text);
        usage = event.usage ?? usage;
      }
      const passed = (performance.now() - (first ?? started)) / 1000;
      const speed = usage && passed > 0 ? (usage.completion_tokens - 1) / passed : null;
      facts.replaceChildren(
        `first text after ${seconds(((first ?? started) - started) / 1000)}, ${count(usage?.completion_tokens)} tokens`,
        speed === null ? "" : `, ${digits(speed)} tokens/s`, ". ", h("a", { href: `#/trace/${trace}` }, "See its trace"));
    } catch (error) {
      if (error.name !== "AbortError") say(error.message);
    }
    send.disabled = false;
    halt.disabled = true;
  }

  send.addEventListener("click", ask);
  halt.addEventListener("click", () => running?.abort());
  return () => running?.abort();
}

/** The JSON of each server-sent event, up to [DONE]. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    let end;
    while ((end = held.indexOf("\n\n")) >= 0) {
      const line = held.slice(0, end);
      held = held.slice(end + 2);
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}
