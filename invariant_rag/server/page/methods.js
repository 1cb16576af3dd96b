/** What methods do with the list of documents, in words. */

const WORDS = {
  canonical: "also reads one document after another, in one order that is made from their contents",
  sequential: "also reads one document after another",
  vote: "asks about several orders that are made from their contents, and keeps the most frequent answer",
};

/** Return the end of a sentence that begins with the method's name. */
export const wordsOf = (method) => WORDS[method] ?? "reads the documents as a set";
