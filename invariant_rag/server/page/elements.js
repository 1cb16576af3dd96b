/** Elements of the page. Whatever comes from outside is set as text: nothing is ever parsed as HTML. */

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8;
const MOST_CHIPS = 12;

/** Return an element with attributes and children; texts become text nodes. An attribute that is null is left out. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Return an element of SVG. */
export function drawing(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

/** Return a button that calls a function. */
export function button(text, pressed, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", pressed);
  return made;
}

/** Return the mark of a document: its letter, on its colour. */
export function chip(name) {
  return element("span", { class: `chip ${colour(name)}` }, name);
}

/** Return the marks of documents in a row, which a screen reader reads as a list of letters; of many, the first ones. */
export function chips(names, most = MOST_CHIPS) {
  const shown = names.slice(0, most);
  const rest = names.length - shown.length;
  const title = rest ? names.join(" ") : null;
  const more = rest ? [`… and ${rest} more `] : [];
  return element("span", { class: "chips", title }, ...shown.flatMap((each) => [chip(each), " "]), ...more);
}

/** Return the class of a document's colour. */
export function colour(name) {
  const letters = [...name].map((each) => each.charCodeAt(0) - 64);
  return `colour-${(letters.reduce((number, letter) => number * 26 + letter, 0) - 1) % COLOURS}`;
}

/** Return text in which characters that have no glyph, or that turn the text around them, are seen. */
export function visible(text) {
  return text
    .replace(/[\0-\x08\x0b\x0c\x0e-\x1f]/g, (each) => String.fromCharCode(0x2400 + each.charCodeAt(0)))
    .replace(/[\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
