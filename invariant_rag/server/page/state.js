/** The state of the page as an address: question, documents, their order and the method. Never a key or an answer. */

import { letterOf } from "./documents.js";

const MARK = "#lab=";

/** Return the address of this page with what it holds now. */
export function urlOf(list, question, method) {
  const added = [...list.order].sort((one, other) => one.length - other.length || (one < other ? -1 : 1));
  const letters = new Map(added.map((name, place) => [name, letterOf(place)])); // a page that begins anew names them so
  const order = list.order.map((name) => letters.get(name));
  const documents = list.inOrder(added).map(({ title, text }) => ({ title, text }));
  const bytes = new TextEncoder().encode(JSON.stringify({ question, method, order, documents }));
  const code = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  return new URL(MARK + code.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", ""), document.baseURI).href;
}

/** Return the state that the part of an address after its `#` holds, or null if it holds none that this page wrote. */
export function stateOf(hash) {
  if (!hash.startsWith(MARK)) return null;
  try {
    const code = hash.slice(MARK.length).replaceAll("-", "+").replaceAll("_", "/");
    const bytes = Uint8Array.from(atob(code), (letter) => letter.charCodeAt(0));
    const { question, method, order, documents } = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
    const strings = [question, method, ...documents.flatMap(({ title, text }) => [title ?? "", text])];
    const letters = documents.map((_, place) => letterOf(place));
    const same = String([...order].sort()) === String(letters.sort());
    return same && strings.every((each) => typeof each === "string") ? { question, method, order, documents } : null;
  } catch {
    return null; // cut short, or written by hand
  }
}
