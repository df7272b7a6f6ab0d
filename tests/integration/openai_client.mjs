// What the official JavaScript client sees, as one JSON object on stdout: streams, tools, responses, errors.
// node openai_client.mjs FOLDER_WITH_NODE_MODULES BASE_URL
import { createRequire } from "node:module";

const OpenAI = createRequire(`${process.argv[2]}/`)("openai");
const client = new OpenAI({ baseURL: process.argv[3], apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Write one short sentence about the sea." }];
const asked = { model, messages, seed: 3, max_tokens: 20 };

const whole = await client.chat.completions.create(asked);
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
const chunks = [];
for await (const chunk of stream) chunks.push(chunk);
const accumulated = await client.chat.completions.stream(asked).finalChatCompletion().catch((error) => ({ error: error.name }));

const early = await client.chat.completions.create({ ...asked, stream: true });
for await (const _ of early) break;

const events = [];
for await (const event of await client.responses.create({ model, input: messages, max_output_tokens: 20, seed: 3, stream: true }))
  events.push(event);

let failure = null;
try {
  await client.chat.completions.create({ ...asked, temperature: 9 });
} catch (error) {
  failure = { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
}

console.log(JSON.stringify({
  whole: whole.choices[0].message.content,
  streamed: chunks.map((chunk) => chunk.choices[0]?.delta?.content ?? "").join(""),
  usage: chunks.at(-1).usage,
  wholeUsage: whole.usage,
  accumulated: accumulated.choices?.[0]?.message?.content ?? accumulated.error,
  deltas: events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta).join(""),
  final: events.at(-1).response.output[0].content[0].text,
  status: events.at(-1).type,
  failure,
}));
