// A tool loop of the AI SDK, which checks every event of a stream by its schemas, against a daemon: prints as JSON what
// it has understood. Arguments: the daemon's URL, the provider's name, the model's.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // they would stand in the output
const [url, provider, name] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey: "none" };
const models = {
  "openai-chat": () => createOpenAI(options).chat(name),
  "openai-responses": () => createOpenAI(options).responses(name),
  "openai-completion": () => createOpenAI(options).completion(name),
  "openai-compatible": () => createOpenAICompatible({ name: "glm53d", includeUsage: true, ...options }).chatModel(name),
  anthropic: () => createAnthropic(options)(name),
};
const results = [];
const bash = tool({
  description: "Runs a command.",
  inputSchema: z.object({ command: z.string(), timeout: z.number().optional() }),
  execute: async (input) => {
    results.push(input);
    return "a.txt";
  },
});
const request = {
  model: models[provider](),
  providerOptions: { openai: { store: false } }, // else Responses would refer to items that the server has stored
  tools: provider === "openai-completion" ? undefined : { bash },
  stopWhen: stepCountIs(3),
  maxRetries: 0,
};

function step({ text, reasoningText, toolCalls, finishReason, usage }) {
  const calls = toolCalls.map(({ toolName, input }) => ({ toolName, input }));
  return { text, reasoning: reasoningText ?? null, calls, finishReason, usage };
}

const stream = streamText({ ...request, prompt: `Which files does ${provider} see in a stream?`, onError: () => {} });
const parts = {};
const errors = [];
for await (const part of stream.fullStream) {
  parts[part.type] = (parts[part.type] ?? 0) + 1;
  if (part.type === "error") errors.push(String(part.error));
}
const streamed = errors.length ? [] : (await stream.steps).map(step);
const plain = (await generateText({ ...request, prompt: `Which files does ${provider} see?` })).steps.map(step);
console.log(JSON.stringify({ streamed, plain, parts, errors, results }));
