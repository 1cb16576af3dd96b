/** The list of documents: dragged, moved by buttons and keys, and read from text and files. Tab stops at it once. */

import { button, chip, element, visible } from "./elements.js";

const EDGE = 48; // pixels from the edge of the window in which a drag scrolls it
const FAR = 4; // pixels that a mouse moves before a press is a drag
const KEYS = { ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity };

export class DocumentList {
  #list;
  #changed;
  #moved;
  #documents = new Map();
  #named = 0;

  /**
   * @param list The element of the list.
   * @param changed Called without arguments after documents came or went.
   * @param moved Called with a sentence after documents changed places.
   */
  constructor(list, changed, moved) {
    this.#list = list;
    this.#changed = changed;
    this.#moved = moved;
    list.addEventListener("pointerdown", (event) => this.#drag(event));
    list.addEventListener("keydown", (event) => this.#press(event));
    list.addEventListener("focusin", (event) => this.#stopAt(event.target.closest("li")));
  }

  /** Names of the documents, as they are listed. */
  get order() {
    return this.#items.map((item) => item.dataset.name);
  }

  /** Return documents as the API takes them, in an order of their names. */
  inOrder(order) {
    return order.map((name) => ({ id: name, ...this.#documents.get(name) }));
  }

  /** Remove all documents. */
  clear() {
    this.#documents.clear();
    this.#list.replaceChildren();
    this.#named = 0;
    this.#changed();
  }

  /** Add documents of a `text` and perhaps a `title`. */
  add(documents) {
    for (const { title, text } of documents) {
      const name = letterOf(this.#named);
      this.#named += 1;
      this.#documents.set(name, title ? { title, text } : { text });
      this.#list.append(this.#item(name));
    }
    this.#update();
    this.#changed();
  }

  /** Mark the documents that hold an answer, by their places when they were added. */
  mark(places) {
    this.#items.forEach((item) => item.classList.toggle("gold", places.includes(placeOf(item.dataset.name))));
  }

  /** List the documents in an order of their names. */
  arrange(order) {
    const items = new Map(this.#items.map((item) => [item.dataset.name, item]));
    this.#list.replaceChildren(...order.map((name) => items.get(name)));
    this.#update();
  }

  get #items() {
    return [...this.#list.children];
  }

  #label(name) {
    const { title } = this.#documents.get(name);
    return title ? `${name}, ${visible(title)}` : `document ${name}`;
  }

  #item(name) {
    const { title, text } = this.#documents.get(name);
    const label = this.#label(name);
    const heading = title ? [element("strong", {}, visible(title)), " "] : [];
    const preview = element("span", { class: "preview" }, visible(text.slice(0, 300)));
    return element(
      "li",
      { "data-name": name },
      element("span", { class: "grip", title: "Drag", "aria-hidden": "true" }),
      chip(name),
      element(
        "details",
        {},
        element("summary", { dir: "auto", tabindex: "-1" }, ...heading, preview),
        element("p", { dir: "auto" }, visible(text)),
      ),
      element(
        "span",
        { class: "moves" },
        button("↑", () => this.#move(name, -1), { "aria-label": `Move ${label} up`, "data-by": "-1", tabindex: "-1" }),
        button("↓", () => this.#move(name, 1), { "aria-label": `Move ${label} down`, "data-by": "1", tabindex: "-1" }),
        button("×", () => this.#remove(name), { "aria-label": `Remove ${label}`, tabindex: "-1" }),
      ),
    );
  }

  #remove(name) {
    const items = this.#items;
    const place = items.findIndex((item) => item.dataset.name === name);
    items[place].remove();
    this.#documents.delete(name);
    this.#update();
    this.#changed();
    (this.#items[place] ?? this.#items.at(-1))?.querySelector("summary").focus();
  }

  #move(name, by) {
    const items = this.#items;
    const place = items.findIndex((item) => item.dataset.name === name);
    const target = Math.min(Math.max(place + by, 0), items.length - 1);
    if (target === place) return;
    const focused = document.activeElement;
    const [item] = items.splice(place, 1);
    this.#list.insertBefore(item, items[target] ?? null);
    focused.focus(); // an element that changes its place loses the focus
    this.#settled(item);
  }

  /** Arrow keys go from document to document; with Alt they move it, and it keeps the focus. Delete removes it. */
  #press(event) {
    const item = event.target.closest("li");
    const by = KEYS[event.key];
    if (event.ctrlKey || event.metaKey || (by === undefined && event.key !== "Delete")) return;
    event.preventDefault();
    if (event.key === "Delete") this.#remove(item.dataset.name);
    else if (event.altKey) this.#move(item.dataset.name, by);
    else {
      const items = this.#items;
      const target = Math.min(Math.max(items.indexOf(item) + by, 0), items.length - 1);
      items[target].querySelector("summary").focus();
    }
  }

  /** Tab comes back to the document where the focus was. */
  #stopAt(item) {
    for (const each of this.#items) each.querySelector("summary").tabIndex = each === item ? 0 : -1;
  }

  /** A mouse drags the whole row, once it has moved; a finger the grip, since it scrolls the page by the rest. */
  #drag(event) {
    const item = event.target.closest("li");
    const grip = event.target.closest(".grip");
    const held = grip || (event.pointerType === "mouse" && !event.target.closest("button, details p"));
    if (!item || !held || event.button !== 0) return;
    if (grip) event.preventDefault();
    const before = this.order;
    const ended = new AbortController();
    const { signal } = ended;
    let dragged = false;
    const begin = () => {
      dragged = true;
      item.classList.add("dragged");
      this.#list.classList.add("dragging");
      this.#list.setPointerCapture(event.pointerId); // so that items may move, and the end is no click on one
    };
    const end = (restored) => {
      ended.abort();
      item.classList.remove("dragged");
      this.#list.classList.remove("dragging");
      if (!dragged) return;
      if (restored) this.arrange(before);
      else if (String(before) !== String(this.order)) this.#settled(item);
    };
    const follow = (moved) => {
      if (!dragged && Math.hypot(moved.clientX - event.clientX, moved.clientY - event.clientY) > FAR) begin();
      if (dragged) this.#follow(item, moved.clientY);
    };
    if (grip) begin();
    document.addEventListener("pointermove", follow, { signal });
    document.addEventListener("pointerup", () => end(false), { signal });
    document.addEventListener("pointercancel", () => end(true), { signal });
    document.addEventListener("keydown", (pressed) => pressed.key === "Escape" && end(true), { signal });
  }

  #follow(item, y) {
    const next = this.#items.filter((each) => each !== item).find((each) => y < middle(each)) ?? null;
    if (item.nextElementSibling !== next) this.#list.insertBefore(item, next);
    if (y < EDGE) window.scrollBy(0, -EDGE / 4);
    if (y > window.innerHeight - EDGE) window.scrollBy(0, EDGE / 4);
  }

  #settled(item) {
    this.#update();
    const { name } = item.dataset;
    this.#moved(`${this.#label(name)}: moved to place ${this.order.indexOf(name) + 1} of ${this.order.length}.`);
  }

  #update() {
    const items = this.#items;
    if (!items.some((item) => item.querySelector("summary").tabIndex === 0)) this.#stopAt(items[0]);
    items.forEach((item, place) => {
      item.querySelector("[data-by='-1']").setAttribute("aria-disabled", place === 0);
      item.querySelector("[data-by='1']").setAttribute("aria-disabled", place === items.length - 1);
    });
  }
}

/** Return the documents of a text: between lines `---`, or else between empty lines. */
export function documentsOf(text) {
  const parts = /^---[^\S\n]*$/m.test(text) ? text.split(/^---[^\S\n]*$/m) : text.split(/\n[^\S\n]*\n/);
  return parts.map((part) => part.trim()).filter(Boolean).map(documentOf);
}

/** Return the document of a file. Throws an Error, in words, if it is no text. */
export async function documentOfFile(file) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${visible(file.name)}: expected text in UTF-8. Save it as text, or paste it.`);
  }
  if (!text.trim()) throw new Error(`${visible(file.name)}: expected text, got an empty file.`);
  return { title: file.name.replace(/\.\w+$/, ""), ...documentOf(text.replaceAll("\r\n", "\n").trim()) };
}

function documentOf(text) {
  const [, title, rest] = /^#[^\S\n]+([^\n]*)\n+(.*)$/s.exec(text) ?? [];
  return title ? { title: title.trim(), text: rest } : { text };
}

/** Return the place at which a document of this name was added. */
function placeOf(name) {
  return [...name].reduce((number, letter) => number * 26 + letter.charCodeAt(0) - 64, 0) - 1;
}

/** Return A, B, ..., Z, AA, AB, ... */
export function letterOf(number) {
  const last = String.fromCharCode(65 + (number % 26));
  return number < 26 ? last : letterOf(Math.floor(number / 26) - 1) + last;
}

function middle(item) {
  const { top, height } = item.getBoundingClientRect();
  return top + height / 2;
}
