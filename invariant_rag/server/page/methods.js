/** The setups that are compared (readings), and what each method does with the documents, in words. */

export const PLAIN = { method: "sequential", ordering: "given" };
export const REFUSED =
  "This server does not allow the plain model. Its operator can: " +
  "--allow-method sequential --allow-ordering given, beside what is allowed already.";
const SORTED = { method: "sequential", ordering: "lexical" };
const ALSO_SORT = ["canonical", "sequential"]; // beside them, "plain, sorted" would be the same again

const allowed = (model, { method, ordering }) => (model?.invariant.choices[method] ?? []).includes(ordering);
const sorts = (model, chosen) => allowed(model, SORTED) && !ALSO_SORT.includes(chosen || model.invariant.method);

/** Return whether the server lets a request choose the plain model. */
export const plainIsAllowed = (model) => allowed(model, PLAIN);

/** Return what is asked for each reading; `chosen` is a method, or "" for the server's. */
export const readingsOf = (model, chosen) => ({
  ...(plainIsAllowed(model) ? { plain: PLAIN } : {}),
  ...(sorts(model, chosen) ? { sorted: SORTED } : {}),
  invariant: chosen ? { method: chosen } : {},
});

/** Return what each reading is called; one that there is not has no name. */
export const namesOf = (model, chosen) => ({
  plain: "Plain",
  ...(sorts(model, chosen) ? { sorted: "Plain, sorted" } : {}),
  invariant: (chosen || model?.invariant.method) ?? "Server's method",
});

const WORDS = {
  canonical: "attends to the documents in sequence, too, in one order that is made from their contents",
  sequential: "attends to the documents in sequence, too",
  vote: "asks about several orders that are made from their contents, and keeps the most frequent answer",
};

/** Return the end of a sentence that begins with the method's name. */
export const wordsOf = (method) => WORDS[method] ?? "attends to the documents as a set";
