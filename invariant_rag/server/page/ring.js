/** Physical order of the documents: the one that the server made from the contents, as a ring or as a row. */

import { chip, chips, colour, drawing, element } from "./elements.js";

const MOST_ROWS = 12; // documents up to which there is a row for each
const MOST_DRAWN = 24; // documents up to which there is a ring

/** Show how an answer's documents were arranged; `same`: all requested orders gave this arrangement. */
export function showRing(content, report, same) {
  const { order, method, ordering } = report;
  const agreement = same
    ? element("p", {}, "All requested orders gave this arrangement.")
    : element("p", { class: "note" }, "Not all requested orders gave this arrangement.");
  if (method !== "rotor" || order.length < 2) {
    const row = ["Method ", element("b", {}, method), `, ordering ${ordering}, from far to near: `, chips(order)];
    content.replaceChildren(element("p", {}, ...row), ...whole(order), agreement);
    return;
  }
  const picture = order.length <= MOST_DRAWN ? [ring(order)] : [];
  const table = order.length <= MOST_ROWS ? [rows(order)] : [];
  content.replaceChildren(
    element(
      "p",
      { class: "muted" },
      `Sorted by content (${ordering}) and closed to a ring. Each document attends to the others around the ring, `,
      "itself last; the question attends to all.",
    ),
    element("div", { class: "picture" }, ...picture, ...table),
    ...limits(order.length),
    ...whole(order),
    agreement,
  );
}

/** Say what is not drawn, and why. */
function limits(count) {
  if (count <= MOST_ROWS) return [];
  const rowsOnly = `The row of each document is listed for up to ${MOST_ROWS} documents`;
  const words = count <= MOST_DRAWN ? rowsOnly : `${rowsOnly}, and the ring is drawn for up to ${MOST_DRAWN}`;
  return [element("p", { class: "note" }, `${words}; here are ${count}.`)];
}

/** Return the whole order, to be opened, where a row of chips leaves some out. */
function whole(order) {
  if (order.length <= MOST_ROWS) return [];
  return [element("details", {}, element("summary", {}, `All ${order.length}, from far to near`), chips(order, Infinity))];
}

function ring(order) {
  const radius = Math.max(70, order.length * 9);
  const dot = Math.min(18, (Math.PI * radius) / order.length / 1.5);
  const size = radius + dot + 4;
  const places = order.map((_, index) => point(index / order.length, radius));
  const gap = (dot + 6) / (2 * Math.PI * radius);
  const arcs = order.map((_, index) => arc(index / order.length + gap, (index + 1) / order.length - gap, radius));
  const dots = order.map((name, index) => {
    const [x, y] = places[index];
    return drawing(
      "g",
      { class: colour(name), transform: `translate(${x} ${y})` },
      drawing("circle", { r: dot }),
      drawing("text", { "text-anchor": "middle", dy: "0.35em", "font-size": dot }, name),
    );
  });
  return drawing(
    "svg",
    {
      class: "ring",
      viewBox: `${-size} ${-size} ${2 * size} ${2 * size}`,
      role: "img",
      "aria-label": `Ring: ${order.join(", ")}, and back to ${order[0]}`,
    },
    ...arcs,
    ...dots,
  );
}

/** Return an arc with the head of an arrow, clockwise between two shares of the circle. */
function arc(from, to, radius) {
  const [x1, y1] = point(from, radius);
  const [x2, y2] = point(to, radius);
  const degrees = 360 * to;
  return drawing(
    "g",
    { class: "arc" },
    drawing("path", { d: `M${x1} ${y1}A${radius} ${radius} 0 0 1 ${x2} ${y2}`, fill: "none" }),
    drawing("path", { d: "M-6 -4L0 0L-6 4", fill: "none", transform: `translate(${x2} ${y2}) rotate(${degrees})` }),
  );
}

/** Return where a share of the circle ends, clockwise from its top. */
function point(share, radius) {
  const angle = 2 * Math.PI * share;
  return [radius * Math.sin(angle), -radius * Math.cos(angle)].map((each) => Number(each.toFixed(2)));
}

/** Return a table of the row of each document and of the question, from far to near. */
function rows(order) {
  const documents = order.map((name, place) => [chip(name), [...order.slice(place + 1), ...order.slice(0, place + 1)]]);
  const lines = [...documents, ["Question", order]].map(([name, row]) =>
    element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, chips(row))),
  );
  return element(
    "table",
    { class: "sights" },
    element("caption", { class: "muted" }, "What each attends to, from far to near"),
    element("tbody", {}, ...lines),
  );
}
