/** The order lab: asks the same question over the same documents in several orders, and shows what changes. */

import { ask, bodyOf, curl, Failure, getExamples, getModel, storedKey, storeKey } from "./api.js";
import { copy } from "./copying.js";
import { documentOfFile, DocumentList, documentsOf } from "./documents.js";
import { element, visible } from "./elements.js";
import { namesOf, PLAIN, plainIsAllowed, readingsOf, REFUSED, wordsOf } from "./methods.js";
import { firstAnswer, otherOrders, recorded, seeded } from "./orders.js";
import { READINGS, showAnswer, showHistory, summary } from "./results.js";
import { showRing } from "./ring.js";
import { stateOf, urlOf } from "./state.js";

const ORDERS_TO_TRY = 5;
const PATIENCE = 400; // milliseconds without a move after which the new order is asked

const at = (id) => document.getElementById(id);
const copyCommand = (body) => copy(curl(body), "command", at("copied"), say);
const contentOf = (id) => at(id).querySelector(".content");
const say = (text) => (at("status").textContent = text);
const random = seeded(1);

let model = null; // the card of the model: its name, and what requests may choose
let history = []; // {order, plain, invariant} of each order that was asked
let subject = ""; // what the history is about: question, method and documents
let running = null; // ends the requests that run
let waiting = 0; // timer of the order to ask next
let examples = [];
let example = null; // the one that was loaded last

const documents = new DocumentList(
  at("documents"),
  () => {
    at("no-documents").hidden = documents.order.length > 0;
    showAnew();
  },
  (sentence) => {
    at("moves").textContent = sentence;
    showAnew();
    clearTimeout(waiting);
    if (at("follow").checked && historyNow().length && !entryOf(documents.order)) {
      waiting = setTimeout(() => askOrders([documents.order]), PATIENCE);
    }
  },
);

const question = () => at("question").value.trim();
const method = () => at("method").value || model?.invariant.method;
const names = () => namesOf(model, at("method").value);
const readings = () => readingsOf(model, at("method").value);

function subjectNow() {
  const all = documents.inOrder([...documents.order].sort());
  return JSON.stringify([question(), at("method").value, all]);
}

/** Return the history, if it is about what would be asked now. */
function historyNow() {
  return subject === subjectNow() ? history : [];
}

function entryOf(order) {
  return historyNow().find((entry) => String(entry.order) === String(order));
}

/** Return the example, if its question is asked over its documents, in any order. */
function exampleNow() {
  const all = documents.inOrder([...documents.order].sort()).map(({ title, text }) => ({ title, text }));
  const same = example && question() === example.question && JSON.stringify(all) === JSON.stringify(example.documents);
  return same ? example : null;
}

/** Show what is known of the order in which the documents are listed now. */
function show(failed = null) {
  const known = historyNow();
  const entry = failed ?? entryOf(documents.order);
  const gold = exampleNow()?.answer ?? null;
  at("sorted").hidden = model !== null && !names().sorted;
  for (const reading of READINGS) {
    showAnswer(reading, contentOf(reading), entry?.[reading], firstAnswer(known, reading), gold, copyCommand);
  }
  at("why").textContent = exampleNow()?.why ?? "";
  documents.mark(exampleNow()?.gold ?? []);
  at("invariant-heading").textContent = names().invariant;
  if (model) at("reading").replaceChildren(element("strong", {}, method()), ` ${wordsOf(method())}`);
  if (model && !plainIsAllowed(model)) {
    contentOf("plain").replaceChildren(element("p", { class: "note" }, REFUSED));
  }
  at("history").hidden = !known.length;
  showHistory(contentOf("history"), known, names(), String(entry?.order), restore);
  const reports = known.flatMap(({ invariant }) => invariant?.report ?? []);
  const report = entry?.invariant?.report ?? reports[0];
  at("ring").hidden = !report?.order.length;
  if (report) {
    const same = reports.every((each) => String(each.order) === String(report.order));
    showRing(contentOf("ring"), report, same);
  }
}

/** Show what is known after something has changed; what was said last was about something else. */
function showAnew() {
  say("");
  show();
}

function restore(order) {
  documents.arrange(order);
  show();
  at("history").querySelector(".current button").focus(); // the row is a new one
  at("moves").textContent = `Listed as ${order.join(" ")}.`;
}

/** Ask in each of some orders, one after the other: so the times are those of one request. */
async function askOrders(orders) {
  clearTimeout(waiting);
  running?.abort();
  running = new AbortController();
  const { signal } = running;
  if (subject !== subjectNow()) history = [];
  subject = subjectNow();
  const asked = bodies(); // they stay what they are, whatever is changed while the answers come
  at("stop").hidden = false;
  at("answers").setAttribute("aria-busy", true);
  try {
    for (const [index, order] of orders.entries()) {
      say(orders.length > 1 ? `Asking: order ${index + 1} of ${orders.length} …` : "Asking …");
      const entry = { order, ...(await answersOf(asked(order), signal)) };
      const answers = READINGS.map((reading) => entry[reading]);
      const failed = answers.some((answer) => answer?.failure);
      if (answers.some((answer) => answer?.text !== undefined)) history = recorded(history, entry);
      if (subject !== subjectNow()) {
        show();
        say("Stopped: what is asked has changed.");
        return;
      }
      show(failed ? entry : null);
      if (failed) {
        say("");
        return;
      }
    }
    say(summary(history, Object.keys(readings()), names()));
  } catch (error) {
    if (!signal.aborted) throw error;
  } finally {
    if (running.signal === signal) {
      at("stop").hidden = true;
      at("answers").setAttribute("aria-busy", false);
    }
  }
}

/** Return a function from an order to what is to be asked in it: the body of a request for each reading. */
function bodies() {
  const wanted = question();
  const named = new Map(documents.inOrder(documents.order).map((each) => [each.id, each]));
  const chosen = Object.entries(readings());
  const logprobs = at("logprobs").checked;
  return (order) => {
    const listed = order.map((name) => named.get(name));
    return chosen.map(([reading, invariant]) => [reading, bodyOf(model.id, wanted, listed, invariant, logprobs)]);
  };
}

async function answersOf(asked, signal) {
  const answers = {};
  for (const [reading, body] of asked) {
    try {
      answers[reading] = await ask(body, signal);
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      answers[reading] = { failure: error.message };
      if (error.status === 401) wantKey(error.message);
    }
  }
  return answers;
}

function notice(words) {
  at("notice").textContent = words;
  at("notice").hidden = !words;
}

function wantKey(words) {
  notice(words);
  at("key-form").hidden = false;
  at("forget-key").hidden = true;
  at("key").focus();
}

/** Ask the server what it serves, and fill in what may be chosen. */
async function connect() {
  try {
    model = await getModel();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    if (error.status === 401) wantKey(storedKey() ? error.message : "This server needs a key.");
    else notice(error.message);
    return;
  }
  notice("");
  at("key-form").hidden = true;
  at("forget-key").hidden = !storedKey();
  at("model").textContent = `Model: ${visible(model.id)}`;
  at("toy").hidden = !model.toy;
  const methods = model.invariant.methods.filter((name) => name !== PLAIN.method);
  at("method").replaceChildren(
    at("method").options[0],
    ...methods.map((name) => element("option", { value: name }, name)),
  );
  show();
}

function load(state) {
  documents.clear();
  documents.add(state.documents);
  at("question").value = state.question;
  if (state.order) documents.arrange(state.order);
  showAnew();
}

/** Fill in what the address of the page holds, or else the first example. */
async function begin() {
  try {
    examples = await getExamples();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    notice(error.message);
  }
  at("example").append(...examples.map(({ name }, place) => element("option", { value: place }, name)));
  const state = stateOf(window.location.hash);
  example = examples.find(({ question }) => question === state?.question) ?? examples[0] ?? null;
  if (state ?? example) load(state ?? example);
  if (state?.method) at("method").value = state.method;
  showAnew();
}

async function addFiles(files) {
  const found = await Promise.allSettled([...files].map(documentOfFile));
  documents.add(found.flatMap((each) => each.value ?? []));
  notice(found.flatMap((each) => each.reason?.message ?? []).join(" "));
}

/** Return whether there is something to ask, or say what is missing. */
function ready() {
  if (!model) say("The server has not said yet what it serves.");
  else if (!question()) say("Ask a question first.");
  else if (!documents.order.length) say("Add documents first.");
  else return true;
  return false;
}

at("question-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (ready()) askOrders([documents.order]);
});
at("try").addEventListener("click", () => {
  if (!ready()) return;
  const { order } = documents;
  const known = historyNow().map((entry) => entry.order);
  const first = known.length ? [] : [order];
  const others = otherOrders(order, ORDERS_TO_TRY, [...known, order], random);
  if (first.length + others.length) askOrders([...first, ...others]);
  else say("Every order of these documents was asked.");
});
at("stop").addEventListener("click", () => {
  running.abort();
  say("Stopped.");
});
for (const id of ["question", "method"]) at(id).addEventListener("input", showAnew);
at("paste-form").addEventListener("submit", (event) => {
  event.preventDefault();
  documents.add(documentsOf(at("pasted").value));
  at("pasted").value = "";
});
at("files").addEventListener("change", async () => {
  await addFiles(at("files").files);
  at("files").value = "";
});
at("example").addEventListener("change", () => {
  example = examples[at("example").value];
  at("example").value = "";
  load(example);
});
at("link").addEventListener("click", () => {
  copy(urlOf(documents, question(), at("method").value), "link", at("copied"), say);
});
at("clear").addEventListener("click", () => documents.clear());
at("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  storeKey(at("key").value.trim());
  at("key").value = "";
  await connect();
});
at("forget-key").addEventListener("click", async () => {
  storeKey("");
  await connect();
});

await connect();
await begin();
