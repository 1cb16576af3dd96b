/** The list of documents: dragged by its grips, moved by buttons and arrow keys, and read from text and files. */

import { button, chip, element, visible } from "./elements.js";

const EDGE = 48; // pixels from the edge of the window in which a drag scrolls it
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
      const name = letters(this.#named);
      this.#named += 1;
      this.#documents.set(name, title ? { title, text } : { text });
      this.#list.append(this.#item(name));
    }
    this.#update();
    this.#changed();
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
        element("summary", { dir: "auto" }, ...heading, preview),
        element("p", { dir: "auto" }, visible(text)),
      ),
      element(
        "span",
        { class: "moves" },
        button("↑", () => this.#move(name, -1), { "aria-label": `Move ${label} up`, "data-by": "-1" }),
        button("↓", () => this.#move(name, 1), { "aria-label": `Move ${label} down`, "data-by": "1" }),
        button("×", () => this.#remove(name), { "aria-label": `Remove ${label}` }),
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
    (this.#items[place] ?? this.#items.at(-1))?.querySelector("[data-by]").focus();
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

  /** Arrow keys on any control of a document move it; the control keeps the focus. */
  #press(event) {
    const by = KEYS[event.key];
    if (by === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.#move(event.target.closest("li").dataset.name, by);
  }

  #drag(event) {
    const grip = event.target.closest(".grip");
    if (!grip || event.button !== 0) return;
    event.preventDefault();
    const item = grip.closest("li");
    const before = this.order;
    const ended = new AbortController();
    const { signal } = ended;
    const end = (restored) => {
      ended.abort();
      item.classList.remove("dragged");
      this.#list.classList.remove("dragging");
      if (restored) this.arrange(before);
      else if (String(before) !== String(this.order)) this.#settled(item);
    };
    item.classList.add("dragged");
    this.#list.classList.add("dragging");
    this.#list.setPointerCapture(event.pointerId); // the list stays where it is while its items move
    this.#list.addEventListener("pointermove", (moved) => this.#follow(item, moved.clientY), { signal });
    this.#list.addEventListener("pointerup", () => end(false), { signal });
    this.#list.addEventListener("pointercancel", () => end(true), { signal });
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

/** Return A, B, ..., Z, AA, AB, ... */
function letters(number) {
  const last = String.fromCharCode(65 + (number % 26));
  return number < 26 ? last : letters(Math.floor(number / 26) - 1) + last;
}

function middle(item) {
  const { top, height } = item.getBoundingClientRect();
  return top + height / 2;
}
