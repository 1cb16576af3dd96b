/** What methods do with the list of documents, in words. */

const WORDS = {
  canonical: "reads them one after another too, in one order that is made from their contents",
  sequential: "reads them one after another too",
  vote: "asks about several orders that are made from their contents, and keeps the most frequent answer",
};

/** Return the end of a sentence that begins with the method's name. */
export const wordsOf = (method) => WORDS[method] ?? "reads them as a set";
