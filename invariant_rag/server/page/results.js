/** Answers: a card for each reading, and the table of all orders that were asked. */

import { button, chips, element, visible } from "./elements.js";
import { answerKey, firstAnswer, flips, isFlipped } from "./orders.js";

export const READINGS = ["plain", "sorted", "invariant"];
const MOST_CHARACTERS = 60; // of an answer in the summary

/**
 * Show an answer in its card.
 *
 * @param reading One of `READINGS`.
 * @param content Where.
 * @param answer What `ask` returned, or `{failure}`; undefined: nothing was asked yet.
 * @param first The answer in the first order that was asked.
 * @param gold What the example's answer is; null: nobody knows.
 * @param copy Called with the body of the request when its command is wanted.
 */
export function showAnswer(reading, content, answer, first, gold, copy) {
  if (!answer) {
    content.replaceChildren(element("p", { class: "empty" }, "Ask to see the answer."));
  } else if (answer.failure) {
    content.replaceChildren(element("p", { class: "failure", role: "alert" }, visible(answer.failure)));
  } else {
    content.replaceChildren(...answerParts(reading, answer, first, gold, copy));
  }
}

function answerParts(reading, answer, first, gold, copy) {
  const { report } = answer;
  const flipped = isFlipped(answer, first);
  const order = report.order.length ? ["Physical order: ", chips(report.order), `(${report.method}).`] : [];
  const promised = report.invariant || reading === "plain";
  const notes = [
    ...(promised ? [] : ["The server does not promise that order cannot matter here."]),
    ...(report.dropped.length ? [`Dropped, as the prompt was too long: ${report.dropped.join(", ")}.`] : []),
    ...(report.trimmed.length ? [`Trimmed, as the prompt was too long: ${report.trimmed.join(", ")}.`] : []),
    ...report.warnings,
  ];
  return [
    element("p", { class: "answer", dir: "auto" }, visible(answer.text) || element("i", {}, "no text")),
    ...(gold === null ? [] : [judged(answer.text, gold)]),
    ...(flipped ? [element("p", { class: "flipped" }, `Flipped. The first order got: ${visible(first.text)}`)] : []),
    element("p", { class: "muted" }, ...order),
    ...(answer.sources.length ? [element("p", { class: "muted" }, "These words are in ", chips(answer.sources))] : []),
    ...notes.map((note) => element("p", { class: "note" }, visible(note))),
    figures(answer),
    button("Copy as curl", () => copy(answer.body), { class: "quiet" }),
  ];
}

function judged(text, gold) {
  const right = answerKey(text) === answerKey(gold);
  return element("p", { class: right ? "right" : "wrong" }, right ? "✓ right" : `✗ wrong: it is ${visible(gold)}`);
}

function figures(answer) {
  const { confidence, promptTokens, cachedTokens, milliseconds } = answer;
  const bar = element("span", { class: "bar", "aria-hidden": "true" }, element("span"));
  bar.firstChild.style.width = `${100 * (confidence ?? 0)}%`;
  return element(
    "dl",
    { class: "figures" },
    ...figure("Confidence", confidence === null ? "not asked" : confidence.toFixed(2), bar),
    ...figure("Prompt tokens", String(promptTokens)),
    ...figure("Cached", String(cachedTokens)),
    ...figure("Time", `${Math.round(milliseconds)} ms`),
  );
}

function figure(name, value, ...more) {
  return [element("div", {}, element("dt", {}, name), element("dd", {}, value, ...more))];
}

/**
 * Show the history: how often each reading flipped, and a row for each order.
 *
 * @param content Where.
 * @param history Entries `{order, plain, sorted, invariant}`, the first order first.
 * @param names What each reading is called; one without a name is not shown.
 * @param current The order that is shown, as a string.
 * @param restore Called with an order that is to be listed again.
 */
export function showHistory(content, history, names, current, restore) {
  const shown = READINGS.filter((reading) => names[reading]);
  const firsts = shown.map((reading) => [reading, firstAnswer(history, reading)]);
  const rows = history.map((entry, number) =>
    element(
      "tr",
      { class: String(entry.order) === current ? "current" : null },
      element("th", { scope: "row" }, orderButton(entry.order, number, restore)),
      ...firsts.map(([reading, first]) => cell(entry[reading], first)),
    ),
  );
  const head = ["Order", ...shown.map((reading) => names[reading])].map((name) => element("th", { scope: "col" }, name));
  content.replaceChildren(
    element("div", { class: "rates" }, ...shown.map((reading) => rate(history, reading, names[reading]))),
    element(
      "div",
      { class: "scrolled", tabindex: "0", role: "region", "aria-label": "Table of orders" },
      element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)),
    ),
  );
}

/** Return what came of some readings in a line: how often they flipped, or else their answers, cut short. */
export function summary(history, readings, names) {
  const found = readings.map((reading) => {
    const { others, flipped } = flips(history, reading);
    const answer = () => `“${cut(visible(firstAnswer(history, reading).text))}”`;
    return `${names[reading]}: ${others ? `flipped in ${flipped} of ${others} other orders` : answer()}`;
  });
  return found.join("; ");
}

function cut(text) {
  const characters = [...text.trim().replace(/\s+/g, " ")];
  return characters.length > MOST_CHARACTERS ? `${characters.slice(0, MOST_CHARACTERS - 1).join("")}…` : characters.join("");
}

function rate(history, reading, name) {
  const { others, flipped } = flips(history, reading);
  const share = element("strong", { class: flipped ? "some" : null }, `${Math.round((100 * flipped) / others)} %`);
  const found = others ? ["flipped ", share, ` in ${flipped} of ${others} other orders`] : ["no other order asked yet"];
  return element("p", { class: "rate", "data-reading": reading }, `${name}: `, ...found);
}

function orderButton(order, number, restore) {
  const label = `List the documents in order ${number + 1}: ${order.join(" ")}`;
  const made = button("", () => restore(order), { class: "quiet", "aria-label": label });
  made.append(chips(order));
  return made;
}

function cell(answer, first) {
  if (answer?.text === undefined) return element("td", { class: "muted" }, answer ? "failed" : "–");
  const mark = isFlipped(answer, first) ? [element("span", { class: "mark" }, "flipped")] : [];
  const text = element("span", { class: "short", dir: "auto" }, visible(answer.text));
  return element("td", {}, element("div", { class: "cell" }, text, " ", ...mark));
}
