/** The server's public API: the model, answers, errors in words, and requests as commands. */

const KEY = "invariant-rag-key";
const KEY_VARIABLE = "INVARIANT_RAG_API_KEY";
const BEGINNINGS = {
  401: "This server needs a valid key",
  413: "That is too long for this server",
  429: "This server is busy",
  504: "The answer took too long",
};

/** A request without an answer; the message says why, in words. */
export class Failure extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
  }
}

export const storedKey = () => sessionStorage.getItem(KEY) ?? "";
export const storeKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

/** Return the card of the model that the server serves. */
export async function getModel() {
  const { data } = await call("v1/models", {});
  return data[0];
}

/** Return the examples: each a name, why it was chosen, a question, its answer, the places of gold documents, and documents. */
export async function getExamples() {
  return call("lab/examples.json", {});
}

/** Return the body of a request. `invariant`: method and ordering; {}: the server's. */
export function bodyOf(model, question, documents, invariant, logprobs) {
  const body = { model, messages: [{ role: "user", content: question }], documents };
  return {
    ...body,
    ...(Object.keys(invariant).length ? { invariant } : {}),
    ...(logprobs ? { logprobs } : {}),
  };
}

/** Ask, and return the answer with its confidence, its cost, and its ledger. */
export async function ask(body, signal) {
  const start = performance.now();
  const reply = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const milliseconds = performance.now() - start;
  const { message, logprobs } = reply.choices[0];
  return {
    text: message.content ?? "",
    confidence: mean((logprobs?.content ?? []).map((token) => Math.exp(token.logprob))),
    sources: [...new Set((message.citations ?? []).flatMap((each) => each.sources.map((source) => source.id)))],
    promptTokens: reply.usage.prompt_tokens,
    cachedTokens: reply.usage.prompt_tokens_details.cached_tokens,
    milliseconds,
    report: reply.invariant,
    body,
  };
}

/** Return a request as a command for a POSIX shell. The key is not in it: the shell's variable is. */
export function curl(body) {
  // Control characters and what is not seen stay escaped: a terminal would obey them.
  const json = JSON.stringify(body).replace(/\p{C}/gu, escaped).replaceAll("'", "'\\''");
  const key = storedKey() ? `  -H "Authorization: Bearer $${KEY_VARIABLE}" \\\n` : "";
  return `curl '${address("v1/chat/completions")}' \\\n  -H 'Content-Type: application/json' \\\n${key}  -d '${json}'`;
}

const address = (path) => new URL(path, document.baseURI).href.replaceAll("'", "%27");

async function call(path, options) {
  const key = storedKey();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  let body;
  try {
    response = await fetch(address(path), { ...options, headers });
    body = await response.text();
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Failure("The server cannot be reached. Is it still running? Then try again.");
  }
  const parsed = parse(body);
  if (!response.ok || parsed === null) {
    throw new Failure(words(response, parsed?.error), response.status);
  }
  return parsed;
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null; // a proxy in between may answer in HTML; the status says enough
  }
}

function words(response, error) {
  const { status } = response;
  const fallback = status >= 500 ? "The server failed" : "The server refused the request";
  const beginning = BEGINNINGS[status] ?? fallback;
  if (!error) return `${beginning}: it answered with status ${status}, and nothing that this page understands.`;
  const wait = response.headers.get("Retry-After");
  const after = wait ? ` Try again in ${wait} s.` : ` ${error.hint ?? ""}`;
  return `${beginning}: ${error.message.replace(/\.$/, "")}.${after}`.trim();
}

const escaped = (text) =>
  text
    .split("") // code units, of which a character may have two
    .map((unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`)
    .join("");

const mean = (numbers) =>
  numbers.length ? numbers.reduce((sum, number) => sum + number, 0) / numbers.length : null;
